// Inter-chunk stage of KDA prefill on Hopper: carries the state over the chunks, writes the output.
//
// The equations are scan.py's, with the solve moved from k_in and v, where it makes w and u, to k_out
// and A_qk. For 64 value rows of one sequence and head, e being what the state before the chunk misses
// of v,
//
//     e^T = v^T + S (-k_in)^T
//     S   = S diag(total) + e^T (T^T k_out)
//     o^T = scale (S q_in^T + e^T (A_qk T)^T)
//
// The state stays in the registers of a warpgroup: as fp32 accumulators [64 values, 128 channels] of
// wgmma, and rounded to fp16 as its A operand, whose register layout is the accumulators' own. The
// same holds for e, so nothing of the chain S -> e -> S passes through shared memory and no warp of the
// chain waits for another. Warps of their own fetch the next chunks' tiles and values.
//
// A wgmma with A in registers keeps its warps from issuing anything else. Without SPLIT a block has
// two warpgroups with 64 value rows each: one multiplies while the other packs, loads and stores,
// and a tile is fetched once for both. With SPLIT a cluster of two blocks has 64 value rows: the
// first computes the chain alone and hands its operands, lane by lane, to the second, which computes
// the output. That takes four times the multiprocessors and the shortest step.
//
// intra_chunk.cu writes the tiles as wgmma reads them, 8 KiB blocks of 64 rows of 128 bytes with
// the 128-byte swizzle, so plain bulk copies fetch them, each as soon as its flag says it is there.

#include "common.cuh"
#include "scan_device.cuh"

struct Params {
    const u16* tiles;     // [chunks, HV, 7 * 4096] fp16: -k_in, q_in, T^T k_out, A_qk T
    const float* totals;  // [chunks, HV, 128], in the order of load_chunk
    const u16* v;         // bf16
    u16* o;               // bf16
    const void* state_in;
    void* state_out;
    const int* state_indices;
    const unsigned char* has_initial_state;
    void* chunk_states;         // bf16, or null
    const int* snapshot_chunks; // [N, num_snapshots]
    float* snapshots;           // [N, num_snapshots, HV, 128, 128]
    const void* cu_seqlens;     // int32, or int64 with CU_INT64
    const int* chunk_offsets;
    const int* sequence_order;
    i64 v_t, v_h, o_t, o_h;
    i64 in_n, in_h, in_v, in_k, out_n, out_h, out_v, out_k, chunk_n, chunk_h, chunk_v, chunk_k;
    float scale;
    int num_snapshots;
    int num_value_heads;
    int num_tasks;  // a sequence and head each; with SPLIT a half of its value rows
    Sync* sync;
};

static_assert(sizeof(Params) == PARAM_BYTES, "prefill_sm90.py packs other parameters");

// Where a stage keeps a tile's blocks. With SPLIT each block keeps what it multiplies.
static constexpr int STAGE_K = SPLIT ? 2 : K_OUT;
static constexpr int STAGE_Q = SPLIT ? 0 : Q_IN, STAGE_A = SPLIT ? 2 : A_QK;
static constexpr int STAGE_BLOCKS = SPLIT ? 4 : 7;
static constexpr int STAGES = SPLIT ? 4 : 3;
static constexpr int RELEASES = SPLIT ? 4 : 2;  // of a stage, by the warps that read it last
// Rows of v, and of the output on its way, lie 16 bytes further than they are long, so that the pieces
// of 8 rows at the same place are in different banks.
static constexpr int ROW_BYTES = SPLIT ? 128 : 256, PITCH = ROW_BYTES + 16;
#if SPLIT
static constexpr int HANDS = 2;                  // operands on their way to the output
static constexpr int HAND_BYTES = 12 * 32 * 16;  // of one warp
#endif

