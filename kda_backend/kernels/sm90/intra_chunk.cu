// Intra-chunk stage of KDA prefill on Hopper: scores, triangular solve, decayed rows.
//
// Computes what intra.py computes (its docstring gives the equations), but for the solve, for bf16
// q, k, g and K = V = 128. One block of 4 warps serves one (chunk, value head); warp b owns the
// 16 tokens of row block b. Lane (l / 4, l % 4) = (r, t) holds tokens r and r + 8 of its block and
// channels 2 t, 2 t + 1 of each 8: the fragments of mma.m16n8k16, which ldmatrix and stmatrix move.
//
// A row's decay over some of the tokens of its block is 2 to a sum of log2 decays. Such sums are
// products of a constant 0/1 matrix [8 rows, 8 tokens] and the log decays [8 tokens, channels], so the
// tensor cores make them. Log decays enter rounded to fp16, all sums from the same rounded numbers:
// what g rounded to 11 bits would give, and g itself has 8.
//
// Scores inside 8 tokens: the row's decay from the first of them on times the inverse of the column's,
// a product in tf32, whose range is that of fp32; for that a decay counts as 2^-22 at least, which is
// nothing in fp16. Of a bounded gate 16 tokens stay in that range, and are taken at once. Between the
// halves of 16, 32 and 64 tokens: rows of the upper half decay from its first token on, those of the
// lower half to its last, so nothing exceeds 1 and fp16 will do. Any gate is exact, and row r depends on
// tokens up to r alone.
//
// The solve is applied to k_out and A_qk, not to k_in and v: what the state misses of a chunk's values,
// v - k_in S^T, enters state and output through T (docs/kda.md), so T^T k_out and A_qk T serve as well, and
// neither v nor w nor u passes through here.
//
// The tiles are made where their inputs lie: q becomes q_in, k -k_in, g k_out and then T^T k_out. What
// belongs to the solve comes where q_in has left. Each leaves by a bulk copy.
//
// Blocks stay and take one tile after the other, in the order in which the scan wants them. They wait
// for nobody, and the scan starts when all of them have, so it may wait for any tile.
//
// Compile-time: GATE, BETA, L2NORM as in elementwise.py; BETA_FP32; MIN_BLOCKS a multiprocessor.

#include "common.cuh"

struct Params {
    const void* q;
    const void* k;
    const void* g;
    const void* beta;         // bf16, or fp32 with BETA_FP32
    const float* a_log;       // [HV] or null
    const float* dt_bias;     // [HV, 128] or null
    u16* tiles;               // [chunks, HV, 7 * 4096] fp16: -k_in, q_in, T^T k_out, A_qk T
    float* totals;            // [chunks, HV, 128], in the order in which scan.cu reads them
    const int* chunk_start;
    const int* chunk_len;
    const int* chunk_order;
    i64 q_t, q_h, k_t, k_h, g_t, g_h, beta_t, beta_h;  // strides in elements
    int num_value_heads;
    int heads_per_key;
    float lower_bound;
    int num_tiles;      // a tile's number is chunk * HV + value head
    int first_scan_sm;  // multiprocessors from this number on are left to the scan, each of whose
    int limit;          // blocks takes a whole one, when every block there has made so many tiles
    Sync* sync;
};

static_assert(sizeof(Params) == PARAM_BYTES, "prefill_sm90.py packs other parameters");

// The thread that works for its block; its warp has the least of the products.
static constexpr int CLERK = 32;
static constexpr float LOG2E = 1.4426950408889634f;
// Log decays are kept as fp16 times this, so that decays next to 1 stay normal numbers.
static constexpr float LOG_SCALE = 256.0f;
// 8 tokens of 2^-22, or 16 of a bounded gate's 2^-7.3, and their inverse, centred by 2^SHIFT, times a
// key or a query, are numbers of fp32.
static constexpr float SHIFT = 60.0f, UNSHIFT = 0x1p-60f;

