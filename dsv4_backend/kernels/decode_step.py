"""A compressor's whole decode step, one launch."""

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, Input, Norm, State, Step, Table
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_decode
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import load_row, write_state_row


@triton.jit
def decode_step_kernel(
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
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    RECORD: tl.constexpr,
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
    window, state_row = locate_decode(step, state_slot_ptr, i_n, RATIO, LAYOUT)
    seq_len = window.seq_len
    slot = tl.load(slot_ptr + i_n).to(tl.int64)
    token_ptr = input.ptr + i_n.to(tl.int64) * input.stride_t
    b_kv, b_score = load_row(token_ptr, D, RATIO)
    b_w = tl.load(norm.weight_ptr + tl.arange(0, D)).to(tl.float32)

    is_token = (seq_len > 0) & (state_row >= 0)
    is_end = is_token & (seq_len % RATIO == 0) & (slot >= 0)
    if LAYOUT == "paged":
        is_end &= window.page_1 >= 0  # keeps the load of the request before the branch
    if is_end:
        b_angles = load_angles(table, seq_len - RATIO, D, IS_SPLIT_TABLE)
        b_x = pool_window(
            tl.arange(0, D), window, step, token_ptr, input.stride_t, state, ape,
            D, RATIO, STATE_BLOCK, LAYOUT, BLOCK_W, BLOCK_D=D,
        )  # fmt: skip
        b_x = finish_row(b_x, b_w, b_angles, norm.eps, D, HAS_ROTATION)
        store_record(b_x, cache, slot, D, RECORD)
    if is_token:
        write_state_row(
            b_kv, b_score, state, ape, state_row, seq_len - 1, D, RATIO, STATE_BLOCK, LAYOUT
        )
