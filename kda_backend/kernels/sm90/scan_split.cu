// The scan (scan.cu) for few long tasks: the recurrence and the output on two SMs.
//
// A cluster of two CTAs carries 64 value rows of one sequence and head. CTA 0 computes the
// recurrence alone and sends its operands, lane by lane, to CTA 1, which computes the output.
// That takes four times the SMs of scan.cu and has the shortest step. "->" is an mbarrier:
//
//     CTA 0, producers      CTA 0, recurrence            CTA 1, output      its producer
//     warp 0     warp 3                                                          warp 0
//     -k_in,                                                                     q_in, A_qk T
//     T^T k_out,
//     decays     v       ->   e = v - k_in S^T                                <- full
//                             S and e in fp16       -> ready: o = S q_in + e (A_qk T)
//                             S = decay S + e (T^T k_out)   store o
//                                                   <- taken
//     empty             <-                                                    -> empty
//
// Four stages of tiles are on their way in each CTA, and two of operands between them.
//
// Compile-time: as scan.cu.

static constexpr int ROW_BYTES = 128;  // of v: a half of the value rows
static constexpr bool STATES_HAVE_PAIRS = false;
#include "scan_chunk.cuh"
#include "scan_task.cuh"

static constexpr int STAGES = 4;
static constexpr int HANDOFF_STAGES = 2;
static constexpr int HANDOFF_BYTES = 12 * 32 * 16;  // of one warp

// A stage of CTA 0 holds -k_in and T^T k_out, one of CTA 1 q_in and A_qk T.
static constexpr int STAGE_K_IN = 0, STAGE_K_OUT = 2, STAGE_Q_IN = 0, STAGE_A_QK = 2;

struct __align__(1024) Shared {
    unsigned char stage[STAGES][4 * BLOCK_BYTES];
    unsigned char v[STAGES][C * PITCH];
    unsigned char out[C * PITCH];
    uint4 handoff[HANDOFF_STAGES][4][12][32];  // the operands: [warp][state 8, e 4][lane]
    // one for each warp of the recurrence and its partner
    ClusterTransactionBarrier ready[HANDOFF_STAGES][4];
    ClusterBarrier taken[HANDOFF_STAGES][4];
    float chunk_decays[STAGES][D];
    ClusterTransactionBarrier full[STAGES];
    ClusterBarrier empty[STAGES];
    TaskQueue tasks;
};
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

