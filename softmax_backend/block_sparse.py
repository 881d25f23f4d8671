"""Block-sparse attention: the public operator. Plans come from ``softmax_backend.plan``."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.target import detect_target
from softmax_backend.contract.block_sparse import check_block_sparse, check_kernel
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.run import block_sparse_torch
from softmax_backend.variants.variant import SOFTMAX, Variant

PATHS = ("torch", "triton", "gluon")


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
        scale: default 1 / sqrt(D).
        variant: what is done with logits and output.
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
    """
    check_block_sparse(q, k, v, plan, variant, out, lse)
    chosen = path or default_path(q, v, plan, variant)
    if chosen not in PATHS:
        raise ValueError(f"path must be one of {PATHS}, got {chosen!r}")
    if chosen != "torch":
        check_kernel(q, k, v, plan)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if out is None:
        out = empty_output(q, v.shape[3])
    if lse is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if chosen == "torch":
        block_sparse_torch.run(q, k, v, plan, variant, scale, out, lse)
    elif chosen == "triton":
        from softmax_backend.run import block_sparse  # Triton need not be there for the torch path

        tuned = block_sparse.default_params(plan, q.shape[3])
        block_sparse.run(q, k, v, plan, variant, scale, out, lse, tuned)
    else:
        from softmax_backend.run import block_sparse_sm90

        if refused := block_sparse_sm90.refusal(q, v, plan, variant):
            raise ValueError(f"the gluon path does not serve {refused}")
        params = block_sparse_sm90.default_params(plan, q.shape[3])
        block_sparse_sm90.run(q, k, v, plan, scale, out, lse, params)
    return out, lse


def default_path(q: Tensor, v: Tensor, plan: BlockPlan, variant: Variant) -> str:
    """The path for the processor that a tensor lies on and for what a call needs."""
    target = detect_target(q.device)
    if target.vendor == "cpu":
        return "torch"
    if target.arch == "sm90":
        from softmax_backend.run import block_sparse_sm90

        if block_sparse_sm90.refusal(q, v, plan, variant) is None:
            return "gluon"
    return "triton"


def default_blocks(device: torch.device, head_dim: int) -> tuple[int, int]:
    """(block_m, block_n) for plans of 16-bit attention on a device."""
    vendor = detect_target(device).vendor
    if vendor == "cpu":
        return 64, 64
    if vendor == "amd":
        return 64, 64
    return (128, 128) if head_dim <= 128 else (128, 64)


def empty_output(q: Tensor, dv: int) -> Tensor:
    """[B, H, M, DV] in the memory order of ``q``: [B, M, H, DV] where q is stored so."""
    b, h, m, _ = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty(b, m, h, dv, dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty(b, h, m, dv, dtype=q.dtype, device=q.device)
