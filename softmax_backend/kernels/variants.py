"""The hooks of the decode kernel (``softmax_backend.variants``) as jit functions."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def same_logits(s, a, b):
    """The logits as they are."""
    return s


@triton.jit
def capped_logits(s, a, b):
    """a tanh(s / a), by exp2: tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return a * (1.0 - 2.0 / (tl.exp2(s / a * (2.0 * LOG2E)) + 1.0))


@triton.jit
def full_mask(key_position, query_position, a, b):
    """Every key is seen."""
    return key_position >= 0


@triton.jit
def window_mask(key_position, query_position, a, b):
    """The last ``a`` keys up to the query's own position are seen."""
    # the distance is exact in fp32 where it matters, positions beyond 2^24 are not
    return (query_position - key_position).to(tl.float32) < a


@triton.jit
def same_key(k, position, a, b):
    """The keys as they are."""
    return k
