"""Which state a sequence reads and writes."""

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
def reads_state(has_initial_state_ptr, i_n, slot):
    """Whether a sequence continues from its state, and not from zeros."""
    reads = slot >= 0
    if has_initial_state_ptr is not None:
        reads &= tl.load(has_initial_state_ptr + i_n).to(tl.int1)
    return reads
