// KDA prefill of short sequences on Hopper, both stages in one launch.
//
// What intra_chunk.cu and scan.cu compute, by the same functions and so with the same bits, but a
// chunk's tile stays in shared memory, and only rows that are there are worked on. A task is one
// sequence of at most one chunk and a value head, or a half of its value rows where p.split is 1. A
// CTA of 4 warps works on one task after the other:
//
//     k, q, g (and v) arrive          asked for while the last task left
//     the state is asked for in the L2 cache
//     warp w: row block w of the tile make_tile: as intra_chunk.cu, nothing leaves
//     all warps, for each half:       scan_half: 64 value rows of the scan
//         state from memory
//         e, S, o                     as scan.cu
//         the next task's k, q, g     are asked for, after the last product of the last half
//         o and S to memory
//
// Several CTAs share an SM, so that one's copies pass beside the arithmetic of others.
//
// Compile-time: GATE, BETA, L2NORM, BETA_FP32 (as intra_chunk.cu); CU_INT64, DT_STATE, TRACK (as
// scan.cu); ROWS: 64, or 32 or 16 where no sequence is longer; MIN_BLOCKS per SM.

#include "tile.cuh"

// With fewer rows all values arrive with the keys. Of 64 rows those of a half arrive where the
// solve's operands were, so that three CTAs fit on an SM.
static constexpr bool VALUES_APART = ROWS < 64;
static constexpr int ROW_BYTES = VALUES_APART ? 256 : 128;
static constexpr bool STATES_HAVE_PAIRS = true;
#include "scan_chunk.cuh"

// The state is rounded to an operand in so many parts.
static constexpr int OPERAND_PARTS = ROWS == 32 ? 2 : 4;
// The thread that finds the next task; its warp has the least to do in short chunks.
static constexpr int LEADER_THREAD = 96;

struct __align__(1024) Shared {
    u16 k[ROWS * D];     // k, then -k_in
    u16 q[ROWS * D];     // q, then q_in
    u16 g[ROWS * D];     // g, then k_out, then T^T k_out
    u16 a_qk[ROWS * C];  // then A_qk T
    u16 low[ROWS * C];   // as in intra_chunk.cu
    union {
        uint4 exchange[5][2][32];
        float diagonal[4][16][16];
    };
    unsigned char v[VALUES_APART ? ROWS * PITCH : 16];  // then the output
    float4 block_decays[3 + 4 + 3][2][4];
    float chunk_decays[D];
    float beta[C];
    float bias[D];
    int next_sequence;
    alignas(8) u32 next_tokens[CU_INT64 ? 4 : 2];  // its first, and the one after its last
};
static_assert(VALUES_APART || sizeof(Shared::low) + sizeof(Shared::exchange) >= ROWS * PITCH);
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

#include "solve.cuh"

__device__ __forceinline__ u32 values_of(Shared& s, int half) {
    return VALUES_APART ? cast_smem_ptr_to_uint(s.v) + 128 * half : cast_smem_ptr_to_uint(s.low);
}
// The halves of the value rows that are this CTA's.
struct Halves {
    int first, end;

    __device__ __forceinline__ Halves(const Params& p, int number)
        : first(p.split ? number % 2 : 0), end(p.split ? first + 1 : 2) {}
};

// A warp's own 16 of 64 values of each of a chunk's tokens, zeros after the last.
// A lane fetches the pieces that it stores as output.
__device__ __forceinline__ void fetch_own_values(const Params& p, Shared& s, const Task& task,
                                                 const Lane& at, int half) {
    const int row = at.lane / 2, piece = 2 * at.warp + at.lane % 2;
    const u16* from = static_cast<const u16*>(p.v.ptr) + (task.begin + row) * p.v.stride_t +
                      task.head * p.v.stride_h + 64 * half + 8 * piece;
    const u32 to = values_at(values_of(s, half), row, piece);
#pragma unroll
    for (int i = 0; i < ROWS; i += 16)
        cp_async_cacheglobal_zfill(to + i * PITCH, from + i * p.v.stride_t,
                                   row + i < task.rows(0));
    cp_async_fence();
}
__device__ __forceinline__ void store_own_output(const Params& p, Shared& s, const Task& task,
                                                 const Lane& at) {
    const int row = at.lane / 2, piece = 2 * at.warp + at.lane % 2;
    u16* to = output_of(p, task, row, piece);
    const u32 from = values_at(values_of(s, task.half), row, piece);
#pragma unroll
    for (int i = 0; i < ROWS; i += 16)
        if (row + i < task.rows(0))
            *reinterpret_cast<uint4*>(to + i * p.o.stride_t) = load_shared(from + i * PITCH);
}

