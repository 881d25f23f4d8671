"""A C4 prefill step over a paged state, windows and state rows in one launch.

A paged state gives every token of a step a row of its own, so no window of the call reads what the
call writes, and the order is free. Programs alternate between the rows of RATIO tokens and the
window that ends with about those tokens: what one reads, the other finds in L2.
"""

import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, State, Step
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_prefill
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import write_paged_rows


@triton.jit(do_not_specialize=["num_windows", "num_tokens"])
def prefill_paged_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [blocks, STATE_BLOCK, 2·C·D], read and written
    ape_ptr,  # [RATIO, C, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    second_ptr,  # uint8 [pages, second page bytes], see arguments.Cache
    window_end_ptr,  # [num_windows]
    query_start_ptr,  # [B + 1]
    state_slot_ptr,  # [T]
    position_ptr,  # [T]
    request_ptr,  # [T]
    block_table_ptr,  # [B, blocks]
    slot_ptr,  # [T]
    num_windows,
    num_tokens,
    eps,
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    stride_table_p,
    stride_block_table_b,
    stride_cache_p,
    stride_second_p,
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
    """The last of every RATIO / ROWS + 1 programs pools a window, the others write state rows."""
    WRITERS: tl.constexpr = RATIO // ROWS
    i_group = tl.program_id(0) // (WRITERS + 1)
    i_rest = tl.program_id(0) % (WRITERS + 1)
    state = State(state_ptr, stride_state_b, stride_state_r)
    ape = Ape(ape_ptr, stride_ape_r, stride_ape_c)
    cache = Cache(cache_ptr, stride_cache_p, second_ptr, stride_second_p)
    step = Step(
        None,
        position_ptr,
        state_slot_ptr,
        request_ptr,
        block_table_ptr,
        stride_block_table_b,
        window_end_ptr,
        query_start_ptr,
    )
    if i_rest < WRITERS:
        o_t = i_group * RATIO + i_rest * ROWS + tl.arange(0, ROWS)
        write_paged_rows(
            o_t, num_tokens, input_ptr, stride_input_t, state, ape, step, D, RATIO, STATE_BLOCK
        )
    elif i_group < num_windows:
        token, window = locate_prefill(step, i_group, RATIO, "paged")
        seq_len = window.seq_len
        slot = tl.load(slot_ptr + token, mask=token >= 0, other=-1).to(tl.int64)
        if (token >= 0) & (seq_len > 0) & (seq_len % RATIO == 0) & (slot >= 0):
            b_w = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
            b_angles = load_angles(table_ptr, seq_len - RATIO, stride_table_p, D, IS_SPLIT_TABLE)
            b_x = pool_window(
                tl.arange(0, D),
                window,
                step,
                input_ptr + token.to(tl.int64) * stride_input_t,
                stride_input_t,
                state,
                ape,
                D=D,
                RATIO=RATIO,
                STATE_BLOCK=STATE_BLOCK,
                LAYOUT="paged",
                BLOCK_W=BLOCK_W,
                BLOCK_D=D,
            )
            b_x = finish_row(b_x, b_w, b_angles, eps, D, HAS_ROTATION)
            store_record(b_x, cache, slot, D, PAGE, FORMAT, ROUNDING, IS_FNUZ)
