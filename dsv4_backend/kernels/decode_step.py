"""A compressor's whole decode step, one launch."""

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, State, Step
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_decode
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import load_row, write_state_row


@triton.jit
def decode_step_kernel(
    input_ptr,  # [N, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D] fp32 or bf16
    ape_ptr,  # [RATIO, C, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    second_ptr,  # uint8 [pages, second page bytes], see arguments.Cache
    entry_ptr,  # the step plan, see arguments.Step
    position_ptr,
    state_slot_ptr,
    request_ptr,
    block_table_ptr,
    slot_ptr,  # [N]
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
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request: where its token ends a window, pool, finish and store it; write its
    state row.

    The new token's row of the window is read from the input, and the state row is written after
    the window was read: no load waits for a store, and what does not depend on the step plan is
    loaded beside it.
    """
    pdl_begin(PDL)
    pdl_wait(PDL)
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
        None,
        None,
    )
    window, state_row = locate_decode(step, i_n, RATIO, LAYOUT)
    seq_len = window.seq_len
    slot = tl.load(slot_ptr + i_n).to(tl.int64)
    token_ptr = input_ptr + i_n.to(tl.int64) * stride_input_t
    b_kv, b_score = load_row(token_ptr, D, RATIO)
    b_w = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)

    is_token = (seq_len > 0) & (state_row >= 0)
    is_end = is_token & (seq_len % RATIO == 0) & (slot >= 0)
    if LAYOUT == "paged":
        is_end &= window.page_1 >= 0  # keeps the load of the request before the branch
    if is_end:
        b_angles = load_angles(table_ptr, seq_len - RATIO, stride_table_p, D, IS_SPLIT_TABLE)
        b_x = pool_window(
            tl.arange(0, D),
            window,
            step,
            token_ptr,
            stride_input_t,
            state,
            ape,
            D=D,
            RATIO=RATIO,
            STATE_BLOCK=STATE_BLOCK,
            LAYOUT=LAYOUT,
            BLOCK_W=BLOCK_W,
            BLOCK_D=D,
        )
        b_x = finish_row(b_x, b_w, b_angles, eps, D, HAS_ROTATION)
        store_record(b_x, cache, slot, D, PAGE, FORMAT, ROUNDING, IS_FNUZ)
    if is_token:
        write_state_row(
            b_kv, b_score, state, ape, state_row, seq_len - 1, D, RATIO, STATE_BLOCK, LAYOUT
        )
