// Merging the splits of an output row by their log-sum-exp, in the order of the splits.
//
//   LSE = log2(sum_s 2^lse_s),  out = sum_s 2^(lse_s - LSE) partial_s
//
// FlashMLA's semantics (its combine kernel of April 2025): all -inf gives LSE +inf and output 0; a split of
// scale 0 adds nothing, whatever it holds; a sum that is NaN gives LSE +inf. Partial LSEs are base 2, the
// output's is natural. A sink takes its part of the weights and none of the LSE.
//
// Row: of an output row `count`, its splits, and `index(p, split)`, the row of the partials with each.
#pragma once
#include "hopper.cuh"
#include "softmax.cuh"

static constexpr int MOST = 160;  // splits of a row

// Scales of a row's splits, lane by lane; returns the row's LSE in base 2.
template <typename Params, typename Row>
__device__ __forceinline__ float scale_splits(const Params& p, const Row& row, int head, int lane,
                                              float (&scale)[MOST / 32]) {
    float top = -INF, sum = 0;
#pragma unroll
    for (int i = 0; i < MOST / 32; ++i) {
        const int split = i * 32 + lane;
        scale[i] = split < row.count ? p.partial_lse[row.index(p, split)] : -INF;
        top = fmaxf(top, scale[i]);
    }
#pragma unroll
    for (int bit = 16; bit; bit /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
    if (top == -INF) top = 0;
#pragma unroll
    for (int i = 0; i < MOST / 32; ++i) sum += ex2(scale[i] - top);
#pragma unroll
    for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    const float all = sum == 0.f || sum != sum ? INF : lg2(sum) + top;
    const float weight = p.sinks && all != INF ? lg2(sum + ex2(p.sinks[head] * LOG2E - top)) + top : all;
#pragma unroll
    for (int i = 0; i < MOST / 32; ++i) scale[i] = ex2(scale[i] - weight);
    return all;
}

__device__ __forceinline__ void add(float4& y, const float4& x, float scale) {
    if (scale == 0.f) return;
    y.x += scale * x.x, y.y += scale * x.y, y.z += scale * x.z, y.w += scale * x.w;
}

// 64 channels of a row, by 256 threads: 16 lanes of four channels, 16 splits at a time. `to` is the row of the
// outputs, `sums` shared memory that nobody else uses before the threads have met again, for which there is `meet`.
template <typename Params, typename Row, typename Meet>
__device__ __forceinline__ void merge_slice(const Params& p, const Row& row, i64 to, int head, int part, int thread,
                                            float (*sums)[64], Meet meet) {
    constexpr int WAYS = 16, EACH = MOST / WAYS;
    const int warp = thread / 32, lane = thread % 32, way = thread / 16;
    const float* from = p.partial_out + part * 64 + thread % 16 * 4;
    float4 x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i * WAYS + way < row.count)
            x[i] = *reinterpret_cast<const float4*>(from + row.index(p, i * WAYS + way) * 512);
    float scale[MOST / 32];
    const float all = scale_splits(p, row, head, lane, scale);
    float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const float k = __shfl_sync(~0u, scale[i / 2], way + WAYS * (i & 1));
        if (i * WAYS + way < row.count) add(y, x[i], k);
    }
    y.x += __shfl_xor_sync(~0u, y.x, 16), y.y += __shfl_xor_sync(~0u, y.y, 16);
    y.z += __shfl_xor_sync(~0u, y.z, 16), y.w += __shfl_xor_sync(~0u, y.w, 16);
    if (lane < 16) *reinterpret_cast<float4*>(&sums[warp][lane * 4]) = y;
    meet();
    if (thread < 32) {
        float a = 0, b = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) a += sums[w][2 * lane], b += sums[w][2 * lane + 1];
        *reinterpret_cast<u32*>(p.out + to * 512 + part * 64 + 2 * lane) = pack_bf16(a, b);
        if (thread == 0 && part == 0) p.lse[to] = all * LN2;
    }
}
