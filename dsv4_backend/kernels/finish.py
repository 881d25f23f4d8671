"""From a pooled row to the row that is quantised."""

import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import hadamard, rope_tail


@triton.jit
def rms_norm(b_x, b_w, eps, D: tl.constexpr):
    """w · x / sqrt(mean(x²) + eps) for rows b_x and b_w [D] fp32."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps) * b_w


@triton.jit
def finish_row(
    b_x,  # [D] fp32, pooled
    b_w,  # [D] fp32, weight of the norm
    b_angles,  # [D] fp32, see rope_hadamard.load_angles
    eps,
    D: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
):
    """Norm, RoPE and, if the compressor rotates, Hadamard."""
    b_x = rope_tail(rms_norm(b_x, b_w, eps, D), b_angles, D)
    if HAS_ROTATION:
        b_x = hadamard(b_x, D)
    return b_x
