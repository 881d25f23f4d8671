"""Inter-chunk stage of KDA prefill: carries the state over the chunks and writes the output.

For each 64-token chunk, with the tiles of ``intra`` and the state S [V, K]:

    v_new = u - w S^T
    o     = scale (q_in S^T + A_qk v_new)
    S     = S diag(total) + v_new^T k_out

The state's value rows are independent, so each program owns BLOCK_V of them and carries the state
over the chunks in registers: the state before a chunk is written only where it is asked for.

Grid: (cdiv(V, BLOCK_V) * HV * N,): one axis, since the others stop at 65,535.
"""

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_wait
from kda_backend.kernels.functions.state import as_stored, reads_state, slot_of


@triton.jit
def as_operand(x, DOT: tl.constexpr, STATES: tl.constexpr):
    """x rounded for a product, whose fp16 ends where that of states in fp16 memory does."""
    if tl.float16 == STATES:
        x = as_stored(x, DOT)
    return x.to(DOT)


@triton.jit
def store_state(p_state, strides, o_v, o_k, b_state, mask):
    """S^T to [V, K] by strides."""
    o_state = o_v[None, :] * strides[0] + o_k[:, None] * strides[1]
    tl.store(p_state + o_state, b_state.to(p_state.dtype.element_ty), mask=mask)


@triton.jit
def store_snapshots(
    count, snapshots, asked, tile, b_state, NUM: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):
    """The state after ``count`` chunks, where it is asked for.

    Args:
        snapshots: pointers to the states, to the chunk counts, and to slots of a pool or None.
        asked: of a pool, the chunk counts and the offsets of the slots.
        tile: sequence, value head, ``HV``, value rows, channels and their mask.
    """
    snapshots_ptr, snapshot_chunks_ptr, snapshot_indices_ptr = snapshots
    marks, places = asked
    i_n, i_hv, HV, o_v, o_k, m_kv = tile
    # unrolled: a loop in here would end the pipelining of the one around it
    for i_s in tl.static_range(NUM):
        if snapshot_indices_ptr is None:
            i_ns = i_n * NUM + i_s
            hit = tl.load(snapshot_chunks_ptr + i_ns) == count
            o_s = (i_ns * HV + i_hv) * (V * K) + o_v[None, :] * K + o_k[:, None]
        else:
            hit = marks[i_s] == count
            o_s = places[i_s] + o_v[None, :] * K + o_k[:, None]
        b_kept = as_stored(b_state, snapshots_ptr.dtype.element_ty)
        tl.store(snapshots_ptr + o_s, b_kept, mask=m_kv & hit)