__device__ __forceinline__ float low_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ u32 mul_fp16(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ u32 minus_mul_fp16(u32 a, u32 b) {
    u32 y;
    asm("{.reg .b32 n; neg.f16x2 n, %1; mul.rn.f16x2 %0, n, %2;}" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c = a b, and SHIFT on each sum
__device__ __forceinline__ void shifted_sums(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(b0), "f"(SHIFT));
}
__device__ __forceinline__ void shifted_sums(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                             u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(SHIFT));
}
// c = a [16, 8] b [8, 8] (+ c)
__device__ __forceinline__ void mma_8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Reads the upper 19 bits of each operand: what it drops is cut off, not rounded.
__device__ __forceinline__ void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3,
                                         float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
          "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// One word, without waiting for it.
__device__ __forceinline__ void copy_word(void* to, const void* from, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Bulk copies from shared memory; what other threads wrote there must have passed writes_done().
__device__ __forceinline__ void writes_done() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void store_bulk(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void store_read_wait() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Byte offset of 16-byte piece c of row r in a block of 64 rows of 128 bytes: wgmma's 128-byte
// swizzle. A row of 128 channels continues in the next block.
__device__ __forceinline__ u32 offset(int r, int c) {
    return (c / 8) * BLOCK_BYTES + r * 128 + ((c % 8 ^ (r & 7)) << 4);
}

// log2 of the decay, times LOG_SCALE. ``bias`` is dt_bias log2(e), ``rate`` is
// exp(A_log) LOG_SCALE.
__device__ __forceinline__ float log_decay(float g, float bias, float rate, float lower_bound) {
#if GATE == 0
    return g * (LOG2E * LOG_SCALE);
#elif GATE == 1
    const float y = fmaf(g, LOG2E, bias);
    const float e = ex2(fminf(y, 40.0f));
    // log2(1 + e) by its series where 1 + e rounds away the digits of a small e
    const float series = e * fmaf(e, -0.5f * LOG2E, LOG2E);
    return -rate * (e < 0.01f ? series : fmaxf(lg2(1.0f + e), y));
#else
    const float gate = rcp(1.0f + ex2((-1.0f / LOG_SCALE) * rate * fmaf(g, LOG2E, bias)));
    return lower_bound * (LOG2E * LOG_SCALE) * gate;  // from -5 on
#endif
}
__device__ __forceinline__ u32 at_least_22(u32 pair) {
    if (GATE == 2) return pair;
    u32 y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(0xed80ed80u));  // -22 * 256
    return y;
}
// Log decays as a pair; those beyond fp16's range are its last number.
__device__ __forceinline__ u32 pack_logs(float low, float high) {
    u32 y;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// Where a tile's inputs lie.
struct Source {
    int head, key_head, chunk;
    int token, length;
    float a_log;
};

struct Shared {
    u16 k[C * D];  // k, then -k_in = -k 2^G
    union {
        u16 q[C * D];  // q, then q_in
        struct {
            // below the diagonal blocks -L without its beta, on the diagonal their T
            u16 low[C * C];
            u16 a_qk[C * C];  // then A_qk T
        };
    };
    u16 g[C * D];  // g, then k_out, then T^T k_out
    union {
        // operands for other warps: [k suf of row blocks 0, 1, 2; q pre, k pre of 3][half][lane]
        uint4 exchange[5][2][32];
        float diagonal[4][16][16];  // L's diagonal blocks
    };
    // decays over the row blocks, of 16 channels the 2 t, 2 t + 1 of each 8 together; 1 before and behind
    float4 totals[3 + 4 + 3][2][4];
    float beta[C];
    float bias[D];     // dt_bias of the head
    Source source[2];  // of this tile and of the next
    int next;          // the block's next tile, as a place in the order
    int left;          // how many it may still make
    u32 launch;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "prefill_sm90.py asks for other shared memory");

__device__ __forceinline__ void fetch_rows(u16* to, const void* from, i64 stride, int length) {
    const int row = threadIdx.x / 16, piece = threadIdx.x % 16;
    const char* source = static_cast<const char*>(from) + 16 * piece;
    const u32 at = shared_address(to) + offset(row, piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        copy_async(at + 8 * i * 128, source + 2 * (row + 8 * i) * stride, row + 8 * i < length);
    }
}
// First row of a tile in q, k, v or g.
__device__ __forceinline__ const u16* rows_of(const void* x, const Source& from, int head, i64 stride_t,
                                              i64 stride_h) {
    return static_cast<const u16*>(x) + from.token * stride_t + head * stride_h;
}

// Applies T by block backward substitution to 16 rows x over the chunk's 64 tokens, in place:
//     y_i = (x_i - sum over j > i of y_j L_ji) T_ii,
// where y and T have beta in them and L has not. KEYS: the rows are channels, ``rows`` is which 16, of
// k_out, whose tokens lie one below the other. Else they are tokens of A_qk, of row block ``rows``, and
// there is nothing behind it.
template <bool KEYS>
__device__ __forceinline__ void solve(u16* x_rows, int rows, const Shared& s, int lane) {
    const u32 low_base = shared_address(s.low), x_base = shared_address(x_rows);
    const int in_matrix = lane % 8, first = 8 * (lane / 8 % 2), second = lane / 16;
    u32 solved[4][4] = {};
#pragma unroll
    for (int i = 3; i >= 0; --i) {
        if (!KEYS && i > rows) continue;
        // matrices, of x and of what is stored: (tokens 0-7, rows 0-7), (0-7, 8-15), (8-15, 0-7), ..
        const u32 x_address =
            x_base + (KEYS ? offset(16 * i + 8 * second + in_matrix, 2 * rows + first / 8)
                           : offset(16 * rows + first + in_matrix, 2 * i + second));
        u32 x[4];
        if (KEYS)
            ldmatrix_trans(x, x_address);
        else
            ldmatrix(x, x_address);
        float acc[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                acc[n][2 * h] = low_fp16(x[2 * n + h]);
                acc[n][2 * h + 1] = high_fp16(x[2 * n + h]);
            }
        auto times = [&](const u32 (&y)[4], int j) {  // acc += y low_ji
            u32 l[4];
            ldmatrix_trans(l, low_base + offset(16 * j + first + in_matrix, 2 * i + second));
            mma(acc[0], y[0], y[1], y[2], y[3], l[0], l[1]);
            mma(acc[1], y[0], y[1], y[2], y[3], l[2], l[3]);
        };
        auto operand = [&](u32 (&y)[4]) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                y[2 * n] = pack_fp16(acc[n][0], acc[n][1]);
                y[2 * n + 1] = pack_fp16(acc[n][2], acc[n][3]);
            }
        };
#pragma unroll
        for (int j = i + 1; j < 4; ++j)
            if (KEYS || j <= rows) times(solved[j], j);
        u32 z[4];
        operand(z);
#pragma unroll
        for (int n = 0; n < 2; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
        times(z, i);
        operand(solved[i]);
        if (KEYS)
            stmatrix_trans(x_address, solved[i]);
        else
            stmatrix(x_address, solved[i]);
    }
}

// Rows [16 tokens, 32 channels] of fp16 pairs times f, the same for all.
__device__ __forceinline__ void scale_rows(u32 (&x)[2][4], const u32 (&f)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] = mul_fp16(x[i][e], f[e]);
}
__device__ __forceinline__ float4 product(const float4& a, const float4& b, const float4& c) {
    return make_float4(a.x * b.x * c.x, a.y * b.y * c.y, a.z * b.z * c.z, a.w * b.w * c.w);
}
__device__ __forceinline__ void mma_rows(float (&c)[4], const u32 (&a)[2][4], const uint4& b) {
    mma(c, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
    mma(c, a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
}

__device__ __forceinline__ u32 started(const Params& p) {
    return *reinterpret_cast<const volatile u32*>(&p.sync->started);
}
// Should the multiprocessors be numbered otherwise than thought, the limited blocks make all tiles.
__device__ __forceinline__ bool nobody_else(const Params& p) { return started(p) < 0x10000; }

// In three steps, each of which uses what the one before has fetched: which chunk comes next, then
// where it is.
__device__ __forceinline__ void find_next(const Params& p, Shared& s, int turn, int step) {
    if (s.next >= p.num_tiles) return;
    Source& to = s.source[turn];
    if (step == 1) {
        to.head = s.next % p.num_value_heads;
        to.key_head = to.head / p.heads_per_key;
        copy_word(&to.chunk, p.chunk_order + s.next / p.num_value_heads);
        copy_commit();
    } else if (step == 2) {
        copy_wait<0>();
        copy_word(&to.token, p.chunk_start + to.chunk);
        copy_word(&to.length, p.chunk_len + to.chunk);
        if (p.a_log) copy_word(&to.a_log, p.a_log + to.head);
        copy_commit();
    } else {
        copy_wait<0>();
    }
}

__device__ __forceinline__ void fetch_keys(const Params& p, Shared& s, const Source& from) {
    fetch_rows(s.k, rows_of(p.k, from, from.key_head, p.k_t, p.k_h), p.k_t, from.length);
}

// Makes the tile of ``s.source[turn]``, whose keys are on their way, and finds out about the next one. At the end the copies to
// memory have read shared memory, but may be on their way.
//
// ``made`` runs while the inputs are on their way, ``told`` behind the barrier that follows.
template <typename F, typename G>
__device__ __forceinline__ void make_tile(const Params& p, Shared& s, int turn, int warp, int lane,
                                          F made, G told) {
    const Source& source = s.source[turn];
    const int head = source.head, length = source.length;
    const i64 index = static_cast<i64>(source.chunk) * p.num_value_heads + head;
    const int r = lane / 4, t = lane % 4;
    __syncthreads();  // the last tile has been read, and s.next
    fetch_rows(s.q, rows_of(p.q, source, source.key_head, p.q_t, p.q_h), p.q_t, length);
    copy_commit();
    fetch_rows(s.g, rows_of(p.g, source, head, p.g_t, p.g_h), p.g_t, length);
    if (GATE != 0) {
        const bool has_bias = p.dt_bias != nullptr;
        copy_word(&s.bias[threadIdx.x],
                  has_bias ? p.dt_bias + head * D + threadIdx.x : static_cast<const void*>(p.g), has_bias);
    }
    copy_commit();
    if (threadIdx.x == CLERK)
        s.next = --s.left > 0 || nobody_else(p) ? atomicAdd(&p.sync->next, 1) : p.num_tiles;
    auto tile = [&](int block) {
        return reinterpret_cast<char*>(p.tiles) + index * TILE_BYTES + block * BLOCK_BYTES;
    };
    const float rate = ex2(source.a_log * LOG2E) * LOG_SCALE;
    if (threadIdx.x < C) {
        float b = 0.f;
        if (threadIdx.x < length) {
            const i64 at = static_cast<i64>(source.token + threadIdx.x) * p.beta_t + head * p.beta_h;
            b = BETA_FP32 ? static_cast<const float*>(p.beta)[at]
                          : __uint_as_float(u32(static_cast<const u16*>(p.beta)[at]) << 16);
            if (BETA >= 1) b = (BETA == 2 ? 2.0f : 1.0f) * rcp(1.0f + ex2(-LOG2E * b));
        }
        s.beta[threadIdx.x] = b;
    } else if (threadIdx.x < C + 8) {
        const int j = (threadIdx.x - C) / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 3; ++i)
            s.totals[i][j][t] = s.totals[7 + i][j][t] = make_float4(1.f, 1.f, 1.f, 1.f);
    }
    made();
    copy_wait<1>();
    __syncthreads();
    told();

    // Where the lane's row of a matrix starts that ldmatrix or stmatrix moves: matrices are (tokens
    // 0-7, channels 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15). x4 number j of a row block has
    // channels 16 j on.
    const int matrix = lane / 8, in_matrix = lane % 8;
    const u32 own_row = (8 * (matrix % 2) + in_matrix) * 128 + ((matrix / 2 ^ in_matrix) << 4);
    auto at = [&](const u16* tile_of, int block, int j) {
        return shared_address(tile_of) + block * 16 * 128 + (j / 4) * BLOCK_BYTES +
               (own_row ^ (j % 4) << 5);
    };

    // Norms and the diagonal of A_qk, which no decay touches: diagonals of products.
    float q_norm[2], k_norm[2], diagonal[2];
    {
        float with_q[2][4] = {}, with_k[2][4] = {};  // rows 0-7 are q's, 8-15 k's
        // lane groups of 8 read channels 0-7 of q, of k, 8-15 of q, of k; and of k, k, q, q
        const u32 rows = 16 * warp * 128 + in_matrix * 128;
        const u32 q_rows = shared_address(s.q) + rows, k_rows = shared_address(s.k) + rows;
        const u32 a_rows = matrix % 2 ? k_rows : q_rows, b_rows = matrix / 2 ? q_rows : k_rows;
        const u32 a_piece = (matrix / 2 ^ in_matrix) << 4, b_piece = (matrix % 2 ^ in_matrix) << 4;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 block = (j / 4) * BLOCK_BYTES + i * 8 * 128;
                u32 a[4], b[4];
                ldmatrix(a, a_rows + block + (a_piece ^ (j % 4) << 5));
                ldmatrix(b, b_rows + block + (b_piece ^ (j % 4) << 5));
                mma_bf16(with_k[i], a[0], a[1], a[2], a[3], b[0], b[1]);
                if (L2NORM) mma_bf16(with_q[i], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            auto own = [&](float even, float odd) {  // column r of row r
                return __shfl_sync(~0u, r & 1 ? odd : even, 4 * r + r / 2);
            };
            q_norm[i] = L2NORM ? rsqrtf(own(with_q[i][0], with_q[i][1]) + 1e-6f) : 1.0f;
            k_norm[i] = L2NORM ? rsqrtf(own(with_k[i][2], with_k[i][3]) + 1e-6f) : 1.0f;
            diagonal[i] = own(with_k[i][0], with_k[i][1]) * q_norm[i] * k_norm[i];
        }
    }
    copy_wait<0>();
    __syncthreads();

    // The sums' matrices, as halves of an A fragment [8 rows, 8 tokens] with entries 1 / LOG_SCALE
    // (0x1c00): over all tokens, and over those through the row's own.
    const u32 all = 0x1c001c00u;
    const u32 through = (2 * t <= r ? 0x1c00u : 0u) | (2 * t + 1 <= r ? 0x1c000000u : 0u);
    static_assert(LOG_SCALE == 256.0f, "0x1c00 is 2^-8");

    u32 inside[2];  // which of the lane's tokens the chunk has
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int first = 16 * warp + 8 * i + 2 * t;
        inside[i] = (first < length ? 0xffffu : 0u) | (first + 1 < length ? 0xffff0000u : 0u);
    }
    // Scores, 32 channels at a time. near: inside the 8 tokens of half i, rows 0-7 for q and 8-15 for
    // k; eight: between the halves. far: with earlier row blocks, 1 with 0 (warp 1), 2 and 3 with 0
    // and 1 (warps 2 and 3), 3 with 2 (warp 0).
    float near[2][4] = {}, eight[4] = {}, q_far[2][2][4] = {}, k_far[2][2][4] = {};
#pragma unroll 1
    for (int slice = 0; slice < 4; ++slice) {
        // Log decays of 32 channels as B operands [8 tokens, 8 channels]: lane (r, t) has tokens 2 t
        // and 2 t + 1, channel r of each 8.
        u32 logs[4][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            u32 x[4];
            ldmatrix_trans(x, at(s.g, warp, 2 * slice + j));
            float total[2][2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float bias =
                    GATE != 0 ? s.bias[32 * slice + 16 * j + 8 * m + r] * LOG2E : 0.0f;
                const int e = 2 * j + m;
                float sums[4] = {};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 z = x[2 * m + i];
                    const u32 pair =
                        inside[i] & pack_logs(log_decay(low_bf16(z), bias, rate, p.lower_bound),
                                              log_decay(high_bf16(z), bias, rate, p.lower_bound));
                    if (GATE != 2) mma_8(sums, all, 0, pair);
                    logs[e][i] = at_least_22(pair);
                }
                total[m][0] = ex2(sums[0]), total[m][1] = ex2(sums[1]);
            }
            if (GATE != 2 && r == 0)
                s.totals[3 + warp][j][t] =
                    make_float4(total[0][0], total[0][1], total[1][0], total[1][1]);
        }
        // rows decayed from the block's first token through their own, and behind it to the last
        u32 q_pre[2][4], k_pre[2][4], k_suf[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            u32 x[4], y[4];
            ldmatrix(x, at(s.q, warp, 2 * slice + j));
            ldmatrix(y, at(s.k, warp, 2 * slice + j));
#if GATE == 2
            float total[2][2];
#endif
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int e = 2 * j + m;
                u32 qh[2], kh[2], pre[2], suf[2];
                float q[2][2], k[2][2];
                float up[2][2];  // decay of the row from the anchor's token on, shifted
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    q[i][0] = low_bf16(x[2 * m + i]) * q_norm[i];
                    q[i][1] = high_bf16(x[2 * m + i]) * q_norm[i];
                    k[i][0] = low_bf16(y[2 * m + i]) * k_norm[i];
                    k[i][1] = high_bf16(y[2 * m + i]) * k_norm[i];
                    qh[i] = pack_fp16(q[i][0], q[i][1]);
                    kh[i] = pack_fp16(k[i][0], k[i][1]);
                }
#if GATE == 2
                float sums[4], down[2][2], end[2];
                shifted_sums(sums, through, all, 0, through, logs[e][0], logs[e][1]);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    end[c] = ex2(__shfl_sync(~0u, sums[2 + c], 28 + t));
                    total[m][c] = end[c] * UNSHIFT;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        up[i][c] = ex2(sums[2 * i + c]);
                        down[i][c] = ex2(-sums[2 * i + c]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    pre[i] = pack_fp16(up[i][0] * UNSHIFT, up[i][1] * UNSHIFT);
                    suf[i] = pack_fp16(end[0] * down[i][0], end[1] * down[i][1]);
                    down[i][0] *= k[i][0];
                    down[i][1] *= k[i][1];
                }
                mma_tf32(near[0], q[0][0] * up[0][0], k[0][0] * up[0][0], q[0][1] * up[0][1],
                         k[0][1] * up[0][1], down[0][0], down[0][1]);
                const float q_up[2] = {q[1][0] * up[1][0], q[1][1] * up[1][1]};
                const float k_up[2] = {k[1][0] * up[1][0], k[1][1] * up[1][1]};
                mma_tf32(near[1], q_up[0], k_up[0], q_up[1], k_up[1], down[1][0], down[1][1]);
                mma_tf32(eight, q_up[0], k_up[0], q_up[1], k_up[1], down[0][0], down[0][1]);
#else
                float q_up[2][2], k_up[2][2], k_down[2][2], k_low[2], end[2][2], behind[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float sums[4];
                    shifted_sums(sums, through, all, logs[e][i]);
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        up[i][c] = ex2(sums[c]);
                        q_up[i][c] = q[i][c] * up[i][c];
                        k_up[i][c] = k[i][c] * up[i][c];
                        const float down = ex2(-sums[c]);
                        k_down[i][c] = k[i][c] * down;
                        end[i][c] = ex2(sums[2 + c]);
                        behind[i][c] = end[i][c] * down;
                    }
                    mma_tf32(near[i], q_up[i][0], k_up[i][0], q_up[i][1], k_up[i][1], k_down[i][0],
                             k_down[i][1]);
                }
                k_low[0] = k[0][0] * behind[0][0];
                k_low[1] = k[0][1] * behind[0][1];
                constexpr float TWICE = UNSHIFT * UNSHIFT;
                suf[0] = pack_fp16(behind[0][0] * (end[1][0] * UNSHIFT), behind[0][1] * (end[1][1] * UNSHIFT));
                suf[1] = pack_fp16(behind[1][0], behind[1][1]);
                pre[0] = pack_fp16(up[0][0] * UNSHIFT, up[0][1] * UNSHIFT);
                pre[1] = pack_fp16(up[1][0] * (end[0][0] * TWICE), up[1][1] * (end[0][1] * TWICE));
                mma_tf32(eight, q_up[1][0], k_up[1][0], q_up[1][1], k_up[1][1], k_low[0], k_low[1]);
#endif
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    q_pre[i][e] = mul_fp16(qh[i], pre[i]);
                    k_pre[i][e] = mul_fp16(kh[i], pre[i]);
                    k_suf[i][e] = mul_fp16(kh[i], suf[i]);
                }
            }
