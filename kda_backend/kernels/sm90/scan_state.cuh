// The state of 64 value rows in a warpgroup's accumulators: from memory and to it.
//
// The kernel has defined STATES_HAVE_PAIRS: every call has states whose channels lie in pairs.
#pragma once

#include "state_type.cuh"
#include "task.cuh"

static constexpr int STATE_BYTES = sizeof(State);

__device__ __forceinline__ float load_state(const void* p, i64 at) {
    return DT_STATE == 2 ? static_cast<const float*>(p)[at]
                         : low_state(static_cast<const u16*>(p)[at]);
}
// Two channels side by side.
__device__ __forceinline__ float2 load_state_pair(const void* p, i64 at) {
    if (DT_STATE == 2) return *reinterpret_cast<const float2*>(static_cast<const float*>(p) + at);
    const u32 x = *reinterpret_cast<const u32*>(static_cast<const u16*>(p) + at);
    return make_float2(low_state(x), high_state(x));
}
__device__ __forceinline__ void store_state_pair(void* p, i64 at, float x, float y) {
    if (DT_STATE == 2)
        *reinterpret_cast<float2*>(static_cast<float*>(p) + at) = make_float2(x, y);
    else
        *reinterpret_cast<u32*>(static_cast<u16*>(p) + at) = pack_states(x, y);
}
__device__ __forceinline__ bool have_pairs(const States& x) {
    if (STATES_HAVE_PAIRS) return true;
    return x.stride_k == 1 && ((x.stride_n | x.stride_h | x.stride_v) & 1) == 0 &&
           (reinterpret_cast<u64>(x.ptr) & (2 * STATE_BYTES - 1)) == 0;
}
// Calls f(index, value row, channel) for each accumulator of the state.
template <typename F>
__device__ __forceinline__ void each_state(const Lane& at, F f) {
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            f(4 * n + e, 16 * at.warp + at.r + 8 * (e / 2), 8 * n + 2 * at.t + e % 2);
}

// Asks for a value row of the state before the sequence in the L2 cache.
__device__ __forceinline__ void prefetch_state_row(const Params& p, const Task& task, int v) {
    const States& x = p.state_in;
    const i64 slot = p.state_indices ? p.state_indices[task.n] : task.n;
    if (!x.ptr || slot < 0 || x.stride_k != 1) return;
    const char* row = static_cast<const char*>(x.ptr) +
                      (slot * x.stride_n + task.head * x.stride_h + v * x.stride_v) * STATE_BYTES;
#pragma unroll
    for (int i = 0; i < D * STATE_BYTES; i += 128) prefetch_l2(row + i);
}
// The state before the sequence.
__device__ __forceinline__ void read_initial_state(const Params& p, const Task& task,
                                                   const Lane& at, float (&state)[64]) {
    const States& x = p.state_in;
    const i64 slot = p.state_indices ? p.state_indices[task.n] : task.n;
    const bool reads = x.ptr && slot >= 0 && (!p.has_initial_state || p.has_initial_state[task.n]);
    const i64 from = slot * x.stride_n + task.head * x.stride_h + 64 * task.half * x.stride_v;
    if (reads && have_pairs(x)) {
        each_state(at, [&](int i, int v, int k) {
            if (i % 2) return;
            const float2 y = load_state_pair(x.ptr, from + v * x.stride_v + k);
            state[i] = y.x, state[i + 1] = y.y;
        });
    } else {
        each_state(at, [&](int i, int v, int k) {
            state[i] = 0.f;
            if (reads) state[i] = load_state(x.ptr, from + v * x.stride_v + k * x.stride_k);
        });
    }
}
// The state before the task.
__device__ __forceinline__ void read_state(const Params& p, const Task& task, const Lane& at,
                                           float (&state)[64]) {
#if SEGMENTS
    if (task.segment.count > 1) {
        load_end(end_of(p, task.place_of_start(p), task.half), state);
        return;
    }
#endif
    read_initial_state(p, task, at, state);
}

__device__ __forceinline__ void write_state(const Params& p, const Task& task, const Lane& at,
                                            const float (&state)[64]) {
    if (!task.ends_sequence()) return;
    const States& x = p.state_out;
    const i64 slot = p.state_indices ? p.state_indices[task.n] : task.n;
    if (!x.ptr || slot < 0) return;
    const i64 to = slot * x.stride_n + task.head * x.stride_h + 64 * task.half * x.stride_v;
    if (have_pairs(x)) {
        each_state(at, [&](int i, int v, int k) {
            if (i % 2 == 0)
                store_state_pair(x.ptr, to + v * x.stride_v + k, state[i], state[i + 1]);
        });
    } else {
        each_state(at, [&](int i, int v, int k) {
            const i64 address = to + v * x.stride_v + k * x.stride_k;
            static_cast<State*>(x.ptr)[address] = as_stored<State>(state[i]);
        });
    }
}

// Those one after another are fp32, those in slots of a pool as the states.
#if TRACK == 2
typedef State Snapshot;
#else
typedef float Snapshot;
#endif
// The state after ``done`` chunks of the task, where it is asked for.
__device__ __forceinline__ void track_state(const Params& p, const Task& task, const Lane& at,
                                            const float (&state)[64], int done) {
    for (int i = 0; i < p.num_snapshots; ++i) {
        const i64 number = static_cast<i64>(task.n) * p.num_snapshots + i;
        if (p.snapshot_chunks[number] != task.chunks_before(p) + done) continue;
#if TRACK == 2
        const i64 slot = p.snapshot_indices[number];
        if (slot < 0) continue;
#if SEGMENTS
        // the last segment's state stays in the sequence's own slot, and nothing orders the others
        if (p.snapshots == p.state_out.ptr && slot == p.state_indices[task.n]) continue;
#endif
        Snapshot* to = static_cast<Snapshot*>(p.snapshots) + slot * p.snapshot_stride +
                       (task.head * D + 64 * task.half) * D;
#else
        Snapshot* to = static_cast<Snapshot*>(p.snapshots) +
                       ((number * p.num_value_heads + task.head) * D + 64 * task.half) * D;
#endif
        each_state(at, [&](int j, int v, int k) { to[v * D + k] = as_stored<Snapshot>(state[j]); });
    }
    const States& x = p.chunk_states;
    if (!x.ptr || done == task.chunks) return;
    u16* chunk = static_cast<u16*>(x.ptr) + (task.first + done) * x.stride_n +
                 task.head * x.stride_h;
    each_state(at, [&](int j, int v, int k) {
        chunk[(64 * task.half + v) * x.stride_v + k * x.stride_k] =
            static_cast<u16>(pack_bf16(state[j], 0.f));
    });
}
