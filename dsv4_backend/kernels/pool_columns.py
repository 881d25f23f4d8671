"""Pooling of prefill windows with the channels split over programs: C128 at long contexts.

A window of 128 rows is half a megabyte, and a chunk of T tokens ends only T / 128 of them: one
program each would leave most of the machine idle.
"""

import triton
import triton.language as tl

from dsv4_backend.kernels.window import locate_prefill, pool_window


@triton.jit
def pool_columns_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D], read
    ape_ptr,  # [RATIO, C, D]
    pooled_ptr,  # [N, D] fp32, written
    plan_ptr,  # see window.locate_prefill
    aux_ptr,
    position_ptr,  # [T], PLAN "paged"
    request_ptr,  # [T], PLAN "paged"
    block_table_ptr,  # [B, blocks], PLAN "paged"
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    stride_block_table_b,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (n, i) pools channels i·BLOCK_D and on of window n."""
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    i_n = tl.program_id(0)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token, seq_len, buffer_len, page_0, page_1, request = locate_prefill(
        plan_ptr, aux_ptr, position_ptr, request_ptr, i_n, WINDOW, PLAN
    )
    if (token < 0) | (seq_len <= 0) | (seq_len % RATIO != 0):
        return
    token_ptr = input_ptr + token.to(tl.int64) * stride_input_t
    block_row_ptr = block_table_ptr + tl.cast(request, tl.int64) * stride_block_table_b
    b_x = pool_window(
        o_d, seq_len, buffer_len, token_ptr, state_ptr, ape_ptr, block_row_ptr,
        page_0, page_1, stride_input_t, stride_state_b, stride_state_r, stride_ape_r, stride_ape_c,
        D, RATIO, STATE_BLOCK, PLAN, BLOCK_W, BLOCK_D,
    )  # fmt: skip
    tl.store(pooled_ptr + i_n.to(tl.int64) * D + o_d, b_x)
