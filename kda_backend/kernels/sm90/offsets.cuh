// Where sequences begin. Compile-time: CU_INT64 (else int32).
#pragma once

#include "tile.cuh"

__device__ __forceinline__ i64 sequence_offset(const void* cu_seqlens, int n) {
    return CU_INT64 ? static_cast<const i64*>(cu_seqlens)[n]
                    : static_cast<i64>(static_cast<const int*>(cu_seqlens)[n]);
}