#if GATE == 2
            if (r == 0)
                s.totals[3 + warp][j][t] =
                    make_float4(total[0][0], total[0][1], total[1][0], total[1][1]);
#endif
        }
        // What other warps need goes to the same lane there through shared memory.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (warp < 3) {
                s.exchange[warp][i][lane] = packed(k_suf[i]);
            } else {
                s.exchange[3][i][lane] = packed(q_pre[i]);
                s.exchange[4][i][lane] = packed(k_pre[i]);
            }
        }
        __syncthreads();
        const float4 (*const totals)[2][4] = s.totals + 3 + warp;  // the warp's own
        u32 reach[2][4];  // decays over the block before the warp's, and over block 1
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // rows decayed from the chunk's start and to its end
            const float4 x0 = totals[-1][j][t], x1 = totals[-2][j][t], x2 = totals[-3][j][t];
            const float4 y0 = totals[1][j][t], y1 = totals[2][j][t], y2 = totals[3][j][t];
            const float4 behind = product(y0, y1, y2);
            const u32 behind_h[2] = {pack_fp16(behind.x, behind.y), pack_fp16(behind.z, behind.w)};
            const float4 before = product(x0, x1, x2);
            const u32 before_h[2] = {pack_fp16(before.x, before.y), pack_fp16(before.z, before.w)};
            const float4 far = warp == 3 ? x1 : x0;
            reach[0][2 * j] = pack_fp16(x0.x, x0.y), reach[0][2 * j + 1] = pack_fp16(x0.z, x0.w);
            reach[1][2 * j] = pack_fp16(far.x, far.y), reach[1][2 * j + 1] = pack_fp16(far.z, far.w);
            u32 in_q[4], in_k[4], out_k[4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    in_q[2 * m + i] = mul_fp16(q_pre[i][2 * j + m], before_h[m]);
                    in_k[2 * m + i] = minus_mul_fp16(k_pre[i][2 * j + m], before_h[m]);
                    out_k[2 * m + i] = mul_fp16(k_suf[i][2 * j + m], behind_h[m]);
                }
            stmatrix(at(s.q, warp, 2 * slice + j), in_q);
            stmatrix(at(s.k, warp, 2 * slice + j), in_k);
            stmatrix(at(s.g, warp, 2 * slice + j), out_k);
            if (warp == 0 && r == 0) {  // a lane of the scan wants channels 2 t, 2 t + 1 of each 8
                const float4 own = totals[0][j][t];
                *reinterpret_cast<float4*>(p.totals + index * D + 32 * t +
                                           4 * ((2 * slice + j) ^ (2 * t))) =
                    make_float4(own.x * behind.x, own.y * behind.y, own.z * behind.z, own.w * behind.w);
            }
        }
        int lower = warp - 1;  // the row block of the columns
        if (warp == 0) {
            lower = 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unpack(q_pre[i], s.exchange[3][i][lane]);
                unpack(k_pre[i], s.exchange[4][i][lane]);
            }
        } else if (warp == 3) {
            lower = 1;
            scale_rows(q_pre, reach[0]);
            scale_rows(k_pre, reach[0]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint4 b = s.exchange[lower][n][lane];
            mma_rows(q_far[0][n], q_pre, b);
            mma_rows(k_far[0][n], k_pre, b);
        }
        if (warp >= 2) {
            scale_rows(q_pre, reach[1]);
            scale_rows(k_pre, reach[1]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const uint4 b = s.exchange[0][n][lane];
                mma_rows(q_far[1][n], q_pre, b);
                mma_rows(k_far[1][n], k_pre, b);
            }
        }
        if (slice % 2) writes_done();
        if (slice > 0 && threadIdx.x == CLERK) find_next(p, s, turn ^ 1, slice);
        __syncthreads();
        if (slice % 2 && threadIdx.x == CLERK) {  // 64 channels are complete
            const int half = slice / 2;
            store_bulk(tile(Q_IN + half), s.q + half * (BLOCK_BYTES / 2), BLOCK_BYTES);
            store_bulk(tile(K_IN + half), s.k + half * (BLOCK_BYTES / 2), BLOCK_BYTES);
            if (half) store_read_wait();
        }
    }

    // Scores [16, 16] of row block ``rows`` with ``columns``: A_qk, and -L without its beta.
    auto pairs = [](u32 (&x)[4], const float (&c)[2][4], float f) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            x[2 * n] = pack_fp16(c[n][0] * f, c[n][1] * f);
            x[2 * n + 1] = pack_fp16(c[n][2] * f, c[n][3] * f);
        }
    };
    // tf32 cut 2^-11 / (2 ln 2) off each of two factors on average
    constexpr float CUT = 1.0f + 0x1p-10f * 0.72134752f;
    u32 a_diagonal[4];
    {
        const float beta0 = s.beta[16 * warp + r], beta1 = s.beta[16 * warp + r + 8];
        constexpr float EIGHT = GATE == 2 ? CUT : UNSHIFT * CUT;
        float a[2][2], l[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int c = 2 * t + j;
                a[i][j] = c < r ? near[i][j] * CUT : c == r ? diagonal[i] : 0.0f;
                l[i][j] = c < r ? near[i][2 + j] * CUT : 0.0f;
            }
        a_diagonal[0] = pack_fp16(a[0][0], a[0][1]);
        a_diagonal[1] = pack_fp16(eight[0] * EIGHT, eight[1] * EIGHT);
        a_diagonal[2] = 0;
        a_diagonal[3] = pack_fp16(a[1][0], a[1][1]);
        float (&to)[16][16] = s.diagonal[warp];
        *reinterpret_cast<float2*>(&to[r][2 * t]) = make_float2(l[0][0] * beta0, l[0][1] * beta0);
        *reinterpret_cast<float2*>(&to[r + 8][2 * t]) =
            make_float2(eight[2] * (EIGHT * beta1), eight[3] * (EIGHT * beta1));
        *reinterpret_cast<float2*>(&to[r + 8][8 + 2 * t]) =
            make_float2(l[1][0] * beta1, l[1][1] * beta1);
    }
    __syncwarp();

    // (I + L)^-1 of the warp's diagonal block in fp32: each of 16 lanes substitutes one column.
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = i == lane % 16 ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 l = *reinterpret_cast<const float4*>(&s.diagonal[warp][i][m]);
            const float of_row[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (m + e < i) x[i] -= of_row[e] * x[m + e];
        }
    }
    __syncthreads();  // q_in and k_in have left
    if (s.next < p.num_tiles) fetch_keys(p, s, s.source[turn ^ 1]);
    {  // lanes from 16 on write the odd rows
        const int column = lane % 16, odd = lane / 16;
        const float beta = s.beta[16 * warp + column];
        char* const to = reinterpret_cast<char*>(s.low) + (16 * warp + odd) * 128 + 2 * (column % 8);
        const int piece = 2 * warp + column / 8 ^ odd;
#pragma unroll
        for (int i = 0; i < 16; i += 2)
            *reinterpret_cast<u16*>(to + i * 128 + ((piece ^ i % 8) << 4)) =
                static_cast<u16>(pack_fp16((odd ? x[i + 1] : x[i]) * beta, 0.f));
    }
    stmatrix(at(s.a_qk, warp, warp), a_diagonal);
    const u32 nothing[4] = {};
