"""Records of drafted tokens, and the fold of them into a state.

The record of a token is its correction u [V], its key k [K] as it came, before its norm, and its
gate as it came: S becomes S diag(decay) + u k^T.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import ex2
from kda_backend.kernels.functions.gate import log2_decay


@triton.jit
def accepted_records(num_accepted_ptr, i_n, max_tokens):
    """The records that the step before has left and the engine has accepted; 0 without a count."""
    accepted = 0
    if num_accepted_ptr is not None:
        accepted = tl.load(num_accepted_ptr + i_n).to(tl.int32)
        accepted = tl.maximum(tl.minimum(accepted, max_tokens), 0)
    return accepted


@triton.jit
def load_record(p_correction, p_key_gate, exists, o_k, o_v, masks, K: tl.constexpr):
    """u, k and the gate of a record, in fp32; zeros where there is none."""
    m_k, m_v = masks[0] & exists, masks[1] & exists
    b_u = tl.load(p_correction + o_v, mask=m_v, other=0.0)
    b_k = tl.load(p_key_gate + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_g = tl.load(p_key_gate + K + o_k, mask=m_k, other=0.0).to(tl.float32)
    return b_u, b_k, b_g


@triton.jit
def store_record(p_correction, p_key_gate, o_k, o_v, masks, values, K: tl.constexpr):
    """The record of a token: ``values`` are u, k and the gate."""
    element = p_key_gate.dtype.element_ty
    tl.store(p_correction + o_v, values[0], mask=masks[1])
    tl.store(p_key_gate + o_k, values[1].to(element), mask=masks[0])
    tl.store(p_key_gate + K + o_k, values[2].to(element), mask=masks[0])


@triton.jit
def fold_record(
    b_state,
    record,
    gate,
    lower_bound,
    K_INNER: tl.constexpr,
    KB_AXIS: tl.constexpr,
    GATE: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """The state after a record, in the order and with the roundings of `delta_update`; ``gate`` is
    a head's A_log and dt_bias."""
    KB: tl.constexpr = b_state.shape[KB_AXIS]
    b_u, b_k, b_g = record
    b_decay = ex2(log2_decay(b_g, gate[0], gate[1], lower_bound, GATE, FAST_MATH), FAST_MATH)
    b_k = tl.expand_dims(tl.reshape(b_k, [KB, K_INNER]), 1 - KB_AXIS)
    b_state *= tl.expand_dims(tl.reshape(b_decay, [KB, K_INNER]), 1 - KB_AXIS)
    return tl.fma(tl.expand_dims(b_u[:, None], KB_AXIS), b_k, b_state)
