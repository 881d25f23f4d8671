// The tasks of the scan, how CTAs take them, and how their tiles are waited for.
//
// A task is one sequence and value head (scan.cu), or a half of its value rows (scan_split.cu).
#pragma once

#include "task.cuh"

// Task numbers on their way from the warp that takes them to the CTA's other warps, two at a
// time. -1 comes after the last.
struct TaskQueue {
    ClusterBarrier posted[2], read[2];
    int number[2];
#if SEGMENTS
    ClusterBarrier started[2];  // what the task starts from lies in memory
#endif

    __device__ __forceinline__ void init(int reading_warps) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            posted[i].init(1);
            read[i].init(reading_warps);
#if SEGMENTS
            started[i].init(1);
#endif
        }
    }
    __device__ __forceinline__ void post(int turn, int task, int lane) {
        if (turn >= 2) read[turn % 2].wait((turn / 2 - 1) & 1);
        if (lane == 0) {
            number[turn % 2] = task;
            posted[turn % 2].arrive();
        }
    }
    __device__ __forceinline__ void wait_until_read(int turn) {
        read[turn % 2].wait((turn / 2) & 1);
        __syncwarp();
    }
    // Segments: by the warp that has waited for what a task starts from.
    __device__ __forceinline__ void start(int turn, int lane) {
#if SEGMENTS
        __syncwarp();
        if (lane == 0) started[turn % 2].arrive();
#endif
    }
    // By a warp that needs what the task starts from; it is waited for before the number counts as
    // read, so that two turns are never started at once.
    __device__ __forceinline__ int take_started(int turn, int lane) {
#if SEGMENTS
        posted[turn % 2].wait((turn / 2) & 1);
        if (number[turn % 2] >= 0) started[turn % 2].wait((turn / 2) & 1);
#endif
        return take(turn, lane);
    }
    __device__ __forceinline__ int take(int turn, int lane) {
        posted[turn % 2].wait((turn / 2) & 1);
        const int task = number[turn % 2];
        __syncwarp();
        if (lane == 0) read[turn % 2].arrive();
        return task;
    }
};

// Until the state that a task starts from lies in memory, where it is a segment's; by a whole warp,
// which then says so (TaskQueue::start). ``warps``: of the eight that share the value rows.
__device__ __forceinline__ void wait_for_start(const Params& p, const Task& task, int warps,
                                               int lane) {
#if SEGMENTS
    if (task.segment.count == 1) return;
    const int flag = END + 4 * task.half + lane;
    wait_for_segment(p, lane < warps ? segment_flag(p, task.place_of_start(p), flag) : nullptr,
                     p.progress->launches + 1);
#endif
}

// The tasks before those of sequences that have neither tokens nor a slot; by a whole warp. In the
// order of lengths these come last: tables of a CUDA graph have them where no request is.
__device__ __forceinline__ int tasks_before_idle_ones(const Params& p, int tasks_per_sequence,
                                                      int lane) {
    const int sequences = p.num_tasks / tasks_per_sequence;
    int idle_last = sequences;
    for (int i = lane; i < sequences; i += 32) {
        const int n = p.sequence_order[i];
        bool idle = p.state_indices && p.state_indices[n] < 0 &&
                    sequence_offset(p.cu_seqlens, n) == sequence_offset(p.cu_seqlens, n + 1);
        for (int j = 0; j < p.num_snapshots; ++j)
            idle = idle && p.snapshot_chunks[static_cast<i64>(n) * p.num_snapshots + j] < 0;
        if (!idle) idle_last = sequences - 1 - i;
    }
    return (sequences - __reduce_min_sync(~0u, idle_last)) * tasks_per_sequence;
}

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
#if SEGMENTS
    wait_on_dependent_grids();  // the kernels before have ended: nobody looks at the counters
#endif
    __threadfence();
    if (atomicAdd(&p.progress->finished_scan_ctas, 1) == gridDim.x - 1) {
        p.progress->next_tile = 0;
        p.progress->next_task = 0;
        p.progress->started_intra_ctas = 0;
        p.progress->finished_scan_ctas = 0;
        p.progress->launches += 1;
    }
}
