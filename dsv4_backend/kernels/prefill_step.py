"""Windows of prefill chunks: pool, finish and store, one program a window."""

import triton
import triton.language as tl

from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.numerics import load_angles
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.window import locate_prefill, pool_window


@triton.jit
def prefill_window(
    i_n,
    input_ptr,
    state_ptr,
    ape_ptr,
    weight_ptr,
    table_ptr,
    cache_ptr,
    plan_ptr,
    aux_ptr,
    position_ptr,
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
):
    """Pool, finish and store window i_n of the plan."""
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    token, seq_len, buffer_len, page_0, page_1, request = locate_prefill(
        plan_ptr, aux_ptr, position_ptr, request_ptr, i_n, WINDOW, PLAN
    )
    slot = tl.load(slot_ptr + token, mask=token >= 0, other=-1).to(tl.int64)
    if (token >= 0) & (seq_len > 0) & (seq_len % RATIO == 0) & (slot >= 0):
        b_w = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
        b_angles = load_angles(table_ptr, seq_len - RATIO, stride_table_p, D, IS_SPLIT_TABLE)
        token_ptr = input_ptr + token.to(tl.int64) * stride_input_t
        block_row_ptr = block_table_ptr + tl.cast(request, tl.int64) * stride_block_table_b
        b_x = pool_window(
            tl.arange(0, D), seq_len, buffer_len, token_ptr, state_ptr, ape_ptr, block_row_ptr,
            page_0, page_1, stride_input_t, stride_state_b, stride_state_r, stride_ape_r,
            stride_ape_c, D, RATIO, STATE_BLOCK, PLAN, BLOCK_W, D,
        )  # fmt: skip
        b_x = finish_row(b_x, b_w, b_angles, eps, D, ROUNDING, HAS_ROTATION)
        store_record(
            b_x, cache_ptr, slot, stride_cache_p, inv_scale, D, PAGE, FORMAT, ROUNDING, IS_FNUZ
        )


@triton.jit
def prefill_step_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D], read
    ape_ptr,  # [RATIO, C, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    plan_ptr,  # see window.locate_prefill
    aux_ptr,
    position_ptr,  # [T], PLAN "paged"
    request_ptr,  # [T], PLAN "paged"
    block_table_ptr,  # [B, blocks], PLAN "paged"
    slot_ptr,  # [T]
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
):
    """State rows are only read: their writes come after, since a ring may reuse them."""
    prefill_window(
        tl.program_id(0), input_ptr, state_ptr, ape_ptr, weight_ptr, table_ptr, cache_ptr, plan_ptr,
        aux_ptr, position_ptr, request_ptr, block_table_ptr, slot_ptr, eps, inv_scale,
        stride_input_t, stride_state_b, stride_state_r, stride_ape_r, stride_ape_c, stride_table_p,
        stride_block_table_b, stride_cache_p, D, RATIO, STATE_BLOCK, PAGE, PLAN, FORMAT, ROUNDING,
        IS_FNUZ, IS_SPLIT_TABLE, HAS_ROTATION, BLOCK_W,
    )  # fmt: skip
