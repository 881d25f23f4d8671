"""A C4 prefill step over a paged state, windows and state rows in one launch.

A paged state gives every token of a step a row of its own, so no window of the call reads what the
call writes, and the order is free. Programs alternate between the rows of RATIO tokens and the
window that ends with about those tokens: what one reads, the other finds in L2.
"""

import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, Input, Norm, State, Step, Table
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_prefill
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import write_paged_rows


@triton.jit(do_not_specialize=["num_windows", "num_tokens"])
def prefill_paged_kernel(
    input: Input,
    state: State,
    ape: Ape,
    norm: Norm,
    table: Table,
    cache: Cache,
    step: Step,
    state_slot_ptr,  # [T]
    slot_ptr,  # [T]
    num_windows,
    num_tokens,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,  # state rows that one program writes, at most RATIO
):
    """The last of every RATIO / ROWS + 1 programs pools a window, the others write state rows."""
    WRITERS: tl.constexpr = RATIO // ROWS
    i_group = tl.program_id(0) // (WRITERS + 1)
    i_rest = tl.program_id(0) % (WRITERS + 1)
    if i_rest < WRITERS:
        o_t = i_group * RATIO + i_rest * ROWS + tl.arange(0, ROWS)
        write_paged_rows(
            o_t, num_tokens, input, state, ape, state_slot_ptr, step.position_ptr,
            D, RATIO, STATE_BLOCK,
        )  # fmt: skip
    elif i_group < num_windows:
        token, window = locate_prefill(step, i_group, RATIO, "paged")
        seq_len = window.seq_len
        slot = tl.load(slot_ptr + token, mask=token >= 0, other=-1).to(tl.int64)
        if (token >= 0) & (seq_len > 0) & (seq_len % RATIO == 0) & (slot >= 0):
            b_w = tl.load(norm.weight_ptr + tl.arange(0, D)).to(tl.float32)
            b_angles = load_angles(table, seq_len - RATIO, D, IS_SPLIT_TABLE)
            token_ptr = input.ptr + token.to(tl.int64) * input.stride_t
            b_x = pool_window(
                tl.arange(0, D), window, step, token_ptr, input.stride_t, state, ape,
                D, RATIO, STATE_BLOCK, "paged", BLOCK_W, BLOCK_D=D,
            )  # fmt: skip
            b_x = finish_row(b_x, b_w, b_angles, norm.eps, D, HAS_ROTATION)
            store_record(b_x, cache, slot, D, RECORD)
