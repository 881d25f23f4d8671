// What the one-launch steps read and write: elements of any type, states by fours, the gate and the
// short convolution.
//
// DT_* say the type of each tensor: 0 (bf16), 1 (fp16) or 2 (fp32).
#pragma once

#include "kda.cuh"
#include "state_type.cuh"

// Of a kernel whose heads are shared by SPLIT CTAs.
#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

// An element as it lies in memory. A conversion would wait for it, and so would the loads after it.
template <int TYPE>
__device__ __forceinline__ u32 load_bits(const void* p, i64 i) {
    return TYPE == 2 ? static_cast<const u32*>(p)[i] : static_cast<const u16*>(p)[i];
}
template <int TYPE>
__device__ __forceinline__ float to_float(u32 bits) {
    bits = compiler_fence(bits);
    return TYPE == 2 ? __uint_as_float(bits) : TYPE == 1 ? from_fp16(bits) : low_bf16(bits);
}
template <int TYPE>
__device__ __forceinline__ void store_bits(void* p, i64 i, u32 bits) {
    if (TYPE == 2) {
        static_cast<u32*>(p)[i] = bits;
    } else {
        static_cast<u16*>(p)[i] = bits;
    }
}
template <int TYPE>
__device__ __forceinline__ u32 to_bits(float x) {
    return TYPE == 2 ? __float_as_uint(x) : TYPE == 1 ? to_fp16(x) : pack_bf16(x, 0.0f) & 0xffff;
}
template <int TYPE>
__device__ __forceinline__ void store(void* p, i64 i, float x) {
    store_bits<TYPE>(p, i, to_bits<TYPE>(x));
}
// The four taps of a channel as they lie in memory, aligned to their 16 or 8 bytes.
#if DT_TAPS == 2
typedef float4 Taps;
__device__ __forceinline__ float4 taps_of(Taps x) { return x; }
#else
typedef uint2 Taps;
__device__ __forceinline__ float4 taps_of(Taps x) {
    return make_float4(to_float<DT_TAPS>(x.x & 0xffff), to_float<DT_TAPS>(x.x >> 16),
                       to_float<DT_TAPS>(x.y & 0xffff), to_float<DT_TAPS>(x.y >> 16));
}
#endif

// log2(1 + e^x), without overflow for large x and without cancellation for very negative x
__device__ __forceinline__ float softplus_log2(float x) {
    float y = x * LOG2E, e = ex2(fminf(y, 40.0f));
    float series = LOG2E * e * (1.0f - e * (0.5f - e * (0.33333333f - e * 0.25f)));
    return e < 0.03f ? series : fmaxf(lg2(1.0f + e), y);
}

// The decay of a channel, from its gate, the head's A_log and dt_bias.
__device__ __forceinline__ float decay_of(float g, float a_log, float dt_bias, float lower_bound) {
    float log2_decay = g * LOG2E;
    if (GATE == GATE_SOFTPLUS) {
        // With A_log above 60 the decay is 0 unless softplus(x) = e^x < e^-20, where
        // exp(A_log) softplus(x) = exp(60) softplus(x + A_log - 60); its factors may overflow.
        const float x = g + (dt_bias + fmaxf(a_log - 60.0f, 0.0f));
        log2_decay = -ex2(fminf(a_log, 60.0f) * LOG2E) * softplus_log2(x);
    }
    if (GATE == GATE_BOUNDED) {  // with a finite rate, since 0 times it is 0
        const float rate = ex2(fminf(a_log, 88.0f) * LOG2E);
        log2_decay = lower_bound * LOG2E * sigmoid(rate * (g + dt_bias));
    }
    return ex2(log2_decay);
}

// silu of the convolution of three inputs of the window and a new one, by four taps.
__device__ __forceinline__ float convolve(float4 taps, float bias, float x0, float x1, float x2,
                                          float x) {
    float y = bias;
    y += taps.x * x0 + taps.y * x1;
    y += taps.z * x2 + taps.w * x;
    return y * sigmoid(y);
}

// Four states of a row.
#if DT_STATE == 2
typedef float4 State4;
__device__ __forceinline__ float4 to_float4(State4 x) { return x; }
__device__ __forceinline__ State4 as_stored4(float4 x) { return x; }
#else
typedef uint2 State4;
__device__ __forceinline__ float4 to_float4(State4 x) {
    return make_float4(low_state(x.x), high_state(x.x), low_state(x.y), high_state(x.y));
}
__device__ __forceinline__ State4 as_stored4(float4 x) {
    return make_uint2(pack_states(x.x, x.y), pack_states(x.z, x.w));
}
#endif
