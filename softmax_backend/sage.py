"""8-bit attention: the public operator."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from backend_core.contracts import expect_kernel_device
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.tables.schema import KernelPath
from backend_core.target import detect_target
from softmax_backend.block_sparse import empty_output
from softmax_backend.contract.block_sparse import (
    check_block_sparse,
    check_quantised,
    check_quantised_plan,
    check_scale,
    check_tensors,
)
from softmax_backend.plan import predicted
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.plan.choice import Choice
from softmax_backend.run import block_sparse_torch
from softmax_backend.selection_prefill import paths_of, plan_blocks
from softmax_backend.variants import sage
from softmax_backend.variants.pooled import Pooled, pool
from softmax_backend.variants.sage import Quantised, SageMode
from softmax_backend.variants.variant import SOFTMAX

DEFAULT_MODE = SageMode()


def quantised_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    *,
    q_position: int | None = None,
    scale: float | None = None,
    mode: SageMode = DEFAULT_MODE,
    path: str | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over a plan's blocks with INT8 q and k and e4m3 v.

    The mean of the keys is always subtracted before they are quantised, and the LSE is corrected
    for that exactly. The inputs are not changed. On normally distributed inputs the relative L2
    error is about 3.5e-2 with e4m3 values and 1e-2 with 16-bit values. The LSE is off by 0.02 to
    0.7, which matters if results are merged by it.

    Args:
        q, k, v: [B, H, M, D], [B, Hkv, N, D] twice; bf16 or fp16, D of 64 or 128.
        plan: of one batch of equal sequences, without pages.
        q_position: position of query 0, for the plan's mask; default N - M.
        scale: positive; default 1 / sqrt(D).
        mode: how the inputs are quantised.
        path: ``"torch"`` (the products of the quantised inputs in fp32) or ``"triton"``; by
            default the one for the device.
        out: written, and returned.

    Returns:
        ``out`` [B, H, M, D] and natural ``lse`` [B, H, M]; a query that sees nothing has 0 and
        -inf.

    Raises:
        ValueError: an argument is not as described; nothing was written.
        LookupError: no path of the device's table serves the mode.
    """
    if is_elsewhere(q):
        return run_there(q, quantised_attention, locals())
    check_block_sparse(q, k, v, plan, SOFTMAX, out, None)
    check_quantised_plan(q, plan)
    check_quantised(q, v, plan.block_n)
    check_scale(q.shape[3] ** -0.5 if scale is None else scale)
    row = _row(q, mode, len(plan.work), path)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not q.numel():
        out = empty_output(q, q.shape[3]) if out is None else out
        return out, q.new_empty(q.shape[:3], dtype=torch.float32)
    x = sage.quantise(q, k, v, mode, scale, plan.block_n, path or row.name)
    out = empty_output(q, q.shape[3]) if out is None else out
    return out, _attend(x, plan, scale, q_position, out, row, path or row.name)


def predicted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    *,
    scale: float | None = None,
    mode: SageMode = DEFAULT_MODE,
    blocks: tuple[int, int] | None = None,
    path: str | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, BlockPlan]:
    """``quantised_attention`` over the blocks that ``plan.predicted.predict`` would keep.

    The kernels that quantise queries and keys also compute their means, so the prediction reads no
    tokens itself. It can be captured in a CUDA graph together with the attention.

    Args:
        q, k, v, scale, mode, path, out: as in ``quantised_attention``.
        choice: which blocks are kept.
        blocks: queries in a tile and keys in a block; default ``default_blocks``.

    Returns:
        ``out`` and ``lse`` as ``quantised_attention`` does, and the plan.

    Raises:
        ValueError: an argument is not as described; nothing was written.
        LookupError: no path of the device's table serves the mode.
    """
    if is_elsewhere(q):
        return run_there(q, predicted_attention, locals())
    check_tensors(q, k, v, out, None)
    choice.check_heads(q.shape[1])
    block_m, block_n = default_blocks(q.device) if blocks is None else blocks
    check_quantised(q, v, block_n)
    predicted.check_size(q, k, block_m, block_n)
    check_scale(q.shape[3] ** -0.5 if scale is None else scale)
    b, h, m, d = q.shape
    row = _row(q, mode, b * h * -(-m // block_m), path)
    chosen = path or row.name
    scale = d**-0.5 if scale is None else scale
    pooled = None
    if chosen == "triton":
        pooled = Pooled.empty(q, k, block_m, block_n, choice.has_likeness)
    x = sage.quantise(q, k, v, mode, scale, block_n, chosen, pooled)
    if pooled is None:
        pooled = pool(q, k, (block_m, block_n), choice.has_likeness, True, chosen)
    plan = predicted.from_pooled(pooled, choice, scale, chosen)
    out = empty_output(q, d) if out is None else out
    return out, _attend(x, plan, scale, None, out, row, chosen), plan


def _row(q: Tensor, mode: SageMode, programs: int, path: str | None) -> KernelPath:
    """The table's row for a call; ``path`` is the caller's choice."""
    if path not in (None, "torch", "triton"):
        raise ValueError(f'path must be "torch" or "triton", got {path!r}')
    if path == "triton":
        expect_kernel_device("q", q)
    needs = frozenset({"e4m3_values"}) if mode.fp8_values else frozenset()
    return paths_of(detect_target(q.device), "block_sparse_int8", needs).lookup(programs)


def _attend(
    x: Quantised,
    plan: BlockPlan,
    scale: float,
    q_position: int | None,
    out: Tensor,
    row: KernelPath,
    path: str,
) -> Tensor:
    """Fills ``out``; the LSE."""
    lse = torch.empty(x.q.shape[:3], dtype=torch.float32, device=x.q.device)
    position = x.k.shape[2] - x.q.shape[2] if q_position is None else q_position
    if path == "torch":
        sequences = plan.sequences.clone()
        sequences[:, 5] = position
        plan = dataclasses.replace(plan, sequences=sequences)
        block_sparse_torch.run(*sage.dequantised(x), plan, SOFTMAX, scale, out, lse)
    else:
        from softmax_backend.run import block_sparse_int8

        params = block_sparse_int8.params_for(plan, row.params if row.name == path else None)
        block_sparse_int8.run(x, plan, scale, position, out, lse, params)
    return lse


def default_blocks(device: torch.device) -> tuple[int, int]:
    """(block_m, block_n) for plans of 8-bit attention on a device."""
    return plan_blocks("block_sparse_int8", device, frozenset())
