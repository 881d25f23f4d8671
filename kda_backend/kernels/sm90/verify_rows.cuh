// The recurrence of a verification from records: for each value row, the corrections and outputs of
// a chunk's tokens from the products of state and tokens.
#pragma once

#include "verify_tokens.cuh"

// Sums by a binary tree.
__device__ __forceinline__ float sum_of_parts(const float (&x)[SPLIT]) {
    float pairs[2] = {x[0], 0.0f};
#pragma unroll
    for (int i = 0; i < SPLIT / 2; ++i) pairs[i] = x[2 * i] + x[2 * i + 1];
    return SPLIT == 4 ? pairs[0] + pairs[1] : pairs[0];
}
__device__ __forceinline__ float sum_of_8(const float (&x)[8]) {
    const float4 a = load4(x), b = load4(x + 4);
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// The recurrence of a warp's ROWS / 8 rows: each has 2 SPLIT lanes, whose tokens are its own and
// every 2 SPLIT-th after it.
struct RowTokens {
    static constexpr int COUNT = ROWS / WARPS, LANES = 32 / COUNT, TOKENS = CHUNK / LANES;
    int lane, row;  // of the row's lanes; of the CTA's rows
    float u[CHUNK], out[TOKENS];

    __device__ __forceinline__ explicit RowTokens(const Place& at)
        : lane(at.lane / COUNT), row(at.warp * COUNT + at.lane % COUNT) {}

    // The state's product with k of a token, or q of token ``factor`` - CHUNK.
    __device__ __forceinline__ float product(const Shared& s, int factor) const {
        float x[SPLIT];
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) x[i] = s.products[i][factor][row];
        return sum_of_parts(x);
    }
    // Makes the corrections, and stores them. Of tokens that there are not, u is nothing that an
    // earlier token takes.
    __device__ __forceinline__ void correct(const Params& p, Shared& s, const Place& at,
                                            const Draft& draft, int first, int tokens) {
        float* const to = draft.corrections(p, at, first) + row;
        float delta[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            float x = product(s, t);
#pragma unroll
            for (int i = 0; i < t; ++i) x = fmaf(s.kk[t][i], u[i], x);
            delta[t] = s.beta[t] * fmaf(-s.r_k[t], x, s.v[t][row]);
            u[t] = s.r_k[t] * delta[t];
        }
#pragma unroll
        for (int t = 0; t < CHUNK; ++t)
            if (t < tokens && lane == t % LANES) {
                s.u[t][row] = u[t];
                if (draft.row >= 0)
                    to[t * D] = p.by_norm ? u[t] : delta[t];
            }
    }
    __device__ __forceinline__ void multiply(const Shared& s) {
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            const int t = LANES * j + lane;
            float y = product(s, CHUNK + t);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) y = i <= t ? fmaf(s.qk[t][i], u[i], y) : y;
            out[j] = s.r_q[t] * y;
        }
    }
    // Divides by the root mean square over the head's rows; ``phase``: the chunk's parity.
    __device__ __forceinline__ void normalise(const Params& p, Shared& s, const Place& at,
                                              int tokens, int phase) {
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            const int t = LANES * j + lane;
            float sum = fmaf(out[j], out[j], 0.0f);
#pragma unroll
            for (int x = 1; x < COUNT; x *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
            if (t < tokens) {
                out[j] *= s.gate[t][row];
                if (at.lane % COUNT == 0) s.squares[t][at.warp] = sum;
            }
        }
        __syncthreads();
        if (SPLIT > 1) {
            const int t = at.t / SPLIT;
            if (t < tokens)
                store_shared_remote(sum_of_8(s.squares[t]), &s.totals[t][at.rank],
                                    s.norm_ready, at.t % SPLIT);
            s.norm_ready.wait(phase);
        }
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            const int t = LANES * j + lane;
            if (t >= tokens) continue;
            const float sum = SPLIT == 1 ? sum_of_8(s.squares[t]) : sum_of_parts(s.totals[t]);
            out[j] *= rsqrtf(sum * (1.0f / D) + p.eps);
        }
    }
    __device__ __forceinline__ void store_out(const Params& p, const Place& at, const Draft& draft,
                                              int first, int tokens) const {
        const Elements to = Elements::from<DT_X>(
            p.out.ptr,
            (draft.first + first + lane) * p.out.stride + at.head * D + at.rank * ROWS + row,
            LANES * p.out.stride);
#pragma unroll
        for (int j = 0; j < TOKENS; ++j)
            if (LANES * j + lane < tokens) to.store<DT_X>(j, to_bits<DT_X>(out[j]));
    }
};
