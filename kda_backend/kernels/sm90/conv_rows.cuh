// The short convolution of a chunk's keys and queries, in place of what the projection made:
//
//     y_t[c] = silu(sum over j of taps[c][j] x_{t - 3 + j}[c])        four taps, fp32, then bf16
//
// The three rows before a chunk (its halo) are the tokens before it; those before a sequence come
// from its slot in the pool of windows, which gets the sequence's last three rows instead. One tile
// alone has the channels of a sequence's first chunk and a head, so nothing races for a window.
//
// Compile-time: CONV (else these functions do nothing); TAPS_FP32 (else bf16); CU_INT64.
#pragma once

#include "chunk_rows.cuh"

#if CONV
#include "offsets.cuh"
// A thread has 8 channels of 8 rows, rows 8 (thread / 16) on.
static constexpr int CONV_ROWS = 8;

// Of a sequence's first chunk, one channel for each thread: the halo from the sequence's window,
// and the window's new rows. A sequence without a slot begins with zeros.
__device__ __forceinline__ void start_window(const Params& p, const Conv& conv,
                                             u16 (&halo)[HALO][D], const TileSource& from,
                                             const u16* rows, i64 stride_t) {
    const int n = from.sequence, channel = threadIdx.x;
    const i64 slot = p.state_indices[n];
    const bool reads = slot >= 0 && (!p.has_initial_state || p.has_initial_state[n]);
    u16* const window = static_cast<u16*>(conv.window) + slot * conv.stride_n +
                        (from.key_head * D + channel) * conv.stride_c;
    u16 old[HALO];
#pragma unroll
    for (int j = 0; j < HALO; ++j)
        halo[j][channel] = old[j] = reads ? window[j * conv.stride_w] : static_cast<u16>(0);
    if (slot < 0) return;
    const i64 tokens = sequence_offset(p.cu_seqlens, n + 1) - from.token;
#pragma unroll
    for (int j = 0; j < HALO; ++j) {
        const i64 t = tokens - HALO + j;  // of the sequence; negative: of the old window
        window[j * conv.stride_w] = t >= 0    ? rows[t * stride_t + channel]
                                    : t == -1 ? old[HALO - 1]
                                              : old[HALO - 2];
    }
}
// The halo of a tile's rows on its way; none where the chunk is after the last one.
__device__ __forceinline__ void fetch_halo(const Params& p, u16 (&halo)[HALO][D], const Conv& conv,
                                           const Rows& x, const TileSource& from) {
    if (from.length == 0) return;
    const u16* rows = rows_of(x, from, from.key_head);
    if (from.sequence >= 0) {
        start_window(p, conv, halo, from, rows, x.stride_t);
    } else if (threadIdx.x < HALO * 16) {
        const int row = threadIdx.x / 16, piece = threadIdx.x % 16;
        cp_async_cacheglobal_zfill(cast_smem_ptr_to_uint(&halo[row][8 * piece]),
                                   rows + (row - HALO) * x.stride_t + 8 * piece, true);
    }
}
__device__ __forceinline__ void fetch_key_halo(const Params& p, Shared& s, const TileSource& from) {
    fetch_halo(p, s.halo[0], p.k_conv, p.k, from);
}
__device__ __forceinline__ void fetch_query_halo(const Params& p, Shared& s,
                                                 const TileSource& from) {
    fetch_halo(p, s.halo[1], p.q_conv, p.q, from);
}

__device__ __forceinline__ void unpack_channels(float (&x)[8], const uint4& from) {
    x[0] = low_bf16(from.x), x[1] = high_bf16(from.x), x[2] = low_bf16(from.y);
    x[3] = high_bf16(from.y), x[4] = low_bf16(from.z), x[5] = high_bf16(from.z);
    x[6] = low_bf16(from.w), x[7] = high_bf16(from.w);
}
// Four taps of each of 8 channels, from channel ``first`` on.
__device__ __forceinline__ void load_taps(float (&taps)[8][4], const void* from, int first) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        if (TAPS_FP32) {
            const float4 x = static_cast<const float4*>(from)[first + c];
            taps[c][0] = x.x, taps[c][1] = x.y, taps[c][2] = x.z, taps[c][3] = x.w;
        } else {
            const uint2 x = static_cast<const uint2*>(from)[first + c];
            taps[c][0] = low_bf16(x.x), taps[c][1] = high_bf16(x.x);
            taps[c][2] = low_bf16(x.y), taps[c][3] = high_bf16(x.y);
        }
    }
}
// 8 channels of a row, or zeros: silu of its taps times the row and the three before.
__device__ __forceinline__ uint4 convolve_row(const float (&x)[4][8], const float (&taps)[8][4],
                                              bool inside) {
    float y[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        y[c] = x[0][c] * taps[c][0];
#pragma unroll
        for (int j = 1; j < 4; ++j) y[c] = fmaf(x[j][c], taps[c][j], y[c]);
        y[c] *= sigmoid(y[c]);
    }
    if (!inside) return make_uint4(0u, 0u, 0u, 0u);
    return make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]),
                      pack_bf16(y[6], y[7]));
}
// Rows of a chunk in shared memory by their convolution, all threads; rows from ``length`` on by
// zeros. The rows and their halo have arrived.
__device__ __forceinline__ void convolve_rows(u16* rows, const u16 (&halo)[HALO][D],
                                              const void* taps_of_head, int length) {
    const int first = threadIdx.x / 16 * CONV_ROWS, piece = threadIdx.x % 16;
    char* const bytes = reinterpret_cast<char*>(rows);
    float x[4][8], taps[8][4];
    load_taps(taps, taps_of_head, 8 * piece);
#pragma unroll
    for (int j = 0; j < HALO; ++j) {
        const char* before = first ? bytes + swizzled(first - HALO + j, piece)
                                   : reinterpret_cast<const char*>(&halo[j][8 * piece]);
        unpack_channels(x[j], *reinterpret_cast<const uint4*>(before));
    }
    __syncthreads();  // the rows before are another thread's, which overwrites them
#pragma unroll
    for (int i = 0; i < CONV_ROWS; ++i) {
        uint4* const at = reinterpret_cast<uint4*>(bytes + swizzled(first + i, piece));
        unpack_channels(x[HALO], *at);
        *at = convolve_row(x, taps, first + i < length);
#pragma unroll
        for (int j = 0; j < HALO; ++j)
#pragma unroll
            for (int c = 0; c < 8; ++c) x[j][c] = x[j + 1][c];
    }
}
// Keys and queries of a tile, which have arrived; ends with a barrier.
__device__ __forceinline__ void convolve_chunk(const Params& p, Shared& s, const TileSource& from,
                                               int length) {
    constexpr int BYTES = 4 * (TAPS_FP32 ? 4 : 2);  // of a channel's taps
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const Conv& conv = i ? p.q_conv : p.k_conv;
        const char* taps = static_cast<const char*>(conv.taps) + from.key_head * D * BYTES;
        convolve_rows(i ? s.q : s.k, s.halo[i], taps, length);
    }
    __syncthreads();
}
#else
__device__ __forceinline__ void fetch_key_halo(const Params&, Shared&, const TileSource&) {}
__device__ __forceinline__ void fetch_query_halo(const Params&, Shared&, const TileSource&) {}
__device__ __forceinline__ void convolve_chunk(const Params&, Shared&, const TileSource&, int) {}
#endif
