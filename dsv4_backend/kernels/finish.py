"""From a pooled row to the row that is quantised."""

import triton
import triton.language as tl

from dsv4_backend.kernels.numerics import hadamard, rms_norm, rope_tail, round_bf16


@triton.jit
def finish_row(
    b_x,  # [D] fp32, pooled
    b_w,  # [D] fp32, weight of the norm
    b_angles,  # [D] fp32, see numerics.load_angles
    eps,
    D: tl.constexpr,
    ROUNDING: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
):
    """Norm, RoPE, rotation; the official code rounds to bf16 around each of them."""
    if ROUNDING == "official":
        b_x = round_bf16(b_x)
    b_x = rms_norm(b_x, b_w, eps, D)
    if ROUNDING == "official":
        b_x = round_bf16(b_x)
    b_x = rope_tail(b_x, b_angles, D)
    if ROUNDING == "official":
        b_x = round_bf16(b_x)
    if HAS_ROTATION:
        b_x = hadamard(b_x, D)
    return b_x
