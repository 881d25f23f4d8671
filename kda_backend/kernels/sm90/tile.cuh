// Data that the two stages of KDA prefill hand to one another: tiles, and the counters and flags by
// which they find them. intra_chunk.cu writes them, scan.cu and scan_split.cu read them.
#pragma once

#include "kda.cuh"

static constexpr int C = 64;  // tokens per chunk

// Rows of a chunk in shared memory: all, or 16 or 32 where no chunk of the launch has more.
#ifndef ROWS
#define ROWS 64
#endif
static constexpr int ROW_BLOCKS = ROWS / 16;

// A tile belongs to one chunk and value head. It is seven blocks of ROWS rows of 128 bytes with
// wgmma's 128-byte swizzle: -k_in, q_in, T^T k_out (two blocks each) and A_qk T.
static constexpr int BLOCK_BYTES = ROWS * 128;
static constexpr int TILE_BYTES = 7 * BLOCK_BYTES;
static constexpr int K_IN = 0, Q_IN = 2, K_OUT = 4, A_QK = 6;  // first block of each

// CONV: keys and queries come from the projection, before their convolution (conv_rows.cuh).
#ifndef CONV
#define CONV 0
#endif
static constexpr int HALO = 3;  // rows before a chunk that its convolution reads

// Where a tile's inputs lie.
struct TileSource {
    int head, key_head, chunk;
    int token, length;  // first token in the batch; tokens
    float a_log;
#if CONV
    int sequence;  // that begins with the chunk; -1: none
#endif
};

// Where a lane stands in its warpgroup.
struct Lane {
    int warp, lane;         // of the warpgroup; of the warp
    int r, t;               // fragment or accumulator: rows r and r + 8, columns 2 t, 2 t + 1
    int matrix, in_matrix;  // ldmatrix: gives the address of this row of this matrix

    __device__ __forceinline__ Lane()
        : Lane(__shfl_sync(~0u, threadIdx.x / 32, 0) % 4, threadIdx.x % 32) {}
    __device__ __forceinline__ Lane(int warp, int lane)
        : warp(warp), lane(lane), r(lane / 4), t(lane % 4), matrix(lane / 8),
          in_matrix(lane % 8) {}
};

// The stages run at the same time. A tile lies in memory when its flag holds the number of this
// launch; the scan counts launches, so no flag is ever cleared.
struct Progress {
    u32 launches;              // that are over
    u32 next_tile;             // tiles that intra CTAs have taken
    u32 next_task;             // tasks that scan CTAs have taken
    u32 finished_scan_ctas;    // that have seen all their flags
    u32 started_intra_ctas;    // and 1 << 16 for each that is not on an SM reserved for the scan

    __device__ __forceinline__ u32* flags() { return reinterpret_cast<u32*>(this + 1); }
};

// A CTA stops polling after this many attempts (half a minute or more, since kernels of other
// streams may hold the SMs for long) and reports a fault.
#ifndef MAX_POLLS
#define MAX_POLLS (1u << 26)
#endif

// What was waited for, in host memory (backend_core/launch/faults.py).
struct Fault {
    u32 code, index, seen, expected;
};
enum FaultCode : u32 { NO_TILE = 1, NO_START = 2, NO_SEGMENT = 3 };

// Ends the kernel, and with it all work of the process on this GPU.
__device__ __forceinline__ void give_up(Fault* fault, FaultCode code, u32 index, u32 seen,
                                        u32 expected) {
    volatile Fault* to = fault;
    to->index = index, to->seen = seen, to->expected = expected;
    __threadfence_system();
    to->code = code;
    __threadfence_system();
    __trap();
}
