// Second pass over segments (segments.cuh): from what each does to a state to where each ends.
//
//     end of segment i = (end of segment i - 1) A_i + B_i
//
// in order, for 64 value rows of a sequence and head in one warpgroup, whose accumulators hold the
// end. A_i is a diagonal of decays, which multiplies the accumulators in fp32, and the rest, which
// meets the end as a chunk's keys do: in fp16. So a segment rounds no more than one chunk does.
// Another warp fetches A and B as soon as their flags say that they are there. "->" is an mbarrier:
//
//     producer warp              consumer warpgroup
//     wait for the flags
//     copy A_i, decay, B_i   ->  full: S = decay S + B_i
//                                      S = S + (S before, in fp16) (A_i - decay)
//     empty                  <-
//                                S in place of B_i; its flag
//
// Compile-time: SEGMENTS is 1, TRACK 0; DT_STATE as scan.cu; CU_INT64 changes nothing.

static constexpr int ROW_BYTES = 256;
static constexpr bool STATES_HAVE_PAIRS = false;
#include "scan_chunk.cuh"

static constexpr int STAGES = 3;
static constexpr int STAGE_BYTES = TRANSITION_BYTES + HALF_END_BYTES + D * 4;

struct __align__(1024) Shared {
    unsigned char transition[STAGES][TRANSITION_BYTES];
    float4 local_end[STAGES][HALF_END_BYTES / 16];
    float decays[STAGES][D];
    ClusterTransactionBarrier full[STAGES];
    ClusterBarrier empty[STAGES];
};
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

// The task of a sequence, head and half of the value rows.
struct MergeTask {
    int head, half;
    Segment sequence;

    __device__ __forceinline__ MergeTask(const Params& p, int number) {
        half = number % 2;
        head = number / 2 % p.num_value_heads;
        sequence = find_sequence(p, number / 2 / p.num_value_heads,
                                 [](int segments) { return segments > 2; });
    }
    __device__ __forceinline__ i64 place(const Params& p, int i) const {
        return segment_and_head(p, sequence.number + i, head);
    }
};

__device__ __forceinline__ void fetch_segments(const Params& p, Shared& s, const MergeTask& task,
                                               int lane, u32 launch, int& before) {
    for (int i = 1; i + 1 < task.sequence.count; ++i, ++before) {
        const int stage = before % STAGES;
        const i64 place = task.place(p, i);
        if (before >= STAGES) s.empty[stage].wait((before / STAGES - 1) & 1);
        const u32* flag = nullptr;  // of the four warps of these rows, and of all eight
        if (lane < 4) flag = segment_flag(p, place, LOCAL_END + 4 * task.half + lane);
        else if (lane < 12) flag = segment_flag(p, place, TRANSITION + lane - 4);
        wait_for_segment(p, flag, launch);
        fence_proxy_async();  // other SMs' threads wrote these; a bulk copy reads them
        if (lane != 0) continue;
        s.full[stage].arrive_and_expect_tx(STAGE_BYTES);
        bulk_copy_g2s(s.transition[stage],
                      reinterpret_cast<const char*>(p.transitions) + place * TRANSITION_BYTES,
                      TRANSITION_BYTES, s.full[stage]);
        bulk_copy_g2s(s.local_end[stage],
                      reinterpret_cast<const char*>(p.segment_ends) + place * END_BYTES +
                          task.half * HALF_END_BYTES,
                      HALF_END_BYTES, s.full[stage]);
        bulk_copy_g2s(s.decays[stage], p.segment_decays + place * D, D * 4, s.full[stage]);
    }
}

// state += S A, S in registers and A [128, 128] in four blocks
__device__ __forceinline__ void add_transition(float (&state)[64], const u32 (&operand)[8][4],
                                               u32 rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        wgmma_m64n128k16_f16_rs_mn(
            state, operand[i],
            make_gmma_desc_sw128(rows + (i / 4) * 2 * BLOCK_BYTES + (i % 4) * 2048, BLOCK_BYTES,
                                 1024));
    warpgroup_commit_batch();
}

__device__ __forceinline__ void merge(const Params& p, Shared& s, const MergeTask& task,
                                      const Lane& at, u32 launch, int& before) {
    if (task.sequence.count == 0) return;
    float state[64];
    u32 operand[8][4];
    const int flag = END + 4 * task.half + at.warp;
    wait_for_segment(p, segment_flag(p, task.place(p, 0), flag), launch);
    load_end(end_of(p, task.place(p, 0), task.half), state);
    for (int i = 1; i + 1 < task.sequence.count; ++i, ++before) {
        const int stage = before % STAGES;
        round_to_operand(operand, state);
        s.full[stage].wait((before / STAGES) & 1);
        float2 decays[16];
        load_decays(decays, s.decays[stage], at.t);
        decay(state, decays);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float4 x = s.local_end[stage][128 * j + threadIdx.x];
            state[4 * j] += x.x, state[4 * j + 1] += x.y;
            state[4 * j + 2] += x.z, state[4 * j + 3] += x.w;
        }
        warpgroup_fence_operand(state);
        warpgroup_arrive();
        add_transition(state, operand, cast_smem_ptr_to_uint(s.transition[stage]));
        warpgroup_wait<0>();
        warpgroup_fence_operand(state);
        __syncwarp();
        if (at.lane == 0) s.empty[stage].arrive();
        const i64 place = task.place(p, i);
        store_end(end_of(p, place, task.half), state);
        set_segment_flag(p, place, flag, launch);
    }
}

extern "C" __global__ void __launch_bounds__(160, 1) merge_segments(const Params p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const u32 launch = p.progress->launches + 1;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            s.full[i].init(1);
            s.empty[i].init(4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    launch_dependent_grids();

    // a shuffle makes the role uniform for the compiler, which else serialises wgmma
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const Lane at;
    int before = 0;  // segments of the tasks before
    for (int number = blockIdx.x; number < p.num_merge_tasks; number += gridDim.x) {
        const MergeTask task(p, number);
        if (warpgroup == 0)
            merge(p, s, task, at, launch, before);
        else
            fetch_segments(p, s, task, at.lane, launch, before);
    }
    if (threadIdx.x == 128) wait_on_dependent_grids();
}
