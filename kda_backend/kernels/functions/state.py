"""Which state a sequence reads and writes, and how states are rounded."""

import triton
import triton.language as tl


@triton.jit
def slot_of(state_indices_ptr, i_n):
    """The row of a sequence's state: its slot of a pool, negative for none, or its own number."""
    slot = i_n.to(tl.int64)
    if state_indices_ptr is not None:
        slot = tl.load(state_indices_ptr + i_n).to(tl.int64)
    return slot


@triton.jit
def as_stored(b_state, element: tl.constexpr):
    """States in a dtype of memory; fp16's largest number in place of what lies beyond it."""
    if element == tl.float16:
        b_state = tl.clamp(b_state, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return b_state.to(element)


@triton.jit
def reads_state(has_initial_state_ptr, i_n, slot):
    """Whether a sequence continues from its state, and not from zeros."""
    reads = slot >= 0
    if has_initial_state_ptr is not None:
        reads &= tl.load(has_initial_state_ptr + i_n).to(tl.int1)
    return reads
