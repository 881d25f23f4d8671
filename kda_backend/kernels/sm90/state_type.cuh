// States as they lie in memory. DT_STATE says their type: 0 (bf16), 1 (fp16) or 2 (fp32).
//
// fp16 ends at 65,504. A state beyond it is stored as that number with its sign, and where a product
// takes states of fp16 memory as fp16 operands, so are the operands. NaN stays NaN.
#pragma once

#include "hopper.cuh"

#if DT_STATE == 2
typedef float State;
#else
typedef u16 State;
#endif

// Two states in 16 bits, and back.
__device__ __forceinline__ u32 pack_states(float low, float high) {
    return DT_STATE == 1 ? pack_fp16_satfinite(low, high) : pack_bf16(low, high);
}
__device__ __forceinline__ float low_state(u32 x) {
    return DT_STATE == 1 ? low_fp16(x) : low_bf16(x);
}
__device__ __forceinline__ float high_state(u32 x) {
    return DT_STATE == 1 ? high_fp16(x) : high_bf16(x);
}
template <typename T>
__device__ __forceinline__ T as_stored(float x) {
    return sizeof(T) == 2 ? static_cast<T>(pack_states(x, 0.0f)) : static_cast<T>(x);
}
// Two numbers of a product's operand.
__device__ __forceinline__ u32 pack_operand(float low, float high) {
    return DT_STATE == 1 ? pack_fp16_satfinite(low, high) : pack_fp16(low, high);
}
