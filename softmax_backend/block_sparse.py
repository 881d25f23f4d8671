"""Block-sparse attention: the public operator. Plans come from ``softmax_backend.plan``."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.contracts import expect_kernel_device
from backend_core.launch.streams import is_elsewhere, run_there
from softmax_backend.contract.block_sparse import (
    check_block_sparse,
    check_kernel,
    check_scale,
)
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.run import block_sparse_torch
from softmax_backend.selection_prefill import plan_blocks, select_path
from softmax_backend.variants.variant import SOFTMAX, Variant

PATHS = ("torch", "triton", "gluon", "gluon_packed")


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    variant: Variant = SOFTMAX,
    path: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the blocks of a plan.

    Args:
        q: [B, H, M, D], any strides but a last one of 1. Packed tokens [T, H, D] are
            ``x.transpose(0, 1)[None]``.
        k, v: [B, Hkv, N, D] and [B, Hkv, N, DV], Hkv a divisor of H; in pages (a plan of
            ``intervals.paged``) [pages, page_size, Hkv, D].
        plan: which blocks each tile of queries attends; see ``plan.intervals``, ``plan.bsr``,
            ``plan.sliding_tile`` and ``plan.predicted``.
        scale: positive; default 1 / sqrt(D).
        variant: what is done with logits and output.
        path: ``"torch"``, ``"triton"``, ``"gluon"`` or ``"gluon_packed"`` (Hopper); by default the
            one for the device and the call.
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
    check_block_sparse(q, k, v, plan, variant, out, lse)
    if path not in (None, *PATHS):
        raise ValueError(f"path must be one of {PATHS}, got {path!r}")
    row = select_path(q, v, plan, variant, path)
    chosen = path or ("torch" if row is None else row.name)
    if chosen != "torch" and q.numel():
        check_kernel(q, k, v, plan)
        if chosen == "triton":  # the others have a row on Hopper alone
            expect_kernel_device("q", q)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    check_scale(scale)
    if out is None:
        out = empty_output(q, v.shape[3])
    if lse is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not q.numel():
        return out, lse
    if chosen == "torch":
        block_sparse_torch.run(q, k, v, plan, variant, scale, out, lse)
    elif chosen == "triton":
        from softmax_backend.run import block_sparse  # Triton need not be there for the torch path

        tuned = block_sparse.params_for(plan, q.shape[3], None if row is None else row.params)
        block_sparse.run(q, k, v, plan, variant, scale, out, lse, tuned)
    else:
        from softmax_backend.run import block_sparse_sm90

        if row is None:
            raise ValueError(f"path {chosen} needs Hopper, got tensors on {q.device}")
        run = block_sparse_sm90.run if chosen == "gluon" else block_sparse_sm90.run_packed
        run(q, k, v, plan, scale, out, lse, row.params)
    return out, lse


def default_blocks(device: torch.device, head_dim: int) -> tuple[int, int]:
    """(block_m, block_n) for plans of 16-bit attention on a device."""
    wide = frozenset({"any_head_size"}) if head_dim not in (64, 128) else frozenset()
    block_m, block_n = plan_blocks("block_sparse", device, wide)
    return block_m, block_n if head_dim <= 128 else min(block_n, 64)


def empty_output(q: Tensor, dv: int) -> Tensor:
    """[B, H, M, DV] in the memory order of ``q``: [B, M, H, DV] where q is stored so."""
    b, h, m, _ = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty(b, m, h, dv, dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty(b, h, m, dv, dtype=q.dtype, device=q.device)
