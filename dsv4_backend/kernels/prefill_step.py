"""Windows of prefill chunks: pool, finish and store, one program per window."""

import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Ape, Cache, Input, Norm, State, Step, Table
from dsv4_backend.kernels.finish import finish_row
from dsv4_backend.kernels.locate import locate_prefill
from dsv4_backend.kernels.pooling import pool_window
from dsv4_backend.kernels.records import store_record


@triton.jit
def prefill_step_kernel(
    input: Input,
    state: State,
    ape: Ape,
    norm: Norm,
    table: Table,
    cache: Cache,
    step: Step,
    slot_ptr,  # [T]
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    RECORD: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """State rows are only read: their writes come after, since a ring may reuse them."""
    token, window = locate_prefill(step, tl.program_id(0), RATIO, LAYOUT)
    seq_len = window.seq_len
    slot = tl.load(slot_ptr + token, mask=token >= 0, other=-1).to(tl.int64)
    if (token >= 0) & (seq_len > 0) & (seq_len % RATIO == 0) & (slot >= 0):
        b_w = tl.load(norm.weight_ptr + tl.arange(0, D)).to(tl.float32)
        b_angles = load_angles(table, seq_len - RATIO, D, IS_SPLIT_TABLE)
        token_ptr = input.ptr + token.to(tl.int64) * input.stride_t
        b_x = pool_window(
            tl.arange(0, D), window, step, token_ptr, input.stride_t, state, ape,
            D, RATIO, STATE_BLOCK, LAYOUT, BLOCK_W, BLOCK_D=D,
        )  # fmt: skip
        b_x = finish_row(b_x, b_w, b_angles, norm.eps, D, HAS_ROTATION)
        store_record(b_x, cache, slot, D, RECORD)