struct __align__(1024) Shared {
    unsigned char stage[STAGES][STAGE_BLOCKS * BLOCK_BYTES];
    unsigned char v[STAGES][C * PITCH];  // without SPLIT then the output
#if SPLIT
    unsigned char out[C * PITCH];
    uint4 hand[HANDS][4][12][32];    // the chain's operands: [warp][state 8, e 4][lane]
    u64 ready[HANDS][4], taken[HANDS][4];  // one for each warp of the chain and its partner
#endif
    float totals[STAGES][D];
    u64 full[STAGES], empty[STAGES];
    u64 written[STAGES][2];  // the output of a half of the value rows
    u64 posted[2], read[2];
    int number[2];  // of tasks, in turn; -1 behind the last
};
static_assert(sizeof(Shared) == SHARED_BYTES, "prefill_sm90.py asks for other shared memory");

__device__ __forceinline__ i64 offset_of(const void* cu_seqlens, int n) {
    return CU_INT64 ? static_cast<const i64*>(cu_seqlens)[n]
                    : static_cast<i64>(static_cast<const int*>(cu_seqlens)[n]);
}
__device__ __forceinline__ float load_state(const void* p, i64 at) {
    return STATE_BF16 ? __uint_as_float(u32(static_cast<const u16*>(p)[at]) << 16)
                      : static_cast<const float*>(p)[at];
}
// What a task is about.
struct Task {
    int head, n;     // value head; sequence
    int half;        // of the value rows
    i64 begin, end;  // its tokens
    int chunks;
    i64 first;  // chunk

