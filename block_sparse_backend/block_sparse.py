"""Block-sparse attention: the public operator. Plans come from ``block_sparse_backend.plan``."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.contracts import check_scale, number
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.ready import layout_of
from block_sparse_backend.contract import (
    BlockSparseInputs,
    check_block_sparse,
    empty_output,
    refuse_gradients,
    scale_of,
)
from block_sparse_backend.dense16 import BlockSparsePath, BlockSparseRun
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.selection import Paths, paths_on
from block_sparse_backend.spec import BlockSparseSpec


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
    refuse_gradients(q, k, v)
    scale = None if scale is None else number("scale", scale)
    off = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    layout = layout_of(q, k, v, out, lse), off, scale, path
    run: BlockSparseRun | None = plan.prepared.get(layout)
    if run is None:
        paths = paths_on(q.device, path, "block_sparse")
        run = plan.prepared.keep(layout, _prepare(q, k, v, plan, out, lse, scale, paths))
    scale = scale_of(q, scale)
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
    paths: Paths,
) -> BlockSparseRun:
    """Check a call and choose its path."""
    check_block_sparse(q, k, v, plan, out, lse)
    selection = paths.select("block_sparse", BlockSparseSpec.of(q, k, v, plan), "q", q)
    if scale is not None:
        check_scale(scale)
    if not q.numel():
        return lambda x: None
    chosen: BlockSparsePath = selection.run(len(plan.work))
    return chosen(BlockSparseInputs(q, k, v, plan, 1.0, q, q))
