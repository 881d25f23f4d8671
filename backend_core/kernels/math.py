"""fp32 functions that kernels build gates, norms and softmax from.

``FAST_MATH`` selects PTX's single-instruction approximations (2 ulp, subnormals flushed) in place
of the library functions, which expand to hundreds of instructions on NVIDIA.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ex2(x, FAST_MATH: tl.constexpr):
    """2^x in fp32."""
    if FAST_MATH:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def lg2(x, FAST_MATH: tl.constexpr):
    """log2(x) in fp32."""
    if FAST_MATH:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def reciprocal(x, FAST_MATH: tl.constexpr):
    """1 / x in fp32."""
    if FAST_MATH:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def sigmoid(x, FAST_MATH: tl.constexpr):
    """1 / (1 + e^-x) in fp32."""
    return reciprocal(1.0 + ex2(-LOG2E * x, FAST_MATH), FAST_MATH)
