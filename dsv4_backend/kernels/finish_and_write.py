"""After pooling by columns: finish and store the windows, and write the state rows."""

import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, Input, Norm, State, Step, Table
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_prefill, locate_write
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import load_row, write_state_row


@triton.jit(do_not_specialize=["num_windows"])
def finish_and_write_kernel(
    pooled_ptr,  # [N, D] fp32
    input: Input,
    state: State,
    ape: Ape,
    norm: Norm,
    table: Table,
    cache: Cache,
    step: Step,
    write_ptr,  # [M, 2], LAYOUT "ring"
    state_slot_ptr,  # [T], LAYOUT "paged"
    slot_ptr,  # [T]
    num_windows,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    RECORD: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
):
    """The first num_windows programs are windows, the others state rows."""
    i_n = tl.program_id(0)
    if i_n < num_windows:
        token, window = locate_prefill(step, i_n, RATIO, LAYOUT)
        seq_len = window.seq_len
        slot = tl.load(slot_ptr + token, mask=token >= 0, other=-1).to(tl.int64)
        if (token >= 0) & (seq_len > 0) & (seq_len % RATIO == 0) & (slot >= 0):
            o_d = tl.arange(0, D)
            b_x = tl.load(pooled_ptr + i_n.to(tl.int64) * D + o_d)
            b_w = tl.load(norm.weight_ptr + o_d).to(tl.float32)
            b_angles = load_angles(table, seq_len - RATIO, D, IS_SPLIT_TABLE)
            b_x = finish_row(b_x, b_w, b_angles, norm.eps, D, HAS_ROTATION)
            store_record(b_x, cache, slot, D, RECORD)
    else:
        written, state_row, position = locate_write(
            write_ptr, state_slot_ptr, step.position_ptr, i_n - num_windows, LAYOUT
        )
        if (written >= 0) & (state_row >= 0):
            token_ptr = input.ptr + written.to(tl.int64) * input.stride_t
            b_kv, b_score = load_row(token_ptr, D, RATIO)
            write_state_row(
                b_kv, b_score, state, ape, state_row, position, D, RATIO, STATE_BLOCK, LAYOUT
            )
