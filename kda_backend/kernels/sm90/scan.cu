// Inter-chunk stage of KDA prefill on Hopper: carries the state over the chunks, writes the output.
//
// The equations are in scan_chunk.cuh; they are scan.py's, with the solve moved from k_in and v to
// k_out and A_qk. A CTA carries all 128 value rows of one sequence and head through its chunks,
// task after task, with three warpgroups. "->" is an mbarrier:
//
//     producer warpgroup                                  two consumer warpgroups,
//     warp 0           warp 3          warps 1, 2         64 value rows each
//     take a task, post its number -> everybody
//     wait for a flag
//                      copy v                         ->  values_full: e = v
//                      values_empty                   <-
//     copy the tile                                   ->  full: e = v - k_in S^T
//                                                         S = decay S + e (T^T k_out)
//                                                         o = S q_in + e (A_qk T)
//     empty                                           <-
//                                      store o        <-  written
//                                      stored         ->
//
// A wgmma with A in registers keeps its warps from issuing anything else, so one warpgroup
// multiplies while the other packs, loads and stores, and a tile is fetched once for both. Three
// tiles and the values of two chunks are on their way (scan_buffers.cuh).
//
// intra_chunk.cu writes the tiles as wgmma reads them, 8 KiB blocks of 64 rows of 128 bytes with
// the 128-byte swizzle, so plain bulk copies fetch them, each as soon as its flag says it is there.
//
// Compile-time: CU_INT64 (cu_seqlens, else int32), DT_STATE (state_type.cuh), TRACK (1: states of
// chunks or snapshots are asked for, 2: snapshots go to slots of a pool); SEGMENTS (segments.cuh).

static constexpr int ROW_BYTES = 256;  // of v: both halves of the value rows
static constexpr bool STATES_HAVE_PAIRS = false;
#include "scan_buffers.cuh"
#include "scan_task.cuh"

struct __align__(1024) Shared : Buffers {
    TaskQueue tasks;
};
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

// Warp 0 of the producers: takes tasks and fetches their tiles.
__device__ __forceinline__ void fetch_tiles(const Params& p, Shared& s, int lane) {
    const u32 launch = p.progress->launches + 1;
    int before = 0;  // chunks of the tasks before
    int tasks = p.num_tasks;
    for (int turn = 0;; ++turn) {
        // CTAs that are fewer than the tasks take them as they come
        int number = blockIdx.x + turn * gridDim.x;
        if (gridDim.x < p.num_tasks)
            number = __shfl_sync(~0u, lane ? 0 : atomicAdd(&p.progress->next_task, 1), 0);
        const bool over = number >= tasks;
        s.tasks.post(turn, over ? -1 : number, lane);
        if (SEGMENTS && over) s.tasks.wait_until_read(turn);  // readers still use the launch number
        if (over) break;
        const Task task(p, number, 0);
        if (!SEGMENTS && !task.chunks) tasks = tasks_before_idle_ones(p, p.num_value_heads, lane);
        TileFlags flags(p, task, launch);
        for (int c = 0; c < task.chunks; ++c, ++before) {
            const int stage = before % STAGES;
            if (before >= STAGES) s.empty[stage].wait((before / STAGES - 1) & 1);
            flags.wait(p, c, lane);
            if (lane != 0) continue;
            const i64 tile = task.tile(p, c);
            s.full[stage].arrive_and_expect_tx(TILE_BYTES + D * 4);
            bulk_copy_g2s(s.stage[stage],
                          reinterpret_cast<const unsigned char*>(p.tiles) + tile * TILE_BYTES,
                          TILE_BYTES, s.full[stage]);
            bulk_copy_g2s(s.chunk_decays[stage], p.chunk_decays + tile * D, D * 4, s.full[stage]);
        }
    }
    __syncwarp();  // all lanes have read the launch's number, which lane 0 may raise
}