    __device__ __forceinline__ Task(const Params& p, int number, int warpgroup) {
        half = SPLIT ? number % 2 : warpgroup;
        if (SPLIT) number /= 2;
        head = number % p.num_value_heads;
        n = p.sequence_order[number / p.num_value_heads];
        begin = offset_of(p.cu_seqlens, n), end = offset_of(p.cu_seqlens, n + 1);
        chunks = static_cast<int>((end - begin + C - 1) / C);
        first = p.chunk_offsets[n];
    }
    // tokens of chunk c, if not more than it can have
    __device__ __forceinline__ int rows(int c) const {
        return static_cast<int>(end - begin) - c * C;
    }
};
// Two channels side by side.
__device__ __forceinline__ float2 load_state_pair(const void* p, i64 at) {
    if (!STATE_BF16) return *reinterpret_cast<const float2*>(static_cast<const float*>(p) + at);
    const u32 x = *reinterpret_cast<const u32*>(static_cast<const u16*>(p) + at);
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ void store_state_pair(void* p, i64 at, float x, float y) {
    if (STATE_BF16)
        *reinterpret_cast<u32*>(static_cast<u16*>(p) + at) = to_bf16(x, y);
    else
        *reinterpret_cast<float2*>(static_cast<float*>(p) + at) = make_float2(x, y);
}
__device__ __forceinline__ bool have_pairs(const void* p, i64 n, i64 h, i64 v, i64 k) {
    const u32 bytes = STATE_BF16 ? 4 : 8;
    return k == 1 && ((n | h | v) & 1) == 0 && (reinterpret_cast<u64>(p) & (bytes - 1)) == 0;
}
// Calls f(index, value row, channel) for each accumulator of the state.
template <typename F>
__device__ __forceinline__ void each_state(int warp, int r, int t, F f) {
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            f(4 * n + e, 16 * warp + r + 8 * (e / 2), 8 * n + 2 * t + e % 2);
}

// Where a lane stands in its warpgroup.
struct Lane {
    int warp, lane;  // of the warpgroup; of the warp
    int r, t;        // row and pair of columns in an accumulator
    int matrix, in_matrix;
};

__device__ __forceinline__ void read_state(const Params& p, const Task& task, const Lane& at,
                                           float (&state)[64]) {
    const i64 slot = p.state_indices ? p.state_indices[task.n] : task.n;
    const bool reads =
        p.state_in && slot >= 0 && (!p.has_initial_state || p.has_initial_state[task.n]);
    const i64 from = slot * p.in_n + task.head * p.in_h + 64 * task.half * p.in_v;
    if (reads && have_pairs(p.state_in, p.in_n, p.in_h, p.in_v, p.in_k)) {
        each_state(at.warp, at.r, at.t, [&](int i, int v, int k) {
            if (i % 2) return;
            const float2 x = load_state_pair(p.state_in, from + v * p.in_v + k);
            state[i] = x.x, state[i + 1] = x.y;
        });
    } else {
        each_state(at.warp, at.r, at.t, [&](int i, int v, int k) {
            state[i] = 0.f;
            if (reads) state[i] = load_state(p.state_in, from + v * p.in_v + k * p.in_k);
        });
    }
}

__device__ __forceinline__ void write_state(const Params& p, const Task& task, const Lane& at,
                                            const float (&state)[64]) {
    const i64 slot = p.state_indices ? p.state_indices[task.n] : task.n;
    if (!p.state_out || slot < 0) return;
    const i64 to = slot * p.out_n + task.head * p.out_h + 64 * task.half * p.out_v;
    if (have_pairs(p.state_out, p.out_n, p.out_h, p.out_v, p.out_k)) {
        each_state(at.warp, at.r, at.t, [&](int i, int v, int k) {
            if (i % 2 == 0)
                store_state_pair(p.state_out, to + v * p.out_v + k, state[i], state[i + 1]);
        });
    } else {
        each_state(at.warp, at.r, at.t, [&](int i, int v, int k) {
            const i64 address = to + v * p.out_v + k * p.out_k;
            if (STATE_BF16)
                static_cast<u16*>(p.state_out)[address] =
                    static_cast<u16>(to_bf16(state[i], 0.f));
            else
                static_cast<float*>(p.state_out)[address] = state[i];
        });
    }
}

// The state after ``done`` chunks, where it is asked for.
__device__ __forceinline__ void snapshot(const Params& p, const Task& task, const Lane& at,
                                         const float (&state)[64], int done) {
    for (int i = 0; i < p.num_snapshots; ++i) {
        const i64 number = static_cast<i64>(task.n) * p.num_snapshots + i;
        if (p.snapshot_chunks[number] != done) continue;
        float* to =
            p.snapshots + ((number * p.num_value_heads + task.head) * D + 64 * task.half) * D;
        each_state(at.warp, at.r, at.t, [&](int j, int v, int k) { to[v * D + k] = state[j]; });
    }
    if (!p.chunk_states || done == task.chunks) return;
    u16* to = static_cast<u16*>(p.chunk_states) + (task.first + done) * p.chunk_n +
              task.head * p.chunk_h;
    each_state(at.warp, at.r, at.t, [&](int j, int v, int k) {
        to[(64 * task.half + v) * p.chunk_v + k * p.chunk_k] =
            static_cast<u16>(to_bf16(state[j], 0.f));
    });
}

// Piece ``piece`` of 8 values of a token's row.
__device__ __forceinline__ u32 values_at(u32 rows, int row, int piece) {
    return rows + row * PITCH + piece * 16;
}
// e = v^T
__device__ __forceinline__ void load_values(float (&e)[32], u32 rows, const Lane& at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 tokens each
        u32 x[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(values_at(rows, 16 * i + 8 * (at.matrix / 2) + at.in_matrix,
                                     2 * at.warp + at.matrix % 2)) : "memory");
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            e[8 * i + 2 * j] = __uint_as_float(x[j] << 16);
            e[8 * i + 2 * j + 1] = __uint_as_float(x[j] & 0xffff0000u);
        }
    }
}
// A chunk's decay of the channels that this lane has.
__device__ __forceinline__ void load_totals(float2 (&totals)[16], const float* from, int t) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(from + 32 * t + 4 * (i ^ (2 * t)));
        totals[2 * i] = make_float2(x.x, x.y);
        totals[2 * i + 1] = make_float2(x.z, x.w);
    }
}
// Accumulators as an A operand.
template <int N>
__device__ __forceinline__ void round(u32 (&operand)[N][4], const float (&x)[8 * N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            operand[i][e] = pack_fp16(x[8 * i + 2 * e], x[8 * i + 2 * e + 1]);
}
__device__ __forceinline__ void decay(float (&state)[64], const float2 (&totals)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        state[4 * i] *= totals[i].x;
        state[4 * i + 1] *= totals[i].y;
        state[4 * i + 2] *= totals[i].x;
        state[4 * i + 3] *= totals[i].y;
    }
}
// y [64, 64 tokens] = S rows^T (+ y); rows [64 tokens, 128] of two blocks
__device__ __forceinline__ void state_times(float (&y)[32], const u32 (&operand)[8][4], u32 rows,
                                            bool add) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        wgmma_64(y, operand[i], descriptor(rows + (i / 4) * BLOCK_BYTES + (i % 4) * 32, 16, 1024),
                 add || i > 0);
    wgmma_commit();
}
// o += e^T (A_qk T)^T
__device__ __forceinline__ void rest_times_scores(float (&o)[32], const u32 (&operand)[4][4],
                                                    u32 scores) {
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_64(o, operand[i], descriptor(scores + i * 32, 16, 1024), 1);
    wgmma_commit();
}
// S += e^T (T^T k_out)
__device__ __forceinline__ void rest_times_keys(float (&state)[64], const u32 (&operand)[4][4],
                                                  u32 keys) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        wgmma_128(state, operand[i], descriptor(keys + i * 2048, BLOCK_BYTES, 1024));
    wgmma_commit();
}
// o^T to rows [64 tokens, 64 values] of shared memory, each warp to its own 16 values.
__device__ __forceinline__ void write_output(const float (&o)[32], float scale, u32 rows,
                                             const Lane& at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            x[e] = to_bf16(o[8 * i + 2 * e] * scale, o[8 * i + 2 * e + 1] * scale);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                         values_at(rows, 16 * i + 8 * (at.matrix / 2) + at.in_matrix,
                                   2 * at.warp + at.matrix % 2)),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    }
    __syncwarp();
}
// Where row 0 of a chunk's output goes.
__device__ __forceinline__ u16* output_of(const Params& p, const Task& task, int c) {
    return p.o + (task.begin + static_cast<i64>(c) * C) * p.o_t + task.head * p.o_h + 64 * task.half;
}
// Four pieces of 8 values, of rows ``row``, ``row + step`` and so on, from ``from`` to memory; ``read``
// is called when they have been read.
template <typename F>
__device__ __forceinline__ void store_output(u16* to, i64 stride, int rows, u32 from, int row, int step,
                                             int piece, F read) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                     : "r"(values_at(from, row + step * i, piece)) : "memory");
    }
    read();
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (row + step * i < rows)
            *reinterpret_cast<uint4*>(to + (row + step * i) * stride + 8 * piece) = x[i];
}