// Where the keys, queries and gates of a task lie.
__device__ __forceinline__ TileSource source_of(const Params& p, const Task& task) {
    TileSource from;
    from.head = task.head;
    from.key_head = task.head / p.heads_per_key;
    from.token = static_cast<int>(task.begin);
    from.length = task.rows(0);
    return from;
}
__device__ __forceinline__ void fetch_chunk(const Params& p, Shared& s, const TileSource& from) {
    fetch_keys(p, s, from);
    fetch_queries_and_gates(p, s, from, from.head, from.length);
}
__device__ __forceinline__ void fetch_all_values(const Params& p, Shared& s, const Task& task,
                                                 const Lane& at, const Halves& halves) {
    if (!VALUES_APART) return;
    for (int half = halves.first; half < halves.end; ++half)
        fetch_own_values(p, s, task, at, half);
}
// A value row of the state for each thread.
__device__ __forceinline__ void prefetch_states(const Params& p, const Task& task,
                                                const Halves& halves) {
    const int v = 64 * halves.first + threadIdx.x;
    if (v < 64 * halves.end) prefetch_state_row(p, task, v);
}
// The leader finds out about the next task in two steps.
__device__ __forceinline__ void find_sequence(const Params& p, Shared& s, int number) {
    if (number >= p.num_tasks) return;
    const int place = (number >> p.split) / p.num_value_heads;
    cp_async_cachealways_zfill(&s.next_sequence, p.sequence_order + place, true);
    cp_async_fence();
}
__device__ __forceinline__ void find_tokens(const Params& p, Shared& s, int number) {
    if (number >= p.num_tasks) return;
    cp_async_wait<0>();
    constexpr int WORDS = CU_INT64 ? 2 : 1;
    const u32* from = static_cast<const u32*>(p.cu_seqlens) + s.next_sequence * WORDS;
#pragma unroll
    for (int i = 0; i < 2 * WORDS; ++i)
        cp_async_cachealways_zfill(s.next_tokens + i, from + i, true);
    cp_async_fence();
}
// What it has found, after a barrier.
__device__ __forceinline__ Task found_task(const Params& p, const Shared& s, int number) {
    return Task(p, (number >> p.split) % p.num_value_heads, 0, s.next_sequence,
                sequence_offset(s.next_tokens, 0), sequence_offset(s.next_tokens, 1));
}

// All four warps, of which some may be without a row block, on a branch of their own.
__device__ __forceinline__ void meet() { named_barrier_sync<128, 1>(); }

// A warp's row block of a tile: scores, rows decayed to the chunk's start and end, and the solve's
// operands. Warp 0 may take scores of a row block 3 that is not there; nobody reads them.
__device__ __forceinline__ void make_row_block(const Params& p, Shared& s, const RowLane& at,
                                               int length, float rate) {
    const SumMatrices matrix(at);
    u32 inside[2], a_diagonal[4];
    float inverse[16];
    tokens_inside(inside, at, length);
    const Norms norms = compute_norms(s, at);
    Scores scores = {};
#pragma unroll 1
    for (int slice = 0; slice < 4; ++slice) {
        make_slice(scores, p, s, at, slice, norms, matrix, rate, inside, s.chunk_decays, meet);
        meet();
    }
    diagonal_scores(a_diagonal, s, scores, norms, at);
    __syncwarp();
    invert_diagonal_block(inverse, s, at);
    write_solve_operands(s, scores, a_diagonal, inverse, at);
}
// A warp whose row block has no tokens: it decays nothing, and meets the others.
__device__ __forceinline__ void pass_row_block(Shared& s, const RowLane& at) {
    if (at.lane < 8)
        s.block_decays[3 + at.warp][at.lane / 4][at.lane % 4] = make_float4(1.f, 1.f, 1.f, 1.f);
#pragma unroll 1
    for (int slice = 0; slice < 4; ++slice) {
        meet();
        meet();
    }
}
// A chunk's tile, in place of its rows.
__device__ __forceinline__ void make_tile(const Params& p, Shared& s, int length, float rate) {
    const int blocks = length < ROWS ? (length + 15) / 16 : ROW_BLOCKS;
    const RowLane at(reread_thread_index());
    if (at.warp < blocks)
        make_row_block(p, s, at, length, rate);
    else
        pass_row_block(s, at);
    __syncthreads();
    if (at.warp < blocks) solve<false>(s.a_qk, at.warp, s, at.lane, blocks);
#pragma unroll 1
    for (int m = 2 * at.warp; m < 2 * at.warp + 2; ++m) solve<true>(s.g, m, s, at.lane, blocks);
    tma_store_fence();
    __syncthreads();
}

