"""Block-sparse attention: the public operator. Plans come from ``block_sparse_backend.plan``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from backend_core.contracts import check_scale
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.operator import Selection, forced, select
from backend_core.ready import layout_of
from backend_core.tables.schema import KernelPath, NoParams
from backend_core.tables.select import load_table
from backend_core.target import Target, detect_target
from block_sparse_backend.contract import BlockSparseInputs, check_block_sparse
from block_sparse_backend.dense16 import BlockSparsePath, BlockSparseRun
from block_sparse_backend.launch_params import TABLES
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.spec import BlockSparseSpec

PATHS = tuple(TABLES.operator("block_sparse").paths)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    path: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the blocks of a plan.

    Args:
        q: [B, H, M, D], any strides but a last one of 1. Packed tokens [T, H, D] are
            ``x.transpose(0, 1)[None]``.
        k, v: [B, Hkv, N, D] and [B, Hkv, N, DV], Hkv a divisor of H.
        plan: which blocks each tile of queries attends; see ``plan.intervals``,
            ``plan.block_plan.from_kinds``, ``plan.sliding_tile`` and ``plan.predicted``.
        scale: positive; default 1 / sqrt(D).
        path: ``"torch"``, ``"triton"`` or ``"gluon"`` (Hopper); by default the one for the device
            and the call.
        out, lse: written, and returned; by default new, ``out`` in the memory order of ``q``.

    Returns:
        ``out`` [B, H, M, DV] in q's dtype and ``lse`` [B, H, M], float32, natural logarithm of the
        sum of exponentials of the logits. A query that sees nothing has output 0 and LSE -inf, the
        neutral element of a merge. Rows of the tensors that belong to no sequence of a ragged plan
        are not written.

    Raises:
        ValueError: an argument is not as described; nothing was written.
        LookupError: no path of the device's table serves the call.
    """
    if is_elsewhere(q):
        return run_there(q, block_sparse_attention, locals())
    off = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    layout = layout_of(q, k, v, out, lse), off, scale, path
    run: BlockSparseRun | None = plan.prepared.get(layout)
    if run is None:
        run = plan.prepared.keep(layout, _prepare(q, k, v, plan, out, lse, scale, path))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if out is None:
        out = empty_output(q, v.shape[3])
    if lse is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run(BlockSparseInputs(q, k, v, plan, scale, out, lse))
    return out, lse


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    out: Tensor | None,
    lse: Tensor | None,
    scale: float | None,
    path: str | None,
) -> BlockSparseRun:
    """Check a call and choose its path."""
    check_block_sparse(q, k, v, plan, out, lse)
    if path not in (None, *PATHS):
        raise ValueError(f"path must be one of {PATHS}, got {path!r}")
    spec = BlockSparseSpec.of(q, k, v, plan)
    selection = selection_for("block_sparse", q.device, spec, path)
    if scale is not None:
        check_scale(scale)
    if not q.numel():
        return lambda x: None
    chosen: BlockSparsePath = selection.run(len(plan.work))
    run = chosen.prepare(BlockSparseInputs(q, k, v, plan, 1.0, q, q))
    selection.expect_device("q", q)
    return run


def selection_for(
    operator: str, device: torch.device, spec: Any, path: str | None = None
) -> Selection[Any, Any]:
    """The paths that serve such calls on a device, or the one that the caller names.

    Raises:
        ValueError: the named path lacks what the call needs, or its device.
        LookupError: no path can serve the call.
    """
    return _selection(operator, detect_target(device), spec, path)


@functools.lru_cache(maxsize=1024)
def _selection(operator: str, target: Target, spec: Any, path: str | None) -> Selection[Any, Any]:
    if path is None:
        return select(TABLES, operator, target, spec)
    rows = [row for row in load_table(TABLES, target).rows if row.operator == operator]
    rows = [row for row in rows if row.name == path]
    needs = spec.requires()
    if not rows and path not in ("torch", "triton"):
        raise ValueError(f"path {path} needs Hopper, got {target.name}")
    if not rows:
        rows = [KernelPath(path, operator, None, needs, NoParams(), False, "as called")]
    row = min(rows, key=lambda row: len(needs - row.features))
    if missing := needs - row.features:
        raise ValueError(f"path {path} lacks {', '.join(sorted(missing))}, which this call needs")
    return forced(TABLES, target, spec, row)


def default_blocks(device: torch.device, head_dim: int) -> tuple[int, int]:
    """(block_m, block_n) for plans of 16-bit attention on a device."""
    spec = BlockSparseSpec((head_dim, head_dim))
    block_m, block_n = selection_for("block_sparse", device, spec).rows[0].params.blocks
    return block_m, block_n if head_dim <= 128 else min(block_n, 64)


def empty_output(q: Tensor, dv: int) -> Tensor:
    """[B, H, M, DV] in the memory order of ``q``: [B, M, H, DV] where q is stored so."""
    b, h, m, _ = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty(b, m, h, dv, dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty(b, h, m, dv, dtype=q.dtype, device=q.device)