// The number that the fetching warp has posted.
__device__ __forceinline__ int task_number(Shared& s, int turn, int lane) {
    barrier_wait(&s.posted[turn % 2], (turn / 2) & 1);
    const int number = s.number[turn % 2];
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.read[turn % 2]);
    return number;
}

#if SPLIT
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(384, 1) scan(const Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int rank = SPLIT ? blockIdx.x % 2 : 0;  // 0: the chain, 1: the output
    const int first_task = SPLIT ? blockIdx.x / 2 : blockIdx.x;
    const int workers = SPLIT ? gridDim.x / 2 : gridDim.x;
    const bool has_chain = rank == 0;
    const int readers = !SPLIT ? 11 : has_chain ? 5 : 4;  // warps that want a task's number

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], has_chain ? 1 + 32 : 1);
            barrier_init(&s.empty[i], RELEASES);
            barrier_init(&s.written[i][0], 4);
            barrier_init(&s.written[i][1], 4);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            barrier_init(&s.posted[i], 1);
            barrier_init(&s.read[i], readers);
        }
#if SPLIT
#pragma unroll
        for (int i = 0; i < 4 * HANDS; ++i) {
            barrier_init(&s.ready[i / 4][i % 4], 1);
            barrier_init(&s.taken[i / 4][i % 4], 1);
        }