// e += S (-k_in)^T, o = S q_in^T, S = S diag(chunk decay). The state becomes an operand by parts, of
// which the registers hold one beside state, e and o.
__device__ __forceinline__ void add_state_products(float (&e)[ROWS / 2], float (&o)[ROWS / 2],
                                                   float (&state)[64], Shared& s, const Lane& at) {
    constexpr int SLICES = 8 / OPERAND_PARTS;  // of 16 channels
    const u32 k_in = cast_smem_ptr_to_uint(s.k), q_in = cast_smem_ptr_to_uint(s.q);
    auto decay_part = [&](int part) {
#pragma unroll
        for (int i = part * SLICES; i < (part + 1) * SLICES; ++i)
            decay_slice(state, i, s.chunk_decays, at.t);
    };
#pragma unroll
    for (int part = 0; part < OPERAND_PARTS; ++part) {
        u32 operand[SLICES][4];
#pragma unroll
        for (int i = 0; i < SLICES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* of = state + 8 * (part * SLICES + i) + 2 * j;
                operand[i][j] = pack_operand(of[0], of[1]);
            }
        warpgroup_fence_operand(e);
        warpgroup_fence_operand(o);
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            const int slice = part * SLICES + i;
            const u32 columns = (slice / 4) * BLOCK_BYTES + (slice % 4) * 32;
            add_product(e, operand[i], make_gmma_desc_sw128(k_in + columns, 16, 1024), true);
            add_product(o, operand[i], make_gmma_desc_sw128(q_in + columns, 16, 1024), slice > 0);
        }
        warpgroup_commit_batch();
        if (part > 0) decay_part(part - 1);
        warpgroup_wait<0>();
    }
    decay_part(OPERAND_PARTS - 1);
    warpgroup_fence_operand(e);
    warpgroup_fence_operand(o);
}

// 64 value rows of a task. ``after_products`` is called when the tile has been read.
template <typename F>
__device__ __forceinline__ void scan_half(const Params& p, Shared& s, const RowLane& at,
                                          const Task& task, F after_products) {
    float state[64], e[ROWS / 2], o[ROWS / 2];
    u32 e_operand[ROW_BLOCKS][4];
    const u32 values = values_of(s, task.half);
    if (!VALUES_APART) fetch_own_values(p, s, task, at, task.half);
    read_state(p, task, at, state);
    if (TRACK) track_state(p, task, at, state, 0);
    if (!VALUES_APART) {
        cp_async_wait<0>();
        __syncwarp();
    }
    load_values(e, values, at);
    add_state_products(e, o, state, s, at);
    round_to_operand(e_operand, e);
    warpgroup_fence_operand(state);
    warpgroup_arrive();
    add_error_keys(state, e_operand, cast_smem_ptr_to_uint(s.g));
    add_error_scores(o, e_operand, cast_smem_ptr_to_uint(s.a_qk));
    warpgroup_wait<0>();
    warpgroup_fence_operand(state);
    warpgroup_fence_operand(o);
    after_products();
    // these values are this warp's own, and have been read
    write_output(o, p.scale, values, at);
    store_own_output(p, s, task, at);
    if (TRACK) track_state(p, task, at, state, 1);
    write_state(p, task, at, state);
}
// A sequence without tokens hands its state on.
__device__ __forceinline__ void hand_on(const Params& p, Task task, const Lane& at,
                                        const Halves& halves) {
    for (task.half = halves.first; task.half < halves.end; ++task.half) {
        float state[64];
        read_state(p, task, at, state);
        if (TRACK) track_state(p, task, at, state, 0);
        write_state(p, task, at, state);
    }
}

// A task with tokens; finds the task ``next`` and asks for its rows.
__device__ __forceinline__ void run_task(const Params& p, Shared& s, Task& task,
                                         const Halves& halves, int next) {
    const bool is_leader = threadIdx.x == LEADER_THREAD;
    const float a_log = p.a_log ? p.a_log[task.head] : 0.0f;
    const float rate = decay_rate(a_log);
    load_beta(p, s, source_of(p, task), task.head, task.rows(0));
    cp_async_wait<0>();
    shift_bias(s.bias, a_log);
    __syncthreads();
    if (is_leader) find_sequence(p, s, next);
    make_tile(p, s, task.rows(0), rate);
    if (is_leader) find_tokens(p, s, next);
#pragma unroll 1
    for (task.half = halves.first; task.half < halves.end; ++task.half)
        scan_half(p, s, RowLane(reread_thread_index()), task, [&] {
            if (task.half + 1 < halves.end) return;
            cp_async_wait<0>();
            __syncthreads();  // the tile has been read, and the next task found
            if (next < p.num_tasks) fetch_chunk(p, s, source_of(p, found_task(p, s, next)));
        });
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) one_launch(const Params p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    Task task(p, blockIdx.x >> p.split, 0);
    if (task.chunks) fetch_chunk(p, s, source_of(p, task));
#pragma unroll 1
    for (int number = blockIdx.x; number < p.num_tasks;) {
        const Halves halves(p, number);
        const Lane at;
        const int next = number + gridDim.x;
        if (p.prefetch_state) prefetch_states(p, task, halves);
        fetch_all_values(p, s, task, at, halves);
        if (task.chunks)
            run_task(p, s, task, halves, next);
        else
            hand_on(p, task, at, halves);
        if (next < p.num_tasks)
            task = task.chunks ? found_task(p, s, next) : Task(p, next >> p.split, 0);
        number = next;
    }
    cp_async_wait<0>();  // of a last task without tokens
}
