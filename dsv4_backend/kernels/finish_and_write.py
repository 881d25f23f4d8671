"""After pooling by columns: finish and store the windows, and write the state rows."""

import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, State, Step
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_prefill, locate_write
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import load_row, write_state_row


@triton.jit(do_not_specialize=["num_windows"])
def finish_and_write_kernel(
    pooled_ptr,  # [N, D] fp32
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D], written
    ape_ptr,  # [RATIO, C, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    second_ptr,  # uint8 [pages, second page bytes], see arguments.Cache
    entry_ptr,  # the step plan, see arguments.Step
    window_end_ptr,
    query_start_ptr,
    write_ptr,  # [M, 2], LAYOUT "ring"
    state_slot_ptr,
    position_ptr,
    request_ptr,
    block_table_ptr,
    slot_ptr,  # [T]
    num_windows,
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
    LAYOUT: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
):
    """The first num_windows programs are windows, the others state rows."""
    i_n = tl.program_id(0)
    state = State(state_ptr, stride_state_b, stride_state_r)
    ape = Ape(ape_ptr, stride_ape_r, stride_ape_c)
    cache = Cache(cache_ptr, stride_cache_p, second_ptr, stride_second_p)
    step = Step(
        entry_ptr,
        position_ptr,
        state_slot_ptr,
        request_ptr,
        block_table_ptr,
        stride_block_table_b,
        window_end_ptr,
        query_start_ptr,
    )
    if i_n < num_windows:
        token, window = locate_prefill(step, i_n, RATIO, LAYOUT)
        seq_len = window.seq_len
        slot = tl.load(slot_ptr + token, mask=token >= 0, other=-1).to(tl.int64)
        if (token >= 0) & (seq_len > 0) & (seq_len % RATIO == 0) & (slot >= 0):
            o_d = tl.arange(0, D)
            b_x = tl.load(pooled_ptr + i_n.to(tl.int64) * D + o_d)
            b_w = tl.load(weight_ptr + o_d).to(tl.float32)
            b_angles = load_angles(table_ptr, seq_len - RATIO, stride_table_p, D, IS_SPLIT_TABLE)
            b_x = finish_row(b_x, b_w, b_angles, eps, D, HAS_ROTATION)
            store_record(b_x, cache, slot, D, PAGE, FORMAT, ROUNDING, IS_FNUZ)
    else:
        written, state_row, position = locate_write(write_ptr, step, i_n - num_windows, LAYOUT)
        if (written >= 0) & (state_row >= 0):
            token_ptr = input_ptr + written.to(tl.int64) * stride_input_t
            b_kv, b_score = load_row(token_ptr, D, RATIO)
            write_state_row(
                b_kv, b_score, state, ape, state_row, position, D, RATIO, STATE_BLOCK, LAYOUT
            )
