"""The hooks of block-sparse attention in Triton: its masks (``variants/masks.py``) and softmax."""

import triton
import triton.language as tl


@triton.jit
def everything_mask(q_pos, k_pos, col, aux_ptr):
    return (k_pos >= 0) & (q_pos == q_pos)


@triton.jit
def causal_mask(q_pos, k_pos, col, aux_ptr):
    return k_pos <= q_pos


@triton.jit
def block_end_mask(q_pos, k_pos, col, aux_ptr):
    # aux: int32 [key blocks], the position after a block's last token
    return (k_pos < tl.load(aux_ptr + col)) & (q_pos == q_pos)


@triton.jit
def softmax_update(s, high, total, factor, MASKED: tl.constexpr):
    """Online softmax in base 2: weights 2^(factor (s - high))."""
    new = tl.maximum(high, tl.max(s, 1))
    shift = new
    if MASKED:  # a row may have seen nothing yet
        shift = tl.where(new == -float("inf"), 0.0, new)
    alpha = tl.exp2((high - shift) * factor)
    p = tl.exp2(s * factor - (shift * factor)[:, None])
    return p, alpha, new, total * alpha + tl.sum(p, 1)
