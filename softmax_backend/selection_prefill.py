"""Which path serves a call of block-sparse attention: by what the call needs, from the table."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PathSelection, load_table, select
from backend_core.target import Target, detect_target
from softmax_backend.launch_params import TABLES
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.variants.variant import SOFTMAX, Variant

_HOOKS = ("key", "logits", "update", "output")


def requirements(q: Tensor, v: Tensor, plan: BlockPlan, variant: Variant) -> frozenset[str]:
    """The features that a path must declare to serve a call."""
    d, dv = q.shape[3], v.shape[3]
    needs = {
        # tiles of 128 queries and blocks of 64 or 128 keys are what every path has
        "any_tile": plan.block_m != 128 or plan.block_n not in (64, 128),
        "any_head_size": d != dv or d not in (64, 128),
        "pages": plan.pages is not None,
        # a tensor copy fetches one block from one page
        "small_pages": plan.pages is not None and plan.pages.size % plan.block_n != 0,
        # beyond the end of a sequence lies another one and not the end of the tensor
        "packed": plan.is_packed,
        # compiled in, whether or not this plan has partial blocks
        "vector_masks": plan.mask.reads_vectors,
        "variants": any(getattr(variant, x) is not getattr(SOFTMAX, x) for x in _HOOKS),
    }
    return frozenset(name for name, is_needed in needs.items() if is_needed)


@functools.lru_cache(maxsize=256)
def paths_of(target: Target, operator: str, requires: frozenset[str]) -> PathSelection:
    """The paths of an operator on a target that can serve such calls.

    Raises:
        LookupError: there is no table for the target, or no path in it.
    """
    return select(load_table(TABLES, target), operator, requires)


def able_paths(target: Target, operator: str, requires: frozenset[str]) -> tuple[KernelPath, ...]:
    """Every path of a target's table that can serve such calls, those among them that are taken by
    name alone."""
    rows = paths_of(target, operator, frozenset()).explain()
    return tuple(row.path for row in rows if not requires - row.path.features)


def select_path(
    q: Tensor, v: Tensor, plan: BlockPlan, variant: Variant, path: str | None
) -> KernelPath | None:
    """The path of a call; ``None`` where the caller names one that its device has no row for.

    Args:
        path: the caller's choice, by name.

    Raises:
        ValueError: the named path lacks what the call needs.
        LookupError: no path can serve the call.
    """
    target = detect_target(q.device)
    requires = requirements(q, v, plan, variant)
    if path is None:
        return paths_of(target, "block_sparse", requires).lookup(len(plan.work))
    every = paths_of(target, "block_sparse", frozenset())
    found = next((row.path for row in every.explain() if row.path.name == path), None)
    if found is not None and (missing := requires - found.features):
        raise ValueError(f"path {path} lacks {', '.join(sorted(missing))}, which this call needs")
    return found


def plan_blocks(operator: str, device: torch.device, requires: frozenset[str]) -> tuple[int, int]:
    """(block_m, block_n) of plans for the first path that serves such calls."""
    path = paths_of(detect_target(device), operator, requires).paths[0]
    if path.name == "torch":
        return 64, 64
    return path.params.block_m, path.params.block_n
