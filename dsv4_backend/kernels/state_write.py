"""State rows of prefill chunks, written after every window that may read them was pooled."""

import triton
import triton.language as tl

from dsv4_backend.kernels.window import load_row, locate_write, write_state_row


@triton.jit
def state_write_kernel(
    input_ptr,  # [T, 2·C·D] fp32 or bf16
    state_ptr,  # [pages, STATE_BLOCK, 2·C·D]
    ape_ptr,  # [RATIO, C, D]
    write_ptr,  # see window.locate_write
    write_aux_ptr,
    position_ptr,  # [T], PLAN "paged"
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
):
    """One program a token."""
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    token, state_row, position = locate_write(
        write_ptr, write_aux_ptr, position_ptr, tl.program_id(0), WINDOW, PLAN
    )
    if (token < 0) | (state_row < 0):
        return
    token_ptr = input_ptr + token.to(tl.int64) * stride_input_t
    b_kv, b_score = load_row(token_ptr, D, RATIO)
    write_state_row(
        b_kv, b_score, state_ptr, ape_ptr, state_row, position,
        stride_state_b, stride_state_r, stride_ape_r, stride_ape_c, D, RATIO, STATE_BLOCK, PLAN,
    )  # fmt: skip
