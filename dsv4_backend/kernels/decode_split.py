"""A decode step of ratio 128 in one launch with each request's channels split over programs.

A window of 128 rows is half a megabyte, which one SM reads slowly, and a step of few requests
leaves most SMs idle. The norm needs all channels of a row: of a request's programs the last to
arrive finishes it.
"""

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, Input, Norm, State, Step, Table
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_decode
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import write_state_columns


@triton.jit
def decode_split_kernel(
    input: Input,
    state: State,
    ape: Ape,
    norm: Norm,
    table: Table,
    cache: Cache,
    step: Step,
    state_slot_ptr,  # [N], LAYOUT "paged"
    slot_ptr,  # [N]
    columns_ptr,  # [capacity, D] fp32, pooled rows until they are whole
    arrived_ptr,  # [capacity] int32, a multiple of SPLITS between launches
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    RECORD: tl.constexpr,
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
    window, state_row = locate_decode(step, state_slot_ptr, i_n, RATIO, LAYOUT)
    seq_len = window.seq_len
    slot = tl.load(slot_ptr + i_n).to(tl.int64)
    token_ptr = input.ptr + i_n.to(tl.int64) * input.stride_t
    b_kv = tl.load(token_ptr + o_d).to(tl.float32)
    b_score = tl.load(token_ptr + D + o_d).to(tl.float32)
    b_w = tl.load(norm.weight_ptr + tl.arange(0, D)).to(tl.float32)

    is_token = (seq_len > 0) & (state_row >= 0)
    is_end = is_token & (seq_len % RATIO == 0) & (slot >= 0)
    if LAYOUT == "paged":
        is_end &= window.page_1 >= 0  # keeps the load of the request before the branch
    if is_end:
        b_angles = load_angles(table, seq_len - RATIO, D, IS_SPLIT_TABLE)
        b_x = pool_window(
            o_d, window, step, token_ptr, input.stride_t, state, ape,
            D, RATIO, STATE_BLOCK, LAYOUT, BLOCK_W, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        row_ptr = columns_ptr + i_n.to(tl.int64) * D
        tl.store(row_ptr + o_d, b_x)
        if HAS_WARPS:
            tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + i_n, 1, sem="acq_rel", scope="gpu")
        if before % SPLITS == SPLITS - 1:
            # not from the L1, which other SMs' stores pass by
            b_row = tl.load(row_ptr + tl.arange(0, D), cache_modifier=".cg")
            b_row = finish_row(b_row, b_w, b_angles, norm.eps, D, HAS_ROTATION)
            store_record(b_row, cache, slot, D, RECORD)
    if is_token:
        write_state_columns(
            o_d, b_kv, b_score, state, ape, state_row, seq_len - 1, D, RATIO, STATE_BLOCK, LAYOUT
        )