__device__ __forceinline__ Task task_of(const Params& p, int number) {
    return Task(p, number / 2, number % 2);
}
__device__ __forceinline__ uint4 packed(const u32 (&x)[4]) {
    return make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void unpack(u32 (&to)[4], const uint4& x) {
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// Warp 0 of either CTA's producers: takes tasks and fetches the CTA's part of their tiles.
__device__ __forceinline__ void fetch_tiles(const Params& p, Shared& s, int rank, int lane) {
    const u32 launch = p.progress->launches + 1;
    const int clusters = gridDim.x / 2;
    int before = 0;  // chunks of the tasks before
    int tasks = p.num_tasks;
    for (int turn = 0;; ++turn) {
        const int number = blockIdx.x / 2 + turn * clusters;
        const bool over = number >= tasks;
        s.tasks.post(turn, over ? -1 : number, lane);
        if (SEGMENTS && over) s.tasks.wait_until_read(turn);  // readers still use the launch number
        if (over) break;
        const Task task = task_of(p, number);
        if (!SEGMENTS && !task.chunks) tasks = tasks_before_idle_ones(p, 2 * p.num_value_heads, lane);
        TileFlags flags(p, task, launch);
        for (int c = 0; c < task.chunks; ++c, ++before) {
            const int stage = before % STAGES;
            if (before >= STAGES) s.empty[stage].wait((before / STAGES - 1) & 1);
            flags.wait(p, c, lane);
            if (lane != 0) continue;
            const i64 tile = task.tile(p, c);
            auto copy_blocks = [&](int to, int from, int blocks) {
                bulk_copy_g2s(s.stage[stage] + to * BLOCK_BYTES,
                              reinterpret_cast<const unsigned char*>(p.tiles) +
                                  tile * TILE_BYTES + from * BLOCK_BYTES,
                              blocks * BLOCK_BYTES, s.full[stage]);
            };
            if (rank == 0) {
                s.full[stage].arrive_and_expect_tx(4 * BLOCK_BYTES + D * 4);
                copy_blocks(STAGE_K_IN, K_IN, 2);
                copy_blocks(STAGE_K_OUT, K_OUT, 2);
                bulk_copy_g2s(s.chunk_decays[stage], p.chunk_decays + tile * D, D * 4,
                              s.full[stage]);
            } else {
                s.full[stage].arrive_and_expect_tx(3 * BLOCK_BYTES);
                copy_blocks(STAGE_Q_IN, Q_IN, 2);
                copy_blocks(STAGE_A_QK, A_QK, 1);
            }
        }
    }
    __syncwarp();  // all lanes have read the launch's number, which lane 0 may raise
}

// CTA 0: the recurrence.
__device__ __forceinline__ void carry_state(const Params& p, Shared& s, const Lane& at) {
    const int warp = at.warp, lane = at.lane;
    int before = 0;
    for (int turn = 0, number; (number = s.tasks.take_started(turn, lane)) >= 0; ++turn) {
        const Task task = task_of(p, number);
        float state[64], e[32];
        read_state(p, task, at, state);
        u32 operand[8][4];
        float2 decays[16];
        auto load_chunk = [&](int c) {  // e starts from v^T; the chunk's decay
            const int stage = (before + c) % STAGES;
            s.full[stage].wait(((before + c) / STAGES) & 1);
            load_values(e, cast_smem_ptr_to_uint(s.v[stage]), at);
            load_decays(decays, s.chunk_decays[stage], at.t);
        };
        auto enter_chunk = [&](int c) {  // the state before chunk c: its operand, then the decay
            if (TRACK) track_state(p, task, at, state, c);
            round_to_operand(operand, state);
            decay(state, decays);
        };
        if (task.chunks) {
            load_chunk(0);
            enter_chunk(0);
        }
        for (int c = 0; c < task.chunks; ++c) {
            const int step = before + c, stage = step % STAGES, handoff = step % HANDOFF_STAGES;
            const u32 base = cast_smem_ptr_to_uint(s.stage[stage]);
            uint4 (&to)[12][32] = s.handoff[handoff][warp];
            warpgroup_fence_operand(e);
            warpgroup_fence_operand(state);
            warpgroup_arrive();
            add_state_product(e, operand, base + STAGE_K_IN * BLOCK_BYTES, true);
            if (step >= HANDOFF_STAGES)
                s.taken[handoff][warp].wait((step / HANDOFF_STAGES - 1) & 1);
#pragma unroll
            for (int i = 0; i < 8; ++i) to[i][lane] = packed(operand[i]);
            warpgroup_wait<0>();
            warpgroup_fence_operand(e);
            u32 e_operand[4][4];
            round_to_operand(e_operand, e);
            warpgroup_arrive();
            add_error_keys(state, e_operand, base + STAGE_K_OUT * BLOCK_BYTES);
#pragma unroll
            for (int i = 0; i < 4; ++i) to[8 + i][lane] = packed(e_operand[i]);
            tma_store_fence();
            __syncwarp();
            if (lane == 0) bulk_copy_s2s(to, HANDOFF_BYTES, s.ready[handoff][warp], 1);
            if (c + 1 < task.chunks) load_chunk(c + 1);
            warpgroup_wait<0>();
            warpgroup_fence_operand(state);
            __syncwarp();
            if (lane == 0) s.empty[stage].arrive();
            if (c + 1 < task.chunks) enter_chunk(c + 1);
        }
        before += task.chunks;
        if (TRACK && task.ends_sequence()) track_state(p, task, at, state, task.chunks);
        write_state(p, task, at, state);
    }
}

// CTA 1: the output.
__device__ __forceinline__ void compute_output(const Params& p, Shared& s, const Lane& at) {
    const int warp = at.warp, lane = at.lane;
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < HANDOFF_STAGES; ++i)
            s.ready[i][warp].arrive_and_expect_tx(HANDOFF_BYTES);
    }
    int before = 0;
    for (int turn = 0, number; (number = s.tasks.take(turn, lane)) >= 0; ++turn) {
        const Task task = task_of(p, number);
        for (int c = 0; c < task.chunks; ++c, ++before) {
            const int stage = before % STAGES, handoff = before % HANDOFF_STAGES;
            const u32 base = cast_smem_ptr_to_uint(s.stage[stage]);
            const uint4 (&from)[12][32] = s.handoff[handoff][warp];
            float o[32];
            u32 operand[8][4], e_operand[4][4];
            s.full[stage].wait((before / STAGES) & 1);
            s.ready[handoff][warp].wait((before / HANDOFF_STAGES) & 1);
#pragma unroll
            for (int i = 0; i < 8; ++i) unpack(operand[i], from[i][lane]);
#pragma unroll
            for (int i = 0; i < 4; ++i) unpack(e_operand[i], from[8 + i][lane]);
            __syncwarp();
            if (lane == 0) {
                s.ready[handoff][warp].arrive_and_expect_tx(HANDOFF_BYTES);
                s.taken[handoff][warp].arrive(0);
            }
            warpgroup_arrive();
            add_state_product(o, operand, base + STAGE_Q_IN * BLOCK_BYTES, false);
            add_error_scores(o, e_operand, base + STAGE_A_QK * BLOCK_BYTES);
            warpgroup_wait<0>();
            warpgroup_fence_operand(o);
            __syncwarp();
            if (lane == 0) s.empty[stage].arrive();
            const u32 out = cast_smem_ptr_to_uint(s.out);
            write_output(o, p.scale, out, at);
            const int row = lane / 2, piece = 2 * warp + lane % 2;
            store_output<16>(output_of(p, task, c * C + row, piece), p.o.stride_t,
                             task.rows(c) - row, values_at(out, row, piece), [] { __syncwarp(); });
        }
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    scan_split(const Params p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const int rank = blockIdx.x % 2;  // 0: the recurrence, 1: the output
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            s.full[i].init(rank == 0 ? 1 + 32 : 1);  // the tile's bytes, and each lane's values
            s.empty[i].init(4);
        }
#pragma unroll
        for (int i = 0; i < 4 * HANDOFF_STAGES; ++i) {
            s.ready[i / 4][i % 4].init(1);
            s.taken[i / 4][i % 4].init(1);
        }
        s.tasks.init(rank == 0 ? 5 : 4);  // the warpgroup that computes, and the one with v
        fence_barrier_init();
    }
    cluster_sync();

    // a shuffle makes the role uniform for the compiler, which else serialises wgmma
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const Lane at;
    if (warpgroup == 2) {
        warpgroup_reg_dealloc<40>();
        if (at.warp == 0) {
            fetch_tiles(p, s, rank, at.lane);
        } else if (at.warp == 3 && rank == 0) {
            int before = 0;
            for (int turn = 0, number; (number = s.tasks.take(turn, at.lane)) >= 0; ++turn) {
                const Task task = task_of(p, number);
                wait_for_start(p, task, 4, at.lane);
                s.tasks.start(turn, at.lane);
                fetch_values(p, s.v, s.full, s.empty, task, at.lane, before);
            }
        }
        if (threadIdx.x % 128 == 0) finish_scan_cta(p);
    } else if (warpgroup == 1 && rank == 1) {
        warpgroup_reg_alloc<208>();
        compute_output(p, s, at);
    } else if (warpgroup == 0 && rank == 0) {
        warpgroup_reg_alloc<232>();
        carry_state(p, s, at);
    }
    cluster_sync();  // shared memory must outlive the other CTA's use of it
}
