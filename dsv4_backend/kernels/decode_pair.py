"""Main and indexer decode step of one C4 layer, one launch."""

import triton
import triton.language as tl

from dsv4_backend.kernels.decode_step import decode_row, decode_row_early


@triton.jit
def decode_pair_kernel(
    m_input_ptr,  # main: the tensors of decode_step_kernel with D = 512
    m_state_ptr,
    m_ape_ptr,
    m_weight_ptr,
    m_cache_ptr,
    m_plan_ptr,
    m_aux_ptr,
    m_block_table_ptr,
    m_slot_ptr,
    x_input_ptr,  # indexer: the same with D = 128
    x_state_ptr,
    x_ape_ptr,
    x_weight_ptr,
    x_cache_ptr,
    x_plan_ptr,
    x_aux_ptr,
    x_block_table_ptr,
    x_slot_ptr,
    table_ptr,  # shared: [positions, 64]
    request_ptr,  # shared: [N], PLAN "paged"
    eps,
    m_inv_scale,
    stride_m_input_t,
    stride_m_state_b,
    stride_m_state_r,
    stride_m_ape_r,
    stride_m_ape_c,
    stride_m_block_table_b,
    stride_m_cache_p,
    stride_x_input_t,
    stride_x_state_b,
    stride_x_state_r,
    stride_x_ape_r,
    stride_x_ape_c,
    stride_x_block_table_b,
    stride_x_cache_p,
    stride_table_p,
    M_STATE_BLOCK: tl.constexpr,
    X_STATE_BLOCK: tl.constexpr,
    M_PAGE: tl.constexpr,
    X_PAGE: tl.constexpr,
    PLAN: tl.constexpr,
    M_FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK_W: tl.constexpr,  # of the main rows
    READS_EARLY: tl.constexpr,
    POOLS_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (n, 0) are the main rows, which take longer, and (n, 1) the indexer's."""
    i_n = tl.program_id(0)
    is_main = tl.program_id(1) == 0
    if READS_EARLY:
        if is_main:
            decode_row_early(
                i_n, m_input_ptr, m_state_ptr, m_ape_ptr, m_weight_ptr, table_ptr, m_cache_ptr,
                m_plan_ptr, m_aux_ptr, request_ptr, m_block_table_ptr, m_slot_ptr, eps, m_inv_scale,
                stride_m_input_t, stride_m_state_b, stride_m_state_r, stride_m_ape_r,
                stride_m_ape_c, stride_table_p, stride_m_block_table_b, stride_m_cache_p, 512,
                M_STATE_BLOCK, M_PAGE, PLAN, M_FORMAT, ROUNDING, IS_FNUZ, IS_SPLIT_TABLE, False,
                PDL, POOLS_EARLY,
            )  # fmt: skip
        else:
            decode_row_early(
                i_n, x_input_ptr, x_state_ptr, x_ape_ptr, x_weight_ptr, table_ptr, x_cache_ptr,
                x_plan_ptr, x_aux_ptr, request_ptr, x_block_table_ptr, x_slot_ptr, eps, 1.0,
                stride_x_input_t, stride_x_state_b, stride_x_state_r, stride_x_ape_r,
                stride_x_ape_c, stride_table_p, stride_x_block_table_b, stride_x_cache_p, 128,
                X_STATE_BLOCK, X_PAGE, PLAN, X_FORMAT, ROUNDING, IS_FNUZ, IS_SPLIT_TABLE,
                HAS_ROTATION, PDL, POOLS_EARLY,
            )  # fmt: skip
    elif is_main:
        decode_row(
            i_n, m_input_ptr, m_state_ptr, m_ape_ptr, m_weight_ptr, table_ptr, m_cache_ptr,
            m_plan_ptr, m_aux_ptr, request_ptr, m_block_table_ptr, m_slot_ptr, eps, m_inv_scale,
            stride_m_input_t, stride_m_state_b, stride_m_state_r, stride_m_ape_r, stride_m_ape_c,
            stride_table_p, stride_m_block_table_b, stride_m_cache_p, 512, 4, M_STATE_BLOCK,
            M_PAGE, PLAN, M_FORMAT, ROUNDING, IS_FNUZ, IS_SPLIT_TABLE, False, BLOCK_W, PDL,
        )  # fmt: skip
    else:
        decode_row(
            i_n, x_input_ptr, x_state_ptr, x_ape_ptr, x_weight_ptr, table_ptr, x_cache_ptr,
            x_plan_ptr, x_aux_ptr, request_ptr, x_block_table_ptr, x_slot_ptr, eps, 1.0,
            stride_x_input_t, stride_x_state_b, stride_x_state_r, stride_x_ape_r, stride_x_ape_c,
            stride_table_p, stride_x_block_table_b, stride_x_cache_p, 128, 4, X_STATE_BLOCK,
            X_PAGE, PLAN, X_FORMAT, ROUNDING, IS_FNUZ, IS_SPLIT_TABLE, HAS_ROTATION, 8, PDL,
        )  # fmt: skip
