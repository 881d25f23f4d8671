"""A compressor's whole decode step for one part, one launch."""

import triton
import triton.language as tl

from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.numerics import load_angles, made_by_now, start_next, wait_for_previous
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.window import (
    load_ape_row,
    load_last_row,
    load_row,
    locate_decode,
    old_rows,
    pool_last_row,
    pool_old_rows,
    pool_window,
    store_state_row,
    write_state_row,
)


@triton.jit
def decode_row_early(
    i_n,
    input_ptr,
    state_ptr,
    ape_ptr,
    weight_ptr,
    table_ptr,
    cache_ptr,
    plan_ptr,
    aux_ptr,
    request_ptr,
    block_table_ptr,
    slot_ptr,
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
    STATE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PLAN: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    PDL: tl.constexpr,
    POOLS_EARLY: tl.constexpr,
):
    """``decode_row`` of ratio 4 where the launch before may only have written the input.

    All else is read before that launch has ended, and with POOLS_EARLY the old rows are pooled too,
    in steps that end no window as well. Loads are masked, not branched over, so that none waits for
    the plan's values in a branch.
    """
    start_next(PDL)
    seq_len, state_row, page_0, page_1 = locate_decode(plan_ptr, aux_ptr, i_n, 4, 8, PLAN)
    slot = tl.load(slot_ptr + i_n).to(tl.int64)
    request = tl.load(request_ptr + i_n).to(tl.int64) if PLAN == "paged" else state_row
    b_w = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
    is_token = (seq_len > 0) & (state_row >= 0)
    is_end = is_token & (seq_len % 4 == 0) & (slot >= 0) & (request >= 0)
    block_row_ptr = block_table_ptr + request * stride_block_table_b
    end = tl.where(is_end, seq_len, 0)
    b_kv, b_s, b_ape = old_rows(
        end, state_ptr, ape_ptr, block_row_ptr, page_0, page_1, stride_state_b, stride_state_r,
        stride_ape_r, stride_ape_c, D, STATE_BLOCK, PLAN,
    )  # fmt: skip
    b_top, b_sum, b_acc = pool_old_rows(b_kv, b_s)
    b_angles = load_angles(table_ptr, tl.maximum(end - 4, 0), stride_table_p, D, IS_SPLIT_TABLE)
    b_row_ape = tl.zeros([2 * D], tl.float32)
    if PLAN == "paged":
        position = tl.maximum(seq_len - 1, 0)
        b_row_ape = load_ape_row(ape_ptr, position, stride_ape_r, stride_ape_c, D, 4)
    token_ptr = input_ptr + i_n.to(tl.int64) * stride_input_t
    if POOLS_EARLY:
        b_acc = made_by_now(b_acc, b_sum, b_top)

    wait_for_previous(PDL)
    b_row_kv, b_row_score = load_row(token_ptr, D, 4)
    b_kv, b_s = load_last_row(token_ptr, b_ape, D)
    if is_token:
        store_state_row(
            b_row_kv, b_row_score + b_row_ape, state_ptr, state_row, stride_state_b,
            stride_state_r, D, 4, STATE_BLOCK,
        )  # fmt: skip
    if is_end:
        b_x = pool_last_row(b_top, b_sum, b_acc, b_kv, b_s)
        b_x = finish_row(b_x, b_w, b_angles, eps, D, ROUNDING, HAS_ROTATION)
        store_record(
            b_x, cache_ptr, slot, stride_cache_p, inv_scale, D, PAGE, FORMAT, ROUNDING, IS_FNUZ
        )


