"""A C4 prefill step over a paged state, windows and state rows in one launch.

A paged state gives every token of a step a row of its own, so no window of the call reads what the
call writes, and the order is free. Programs alternate between the rows of RATIO tokens and the
window that ends with about those tokens: what one reads, the other finds in L2.
"""

import triton
import triton.language as tl

from dsv4_backend.kernels.prefill_step import prefill_window
from dsv4_backend.kernels.window import write_paged_rows


@triton.jit(do_not_specialize=["num_windows", "num_tokens"])
def prefill_paged_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [blocks, STATE_BLOCK, 2·C·D], read and written
    ape_ptr,  # [RATIO, C, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    plan_ptr,  # ends [num_windows]
    aux_ptr,  # query_starts [B + 1]
    state_slot_ptr,  # [T]
    position_ptr,  # [T]
    request_ptr,  # [T]
    block_table_ptr,  # [B, blocks]
    slot_ptr,  # [T]
    num_windows,
    num_tokens,
    eps,
    inv_scale,
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    stride_table_p,
    stride_block_table_b,
    stride_cache_p,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,  # state rows that one program writes, at most RATIO
):
    """Of every RATIO / ROWS + 1 programs the last pools a window, the others write state rows."""
    WRITERS: tl.constexpr = RATIO // ROWS
    i_group = tl.program_id(0) // (WRITERS + 1)
    i_rest = tl.program_id(0) % (WRITERS + 1)
    if i_rest < WRITERS:
        write_paged_rows(
            i_group * RATIO + i_rest * ROWS + tl.arange(0, ROWS), num_tokens, input_ptr, state_ptr,
            ape_ptr, state_slot_ptr, position_ptr, stride_input_t, stride_state_b, stride_state_r,
            stride_ape_r, stride_ape_c, D, RATIO, STATE_BLOCK,
        )  # fmt: skip
    elif i_group < num_windows:
        prefill_window(
            i_group, input_ptr, state_ptr, ape_ptr, weight_ptr, table_ptr, cache_ptr, plan_ptr,
            aux_ptr, position_ptr, request_ptr, block_table_ptr, slot_ptr, eps, inv_scale,
            stride_input_t, stride_state_b, stride_state_r, stride_ape_r, stride_ape_c,
            stride_table_p, stride_block_table_b, stride_cache_p, D, RATIO, STATE_BLOCK, PAGE,
            "paged", FORMAT, ROUNDING, IS_FNUZ, IS_SPLIT_TABLE, HAS_ROTATION, BLOCK_W,
        )  # fmt: skip
