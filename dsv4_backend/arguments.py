"""The kernels' run-time arguments by name, grouped by what they change with.

What belongs to a layer and its caches is packed once, what belongs to a plan once a step for all
layers that share it; a call adds its input.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_backend import step_plan as plans
from dsv4_backend.spec import CompressorLayer

Argument = torch.Tensor | int | float
Part = tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor]
"""A layer with its kv_score, state and cache."""

_INPUT = ("input_ptr", "stride_input_t")
_LAYER = (
    "state_ptr", "ape_ptr", "weight_ptr", "table_ptr", "cache_ptr", "eps", "inv_scale",
    "stride_state_b", "stride_state_r", "stride_ape_r", "stride_ape_c", "stride_table_p",
    "stride_cache_p",
)  # fmt: skip
_PLAN = (
    "plan_ptr", "aux_ptr", "write_ptr", "write_aux_ptr", "state_slot_ptr", "position_ptr",
    "request_ptr", "block_table_ptr", "slot_ptr", "num_windows", "num_tokens",
    "stride_block_table_b",
)  # fmt: skip
INPUT, LAYER, PLAN = range(3)  # groups of a kernel; of the indexer in a pair's 3 more
PAIR = 3
_POOLED = ("pooled_ptr",)

Groups = tuple[tuple[str, ...], ...]


def groups_of(kernel: Any) -> Groups:
    """(input, layer, plan) of a kernel, and a fourth where it takes pooled rows."""
    taken = set(kernel.arg_names)
    groups = [tuple(n for n in names if n in taken) for names in (_INPUT, _LAYER, _PLAN)]
    return (*groups, _POOLED) if "pooled_ptr" in taken else tuple(groups)


def pair_groups(kernel: Any) -> Groups:
    """(input, layer, plan) of main, then of the indexer; what they share is main's."""
    taken = set(kernel.arg_names)
    main = [[_prefixed(n, "m", taken) or n for n in names] for names in (_INPUT, _LAYER, _PLAN)]
    other = [[_prefixed(n, "x", taken) for n in names] for names in (_INPUT, _LAYER, _PLAN)]
    return tuple(tuple(n for n in names if n in taken) for names in (*main, *other))


def _prefixed(name: str, part: str, taken: set[str]) -> str:
    plain = name.removeprefix("stride_")
    found = f"stride_{part}_{plain}" if plain != name else f"{part}_{name}"
    return found if found in taken else ""


def plain_name(name: str) -> str:
    """``m_state_ptr`` and ``stride_m_state_b`` of a pair without their part."""
    return name.removeprefix("m_").removeprefix("x_").replace("_m_", "_").replace("_x_", "_")


def of_kernel(
    kernel: Any,
    part: Part,
    plan: plans.DecodePlan | plans.PrefillPlan,
    pooled: torch.Tensor | None = None,
) -> tuple[Argument, ...]:
    """All in the order of the kernel's signature."""
    values = _values(part, plan)
    if pooled is not None:
        values["pooled_ptr"] = pooled
    return tuple(values[name] for name in kernel.arg_names if name in values)


def of_pair(
    kernel: Any, parts: tuple[Part, Part], decode_plans: tuple[plans.DecodePlan, plans.DecodePlan]
) -> tuple[Argument, ...]:
    values: dict[str, Argument] = {}
    for groups, part, plan in zip(
        (pair_groups(kernel)[:PAIR], pair_groups(kernel)[PAIR:]), parts, decode_plans, strict=True
    ):
        own = _values(part, plan)
        values |= {name: own[plain_name(name)] for names in groups for name in names}
    return tuple(values[name] for name in kernel.arg_names if name in values)


def _values(part: Part, plan: plans.DecodePlan | plans.PrefillPlan) -> dict[str, Argument]:
    inputs = zip(_INPUT, input_values(part[1]), strict=True)
    return dict(inputs) | layer_values(part) | plan_values(plan)


def input_values(kv_score: torch.Tensor) -> tuple[Argument, ...]:
    return kv_score, kv_score.stride()[0]


def layer_values(part: Part) -> dict[str, Argument]:
    layer, _, state, cache = part
    return {
        "state_ptr": state,
        "ape_ptr": layer.ape,
        "weight_ptr": layer.norm_weight,
        "table_ptr": layer.rope_table,
        "cache_ptr": cache,
        "eps": layer.spec.eps,
        "inv_scale": 1.0 / layer.fp8_scale,
        "stride_state_b": state.stride(0),
        "stride_state_r": state.stride(1),
        "stride_ape_r": layer.ape.stride(0),
        "stride_ape_c": layer.ape.stride(1),
        "stride_table_p": layer.rope_table.stride(0),
        "stride_cache_p": cache.stride(0),
    }


def plan_values(plan: plans.DecodePlan | plans.PrefillPlan) -> dict[str, Argument]:
    """What a layout lacks, and its kernels do not read, is filled with what it has."""
    slots = plan.slots
    values: dict[str, Argument] = {
        "slot_ptr": slots,
        "request_ptr": slots,
        "position_ptr": slots,
        "num_tokens": plan.num_tokens,
    }
    if isinstance(plan, plans.PagedDecode | plans.PagedPrefill):
        values |= {"request_ptr": plan.requests, "position_ptr": plan.positions}
        values |= {"block_table_ptr": plan.block_table, "state_slot_ptr": plan.state_slots}
    if isinstance(plan, plans.RingDecode):
        values |= {"plan_ptr": plan.plan, "aux_ptr": slots, "block_table_ptr": plan.plan}
    elif isinstance(plan, plans.RingDecodeV1):
        values |= {"plan_ptr": plan.seq_lens, "aux_ptr": plan.pages}
        values["block_table_ptr"] = plan.seq_lens
    elif isinstance(plan, plans.PagedDecode):
        values |= {"plan_ptr": plan.positions, "aux_ptr": plan.state_slots}
    elif isinstance(plan, plans.PagedPrefill):
        values |= {"plan_ptr": plan.ends, "aux_ptr": plan.query_starts}
        values |= {"write_ptr": plan.state_slots, "write_aux_ptr": slots}
        values["num_windows"] = plan.num_windows
    else:
        aux = slots if isinstance(plan, plans.RingPrefill) else plan.pages
        values |= {"plan_ptr": plan.windows, "aux_ptr": aux, "block_table_ptr": plan.windows}
        values |= {"write_ptr": plan.writes, "write_aux_ptr": aux, "num_windows": plan.num_windows}
    table = values["block_table_ptr"]
    assert isinstance(table, torch.Tensor)
    values["stride_block_table_b"] = table.stride(0)
    return values
