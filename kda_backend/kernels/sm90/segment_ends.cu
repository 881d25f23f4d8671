// First pass over segments (segments.cuh): what each does to the state that it starts from.
//
// A segment turns a state S into S A + B. B is where the scan ends that starts from zero; A is
// where 128 more rows end that start as the identity and have no values. Neither needs an output.
// A task is one of the two for a segment and head, and a CTA carries its 128 rows through the
// segment's chunks with three warpgroups:
//
//     producer warpgroup                two consumer warpgroups, 64 rows each
//     warp 0           warp 3
//     wait for a flag
//     copy the tile    copy v       ->  full: e = v - k_in S^T      (of A: e = - k_in S^T)
//                                       S = decay S + e (T^T k_out)
//     empty                         <-
//
// Four stages are on their way. The first segment of a sequence starts from the sequence's own
// state, so what it has at its end is the start of the second.
//
// Compile-time: CU_INT64, DT_STATE as scan.cu; SEGMENTS is 1, TRACK 0.

static constexpr int ROW_BYTES = 256;  // of v: both halves of the value rows
static constexpr bool STATES_HAVE_PAIRS = false;
#include "scan_chunk.cuh"
#include "scan_task.cuh"

static constexpr int STAGES = 4;
static constexpr int STAGE_K_IN = 0, STAGE_K_OUT = 2;

struct __align__(1024) Shared {
    unsigned char stage[STAGES][4 * BLOCK_BYTES];  // -k_in and T^T k_out
    unsigned char v[STAGES][C * PITCH];
    float chunk_decays[STAGES][D];
    ClusterTransactionBarrier full[STAGES];
    ClusterBarrier empty[STAGES];
};
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

struct EndTask : Task {
    bool is_transition;

    __device__ __forceinline__ EndTask(const Params& p, const Segment& of, int head, int half,
                                       bool transition)
        : Task(p, of, head, half), is_transition(transition) {}
};
// A sequence of m > 1 segments has the end of the first, then of each but the last B and A.
__device__ __forceinline__ EndTask task_of(const Params& p, int number, int half) {
    const int head = number % p.num_value_heads;
    Segment x = find_sequence(p, number / p.num_value_heads,
                              [](int segments) { return max(0, 2 * segments - 3); });
    const bool is_transition = x.index > 0 && x.index % 2 == 0;
    x.index = (x.index + 1) / 2;
    x.number += x.index;
    return EndTask(p, x, head, half, is_transition);
}

// Warp 0 of the producers: the tiles of a task.
__device__ __forceinline__ void fetch_tiles(const Params& p, Shared& s, const Task& task, int lane,
                                            u32 launch, int& before) {
    TileFlags flags(p, task, launch);
    for (int c = 0; c < task.chunks; ++c, ++before) {
        const int stage = before % STAGES;
        if (before >= STAGES) s.empty[stage].wait((before / STAGES - 1) & 1);
        flags.wait(p, c, lane);
        if (lane != 0) continue;
        const i64 tile = task.tile(p, c);
        const unsigned char* from =
            reinterpret_cast<const unsigned char*>(p.tiles) + tile * TILE_BYTES;
        s.full[stage].arrive_and_expect_tx(4 * BLOCK_BYTES + D * 4);
        bulk_copy_g2s(s.stage[stage] + STAGE_K_IN * BLOCK_BYTES, from + K_IN * BLOCK_BYTES,
                      2 * BLOCK_BYTES, s.full[stage]);
        bulk_copy_g2s(s.stage[stage] + STAGE_K_OUT * BLOCK_BYTES, from + K_OUT * BLOCK_BYTES,
                      2 * BLOCK_BYTES, s.full[stage]);
        bulk_copy_g2s(s.chunk_decays[stage], p.chunk_decays + tile * D, D * 4, s.full[stage]);
    }
}
// Warp 3 in place of fetch_values, where a task has no values.
__device__ __forceinline__ void fetch_no_values(Shared& s, const Task& task, int& before) {
    for (int c = 0; c < task.chunks; ++c, ++before) {
        const int stage = before % STAGES;
        if (before >= STAGES) s.empty[stage].wait((before / STAGES - 1) & 1);
        s.full[stage].arrive();
    }
}

// The decays of two channels over the chunks so far: those that meet this lane's two rows of A, if
// the lane has them, on A's diagonal.
struct DiagonalDecays {
    int place;  // of the first among a chunk's decays; the other is two further
    float x[2];

    __device__ __forceinline__ DiagonalDecays(int half, const Lane& at)
        : place(32 * (at.r / 2) + 4 * ((4 * half + at.warp) ^ (2 * (at.r / 2))) + at.r % 2),
          x{1.0f, 1.0f} {}
    __device__ __forceinline__ void pass(const float* chunk_decays) {
        x[0] *= chunk_decays[place];
        x[1] *= chunk_decays[place + 2];
    }
};

