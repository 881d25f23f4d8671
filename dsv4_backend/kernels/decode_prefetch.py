"""A decode step of ratio 4 that reads all but its input before its PDL wait.

For step plans that are ``pdl_prefetch_safe``: the kernel in front of this one may only have written
the input.
"""

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, Input, Norm, State, Step, Table
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_decode
from dsv4_backend.kernels.pooling import (
    before_wait,
    load_last_row,
    load_old_rows,
    pool_last_row,
    pool_old_rows,
)
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import load_ape_row, load_row, store_state_row


@triton.jit
def decode_prefetch_kernel(
    input: Input,
    state: State,
    ape: Ape,
    norm: Norm,
    table: Table,
    cache: Cache,
    step: Step,
    state_slot_ptr,  # [N], LAYOUT "paged"
    slot_ptr,  # [N]
    D: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    RECORD: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    POOLS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request; with POOLS_FIRST the old rows are pooled before the wait, too, in
    steps that end no window as well.

    Loads are masked, not branched over, so that none waits for the step plan's values in a branch.
    """
    pdl_begin(PDL)
    i_n = tl.program_id(0)
    window, state_row = locate_decode(step, state_slot_ptr, i_n, 4, LAYOUT)
    seq_len = window.seq_len
    slot = tl.load(slot_ptr + i_n).to(tl.int64)
    b_w = tl.load(norm.weight_ptr + tl.arange(0, D)).to(tl.float32)
    is_token = (seq_len > 0) & (state_row >= 0)
    is_end = is_token & (seq_len % 4 == 0) & (slot >= 0)
    if LAYOUT == "paged":
        is_end &= window.page_1 >= 0
    end = tl.where(is_end, seq_len, 0)
    b_kv, b_s, b_ape = load_old_rows(window, end, step, state, ape, D, STATE_BLOCK, LAYOUT)
    b_top, b_sum, b_acc = pool_old_rows(b_kv, b_s)
    b_angles = load_angles(table, tl.maximum(end - 4, 0), D, IS_SPLIT_TABLE)
    b_row_ape = tl.zeros([2 * D], tl.float32)
    if LAYOUT == "paged":
        b_row_ape = load_ape_row(ape, tl.maximum(seq_len - 1, 0), D, 4)
    token_ptr = input.ptr + i_n.to(tl.int64) * input.stride_t
    if POOLS_FIRST:
        b_acc = before_wait(b_acc, b_sum, b_top)

    pdl_wait(PDL)
    b_row_kv, b_row_score = load_row(token_ptr, D, 4)
    b_kv, b_s = load_last_row(token_ptr, b_ape, D)
    if is_token:
        b_row_score += b_row_ape
        store_state_row(b_row_kv, b_row_score, state, state_row, D, 4, STATE_BLOCK)
    if is_end:
        b_x = pool_last_row(b_top, b_sum, b_acc, b_kv, b_s)
        b_x = finish_row(b_x, b_w, b_angles, norm.eps, D, HAS_ROTATION)
        store_record(b_x, cache, slot, D, RECORD)
