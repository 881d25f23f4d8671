"""8-bit attention: the public operator."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.target import detect_target
from softmax_backend.block_sparse import empty_output
from softmax_backend.contract.block_sparse import check_block_sparse, check_quantised
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.run import block_sparse_torch
from softmax_backend.selection_prefill import paths_of, plan_blocks
from softmax_backend.variants import sage
from softmax_backend.variants.sage import SageMode
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

    Keys are always smoothed, and the LSE gets back exactly what that took. The inputs are not
    changed. Errors on normal inputs are about 3.5e-2 with e4m3 values and 1e-2 with 16-bit ones,
    relative L2; the LSE is off by 0.02 to 0.7, which matters where it feeds a merge.

    Args:
        q, k, v: [B, H, M, D], [B, Hkv, N, D] twice; bf16 or fp16, D of 64 or 128.
        plan: of one batch of equal sequences, without pages.
        q_position: position of query 0, for the plan's mask; default N - M.
        scale: default 1 / sqrt(D).
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
    check_block_sparse(q, k, v, plan, SOFTMAX, out, None)
    check_quantised(q, k, v, plan)
    if path not in (None, "torch", "triton"):
        raise ValueError(f'path must be "torch" or "triton", got {path!r}')
    needs = frozenset({"e4m3_values"}) if mode.fp8_values else frozenset()
    row = paths_of(detect_target(q.device), "block_sparse_int8", needs).lookup(len(plan.work))
    chosen = path or row.name
    scale = q.shape[3] ** -0.5 if scale is None else scale
    position = k.shape[2] - q.shape[2] if q_position is None else q_position
    out = empty_output(q, q.shape[3]) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    x = sage.quantise(q, k, v, mode, scale, plan.block_n, chosen)
    if chosen == "torch":
        block_sparse_torch.run(*sage.dequantised(x), plan, SOFTMAX, scale, out, lse)
    else:
        from softmax_backend.run import block_sparse_int8

        params = block_sparse_int8.params_for(plan, row.params if row.name == chosen else None)
        block_sparse_int8.run(x, plan, scale, position, out, lse, params)
    return out, lse


def default_blocks(device: torch.device) -> tuple[int, int]:
    """(block_m, block_n) for plans of 8-bit attention on a device."""
    return plan_blocks("block_sparse_int8", device, frozenset())
