"""State rows of prefill chunks, written after every window that may read them was pooled."""

import triton
import triton.language as tl

from dsv4_backend.kernels.arguments import Ape, State, Step
from dsv4_backend.kernels.locate import locate_write
from dsv4_backend.kernels.state_rows import load_row, write_state_row


@triton.jit
def state_write_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D]
    ape_ptr,  # [RATIO, C, D]
    write_ptr,  # [M, 2], LAYOUT "ring"
    state_slot_ptr,  # [T], LAYOUT "paged"
    position_ptr,  # [T], LAYOUT "paged"
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program per entry of the step plan that may write."""
    state = State(state_ptr, stride_state_b, stride_state_r)
    ape = Ape(ape_ptr, stride_ape_r, stride_ape_c)
    step = Step(None, position_ptr, state_slot_ptr, None, None, None, None, None)
    token, state_row, position = locate_write(write_ptr, step, tl.program_id(0), LAYOUT)
    if (token < 0) | (state_row < 0):
        return
    token_ptr = input_ptr + token.to(tl.int64) * stride_input_t
    b_kv, b_score = load_row(token_ptr, D, RATIO)
    write_state_row(b_kv, b_score, state, ape, state_row, position, D, RATIO, STATE_BLOCK, LAYOUT)
