"""Pooling of prefill windows with the channels split over programs: C128 at long contexts.

A window of 128 rows is half a megabyte, and a chunk of T tokens ends only T / 128 of them: one
program each would leave most SMs idle.
"""

import triton
import triton.language as tl

from dsv4_backend.kernels.arguments import Ape, Input, State, Step
from dsv4_backend.kernels.locate import locate_prefill
from dsv4_backend.kernels.pooling import pool_window


@triton.jit
def pool_columns_kernel(
    input: Input,
    state: State,
    ape: Ape,
    step: Step,
    pooled_ptr,  # [N, D] fp32, written
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (n, i) pools channels i·BLOCK_D and on of window n."""
    i_n = tl.program_id(0)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token, window = locate_prefill(step, i_n, RATIO, LAYOUT)
    if (token < 0) | (window.seq_len <= 0) | (window.seq_len % RATIO != 0):
        return
    token_ptr = input.ptr + token.to(tl.int64) * input.stride_t
    b_x = pool_window(
        o_d, window, step, token_ptr, input.stride_t, state, ape,
        D, RATIO, STATE_BLOCK, LAYOUT, BLOCK_W, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    tl.store(pooled_ptr + i_n.to(tl.int64) * D + o_d, b_x)
