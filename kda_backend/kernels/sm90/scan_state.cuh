// The state of 64 value rows in a warpgroup's accumulators: from memory and to it.
#pragma once

#include "scan_task.cuh"

// Where a lane stands in its warpgroup.
struct Lane {
    int warp, lane;         // of the warpgroup; of the warp
    int r, t;               // row and pair of columns in an accumulator
    int matrix, in_matrix;  // ldmatrix: gives the address of this row of this matrix

    __device__ __forceinline__ Lane()
        : warp(__shfl_sync(~0u, threadIdx.x / 32, 0) % 4), lane(threadIdx.x % 32), r(lane / 4),
          t(lane % 4), matrix(lane / 8), in_matrix(lane % 8) {}
};

__device__ __forceinline__ float load_state(const void* p, i64 at) {
    return STATE_BF16 ? low_bf16(static_cast<const u16*>(p)[at])
                      : static_cast<const float*>(p)[at];
}
// Two channels side by side.
__device__ __forceinline__ float2 load_state_pair(const void* p, i64 at) {
    if (!STATE_BF16) return *reinterpret_cast<const float2*>(static_cast<const float*>(p) + at);
    const u32 x = *reinterpret_cast<const u32*>(static_cast<const u16*>(p) + at);
    return make_float2(low_bf16(x), high_bf16(x));
}
__device__ __forceinline__ void store_state_pair(void* p, i64 at, float x, float y) {
    if (STATE_BF16)
        *reinterpret_cast<u32*>(static_cast<u16*>(p) + at) = pack_bf16(x, y);
    else
        *reinterpret_cast<float2*>(static_cast<float*>(p) + at) = make_float2(x, y);
}
__device__ __forceinline__ bool have_pairs(const void* p, i64 n, i64 h, i64 v, i64 k) {
    const u32 bytes = STATE_BF16 ? 4 : 8;
    return k == 1 && ((n | h | v) & 1) == 0 && (reinterpret_cast<u64>(p) & (bytes - 1)) == 0;
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

__device__ __forceinline__ void read_state(const Params& p, const Task& task, const Lane& at,
                                           float (&state)[64]) {
    const i64 slot = p.state_indices ? p.state_indices[task.n] : task.n;
    const bool reads =
        p.state_in && slot >= 0 && (!p.has_initial_state || p.has_initial_state[task.n]);
    const i64 from = slot * p.stride_in_n + task.head * p.stride_in_h +
                     64 * task.half * p.stride_in_v;
    if (reads && have_pairs(p.state_in, p.stride_in_n, p.stride_in_h, p.stride_in_v,
                            p.stride_in_k)) {
        each_state(at, [&](int i, int v, int k) {
            if (i % 2) return;
            const float2 x = load_state_pair(p.state_in, from + v * p.stride_in_v + k);
            state[i] = x.x, state[i + 1] = x.y;
        });
    } else {
        each_state(at, [&](int i, int v, int k) {
            state[i] = 0.f;
            if (reads)
                state[i] =
                    load_state(p.state_in, from + v * p.stride_in_v + k * p.stride_in_k);
        });
    }
}

__device__ __forceinline__ void write_state(const Params& p, const Task& task, const Lane& at,
                                            const float (&state)[64]) {
    const i64 slot = p.state_indices ? p.state_indices[task.n] : task.n;
    if (!p.state_out || slot < 0) return;
    const i64 to = slot * p.stride_out_n + task.head * p.stride_out_h +
                   64 * task.half * p.stride_out_v;
    if (have_pairs(p.state_out, p.stride_out_n, p.stride_out_h, p.stride_out_v,
                   p.stride_out_k)) {
        each_state(at, [&](int i, int v, int k) {
            if (i % 2 == 0)
                store_state_pair(p.state_out, to + v * p.stride_out_v + k, state[i],
                                 state[i + 1]);
        });
    } else {
        each_state(at, [&](int i, int v, int k) {
            const i64 address = to + v * p.stride_out_v + k * p.stride_out_k;
            if (STATE_BF16)
                static_cast<u16*>(p.state_out)[address] =
                    static_cast<u16>(pack_bf16(state[i], 0.f));
            else
                static_cast<float*>(p.state_out)[address] = state[i];
        });
    }
}

// The state after ``done`` chunks, where it is asked for.
__device__ __forceinline__ void track_state(const Params& p, const Task& task, const Lane& at,
                                            const float (&state)[64], int done) {
    for (int i = 0; i < p.num_snapshots; ++i) {
        const i64 number = static_cast<i64>(task.n) * p.num_snapshots + i;
        if (p.snapshot_chunks[number] != done) continue;
        float* to =
            p.snapshots + ((number * p.num_value_heads + task.head) * D + 64 * task.half) * D;
        each_state(at, [&](int j, int v, int k) { to[v * D + k] = state[j]; });
    }
    if (!p.chunk_states || done == task.chunks) return;
    u16* to = static_cast<u16*>(p.chunk_states) + (task.first + done) * p.stride_chunk_n +
              task.head * p.stride_chunk_h;
    each_state(at, [&](int j, int v, int k) {
        to[(64 * task.half + v) * p.stride_chunk_v + k * p.stride_chunk_k] =
            static_cast<u16>(pack_bf16(state[j], 0.f));
    });
}