#pragma unroll
    for (int n = 1; n < 4; ++n)
        if (n > warp) stmatrix(at(s.a_qk, warp, n), nothing);
    {
        const int rows = warp == 0 ? 3 : warp, columns = warp == 0 ? 2 : warp == 3 ? 1 : warp - 1;
        u32 y[4];
        pairs(y, q_far[0], 1.0f);
        stmatrix(at(s.a_qk, rows, columns), y);
        pairs(y, k_far[0], -1.0f);
        stmatrix(at(s.low, rows, columns), y);
        if (warp >= 2) {
            pairs(y, q_far[1], 1.0f);
            stmatrix(at(s.a_qk, rows, 0), y);
            pairs(y, k_far[1], -1.0f);
            stmatrix(at(s.low, rows, 0), y);
        }
    }
    __syncthreads();
    solve<false>(s.a_qk, warp, s, lane);
#pragma unroll 1
    for (int m = 2 * warp; m < 2 * warp + 2; ++m) solve<true>(s.g, m, s, lane);
    writes_done();
    __syncthreads();
    if (threadIdx.x == CLERK) {
        store_bulk(tile(K_OUT), s.g, 2 * BLOCK_BYTES);
        store_bulk(tile(A_QK), s.a_qk, BLOCK_BYTES);
        store_read_wait();
    }
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) intra_chunk(const Params p) {
    u32 sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    const bool limited = sm >= p.first_scan_sm;
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == CLERK) {
        atomicAdd(&p.sync->started, limited ? 1 : 0x10001);
        s.left = limited ? p.limit : p.num_tiles;
        s.next = p.num_tiles;
        if (s.left == 0)  // leaving earlier, it would draw blocks here that are for the others
            while ((started(p) & 0xffff) < gridDim.x) __nanosleep(100);
        s.launch = p.sync->launches + 1;
        if (s.left || nobody_else(p)) s.next = atomicAdd(&p.sync->next, 1);
        s.source[0].a_log = s.source[1].a_log = 0.0f;
    }
    __syncthreads();
    let_next_kernel_start();  // it resets the numbers, so all blocks have their first by then
    if (threadIdx.x == CLERK) {
#pragma unroll
        for (int step = 1; step <= 3; ++step) find_next(p, s, 0, step);
    }
    __syncthreads();
    if (s.next < p.num_tiles) fetch_keys(p, s, s.source[0]);
    i64 made = -1;  // the tile before, which has no flag yet
    auto copies_done = [&] {
        if (threadIdx.x == CLERK) store_wait();
    };
    auto set_flag = [&] {
        if (threadIdx.x == CLERK && made >= 0)
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.sync->flags() + made),
                         "r"(s.launch) : "memory");
    };
    // behind the last chunk are only more of length 0: they take no number and set no flag
    for (int turn = 0; s.next < p.num_tiles && s.source[turn].length; turn ^= 1) {
        int thread;  // read anew for each tile: addresses made from it would fill the registers
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const i64 tile =
            static_cast<i64>(s.source[turn].chunk) * p.num_value_heads + s.source[turn].head;
        // the shuffle tells the compiler that the warp's number is uniform
        make_tile(p, s, turn, __shfl_sync(~0u, thread / 32, 0), thread % 32, copies_done, set_flag);
        made = tile;
    }
    copies_done();
    __syncthreads();
    set_flag();
}
