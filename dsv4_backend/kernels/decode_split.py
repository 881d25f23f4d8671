"""A decode step of ratio 128 in one launch with each request's channels split over programs.

A window of 128 rows is half a megabyte, which one SM reads slowly, and a step of few requests
leaves most SMs idle. The norm needs all channels of a row: of a request's programs the last to
arrive finishes it.
"""

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, State, Step
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_decode
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import write_state_columns


@triton.jit
def decode_split_kernel(
    input_ptr,  # [N, 2·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·D] fp32 or bf16
    ape_ptr,  # [RATIO, 1, D]
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64]
    cache_ptr,  # uint8 [pages, page bytes]
    second_ptr,  # uint8 [pages, second page bytes], see arguments.Cache
    columns_ptr,  # [capacity, D] fp32, pooled rows until they are whole
    arrived_ptr,  # [capacity] int32, a multiple of SPLITS between launches
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
    SPLITS: tl.constexpr,
    HAS_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, i) pools channels i·D/SPLITS and on of request n, and writes them of its state
    row; nobody else reads or writes these channels.

    A program's stores of its channels come before its arrival, all warps' by the barrier, and are
    seen by whoever arrives later. The counter only ever grows, so it needs no reset for the next
    launch, and none in a graph's replay.
    """
    pdl_begin(PDL)
    pdl_wait(PDL)
    BLOCK_D: tl.constexpr = D // SPLITS
    i_n = tl.program_id(0) // SPLITS
    o_d = tl.program_id(0) % SPLITS * BLOCK_D + tl.arange(0, BLOCK_D)
    state = State(state_ptr, stride_state_b, stride_state_r)
    ape = Ape(ape_ptr, stride_ape_r, stride_ape_c)
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
    b_kv = tl.load(token_ptr + o_d).to(tl.float32)
    b_score = tl.load(token_ptr + D + o_d).to(tl.float32)
    b_w = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)

    is_token = (seq_len > 0) & (state_row >= 0)
    is_end = is_token & (seq_len % RATIO == 0) & (slot >= 0)
    if LAYOUT == "paged":
        is_end &= window.page_1 >= 0  # keeps the load of the request before the branch
    if is_end:
        b_angles = load_angles(table_ptr, seq_len - RATIO, stride_table_p, D, IS_SPLIT_TABLE)
        b_x = pool_window(
            o_d,
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
            BLOCK_D=BLOCK_D,
        )
        row_ptr = columns_ptr + i_n.to(tl.int64) * D
        tl.store(row_ptr + o_d, b_x)
        if HAS_WARPS:
            tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + i_n, 1, sem="acq_rel", scope="gpu")
        if before % SPLITS == SPLITS - 1:
            # not from the L1, which other SMs' stores pass by
            b_row = tl.load(row_ptr + tl.arange(0, D), cache_modifier=".cg")
            b_row = finish_row(b_row, b_w, b_angles, eps, D, HAS_ROTATION)
            cache = Cache(cache_ptr, stride_cache_p, second_ptr, stride_second_p)
            store_record(b_row, cache, slot, D, PAGE, FORMAT, ROUNDING, IS_FNUZ)
    if is_token:
        write_state_columns(
            o_d, b_kv, b_score, state, ape, state_row, seq_len - 1, D, RATIO, STATE_BLOCK, LAYOUT
        )
