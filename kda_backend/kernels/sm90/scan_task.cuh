// The tasks of the scan, how CTAs take them, and how their tiles are waited for.
//
// A task is one sequence and value head (scan.cu), or a half of its value rows (scan_split.cu).
#pragma once

#include "tile.cuh"
#include "params.cuh"

__device__ __forceinline__ i64 sequence_offset(const void* cu_seqlens, int n) {
    return CU_INT64 ? static_cast<const i64*>(cu_seqlens)[n]
                    : static_cast<i64>(static_cast<const int*>(cu_seqlens)[n]);
}

struct Task {
    int half;        // of the 128 value rows
    int head, n;     // value head; sequence
    i64 begin, end;  // its tokens
    int chunks;
    i64 first;  // chunk

    __device__ __forceinline__ Task(const Params& p, int number, int half_of_values)
        : half(half_of_values) {
        head = number % p.num_value_heads;
        n = p.sequence_order[number / p.num_value_heads];
        begin = sequence_offset(p.cu_seqlens, n), end = sequence_offset(p.cu_seqlens, n + 1);
        chunks = static_cast<int>((end - begin + C - 1) / C);
        first = p.chunk_offsets[n];
    }
    // tokens of chunk c, if not more than it can have
    __device__ __forceinline__ int rows(int c) const {
        return static_cast<int>(end - begin) - c * C;
    }
    __device__ __forceinline__ i64 tile(const Params& p, int c) const {
        return (first + c) * p.num_value_heads + head;
    }
};

// Task numbers on their way from the warp that takes them to the CTA's other warps, two at a
// time. -1 comes after the last.
struct TaskQueue {
    ClusterBarrier posted[2], read[2];
    int number[2];

    __device__ __forceinline__ void init(int reading_warps) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            posted[i].init(1);
            read[i].init(reading_warps);
        }
    }
    __device__ __forceinline__ void post(int turn, int task, int lane) {
        if (turn >= 2) read[turn % 2].wait((turn / 2 - 1) & 1);
        if (lane == 0) {
            number[turn % 2] = task;
            posted[turn % 2].arrive();
        }
    }
    __device__ __forceinline__ int take(int turn, int lane) {
        posted[turn % 2].wait((turn / 2) & 1);
        const int task = number[turn % 2];
        __syncwarp();
        if (lane == 0) read[turn % 2].arrive();
        return task;
    }
};

// The flags of a task's tiles, looked at by a whole warp.
struct TileFlags {
    const u32* flags;
    int stride, chunks;
    u32 launch;
    int known;  // chunks known to lie in memory

    __device__ __forceinline__ TileFlags(const Params& p, const Task& task, u32 this_launch)
        : flags(p.progress->flags() + task.first * p.num_value_heads + task.head),
          stride(p.num_value_heads), chunks(task.chunks), launch(this_launch), known(0) {}

    // Until chunk c's tile may be copied; each lane asks for one of the next chunks.
    __device__ __forceinline__ void wait(const Params& p, int c, int lane) {
        for (u32 polls = 0; known <= c;) {
            const int asked = known + lane;
            const bool there =
                asked < chunks && load_acquire(flags + static_cast<i64>(asked) * stride) == launch;
            const u32 missing = ~__ballot_sync(~0u, there);
            known += missing ? __ffs(missing) - 1 : 32;
            if ((missing & 1) && ++polls == MAX_POLLS && lane == 0) {
                const u32* flag = flags + static_cast<i64>(known) * stride;
                give_up(p.fault, NO_TILE, flag - p.progress->flags(), *flag, launch);
            }
            __syncwarp();
            fence_proxy_async();  // other SMs wrote the tile; a bulk copy reads it
        }
    }
};

// Called by one thread of each CTA, after its last flag: the last of all CTAs makes the
// counters ready for the next launch.
__device__ __forceinline__ void finish_scan_cta(const Params& p) {
    __threadfence();
    if (atomicAdd(&p.progress->finished_scan_ctas, 1) == gridDim.x - 1) {
        p.progress->next_tile = 0;
        p.progress->next_task = 0;
        p.progress->started_intra_ctas = 0;
        p.progress->finished_scan_ctas = 0;
        p.progress->launches += 1;
    }
}
