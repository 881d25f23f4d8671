"""The Hopper kernels' walk under random schedules of their warps: every form, and broken ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from softmax_backend import reference_block_sparse as reference
from softmax_backend.plan import intervals
from softmax_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from softmax_backend.variants import masks
from tests.softmax.prefill.gluon_on_host import Descriptor, Machine, Pointer, launch, load

D, BLOCK_N, SCALE = 16, 32, 0.25
FILES = ("gluon_names", "block_forms", "block_load", "block_walk", "block_sparse")
FORMS = (
    "",
    "ping_pong",
    "ping_pong early_softmax",
    "ping_pong named_turns early_softmax lazy_rescale",
    "ping_pong named_turns keys_ahead",
    "early_softmax lazy_rescale keys_ahead",
    "ping_pong named_turns early_softmax lazy_rescale keys_ahead",
)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def softmax(s: Any, high: Any, total: Any, factor: float, MASKED: bool) -> tuple[Any, ...]:
    """``prefill_hooks.softmax_update``."""
    new = np.maximum(high, s.max(1))
    shift = np.where(new == -np.inf, 0.0, new) if MASKED else new
    alpha = np.exp2((high - shift) * factor)
    p = np.exp2(s * factor - (shift * factor)[:, None])
    return p.view(type(s)), alpha.view(type(s)), new, total * alpha + p.sum(1)


def causal(q_pos: Any, k_pos: Any, *_: Any) -> Any:
    return k_pos <= q_pos


def everything(q_pos: Any, k_pos: Any, *_: Any) -> Any:
    return (k_pos >= 0) & (q_pos == q_pos)


def random(heads: int, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, tokens, D, generator=generator)


def uneven(seed: int) -> BlockPlan:
    """Rows of other lengths in each head, one of them empty, and a cut last block."""
    generator = torch.Generator().manual_seed(seed)
    kinds = (torch.rand(2, 3, 9, generator=generator) < 0.3).to(torch.int8)
    kinds[0, 1] = 0
    kinds[..., -1] *= 2
    sequences = uniform_sequences(1, 300, 270, kinds.device)
    return from_kinds(kinds[None], 2, sequences, 128, BLOCK_N)


def plans() -> dict[str, tuple[BlockPlan, tuple[int, int, int, int]]]:
    """By name: a plan, and query heads, heads, queries and keys."""
    blocks: dict[str, Any] = {"block_n": BLOCK_N, "device": "cpu"}
    return {
        "dense": (intervals.dense(200, 250, 2, **blocks), (2, 1, 200, 250)),
        "causal": (intervals.causal(300, 310, 2, **blocks), (2, 2, 300, 310)),
        "uneven": (uneven(3), (2, 2, 300, 270)),
    }


def packed_plan(is_paged: bool) -> BlockPlan:
    """Three causal sequences, one of which has no query."""
    cu_q = torch.tensor([0, 140, 140, 290], dtype=torch.int32)
    lengths = torch.tensor([170, 30, 157], dtype=torch.int32)
    blocks: dict[str, Any] = {"block_m": 128, "block_n": BLOCK_N}
    if is_paged:
        table = torch.tensor([5, 0, 3, 6, 1, 2, 4], dtype=torch.int32)
        indptr = torch.tensor([0, 3, 4], dtype=torch.int32)
        return intervals.paged(cu_q, lengths, indptr, table, 64, 150, 170, 2, **blocks)
    cu_k = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    return intervals.ragged(cu_q, cu_k, 150, 170, 2, **blocks)


def attend(
    plan: BlockPlan,
    x: Inputs,
    form: str,
    seed: int,
    stages: int = 2,
    changes: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; keys and values [pages, Hkv, page_size, D] where the plan has pages."""
    machine = Machine(seed)
    kernels = load(FILES, machine, changes)
    q, k, v = (t.numpy() for t in x)
    out, lse = np.full(q.shape, np.nan, "f4"), np.full(q.shape[:3], np.nan, "f4")
    pages = plan.cols if plan.pages is None else plan.pages.indices
    flat = {"out_ptr": out, "lse_ptr": lse, "rows_ptr": plan.rows, "cols_ptr": plan.cols,
            "work_ptr": plan.work, "sequences_ptr": plan.sequences, "mask_aux_ptr": plan.cols,
            "pages_ptr": pages}  # fmt: skip
    arguments: dict[str, Any] = {
        name: Pointer(np.asarray(array).reshape(-1)) for name, array in flat.items()
    }
    arguments |= {"q_desc": Descriptor(q, 64), "k_desc": Descriptor(k, BLOCK_N)}
    arguments["v_desc"] = Descriptor(v, BLOCK_N)
    strides = [s // out.itemsize for s in (*out.strides[:3], *lse.strides[:2])]
    names = ("out_b", "out_h", "out_m", "lse_b", "lse_h")
    arguments |= {f"stride_{name}": s for name, s in zip(names, strides, strict=True)}
    arguments |= {"factor": SCALE / np.log(2.0), "GROUP": plan.num_heads // k.shape[1]}
    arguments |= {"BLOCK_N": BLOCK_N, "D": D, "STAGES": stages, "REGISTERS": 240, "FORM": form}
    arguments |= {"update": softmax, "mask": causal if plan.mask is masks.causal else everything}
    name = "block_sparse_sm90_kernel"
    if plan.is_packed:
        name = "block_sparse_packed_sm90_kernel"
        at_keys = "packed_keys" if plan.pages is None else "paged_keys"
        arguments |= {"at_keys": kernels[at_keys]}
        arguments |= {"page_size": 1 if plan.pages is None else plan.pages.size}
    wanted = kernels[name].__code__
    given = {key: arguments[key] for key in wanted.co_varnames[: wanted.co_argcount]}
    launch(machine, kernels[name], len(plan.work), given)
    return torch.from_numpy(out), torch.from_numpy(lse)


def error(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, ...]) -> float:
    """The largest difference of output and LSE; NaN where one is not a number."""
    worst = 0.0
    for mine, theirs in zip(got, want, strict=True):
        same = mine.double() == theirs
        worst = max(worst, float((mine.double() - theirs).masked_fill(same, 0.0).abs().max()))
        if bool(mine.isnan().any()):
            return float("nan")
    return worst


def unpacked_error(name: str, form: str, **more: Any) -> float:
    plan, (heads, kv_heads, m, n) = plans()[name]
    x = random(heads, m, 1), random(kv_heads, n, 2), random(kv_heads, n, 3)
    seen = reference.elements_seen(plan)
    want, want_lse = reference.attention(*x, seen, SCALE)
    want = want.masked_fill(want_lse.isneginf()[..., None], 0.0)
    return error(attend(plan, x, form, **more), (want, want_lse))


@pytest.mark.parametrize("name", list(plans()))
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_right_in_any_order(name: str, form: str) -> None:
    for seed in range(3):
        for stages in (2, 3):
            got = unpacked_error(name, form, seed=seed, stages=stages)
            assert got < 1e-5, (seed, stages, got)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("form", [FORMS[1], FORMS[4], FORMS[6]])
def test_packed_sequences_are_right_in_any_order(is_paged: bool, form: str) -> None:
    plan = packed_plan(is_paged)
    q = random(2, 290, 1)
    lengths, begins = plan.sequences[:, 4].tolist(), plan.sequences[:, 3].tolist()
    k, v = (random(1, 357, seed) for seed in (2, 3))
    parts = [(t.split(lengths, 2)) for t in (k, v)]
    if plan.pages is None:
        tail = torch.full((1, 1, 40, D), torch.nan)
        stored = tuple(torch.cat([t, tail], 2) for t in (k, v))
    else:
        stored = tuple(torch.full((7, 1, 64, D), torch.nan) for _ in range(2))
        for pages, pieces in zip(stored, parts, strict=True):
            for begin, piece in zip(begins, pieces, strict=True):
                for i, rows in enumerate(piece.split(64, 2)):
                    page = int(plan.pages.indices[begin + i])
                    pages[page, :, : rows.shape[2]] = rows[0]
    want = torch.zeros(1, 2, 290, D, dtype=torch.float64)
    want_lse = torch.zeros(1, 2, 290, dtype=torch.float64)
    for i, (_, first, count, *_) in enumerate(plan.sequences.tolist()):
        if count:
            x = q[:, :, first : first + count], parts[0][i], parts[1][i]
            one, one_lse = reference.attention(*x, reference.elements_seen(plan, i), SCALE)
            want[:, :, first : first + count] = one
            want_lse[:, :, first : first + count] = one_lse
    for seed in range(3):
        got = attend(plan, (q, *stored), form, seed)
        assert error(got, (want, want_lse)) < 1e-5, seed


FAULTS = {
    "values freed before they are read": (
        "            acc = warpgroup_mma_wait(0, deps=[acc])\n"
        "            mbarrier.arrive(v_empty.index(before), count=1)\n",
        "            mbarrier.arrive(v_empty.index(before), count=1)\n"
        "            acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "logits used before they are there": (
        "warpgroup_mma_wait(1, deps=[s])", "warpgroup_mma_wait(2, deps=[s])",
    ),
    "stages that are not waited for": (
        "    mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)\n", "",
    ),
    "no turn to begin with": ('_hardware_barrier("arrive", 0)', "pass"),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_are_seen(fault: str) -> None:
    """In one of twenty schedules."""
    old, new = FAULTS[fault]
    form = "ping_pong keys_ahead"
    if "turn to begin" in fault:
        form = FORMS[6]
    for seed in range(20):
        try:
            if not unpacked_error("uneven", form, seed=seed, changes={old: new}) < 1e-5:
                return
        except AssertionError:
            return
    pytest.fail("no schedule shows it")