#endif
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (SPLIT) {
        cluster_sync();
    } else {
        __syncthreads();
    }

    // a shuffle makes the role uniform for the compiler, which else serialises wgmma
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    Lane at;
    at.warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, at.lane = threadIdx.x % 32;
    at.r = at.lane / 4, at.t = at.lane % 4, at.matrix = at.lane / 8, at.in_matrix = at.lane % 8;
    const int warp = at.warp, lane = at.lane;

    int before = 0;  // chunks of the tasks before: stages and barriers take turns over all of them
    if (role == 2) {  // the fetching warp
        registers<40, false>();
        const u32 launch = p.sync->launches + 1;
        for (int turn = 0; warp == 0; ++turn) {
            // blocks that are fewer than the tasks take them as they come
            int number = first_task + turn * workers;
            if (!SPLIT && workers < p.num_tasks)
                number = __shfl_sync(~0u, lane ? 0 : atomicAdd(&p.sync->next_task, 1), 0);
            const bool over = number >= p.num_tasks;
            if (turn >= 2) barrier_wait(&s.read[turn % 2], (turn / 2 - 1) & 1);
            if (lane == 0) {
                s.number[turn % 2] = over ? -1 : number;
                barrier_arrive(&s.posted[turn % 2]);
            }
            if (over) break;
            const Task task(p, number, 0);
            const u32* flags = p.sync->flags() + task.first * p.num_value_heads + task.head;
            int known = 0;  // chunks known to lie in memory
            for (int c = 0; c < task.chunks; ++c, ++before) {
                const int stage = before % STAGES;
                if (before >= STAGES) barrier_wait(&s.empty[stage], (before / STAGES - 1) & 1);
                while (known <= c) {  // each lane asks for one of the next chunks
                    const int asked = known + lane;
                    const bool there =
                        asked < task.chunks &&
                        load_acquire(flags + static_cast<i64>(asked) * p.num_value_heads) == launch;
                    const u32 missing = ~__ballot_sync(~0u, there);
                    known += missing ? __ffs(missing) - 1 : 32;
                    __syncwarp();
                    // other multiprocessors wrote the tiles; the copies below are of the async proxy
                    asm volatile("fence.proxy.async;" ::: "memory");
                }
                if (lane != 0) continue;
                const i64 tile_index = (task.first + c) * p.num_value_heads + task.head;
                const unsigned char* tile =
                    reinterpret_cast<const unsigned char*>(p.tiles) + tile_index * TILE_BYTES;
                auto get = [&](int to, int from, int blocks) {
                    fetch(s.stage[stage] + to * BLOCK_BYTES, tile + from * BLOCK_BYTES,
                          blocks * BLOCK_BYTES, &s.full[stage]);
                };
                const int blocks = !SPLIT ? 7 : rank == 0 ? 4 : 3;
                barrier_expect(&s.full[stage], blocks * BLOCK_BYTES + (has_chain ? D * 4 : 0));
                if (!SPLIT) {
                    get(0, 0, 7);
                } else if (rank == 0) {
                    get(K_IN, K_IN, 2);
                    get(STAGE_K, K_OUT, 2);
                } else {
                    get(STAGE_Q, Q_IN, 2);
                    get(STAGE_A, A_QK, 1);
                }
                if (has_chain)
                    fetch(s.totals[stage], p.totals + tile_index * D, D * 4, &s.full[stage]);
            }
        }
        // another the values, zeros behind the sequence's end
        for (int turn = 0, number;
             has_chain && warp == 3 && (number = task_number(s, turn, lane)) >= 0; ++turn) {
            const Task task(p, number, 0);
            constexpr int PIECES = ROW_BYTES / 16, STEP = 32 / PIECES;  // rows at once
            const int row = lane / PIECES, piece = lane % PIECES;
            const u16* from = p.v + (task.begin + row) * p.v_t + task.head * p.v_h +
                              64 * task.half + 8 * piece;
            for (int c = 0; c < task.chunks; ++c, ++before) {
                const int stage = before % STAGES;
                if (before >= STAGES) barrier_wait(&s.empty[stage], (before / STAGES - 1) & 1);
                const u32 to = values_at(shared_address(s.v[stage]), row, piece);
                const int rows = task.rows(c) - row;
#pragma unroll 8
                for (int i = 0; i < C; i += STEP, from += STEP * p.v_t)
                    copy_async(to + i * PITCH, from, i < rows);
                copies_arrive(&s.full[stage]);
            }
        }
        // two more carry the output of a half each from shared memory to memory
        for (int turn = 0, number;
             !SPLIT && (warp == 1 || warp == 2) && (number = task_number(s, turn, lane)) >= 0; ++turn) {
            const int half = warp - 1;
            const Task task(p, number, half);
            for (int c = 0; c < task.chunks; ++c, ++before) {
                const int stage = before % STAGES;
                barrier_wait(&s.written[stage][half], (before / STAGES) & 1);
                const u32 from = shared_address(s.v[stage]) + 128 * half;
                u16* const to = output_of(p, task, c);
                const int rows = task.rows(c);
#pragma unroll 1
                for (int row = lane / 8; row < C; row += 16)
                    store_output(to, p.o_t, rows, from, row, 4, lane % 8, [] {});
                __syncwarp();
                if (lane == 0) barrier_arrive(&s.empty[stage]);
            }
        }
        if (threadIdx.x % 128 == 0) {
            __threadfence();
            if (atomicAdd(&p.sync->finished, 1) == gridDim.x - 1) {
                p.sync->next = 0;
                p.sync->next_task = 0;
                p.sync->started = 0;
                p.sync->finished = 0;
                p.sync->launches += 1;
            }
        }
    }