@triton.jit
def scan_kernel(
    tile_ptr,  # [capacity, HV, C * (3 ROW_K + ROW_V + 2 C)]: w, q_in, k_out, u, A_qk, -
    total_ptr,  # [capacity, HV, K] fp32
    o_ptr,  # [T, HV, V]
    state_in_ptr,  # [slots or N, HV, V, K] by strides, or None
    state_out_ptr,  # the same, or None
    state_indices_ptr,  # [N] int32 slot of each sequence, -1: no state; or None
    has_initial_state_ptr,  # [N] bool, or None
    chunk_states_ptr,  # [capacity, HV, V, K] by strides: the state before each chunk; or None
    snapshot_chunks_ptr,  # [N, NUM_SNAPSHOTS] int32 chunk counts, -1: none; or None
    snapshot_indices_ptr,  # [N, NUM_SNAPSHOTS] int32 slots, -1: none; or None
    snapshots_ptr,  # [N, NUM_SNAPSHOTS, HV, V, K] fp32; or of slots, as the states; or None
    cu_seqlens_ptr,
    chunk_offsets_ptr,
    scale,
    stride_o_t,
    stride_o_h,
    stride_state_in_n,
    stride_state_in_h,
    stride_state_in_v,
    stride_state_in_k,
    stride_state_out_n,
    stride_state_out_h,
    stride_state_out_v,
    stride_state_out_k,
    stride_chunk_states_n,
    stride_chunk_states_h,
    stride_chunk_states_v,
    stride_chunk_states_k,
    stride_snapshot_n,  # from slot to slot, or None
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_SNAPSHOTS: tl.constexpr,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pdl_wait(PDL)  # launched while the tiles are made
    NUM_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_v = tl.program_id(0) % NUM_V
    i_hv = (tl.program_id(0) // NUM_V % HV).to(tl.int64)  # heads may lie 2^31 elements apart
    i_n = tl.program_id(0) // (NUM_V * HV)
    bos = tl.load(cu_seqlens_ptr + i_n).to(tl.int64)
    eos = tl.load(cu_seqlens_ptr + i_n + 1).to(tl.int64)
    first = tl.load(chunk_offsets_ptr + i_n).to(tl.int64)
    num_chunks = (eos - bos + CHUNK - 1) // CHUNK
    slot = slot_of(state_indices_ptr, i_n)
    DOT: tl.constexpr = tile_ptr.dtype.element_ty
    STATES: tl.constexpr = None if state_out_ptr is None else state_out_ptr.dtype.element_ty

    o_r = tl.arange(0, CHUNK)
    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # S^T
    if state_in_ptr is not None:
        reads = reads_state(has_initial_state_ptr, i_n, slot)
        o_state = o_v[None, :] * stride_state_in_v + o_k[:, None] * stride_state_in_k
        state_in_ptr += slot * stride_state_in_n + i_hv * stride_state_in_h
        b_state += tl.load(state_in_ptr + o_state, mask=m_kv & reads, other=0.0).to(tl.float32)

    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    ROW_V: tl.constexpr = (V + 7) // 8 * 8
    TILE: tl.constexpr = CHUNK * (3 * ROW_K + ROW_V + 2 * CHUNK)
    tile_ptr += (first * HV + i_hv) * TILE
    total_ptr += (first * HV + i_hv) * K
    o_ptr += bos * stride_o_t + i_hv * stride_o_h
    o_rk = o_r[:, None] * ROW_K + o_k[None, :]
    o_rv = o_r[:, None] * ROW_V + o_v[None, :]
    m_rk = (o_k < ROW_K)[None, :]
    m_rv = (o_v < ROW_V)[None, :]
    o_rc = o_r[:, None] * CHUNK + o_r[None, :]
    marks, places = (), ()  # of snapshots in a pool
    if snapshot_indices_ptr is not None:
        for i_s in tl.static_range(NUM_SNAPSHOTS):
            i_ns = i_n * NUM_SNAPSHOTS + i_s
            slot_s = tl.load(snapshot_indices_ptr + i_ns).to(tl.int64)
            marks += (tl.where(slot_s >= 0, tl.load(snapshot_chunks_ptr + i_ns), -1),)
            places += (slot_s * stride_snapshot_n + i_hv * (V * K),)
    snapshots = (snapshots_ptr, snapshot_chunks_ptr, snapshot_indices_ptr)
    asked, tile = (marks, places), (i_n, i_hv, HV, o_v, o_k, m_kv)
    for i_c in tl.range(0, num_chunks, num_stages=NUM_STAGES):
        if chunk_states_ptr is not None:
            p_chunk = chunk_states_ptr + (first + i_c) * stride_chunk_states_n
            strides = (stride_chunk_states_v, stride_chunk_states_k)
            store_state(p_chunk + i_hv * stride_chunk_states_h, strides, o_v, o_k, b_state, m_kv)
        store_snapshots(i_c, snapshots, asked, tile, b_state, NUM_SNAPSHOTS, K, V)
        b_w = tl.load(tile_ptr + o_rk, mask=m_rk, other=0.0)
        b_q = tl.load(tile_ptr + CHUNK * ROW_K + o_rk, mask=m_rk, other=0.0)
        b_k = tl.load(tile_ptr + 2 * CHUNK * ROW_K + o_rk, mask=m_rk, other=0.0)
        b_u = tl.load(tile_ptr + 3 * CHUNK * ROW_K + o_rv, mask=m_rv, other=0.0)
        b_a = tl.load(tile_ptr + CHUNK * (3 * ROW_K + ROW_V) + o_rc)
        b_total = tl.load(total_ptr + o_k, mask=m_k, other=0.0)

        b_s = as_operand(b_state, DOT, STATES)
        b_new = b_u.to(tl.float32) - tl.dot(b_w, b_s, input_precision=PRECISION)
        b_new = as_operand(b_new, DOT, STATES)
        b_o = tl.dot(b_q, b_s, input_precision=PRECISION)
        b_state = tl.dot(
            tl.trans(b_k), b_new, acc=b_state * b_total[:, None], input_precision=PRECISION
        )
        b_o = tl.dot(b_a, b_new, acc=b_o, input_precision=PRECISION) * scale
        m_o = ((bos + i_c * CHUNK + o_r) < eos)[:, None] & m_v[None, :]
        o_o = o_r[:, None] * stride_o_t + o_v[None, :]
        tl.store(o_ptr + o_o, b_o.to(o_ptr.dtype.element_ty), mask=m_o)
        tile_ptr += HV * TILE
        total_ptr += HV * K
        o_ptr += CHUNK * stride_o_t

    store_snapshots(num_chunks, snapshots, asked, tile, b_state, NUM_SNAPSHOTS, K, V)
    if state_out_ptr is not None:
        o_state = o_v[None, :] * stride_state_out_v + o_k[:, None] * stride_state_out_k
        state_out_ptr += slot * stride_state_out_n + i_hv * stride_state_out_h
        b_state = as_stored(b_state, state_out_ptr.dtype.element_ty)
        tl.store(state_out_ptr + o_state, b_state, mask=m_kv & (slot >= 0))
