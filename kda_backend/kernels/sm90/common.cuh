// What the two stages of KDA prefill on Hopper share: types, conversions, and the tile that
// intra_chunk.cu writes and scan.cu reads.
#pragma once

#include "device.cuh"

static constexpr int C = 64, D = 128;  // tokens of a chunk; channels of a key and of a value
// A tile is seven blocks of 64 rows of 128 bytes with wgmma's 128-byte swizzle:
// -k_in, q_in, T^T k_out (2 blocks each), A_qk T.
static constexpr int BLOCK_BYTES = 8192;
static constexpr int TILE_BYTES = 7 * BLOCK_BYTES;
static constexpr int K_IN = 0, Q_IN = 2, K_OUT = 4, A_QK = 6;  // first block of each

__device__ __forceinline__ u32 pack_fp16(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ float low_fp16(u32 x) {
    float y;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ float high_fp16(u32 x) {
    float y;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
    return y;
}

// How the stages, which run at the same time, tell one another of tiles. A tile lies in memory when
// its flag is the number of this launch; scan.cu counts launches, so no flag is ever cleared.
struct Sync {
    u32 launches;  // that are over
    u32 next;      // tiles handed out
    u32 next_task; // tasks of the scan handed out
    u32 finished;  // scan blocks that have seen all their flags
    u32 started;   // blocks of the intra stage, and 1 << 16 for each that is not limited
    __device__ __forceinline__ u32* flags() { return reinterpret_cast<u32*>(this + 1); }
};
