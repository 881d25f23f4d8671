"""Windows of prefill chunks: pool, finish and store, one program per window."""

import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, State, Step
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_prefill
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record


@triton.jit
def prefill_step_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D], read
    ape_ptr,  # [RATIO, C, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    second_ptr,  # uint8 [pages, second page bytes], see arguments.Cache
    entry_ptr,  # the step plan, see arguments.Step
    window_end_ptr,
    query_start_ptr,
    position_ptr,
    request_ptr,
    block_table_ptr,
    slot_ptr,  # [T]
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
):
    """State rows are only read: their writes come after, since a ring may reuse them."""
    state = State(state_ptr, stride_state_b, stride_state_r)
    ape = Ape(ape_ptr, stride_ape_r, stride_ape_c)
    cache = Cache(cache_ptr, stride_cache_p, second_ptr, stride_second_p)
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
    token, window = locate_prefill(step, tl.program_id(0), RATIO, LAYOUT)
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
            LAYOUT=LAYOUT,
            BLOCK_W=BLOCK_W,
            BLOCK_D=D,
        )
        b_x = finish_row(b_x, b_w, b_angles, eps, D, HAS_ROTATION)
        store_record(b_x, cache, slot, D, PAGE, FORMAT, ROUNDING, IS_FNUZ)
