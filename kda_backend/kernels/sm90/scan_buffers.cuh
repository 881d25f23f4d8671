// The buffers of a scan CTA (scan.cu) and the barriers at which its warps hand them on.
//
// A step is a chunk of one of the CTA's tasks, counted over all of them. A stage has a tile alone and
// is free after the tile's last product, values have two buffers, free as soon as they are
// accumulators, and the output has one. If a stage waited for the store of its output, three steps
// would last at least as long as a tile's way here, a step and a store together.
#pragma once

#include "scan_chunk.cuh"

static constexpr int STAGES = 3;
static constexpr int CONSUMERS = 8;  // warps

struct Buffers {
    static constexpr int VALUE_STAGES = 2;

    unsigned char stage[STAGES][TILE_BYTES];
    unsigned char v[VALUE_STAGES][C * PITCH];
    unsigned char out[C * PITCH];
    float chunk_decays[STAGES][D];
    ClusterTransactionBarrier full[STAGES];
    ClusterBarrier empty[STAGES];
    ClusterBarrier values_full[VALUE_STAGES], values_empty[VALUE_STAGES];
    ClusterBarrier written[2], stored[2];  // the output of a half of the value rows

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            full[i].init(1);  // the tile's bytes
            empty[i].init(CONSUMERS);
        }
#pragma unroll
        for (int i = 0; i < VALUE_STAGES; ++i) {
            values_full[i].init(32);  // each lane's
            values_empty[i].init(CONSUMERS);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            written[i].init(4);
            stored[i].init(1);
        }
    }
    __device__ __forceinline__ void fetch_values_of(const Params& p, const Task& task, int lane,
                                                    int& step) {
        fetch_values(p, v, values_full, values_empty, task, lane, step);
    }
    // By each lane of a consumer: e = v^T of a half of the value rows, when they are there.
    __device__ __forceinline__ void take_values(float (&e)[32], int step, int half,
                                                const Lane& at) {
        const int i = step % VALUE_STAGES;
        values_full[i].wait((step / VALUE_STAGES) & 1);
        load_values(e, cast_smem_ptr_to_uint(v[i]) + 128 * half, at);
        __syncwarp();
        if (at.lane == 0) values_empty[i].arrive();
    }
    __device__ __forceinline__ void wait_for_tile(int step) {
        full[step % STAGES].wait((step / STAGES) & 1);
    }
    // By a consumer whose products have read a step's tile.
    __device__ __forceinline__ void free_tile(int step, const Lane& at) {
        __syncwarp();
        if (at.lane == 0) empty[step % STAGES].arrive();
    }
    // The output's buffer, when the step before has left it.
    __device__ __forceinline__ u32 take_output(int step, int half) {
        if (step > 0) stored[half].wait((step - 1) & 1);
        return cast_smem_ptr_to_uint(out) + 128 * half;
    }
    __device__ __forceinline__ void hand_on_output(int step, int half, const Lane& at) {
        if (at.lane == 0) written[half].arrive();
    }
    // By a warp that stores the output.
    __device__ __forceinline__ u32 written_output(int step, int half) {
        written[half].wait(step & 1);
        return cast_smem_ptr_to_uint(out) + 128 * half;
    }
    __device__ __forceinline__ void free_output(int step, int half, int lane) {
        __syncwarp();
        if (lane == 0) stored[half].arrive();
    }
};
