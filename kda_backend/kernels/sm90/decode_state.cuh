// The states of one warp in a decode step: WARP_ROWS rows of 128 channels, fetched in one of two
// ways.
#pragma once

#include "decode_channels.cuh"

// Up to eight rows go to registers, more by bulk copies to shared memory.
static constexpr bool DIRECT = WARP_ROWS <= 8;
static constexpr int CHUNK_ROWS = WARP_ROWS < 8 ? WARP_ROWS : 8, CHUNKS = WARP_ROWS / CHUNK_ROWS;
static constexpr int STEPS = CHUNK_ROWS / 4;  // rows of a chunk, four at a time
static constexpr int ROW4 = D / 4;            // of a row of states, by fours

template <bool IN_REGISTERS>
struct StateTile {};
template <>
struct StateTile<false> {
    State tile[ROWS * D];
    ClusterTransactionBarrier arrived[WARPS][CHUNKS];
};
struct __align__(16) Vectors {
    float q[D], k[D], decay[D];
    float squares[SPLIT][WARPS];           // of the outputs of each warp of the head
    ClusterTransactionBarrier norm_ready;  // the squares of all CTAs are there
};
struct Shared : StateTile<DIRECT>, Vectors {};
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

// State4 (i, j) of chunk c belongs to this lane's row, the lane / 8th of four, and to channels
// 32 j + 4 column on.
template <bool IN_REGISTERS>
struct WarpState {
    State4 fetched[STEPS][4];

    __device__ __forceinline__ void init(Shared&, const Place&) {}
    __device__ __forceinline__ void fetch(Shared&, const Place&, State*, State4* own) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                fetched[i][j] =
                    load_global(own + 4 * i * ROW4 + 8 * j, create_policy<LOAD_HINT>());
    }
    __device__ __forceinline__ void wait(Shared&, const Place&, int) {}
    __device__ __forceinline__ State4 get(int, int i, int j) const { return fetched[i][j]; }
};
template <>
struct WarpState<false> {
    const State4* own_shared;

    template <typename S>
    __device__ __forceinline__ void init(S& s, const Place& at) {
        if (at.lane == 0)
            for (int c = 0; c < CHUNKS; ++c) s.arrived[at.warp][c].init(1);
    }
    template <typename S>
    __device__ __forceinline__ void fetch(S& s, const Place& at, State* tile, State4*) {
        own_shared =
            reinterpret_cast<State4*>(s.tile + (at.warp * WARP_ROWS + at.lane / 8) * D) +
            at.column;
        if (at.lane != 0) return;
        constexpr u32 BYTES = sizeof(State) * CHUNK_ROWS * D;
        for (int c = 0; c < CHUNKS; ++c) {
            ClusterTransactionBarrier& arrived = s.arrived[at.warp][c];
            arrived.arrive_and_expect_tx(BYTES);
            bulk_copy_g2s(s.tile + (at.warp * WARP_ROWS + c * CHUNK_ROWS) * D,
                          tile + c * CHUNK_ROWS * D, BYTES, arrived, create_policy<LOAD_HINT>());
        }
    }
    template <typename S>
    __device__ __forceinline__ void wait(S& s, const Place& at, int c) {
        s.arrived[at.warp][c].wait(0);
    }
    __device__ __forceinline__ State4 get(int c, int i, int j) const {
        return own_shared[(c * CHUNK_ROWS + 4 * i) * ROW4 + 8 * j];
    }
};
