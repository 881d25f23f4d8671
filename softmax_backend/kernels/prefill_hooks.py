"""The hooks that ship for block-sparse attention, in Triton.

Their signatures, and the same in torch: ``variants/masks.py`` and ``variants/variant.py``.
"""

import triton
import triton.language as tl


@triton.jit
def everything_mask(q_pos, k_pos, col, slot, head, aux_ptr):
    return (k_pos >= 0) & (q_pos == q_pos)


@triton.jit
def causal_mask(q_pos, k_pos, col, slot, head, aux_ptr):
    return k_pos <= q_pos


@triton.jit
def causal_window_mask(q_pos, k_pos, col, slot, head, aux_ptr):
    # aux: int32 [H], keys that a query sees, itself included
    return (k_pos <= q_pos) & (q_pos - k_pos < tl.load(aux_ptr + head))


@triton.jit
def window_mask(q_pos, k_pos, col, slot, head, aux_ptr):
    # aux: int32 [H], keys up to its own that a query sees; later ones it sees all
    return q_pos - k_pos < tl.load(aux_ptr + head)


@triton.jit
def block_end_mask(q_pos, k_pos, col, slot, head, aux_ptr):
    # aux: int32 [key blocks], the position after a block's last token
    return (k_pos < tl.load(aux_ptr + col)) & (q_pos == q_pos)


@triton.jit
def element_bits_mask(q_pos, k_pos, col, slot, head, aux_ptr):
    # aux: int32 [slots, BLOCK_M, BLOCK_N / 32], bit n % 32 of word n // 32
    words: tl.constexpr = k_pos.shape[1] // 32
    o_m = tl.arange(0, q_pos.shape[0])[:, None]
    o_n = tl.arange(0, k_pos.shape[1])[None, :]
    at = (slot.to(tl.int64) * q_pos.shape[0] + o_m) * words + o_n // 32
    return (tl.load(aux_ptr + at) >> (o_n % 32)) & 1 != 0


@triton.jit
def plain_key(k, k_pos, aux_ptr):
    return k


@triton.jit
def products(s, scale, q_pos, k_pos, head, aux_ptr, value):
    return s


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


@triton.jit
def divide_by_sum(acc, high, total, factor, head, aux_ptr):
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def soft_capped(s, scale, q_pos, k_pos, head, aux_ptr, value):
    # value tanh(x / value) log2(e), with tanh(y) = 1 - 2 / (exp(2 y) + 1)
    turned = tl.exp2(s * (scale * 2.8853900817779268 / value))
    return (value * 1.4426950408889634) * (1.0 - 2.0 / (turned + 1.0))


@triton.jit
def alibi_biased(s, scale, q_pos, k_pos, head, aux_ptr, value):
    # aux: float32 [H], slopes
    slope = tl.load(aux_ptr + head)
    return (s * scale - slope * (q_pos - k_pos).to(tl.float32)) * 1.4426950408889634


@triton.jit
def biased(s, scale, q_pos, k_pos, head, aux_ptr, value):
    return (s * scale + value) * 1.4426950408889634


@triton.jit
def sigmoid_update(s, high, total, factor, MASKED: tl.constexpr):
    """Weights 1 / (1 + 2^-s) that no sum divides; ``high`` and ``total`` are 0 and 1."""
    p = 1.0 / (1.0 + tl.exp2(-s * factor))
    alpha = tl.full(high.shape, 1.0, tl.float32)
    return p, alpha, tl.zeros(high.shape, tl.float32), alpha


@triton.jit
def divide_with_sink(acc, high, total, factor, head, aux_ptr):
    # aux: float32 [H], the sink's logit: a key with value 0 that every query sees
    empty = total == 0.0
    sink = tl.exp2(
        tl.load(aux_ptr + head) * 1.4426950408889634 - tl.where(empty, 0.0, high) * factor
    )
    return acc / tl.where(empty, 1.0, total + sink)[:, None]


@triton.jit
def rotated_key(k, k_pos, aux_ptr):
    # aux: float32 [N, 2, D / 2], cosines then sines; the halves of a key are the pairs
    half: tl.constexpr = k.shape[1] // 2
    low, high = tl.split(tl.permute(tl.reshape(k.to(tl.float32), (k.shape[0], 2, half)), (0, 2, 1)))
    at = aux_ptr + k_pos[:, None].to(tl.int64) * (2 * half) + tl.arange(0, half)[None, :]
    cos, sin = tl.load(at), tl.load(at + half)
    turned = tl.join(low * cos - high * sin, high * cos + low * sin)
    return tl.reshape(tl.permute(turned, (0, 2, 1)), (k.shape[0], k.shape[1])).to(k.dtype)