@triton.jit
def decode_row(
    i_n,
    input_ptr,
    state_ptr,
    ape_ptr,
    weight_ptr,
    table_ptr,
    cache_ptr,
    plan_ptr,
    aux_ptr,
    request_ptr,
    block_table_ptr,
    slot_ptr,
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
    PLAN: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where entry i_n's token ends a window, pool, finish and store it; write its state row.

    The new token's row of the window is read from the input, and the state row is written after
    the window was read: no load waits for a store, and what does not depend on the plan is loaded
    beside it.
    """
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    start_next(PDL)
    wait_for_previous(PDL)
    seq_len, state_row, page_0, page_1 = locate_decode(plan_ptr, aux_ptr, i_n, RATIO, WINDOW, PLAN)
    slot = tl.load(slot_ptr + i_n).to(tl.int64)
    request = tl.load(request_ptr + i_n).to(tl.int64) if PLAN == "paged" else state_row
    block_row_ptr = block_table_ptr + request * stride_block_table_b
    token_ptr = input_ptr + i_n.to(tl.int64) * stride_input_t
    b_kv, b_score = load_row(token_ptr, D, RATIO)
    b_w = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)

    is_token = (seq_len > 0) & (state_row >= 0)
    # Asking for request >= 0 keeps its load before the branch, beside the plan's.
    if is_token & (seq_len % RATIO == 0) & (slot >= 0) & (request >= 0):
        b_angles = load_angles(table_ptr, seq_len - RATIO, stride_table_p, D, IS_SPLIT_TABLE)
        b_x = pool_window(
            tl.arange(0, D), seq_len, WINDOW - 1, token_ptr, state_ptr, ape_ptr, block_row_ptr,
            page_0, page_1, stride_input_t, stride_state_b, stride_state_r, stride_ape_r,
            stride_ape_c, D, RATIO, STATE_BLOCK, PLAN, BLOCK_W, D,
        )  # fmt: skip
        b_x = finish_row(b_x, b_w, b_angles, eps, D, ROUNDING, HAS_ROTATION)
        store_record(
            b_x, cache_ptr, slot, stride_cache_p, inv_scale, D, PAGE, FORMAT, ROUNDING, IS_FNUZ
        )
    if is_token:
        write_state_row(
            b_kv, b_score, state_ptr, ape_ptr, state_row, seq_len - 1,
            stride_state_b, stride_state_r, stride_ape_r, stride_ape_c, D, RATIO, STATE_BLOCK, PLAN,
        )  # fmt: skip


@triton.jit
def decode_step_kernel(
    input_ptr,  # [N, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D] fp32 or bf16
    ape_ptr,  # [RATIO, C, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    plan_ptr,  # see window.locate_decode
    aux_ptr,
    request_ptr,  # [N], PLAN "paged"
    block_table_ptr,  # [B, blocks], PLAN "paged"
    slot_ptr,  # [N]
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
    PLAN: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    READS_EARLY: tl.constexpr,
    POOLS_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a request."""
    if READS_EARLY:
        tl.static_assert(RATIO == 4)
        decode_row_early(
            tl.program_id(0), input_ptr, state_ptr, ape_ptr, weight_ptr, table_ptr, cache_ptr,
            plan_ptr, aux_ptr, request_ptr, block_table_ptr, slot_ptr, eps, inv_scale,
            stride_input_t, stride_state_b, stride_state_r, stride_ape_r, stride_ape_c,
            stride_table_p, stride_block_table_b, stride_cache_p, D, STATE_BLOCK, PAGE, PLAN,
            FORMAT, ROUNDING, IS_FNUZ, IS_SPLIT_TABLE, HAS_ROTATION, PDL, POOLS_EARLY,
        )  # fmt: skip
    else:
        decode_row(
            tl.program_id(0), input_ptr, state_ptr, ape_ptr, weight_ptr, table_ptr, cache_ptr,
            plan_ptr, aux_ptr, request_ptr, block_table_ptr, slot_ptr, eps, inv_scale,
            stride_input_t, stride_state_b, stride_state_r, stride_ape_r, stride_ape_c,
            stride_table_p, stride_block_table_b, stride_cache_p, D, RATIO, STATE_BLOCK, PAGE, PLAN,
            FORMAT, ROUNDING, IS_FNUZ, IS_SPLIT_TABLE, HAS_ROTATION, BLOCK_W, PDL,
        )  # fmt: skip
