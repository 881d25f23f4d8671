// A chunk's rows in shared memory: how they get there, and where a lane stands in them.
//
// The kernel that includes this has defined its Shared, with the members that are named here.
#pragma once

#include "tile.cuh"
#include "params.cuh"

// Byte offset of 16-byte piece c of row r in a block of rows of 128 bytes with the 128-byte
// swizzle. A row of 128 channels continues in the next block.
__device__ __forceinline__ u32 swizzled(int r, int c) {
    return (c / 8) * BLOCK_BYTES + r * 128 + ((c % 8 ^ (r & 7)) << 4);
}

// Where a lane stands: warp w owns the 16 tokens of row block w.
struct RowLane : Lane {
    u32 own_row;

    // ldmatrix's matrices are (tokens 0-7, channels 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
    __device__ __forceinline__ explicit RowLane(int thread)
        // the shuffle tells the compiler that the warp's number is uniform
        : Lane(__shfl_sync(~0u, thread / 32, 0), thread % 32),
          own_row((8 * (matrix % 2) + in_matrix) * 128 + ((matrix / 2 ^ in_matrix) << 4)) {}

    // The address this lane gives for channels 16 j on of a row block.
    __device__ __forceinline__ u32 address(const u16* rows, int row_block, int j) const {
        return cast_smem_ptr_to_uint(rows) + row_block * 16 * 128 + (j / 4) * BLOCK_BYTES +
               (own_row ^ (j % 4) << 5);
    }
};

// First row of a tile in q, k or g.
__device__ __forceinline__ const u16* rows_of(const Rows& x, const TileSource& from, int head) {
    return static_cast<const u16*>(x.ptr) + from.token * x.stride_t + head * x.stride_h;
}
// A chunk's rows to shared memory, zeros after the last.
__device__ __forceinline__ void fetch_rows(u16* to, const void* from, i64 stride, int length) {
    const int row = threadIdx.x / 16, piece = threadIdx.x % 16;
    const char* source = static_cast<const char*>(from) + 16 * piece;
    const u32 at = cast_smem_ptr_to_uint(to) + swizzled(row, piece);
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
        cp_async_cacheglobal_zfill(at + 8 * i * 128, source + 2 * (row + 8 * i) * stride,
                                   row + 8 * i < length);
    }
}
__device__ __forceinline__ void fetch_keys(const Params& p, Shared& s, const TileSource& from) {
    fetch_rows(s.k, rows_of(p.k, from, from.key_head), p.k.stride_t, from.length);
}
// Two groups of copies: q; then g and dt_bias.
__device__ __forceinline__ void fetch_queries_and_gates(const Params& p, Shared& s,
                                                        const TileSource& from, int head,
                                                        int length) {
    fetch_rows(s.q, rows_of(p.q, from, from.key_head), p.q.stride_t, length);
    cp_async_fence();
    fetch_rows(s.g, rows_of(p.g, from, head), p.g.stride_t, length);
    if (GATE != GATE_LOG) {
        const bool has_bias = p.dt_bias != nullptr;
        cp_async_cachealways_zfill(
            &s.bias[threadIdx.x],
            has_bias ? p.dt_bias + head * D + threadIdx.x : p.g.ptr,
            has_bias);
    }
    cp_async_fence();
}
// Beta of the chunk's tokens, and the ones around block_decays.
__device__ __forceinline__ void load_beta(const Params& p, Shared& s, const TileSource& source,
                                          int head, int length) {
    if (threadIdx.x < C) {
        float b = 0.f;
        if (threadIdx.x < length) {
            const i64 at = static_cast<i64>(source.token + threadIdx.x) * p.beta.stride_t +
                           head * p.beta.stride_h;
            b = BETA_FP32 ? static_cast<const float*>(p.beta.ptr)[at]
                          : low_bf16(static_cast<const u16*>(p.beta.ptr)[at]);
            b = activate_beta<BETA>(b);
        }
        s.beta[threadIdx.x] = b;
    } else if (threadIdx.x < C + 8) {
        const int j = (threadIdx.x - C) / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 3; ++i)
            s.block_decays[i][j][t] = s.block_decays[7 + i][j][t] =
                make_float4(1.f, 1.f, 1.f, 1.f);
    }
}
