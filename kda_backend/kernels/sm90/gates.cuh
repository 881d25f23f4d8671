// Log decays of a chunk, from the gate, and their sums by matrix products.
//
// A row's decay over some tokens of its block is 2 to a sum of log2 decays. Such sums are products
// of a constant 0/1 matrix [8 rows, 8 tokens] and the log decays [8 tokens, channels], so the
// tensor cores make them. Log decays enter rounded to fp16, all sums from the same rounded numbers:
// what g rounded to 11 bits would give, and g itself has 8.
#pragma once

#include "chunk_rows.cuh"

// Log decays are kept as fp16 times this, so that decays next to 1 stay normal numbers.
static constexpr float LOG_SCALE = 256.0f;
// Decays over 8 tokens of at least 2^-22, or 16 of a bounded gate's 2^-7.3, and their inverses,
// centred by 2^SHIFT, times a key or a query, are numbers of fp32.
static constexpr float SHIFT = 60.0f, UNSHIFT = 0x1p-60f;

// exp(A_log) and softplus(x) may leave fp32 on either side where their product does not. With A_log
// above 60 the decay is 0 unless softplus(x) = e^x < e^-20, and there
// exp(A_log) softplus(x) = exp(60) softplus(x + A_log - 60). A bounded gate's rate must be finite,
// since 0 times it is 0.
static constexpr float LARGEST_A_LOG = GATE == GATE_BOUNDED ? 80.0f : 60.0f;

// What log_decay takes of a head's A_log: exp(A_log) LOG_SCALE.
__device__ __forceinline__ float decay_rate(float a_log) {
    return ex2(fminf(a_log, LARGEST_A_LOG) * LOG2E) * LOG_SCALE;
}
// Adds what decay_rate leaves of A_log to dt_bias, once it lies in shared memory: each thread to
// the channel that it has copied.
__device__ __forceinline__ void shift_bias(float* bias, float a_log) {
    if (GATE == GATE_SOFTPLUS) bias[threadIdx.x] += fmaxf(a_log - LARGEST_A_LOG, 0.0f);
}

// log2 of the decay, times LOG_SCALE. ``bias`` is dt_bias log2(e).
__device__ __forceinline__ float log_decay(float g, float bias, float rate, float lower_bound) {
    if constexpr (GATE == GATE_LOG) {
        return g * (LOG2E * LOG_SCALE);
    } else if constexpr (GATE == GATE_SOFTPLUS) {
        const float y = fmaf(g, LOG2E, bias);
        const float e = ex2(fminf(y, 40.0f));
        // log2(1 + e) by its series where 1 + e rounds away the digits of a small e
        const float series = e * fmaf(e, -0.5f * LOG2E, LOG2E);
        return -rate * (e < 0.01f ? series : fmaxf(lg2(1.0f + e), y));
    } else {
        const float z = (-1.0f / LOG_SCALE) * rate * fmaf(g, LOG2E, bias);
        return lower_bound * (LOG2E * LOG_SCALE) * rcp(1.0f + ex2(z));  // from -5 on
    }
}
// In scores within 8 tokens a decay counts as 2^-22 at least, which is nothing in fp16; a bounded
// gate's is never less.
__device__ __forceinline__ u32 at_least_2_to_minus_22(u32 log_pair) {
    if (GATE == GATE_BOUNDED) return log_pair;
    return max_fp16x2(log_pair, 0xed80ed80u);  // -22 * 256
}

// The sums' matrices, as halves of an A fragment [8 rows, 8 tokens] with entries 1 / LOG_SCALE
// (0x1c00): over all tokens, and over those through the row's own.
struct SumMatrices {
    static_assert(LOG_SCALE == 256.0f, "0x1c00 is 2^-8");
    static constexpr u32 all = 0x1c001c00u;
    u32 through;

    __device__ __forceinline__ explicit SumMatrices(const RowLane& at)
        : through((2 * at.t <= at.r ? 0x1c00u : 0u) | (2 * at.t + 1 <= at.r ? 0x1c000000u : 0u)) {}
};

// Masks of the lane's pairs of tokens: those that the chunk has.
__device__ __forceinline__ void tokens_inside(u32 (&inside)[2], const RowLane& at, int length) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int first = 16 * at.warp + 8 * i + 2 * at.t;
        inside[i] = (first < length ? 0xffffu : 0u) | (first + 1 < length ? 0xffff0000u : 0u);
    }
}
