"""Windows of the convolution inside of a prefill, put where a prefix cache keeps them.

For each sequence with a checkpoint: the WIDTH - 1 tokens before it, which the convolution reads
when the sequence is resumed. The scan writes the recurrent state itself.

Grid: (N * cdiv(C, BLOCK),).
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize_on_alignment=["offsets_ptr", "state_indices_ptr", "cu_seqlens_ptr"],
)
def store_checkpoints_kernel(
    x_ptr,  # [T, C]: the tokens before their convolution
    conv_state_ptr,  # [slots, C, WIDTH - 1] by strides
    offsets_ptr,  # [N] int32, tokens of the sequence before its checkpoint, at least WIDTH - 1
    state_indices_ptr,  # [N] int32 slot of each checkpoint, -1: none
    cu_seqlens_ptr,  # [N + 1]
    C,
    stride_x_t,
    stride_conv_state_n,
    stride_conv_state_c,
    stride_conv_state_w,
    WIDTH: tl.constexpr,  # 4
    BLOCK: tl.constexpr,
):
    num_blocks = tl.cdiv(C, BLOCK)
    i_n = tl.program_id(0) // num_blocks
    slot = tl.load(state_indices_ptr + i_n).to(tl.int64)
    if slot < 0:
        return
    o_c = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < C
    end = tl.load(cu_seqlens_ptr + i_n).to(tl.int64) + tl.load(offsets_ptr + i_n)
    window_ptr = conv_state_ptr + slot * stride_conv_state_n + o_c * stride_conv_state_c
    for j in tl.static_range(WIDTH - 1):
        b_x = tl.load(x_ptr + (end - (WIDTH - 1) + j) * stride_x_t + o_c, mask=m_c)
        b_x = b_x.to(conv_state_ptr.dtype.element_ty)
        tl.store(window_ptr + j * stride_conv_state_w, b_x, mask=m_c)
