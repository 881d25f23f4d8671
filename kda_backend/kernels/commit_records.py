"""The fold of accepted records into states, of the layers of a model at once.

A state goes back to its slot, or to ``written_slots[n]``. The one after the first
``kept_counts[n]`` records also goes to slot ``kept_slots[n]``, which is what a prefix cache keeps
of a boundary inside of a draft. ``layer_offsets`` say where layers lie that are apart, from the
tensors of the first.

Grid: (V / BLOCK_V * HV * N, layers).
"""

import triton
import triton.language as tl

from kda_backend.kernels.functions.delta import state_tile
from kda_backend.kernels.functions.gate import load_gate
from kda_backend.kernels.functions.records import accepted_records, fold_record, load_record
from kda_backend.kernels.functions.state import as_stored


@triton.jit
def _of_layer(pointer, offset_ptr):
    """A pointer moved by an offset in units of 16 bytes, out of its tensor: as a number, for which
    no compiler takes the tensor's size for a bound."""
    address = pointer.to(tl.int64) + tl.load(offset_ptr) * 16
    return tl.multiple_of(address.to(pointer.dtype), 16)


@triton.jit(do_not_specialize=["null_slot", "max_tokens"])
def commit_records_kernel(
    state_ptr,  # [layers, slots, HV, V, K], in place
    state_indices_ptr,  # [N] int32
    correction_ptr,  # [layers, rows, HV, max_tokens, V] fp32
    key_gate_ptr,  # [layers, rows, HV, max_tokens, 2 K]
    record_indices_ptr,  # [N] int32
    num_accepted_ptr,  # [N] int32
    written_slots_ptr,  # [N] int32 or None
    kept_slots_ptr,  # [N] int32 or None
    kept_counts_ptr,  # [N] int32 or None
    a_log_ptr,  # [layers, HV] or None
    dt_bias_ptr,  # [layers, HV, K] or None
    layer_offsets_ptr,  # [3, layers] int64 of states, corrections, keys with gates; or None
    max_tokens,
    null_slot,
    lower_bound,
    stride_state_l,
    stride_state_n,
    stride_correction_l,
    stride_correction_n,
    stride_key_gate_l,
    stride_key_gate_n,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_INNER: tl.constexpr,
    KB_AXIS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_v, i_l = tl.program_id(0) % NV, tl.program_id(1).to(tl.int64)
    i_hv, i_n = tl.program_id(0) // NV % HV, (tl.program_id(0) // NV // HV).to(tl.int64)
    slot = tl.load(state_indices_ptr + i_n).to(tl.int64)
    row = tl.load(record_indices_ptr + i_n).to(tl.int64)
    accepted = accepted_records(num_accepted_ptr, i_n, max_tokens)
    written = slot
    if written_slots_ptr is not None:
        written = tl.load(written_slots_ptr + i_n).to(tl.int64)
    nowhere = (slot < 0) | (slot == null_slot) | (written < 0) | (written == null_slot)
    if nowhere | (row < 0) | (accepted == 0):
        return
    kept_slot, kept_count = slot, 0
    if kept_slots_ptr is not None:
        kept_slot = tl.load(kept_slots_ptr + i_n).to(tl.int64)
        kept_count = tl.load(kept_counts_ptr + i_n)
        keeps = (kept_slot >= 0) & (kept_slot != null_slot)
        kept_count = tl.where(keeps, kept_count, 0)

    o_k, o_v = tl.arange(0, BLOCK_K), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    masks = (o_k < K, o_v < V)
    o_row = i_hv * (V * K) + o_v * K
    o_state, m_state = state_tile(o_row, masks[1], K, BLOCK_K, K_INNER, KB_AXIS)
    if layer_offsets_ptr is not None:
        p_offset = layer_offsets_ptr + i_l
        state_ptr = _of_layer(state_ptr, p_offset)
        correction_ptr = _of_layer(correction_ptr, p_offset + tl.num_programs(1))
        key_gate_ptr = _of_layer(key_gate_ptr, p_offset + 2 * tl.num_programs(1))
    else:
        state_ptr += i_l * stride_state_l
        correction_ptr += i_l * stride_correction_l
        key_gate_ptr += i_l * stride_key_gate_l
    b_state = tl.load(state_ptr + slot * stride_state_n + o_state, mask=m_state, other=0.0)
    b_state = b_state.to(tl.float32)
    gate = load_gate(a_log_ptr, dt_bias_ptr, i_l * HV + i_hv, o_k, masks[0], K)
    p_correction = correction_ptr + row * stride_correction_n + i_hv * (max_tokens * V)
    p_key_gate = key_gate_ptr + row * stride_key_gate_n + i_hv * (max_tokens * (2 * K))
    element = state_ptr.dtype.element_ty
    upcoming = load_record(p_correction, p_key_gate, True, o_k, o_v, masks, K)
    for i in range(accepted):
        record = upcoming
        p_correction += V
        p_key_gate += 2 * K
        upcoming = load_record(p_correction, p_key_gate, i + 1 < accepted, o_k, o_v, masks, K)
        b_state = fold_record(b_state, record, gate, lower_bound, K_INNER, KB_AXIS, GATE, FAST_MATH)
        if i + 1 == kept_count:
            p_kept = state_ptr + kept_slot * stride_state_n + o_state
            tl.store(p_kept, as_stored(b_state, element), mask=m_state)
    p_state = state_ptr + written * stride_state_n + o_state
    tl.store(p_state, as_stored(b_state, element), mask=m_state)