// 64 rows through a segment: of values if HAS_VALUES, else rows of A, whose decays are kept.
template <bool HAS_VALUES>
__device__ __forceinline__ void carry_rows(Shared& s, const Task& task, const Lane& at,
                                           float (&state)[64], DiagonalDecays& diagonal,
                                           int before) {
    float e[32];
    float2 decays[16];
    u32 operand[8][4];
    auto load_chunk = [&](int c) {
        const int stage = (before + c) % STAGES;
        s.full[stage].wait(((before + c) / STAGES) & 1);
        if (HAS_VALUES)
            load_values(e, cast_smem_ptr_to_uint(s.v[stage]) + 128 * task.half, at);
        else
            diagonal.pass(s.chunk_decays[stage]);
        load_decays(decays, s.chunk_decays[stage], at.t);
    };
    auto enter_chunk = [&] {  // the state as an operand, then its decay
        round_to_operand(operand, state);
        decay(state, decays);
    };
    if (task.chunks) {
        load_chunk(0);
        enter_chunk();
    }
    for (int c = 0; c < task.chunks; ++c) {
        const int stage = (before + c) % STAGES;
        const u32 base = cast_smem_ptr_to_uint(s.stage[stage]);
        warpgroup_fence_operand(e);
        warpgroup_fence_operand(state);
        warpgroup_arrive();
        add_state_product(e, operand, base + STAGE_K_IN * BLOCK_BYTES, HAS_VALUES);
        warpgroup_wait<0>();
        warpgroup_fence_operand(e);
        u32 e_operand[4][4];
        round_to_operand(e_operand, e);
        warpgroup_arrive();
        add_error_keys(state, e_operand, base + STAGE_K_OUT * BLOCK_BYTES);
        if (c + 1 < task.chunks) load_chunk(c + 1);
        warpgroup_wait<0>();
        warpgroup_fence_operand(state);
        __syncwarp();
        if (at.lane == 0) s.empty[stage].arrive();
        if (c + 1 < task.chunks) enter_chunk();
    }
}

// Rows of A without the decays on its diagonal, in fp16, as wgmma reads them; and the decays.
__device__ __forceinline__ void store_transition(const Params& p, i64 place, const Task& task,
                                                 const Lane& at, const float (&state)[64],
                                                 const DiagonalDecays& diagonal) {
    char* blocks = reinterpret_cast<char*>(p.transitions) + place * TRANSITION_BYTES +
                   2 * task.half * BLOCK_BYTES;
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = 16 * at.warp + at.r + 8 * e, channel = 8 * n + 2 * at.t;
            const int own = 64 * task.half + row - channel;  // 0 or 1 where the diagonal is
            const u32 x = pack_operand(state[4 * n + 2 * e] - (own == 0 ? diagonal.x[e] : 0.0f),
                                       state[4 * n + 2 * e + 1] - (own == 1 ? diagonal.x[e] : 0.0f));
            const int at_byte = row * 128 + ((n % 8 ^ at.r) << 4) + 4 * at.t;
            *reinterpret_cast<u32*>(blocks + (n / 8) * BLOCK_BYTES + at_byte) = x;
        }
    if (at.t == at.r / 2) {
        float* to = p.segment_decays + place * D + diagonal.place;
        to[0] = diagonal.x[0];
        to[2] = diagonal.x[1];
    }
}

// A consumer warpgroup's half of a task.
__device__ __forceinline__ void run_task(const Params& p, Shared& s, const EndTask& task,
                                         const Lane& at, u32 launch, int before) {
    float state[64];
    DiagonalDecays diagonal(task.half, at);
    const i64 place = task.place(p, task.segment.index);
    const int warp = 4 * task.half + at.warp;
    if (task.is_transition) {
        each_state(at, [&](int i, int row, int k) {
            state[i] = k == 64 * task.half + row ? 1.0f : 0.0f;
        });
        carry_rows<false>(s, task, at, state, diagonal, before);
        store_transition(p, place, task, at, state, diagonal);
        set_segment_flag(p, place, TRANSITION + warp, launch);
        return;
    }
    if (task.segment.index == 0) {
        read_initial_state(p, task, at, state);
        const i64 start = task.place_of_start(p);
        store_end(end_of(p, start, task.half), state);
        set_segment_flag(p, start, END + warp, launch);
    } else {
        each_state(at, [&](int i, int, int) { state[i] = 0.0f; });
    }
    carry_rows<true>(s, task, at, state, diagonal, before);
    store_end(end_of(p, place, task.half), state);
    set_segment_flag(p, place, (task.segment.index == 0 ? END : LOCAL_END) + warp, launch);
}

extern "C" __global__ void __launch_bounds__(384, 1) segment_ends(const Params p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const u32 launch = p.progress->launches + 1;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            s.full[i].init(1 + 32);  // the tile's bytes, and each lane's values
            s.empty[i].init(8);
        }
        fence_barrier_init();
    }
    __syncthreads();
    launch_dependent_grids();

    // a shuffle makes the role uniform for the compiler, which else serialises wgmma
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const Lane at;
    int before = 0;  // chunks of the tasks before
    if (warpgroup == 2) {
        warpgroup_reg_dealloc<40>();
        for (int number = blockIdx.x; number < p.num_end_tasks; number += gridDim.x) {
            const EndTask task = task_of(p, number, 0);
            if (at.warp == 0)
                fetch_tiles(p, s, task, at.lane, launch, before);
            else if (at.warp == 3 && task.is_transition)
                fetch_no_values(s, task, before);
            else if (at.warp == 3)
                fetch_values(p, s.v, s.full, s.empty, task, at.lane, before);
        }
        if (threadIdx.x % 128 == 0) wait_on_dependent_grids();
    } else {
        warpgroup_reg_alloc<232>();
        for (int number = blockIdx.x; number < p.num_end_tasks; number += gridDim.x) {
            const EndTask task = task_of(p, number, warpgroup);
            run_task(p, s, task, at, launch, before);
            before += task.chunks;
        }
    }
}