#if SPLIT
    else if (role == 1 && rank == 1) {  // the output
        registers<208, true>();
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < HANDS; ++i) barrier_expect(&s.ready[i][warp], HAND_BYTES);
        }
        for (int turn = 0, number; (number = task_number(s, turn, lane)) >= 0; ++turn) {
            const Task task(p, number, 0);
            for (int c = 0; c < task.chunks; ++c, ++before) {
                const int stage = before % STAGES, hand = before % HANDS;
                const u32 base = shared_address(s.stage[stage]);
                float o[32];
                u32 operand[8][4], e_operand[4][4];
                barrier_wait(&s.full[stage], (before / STAGES) & 1);
                barrier_wait(&s.ready[hand][warp], (before / HANDS) & 1);
#pragma unroll
                for (int i = 0; i < 8; ++i) unpack(operand[i], s.hand[hand][warp][i][lane]);
#pragma unroll
                for (int i = 0; i < 4; ++i) unpack(e_operand[i], s.hand[hand][warp][8 + i][lane]);
                __syncwarp();
                if (lane == 0) {
                    barrier_expect(&s.ready[hand][warp], HAND_BYTES);
                    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                                     shared_of(&s.taken[hand][warp], 0)) : "memory");
                }
                wgmma_fence();
                state_times(o, operand, base + STAGE_Q * BLOCK_BYTES, false);
                rest_times_scores(o, e_operand, base + STAGE_A * BLOCK_BYTES);
                wgmma_wait<0>();
                settled(o);
                if (lane == 0) barrier_arrive(&s.empty[stage]);
                write_output(o, p.scale, shared_address(s.out), at);
                store_output(output_of(p, task, c), p.o_t, task.rows(c), shared_address(s.out), lane / 2,
                             16, 2 * warp + lane % 2, [] { __syncwarp(); });
            }
        }
    } else if (role == 0 && rank == 0) {  // the chain
        registers<232, true>();
        for (int turn = 0, number; (number = task_number(s, turn, lane)) >= 0; ++turn) {
            const Task task(p, number, 0);
            float state[64], e[32];
            read_state(p, task, at, state);
            u32 operand[8][4];
            float2 totals[16];
            auto load_chunk = [&](int c) {  // e starts from v^T; the chunk's decay
                const int stage = (before + c) % STAGES;
                barrier_wait(&s.full[stage], ((before + c) / STAGES) & 1);
                load_values(e, shared_address(s.v[stage]), at);
                load_totals(totals, s.totals[stage], at.t);
            };
            auto enter = [&](int c) {  // the state before chunk c: its operand, then the decay
                if (TRACK) snapshot(p, task, at, state, c);
                round(operand, state);
                decay(state, totals);
            };
            if (task.chunks) {
                load_chunk(0);
                enter(0);
            }
            for (int c = 0; c < task.chunks; ++c) {
                const int step = before + c, stage = step % STAGES, hand = step % HANDS;
                const u32 base = shared_address(s.stage[stage]);
                settled(e);
                settled(state);
                wgmma_fence();
                state_times(e, operand, base + K_IN * BLOCK_BYTES, true);
                if (step >= HANDS)
                    barrier_wait(&s.taken[hand][warp], (step / HANDS - 1) & 1);
#pragma unroll
                for (int i = 0; i < 8; ++i) s.hand[hand][warp][i][lane] = packed(operand[i]);
                wgmma_wait<0>();
                settled(e);
                u32 e_operand[4][4];
                round(e_operand, e);
                wgmma_fence();
                rest_times_keys(state, e_operand, base + STAGE_K * BLOCK_BYTES);
#pragma unroll
                for (int i = 0; i < 4; ++i) s.hand[hand][warp][8 + i][lane] = packed(e_operand[i]);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                if (lane == 0) send(s.hand[hand][warp], HAND_BYTES, &s.ready[hand][warp]);
                if (c + 1 < task.chunks) load_chunk(c + 1);
                wgmma_wait<0>();
                settled(state);
                if (lane == 0) barrier_arrive(&s.empty[stage]);
                if (c + 1 < task.chunks) enter(c + 1);
            }
            before += task.chunks;
            if (TRACK) snapshot(p, task, at, state, task.chunks);
            write_state(p, task, at, state);
        }
    }
    cluster_sync();  // shared memory must outlive the other block's use of it
