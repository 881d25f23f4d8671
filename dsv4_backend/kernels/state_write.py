"""State rows of prefill chunks, written after every window that may read them was pooled."""

import triton
import triton.language as tl

from dsv4_backend.kernels.arguments import Ape, Input, State
from dsv4_backend.kernels.locate import locate_write
from dsv4_backend.kernels.state_rows import load_row, write_state_row


@triton.jit
def state_write_kernel(
    input: Input,
    state: State,
    ape: Ape,
    write_ptr,  # [M, 2], LAYOUT "ring"
    state_slot_ptr,  # [T], LAYOUT "paged"
    position_ptr,  # [T], LAYOUT "paged"
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program per entry of the step plan that may write."""
    token, state_row, position = locate_write(
        write_ptr, state_slot_ptr, position_ptr, tl.program_id(0), LAYOUT
    )
    if (token < 0) | (state_row < 0):
        return
    token_ptr = input.ptr + token.to(tl.int64) * input.stride_t
    b_kv, b_score = load_row(token_ptr, D, RATIO)
    write_state_row(b_kv, b_score, state, ape, state_row, position, D, RATIO, STATE_BLOCK, LAYOUT)
