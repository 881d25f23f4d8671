"""Pooling of prefill windows with the channels split over programs: C128 at long contexts.

A window of 128 rows is half a megabyte, and a chunk of T tokens ends only T / 128 of them: one
program each would leave most SMs idle.
"""

import triton
import triton.language as tl

from dsv4_backend.kernels.arguments import Ape, State, Step
from dsv4_backend.kernels.locate import locate_prefill
from dsv4_backend.kernels.pooling import pool_window


@triton.jit
def pool_columns_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D], read
    ape_ptr,  # [RATIO, C, D]
    pooled_ptr,  # [N, D] fp32, written
    entry_ptr,  # the step plan, see arguments.Step
    window_end_ptr,
    query_start_ptr,
    position_ptr,
    request_ptr,
    block_table_ptr,
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    stride_block_table_b,
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
    state = State(state_ptr, stride_state_b, stride_state_r)
    ape = Ape(ape_ptr, stride_ape_r, stride_ape_c)
    step = Step(
        entry_ptr,
        position_ptr,
        None,
        request_ptr,
        block_table_ptr,
        stride_block_table_b,
        window_end_ptr,
        query_start_ptr,
    )
    token, window = locate_prefill(step, i_n, RATIO, LAYOUT)
    if (token < 0) | (window.seq_len <= 0) | (window.seq_len % RATIO != 0):
        return
    b_x = pool_window(
        o_d,
        window,
        step,
        input_ptr + token.to(tl.int64) * stride_input_t,
        stride_input_t,
        state,
        ape,
        D=D,
        RATIO=RATIO,
        STATE_BLOCK=STATE_BLOCK,
        LAYOUT=LAYOUT,
        BLOCK_W=BLOCK_W,
        BLOCK_D=BLOCK_D,
    )
    tl.store(pooled_ptr + i_n.to(tl.int64) * D + o_d, b_x)