#else
    else {  // a half of the value rows: chain and output
        registers<232, true>();
        for (int turn = 0, number; (number = task_number(s, turn, lane)) >= 0; ++turn) {
            const Task task(p, number, role);
            float state[64], e[32], o[32];
            u32 operand[8][4], e_operand[4][4];
            read_state(p, task, at, state);
            auto load_chunk = [&](int c) {
                const int stage = (before + c) % STAGES;
                barrier_wait(&s.full[stage], ((before + c) / STAGES) & 1);
                load_values(e, shared_address(s.v[stage]) + 128 * role, at);
            };
            if (task.chunks) load_chunk(0);
            for (int c = 0; c < task.chunks; ++c) {
                const int stage = (before + c) % STAGES;
                const u32 base = shared_address(s.stage[stage]);
                if (TRACK) snapshot(p, task, at, state, c);
                round(operand, state);
                settled(e);
                wgmma_fence();
                state_times(e, operand, base + K_IN * BLOCK_BYTES, true);
                float2 totals[16];
                load_totals(totals, s.totals[stage], at.t);
                decay(state, totals);
                wgmma_wait<0>();
                settled(e);
                round(e_operand, e);
                settled(state);
                wgmma_fence();
                rest_times_keys(state, e_operand, base + K_OUT * BLOCK_BYTES);
                state_times(o, operand, base + Q_IN * BLOCK_BYTES, false);
                rest_times_scores(o, e_operand, base + A_QK * BLOCK_BYTES);
                if (c + 1 < task.chunks) load_chunk(c + 1);
                wgmma_wait<0>();
                settled(state);
                settled(o);
                // these values are this warp's own, and have been read
                write_output(o, p.scale, shared_address(s.v[stage]) + 128 * role, at);
                if (lane == 0) barrier_arrive(&s.written[stage][role]);
            }
            before += task.chunks;
            if (TRACK) snapshot(p, task, at, state, task.chunks);
            write_state(p, task, at, state);
        }
    }
#endif
}