// Warps 1 and 2 of the producers: the output of a half of the value rows to memory.
__device__ __forceinline__ void store_outputs(const Params& p, Shared& s, int half, int lane) {
    int before = 0;
    for (int turn = 0, number; (number = s.tasks.take(turn, lane)) >= 0; ++turn) {
        const Task task(p, number, half);
        const int row = lane / 8, piece = lane % 8;
        u16* to = output_of(p, task, row, piece);
        for (int c = 0; c < task.chunks; ++c, ++before) {
            u32 from = values_at(s.written_output(before, half), row, piece);
            const int rows = task.rows(c) - row;
#pragma unroll 1
            for (int i = 0; i < C; i += 16, from += 16 * PITCH, to += 16 * p.o.stride_t)
                store_output<4>(to, p.o.stride_t, rows - i, from, [] {});
            s.free_output(before, half, lane);
        }
    }
}

// A consumer warpgroup: the recurrence and the output of a half of the value rows.
__device__ __forceinline__ void scan_tasks(const Params& p, Shared& s, int half, const Lane& at) {
    int before = 0;
    for (int turn = 0, number; (number = s.tasks.take_started(turn, at.lane)) >= 0; ++turn) {
        const Task task(p, number, half);
        float state[64], e[32], o[32];
        u32 operand[8][4], e_operand[4][4];
        read_state(p, task, at, state);
        if (task.chunks) s.take_values(e, before, half, at);
        for (int c = 0; c < task.chunks; ++c) {
            const int step = before + c, stage = step % STAGES;
            const u32 base = cast_smem_ptr_to_uint(s.stage[stage]);
            if (TRACK) track_state(p, task, at, state, c);
            round_to_operand(operand, state);
            s.wait_for_tile(step);
            warpgroup_fence_operand(e);
            warpgroup_arrive();
            add_state_product(e, operand, base + K_IN * BLOCK_BYTES, true);
            float2 decays[16];
            load_decays(decays, s.chunk_decays[stage], at.t);
            decay(state, decays);
            warpgroup_wait<0>();
            warpgroup_fence_operand(e);
            round_to_operand(e_operand, e);
            warpgroup_fence_operand(state);
            warpgroup_arrive();
            add_error_keys(state, e_operand, base + K_OUT * BLOCK_BYTES);
            add_state_product(o, operand, base + Q_IN * BLOCK_BYTES, false);
            add_error_scores(o, e_operand, base + A_QK * BLOCK_BYTES);
            if (c + 1 < task.chunks) s.take_values(e, step + 1, half, at);
            warpgroup_wait<0>();
            warpgroup_fence_operand(state);
            s.free_tile(step, at);
            warpgroup_fence_operand(o);
            write_output(o, p.scale, s.take_output(step, half), at);
            s.hand_on_output(step, half, at);
        }
        before += task.chunks;
        if (TRACK && task.ends_sequence()) track_state(p, task, at, state, task.chunks);
        write_state(p, task, at, state);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) scan(const Params p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    if (threadIdx.x == 0) {
        s.init();
        s.tasks.init(11);  // all warps but the one that posts
        fence_barrier_init();
    }
    __syncthreads();

    // a shuffle makes the role uniform for the compiler, which else serialises wgmma
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const Lane at;
    if (warpgroup == 2) {
        warpgroup_reg_dealloc<40>();
        if (at.warp == 0) {
            fetch_tiles(p, s, at.lane);
        } else if (at.warp == 3) {
            int before = 0;
            for (int turn = 0, number; (number = s.tasks.take(turn, at.lane)) >= 0; ++turn) {
                const Task task(p, number, 0);
                wait_for_start(p, task, 8, at.lane);
                s.tasks.start(turn, at.lane);
                s.fetch_values_of(p, task, at.lane, before);
            }
        } else {
            store_outputs(p, s, at.warp - 1, at.lane);
        }
        if (threadIdx.x % 128 == 0) finish_scan_cta(p);
    } else {
        warpgroup_reg_alloc<232>();
        scan_tasks(p, s, warpgroup, at);
    }
}
