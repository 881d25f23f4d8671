// Intra-chunk stage of KDA prefill on Hopper: scores, triangular solve, decayed rows.
//
// Computes what scores.py and solve.py compute (their docstrings give the equations), for bf16
// q, k, v, g and K = V = 128. One block of 4 warps serves one (chunk, value head); warp b owns the
// 16 tokens of row block b. Lane (l / 4, l % 4) = (r, t) holds tokens r and r + 8 of its block and
// channels 8 t .. 8 t + 7 of each 32: the order in which channels enter a product is free, so this
// is an operand fragment of mma.m16n8k16 and a 16-byte load at once.
//
// Decays are products, never quotients. For a block of h tokens each row keeps
//     pre = product of the decays from the block's first token through its own
//     suf = product of the decays behind its own through the block's last
// and pre * suf is the block's total, so doubling h takes one exchange: rows of the upper half
// multiply pre by the lower half's total, rows of the lower half suf by the upper's. At each
// doubling, (x pre) of upper rows times (k suf) of lower rows are the scores between the halves.
// Nothing exceeds 1, so any gate is exact, and row r depends on tokens up to r alone.
//
// Blocks stay and take one tile after the other, in the order in which the scan wants them. They wait
// for nobody, and the scan starts when all of them have, so it may wait for any tile.
//
// Compile-time: GATE, BETA, L2NORM as in elementwise.py; BETA_FP32; MIN_BLOCKS a multiprocessor.

#include "common.cuh"

struct Params {
    const void* q;
    const void* k;
    const void* v;
    const void* g;
    const void* beta;         // bf16, or fp32 with BETA_FP32
    const float* a_log;       // [HV] or null
    const float* dt_bias;     // [HV, 128] or null
    u16* tiles;               // [chunks, HV, 9 * 4096] fp16: -w, q_in, k_out, A_qk, u
    float* totals;            // [chunks, HV, 128], in the order in which scan.cu reads them
    const int* chunk_start;
    const int* chunk_len;
    const int* chunk_order;
    i64 q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h;  // strides in elements
    int num_value_heads;
    int heads_per_key;
    float lower_bound;
    int num_tiles;      // a tile's number is chunk * HV + value head
    int first_scan_sm;  // multiprocessors from this number on are left to the scan, each of whose
    int limit;          // blocks takes a whole one, when every block there has made so many tiles
    Sync* sync;
};

static_assert(sizeof(Params) == PARAM_BYTES, "prefill_sm90.py packs other parameters");

static constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float low_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ u32 mul_fp16(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Byte offset of 16-byte piece c of row r in a [64][128] fp16 tile: rows r .. r + 7 at one c, and
// the 2 x 4 pieces a quarter warp writes, fall into different banks.
__device__ __forceinline__ u32 wide_offset(int r, int c) {
    return r * 256 + ((c ^ (((r & 1) << 2) | ((r >> 1) & 3))) << 4);
}
// The same for 64 rows of 128 bytes: wgmma's 128-byte swizzle.
__device__ __forceinline__ u32 square_offset(int r, int c) { return r * 128 + ((c ^ (r & 7)) << 4); }

__device__ __forceinline__ float decay(float g, float bias, float rate, float lower_bound) {
#if GATE == 0
    return ex2(g * LOG2E);
#elif GATE == 1
    float y = (g + bias) * LOG2E;
    float e = ex2(fminf(y, 40.0f));
    // log(1 + e) by its series where 1 + e rounds away the digits of a small e
    float series = LOG2E * e * (1.0f - e * (0.5f - e * (0.33333333f - e * 0.25f)));
    float s = e < 0.03f ? series : fmaxf(lg2(1.0f + e), y);
    return ex2(-rate * s);
#else
    return ex2(lower_bound * LOG2E * reciprocal(1.0f + ex2(-rate * LOG2E * (g + bias))));
#endif
}

// The rows r and r + 8 of q and k times their decays, as A operands.
__device__ __forceinline__ void scale_rows(u32 (&qd)[2][4], u32 (&kd)[2][4], const u32 (&q)[2][4],
                                           const u32 (&k)[2][4], const float (&f)[2][8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const u32 pair = pack_fp16(f[i][2 * e], f[i][2 * e + 1]);
            qd[i][e] = mul_fp16(q[i][e], pair);
            kd[i][e] = mul_fp16(k[i][e], pair);
        }
}
__device__ __forceinline__ void mma_rows(float (&c)[4], const u32 (&a)[2][4], const uint4& b) {
    mma(c, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
    mma(c, a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
}

struct Shared {
    u16 k[C * D];  // k, then k 2^G, then w
    u16 v[C * D];  // v, then u
    union {
        u16 q[C * D];
        u16 low[C * C];  // -L below the diagonal blocks, the blocks' inverses on the diagonal
    };
    u16 g[C * D];
    union {
        uint4 exchange[4][2][32];   // k suf of the lower blocks: [pair][token half][lane]
        float diagonal[4][16][16];  // L's diagonal blocks
    };
    float totals[2][4][32];  // block totals of 32 channels; slices take turns
    float beta[C];
    int next;  // the block's next tile
    int left;  // how many it may still make
    u32 launch;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "prefill_sm90.py asks for other shared memory");

__device__ __forceinline__ void fetch_rows(u16* to, const void* from, i64 stride, int length) {
    const u16* rows = static_cast<const u16*>(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = 8 * i + threadIdx.x / 16, piece = threadIdx.x % 16;
        const bool valid = row < length;
        copy_async(reinterpret_cast<char*>(to) + wide_offset(row, piece),
                   rows + (valid ? row : 0) * stride + 8 * piece, valid);
    }
}
__device__ __forceinline__ uint4 piece_of(const u16* tile, int row, int piece) {
    return *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile) +
                                           wide_offset(row, piece));
}

// w or u by block forward substitution, transposed: channels are rows, tokens columns. Block i is
//     ((beta x)_i - sum over j < i of L_ij y_j) times the inverse of its diagonal block.
// Solves, in place, the 64 channels from 16-byte piece first_piece on of x = k_in (fp16) or v (bf16).
template <bool VALUES>
__device__ __forceinline__ void solve(u16* tile, Shared& s, int first_piece, int lane) {
    const u32 low_base = shared_address(s.low);
    const u32 x_base = shared_address(tile);
    const int matrix = lane / 8, in_matrix = lane % 8, t = lane % 4;
#pragma unroll 1
    for (int m = 0; m < 4; ++m) {
        u32 solved[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // matrices: (tokens 0-7, channels 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)
            const u32 x_address =
                x_base + wide_offset(16 * i + 8 * (matrix / 2) + in_matrix,
                                     first_piece + 2 * m + matrix % 2);
            u32 x[4];
            ldmatrix_trans(x, x_address);
            float acc[2][4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 b = *reinterpret_cast<const float2*>(&s.beta[16 * i + 8 * n + 2 * t]);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const u32 y = x[2 * n + h];
                    acc[n][2 * h] = (VALUES ? low_bf16(y) : low_fp16(y)) * b.x;
                    acc[n][2 * h + 1] = (VALUES ? high_bf16(y) : high_fp16(y)) * b.y;
                }
            }
#pragma unroll
            for (int j = 0; j < i; ++j) {
                u32 l[4];
                ldmatrix(l, low_base + square_offset(16 * i + 8 * (matrix / 2) + in_matrix,
                                                     2 * j + matrix % 2));
                mma(acc[0], solved[j][0], solved[j][1], solved[j][2], solved[j][3], l[0], l[1]);
                mma(acc[1], solved[j][0], solved[j][1], solved[j][2], solved[j][3], l[2], l[3]);
            }
            u32 z[4], inverse[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                z[2 * n] = pack_fp16(acc[n][0], acc[n][1]);
                z[2 * n + 1] = pack_fp16(acc[n][2], acc[n][3]);
                acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
            }
            ldmatrix(inverse, low_base + square_offset(16 * i + 8 * (matrix / 2) + in_matrix,
                                                       2 * i + matrix % 2));
            mma(acc[0], z[0], z[1], z[2], z[3], inverse[0], inverse[1]);
            mma(acc[1], z[0], z[1], z[2], z[3], inverse[2], inverse[3]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                solved[i][2 * n] = pack_fp16(acc[n][0], acc[n][1]);
                solved[i][2 * n + 1] = pack_fp16(acc[n][2], acc[n][3]);
            }
            stmatrix_trans(x_address, solved[i]);
        }
    }
}

// Makes tile ``index``; ``meanwhile`` runs while the inputs are on their way.
template <typename F>
__device__ __forceinline__ void make_tile(const Params& p, Shared& s, int index, int warp, int lane,
                                          F meanwhile) {
    const int head = index % p.num_value_heads;
    const int chunk = index / p.num_value_heads;
    const int length = p.chunk_len[chunk];
    const int r = lane / 4, t = lane % 4;
    const i64 token = p.chunk_start[chunk];
    const int key_head = head / p.heads_per_key;
    fetch_rows(s.q, static_cast<const u16*>(p.q) + token * p.q_t + key_head * p.q_h, p.q_t, length);
    fetch_rows(s.k, static_cast<const u16*>(p.k) + token * p.k_t + key_head * p.k_h, p.k_t, length);
    fetch_rows(s.g, static_cast<const u16*>(p.g) + token * p.g_t + head * p.g_h, p.g_t, length);
    copy_commit();
    fetch_rows(s.v, static_cast<const u16*>(p.v) + token * p.v_t + head * p.v_h, p.v_t, length);
    copy_commit();
    meanwhile();
    char* tile = reinterpret_cast<char*>(p.tiles) + static_cast<i64>(index) * TILE_BYTES;
    const int row[2] = {16 * warp + r, 16 * warp + r + 8};
    const bool valid[2] = {row[0] < length, row[1] < length};
    const float rate = p.a_log ? ex2(p.a_log[head] * LOG2E) : 1.0f;
    if (threadIdx.x < C) {
        float b = 0.f;
        if (threadIdx.x < length) {
            const i64 at = (token + threadIdx.x) * p.beta_t + head * p.beta_h;
            b = BETA_FP32 ? static_cast<const float*>(p.beta)[at]
                          : __uint_as_float(u32(static_cast<const u16*>(p.beta)[at]) << 16);
            if (BETA >= 1) b = (BETA == 2 ? 2.0f : 1.0f) * reciprocal(1.0f + ex2(-LOG2E * b));
        }
        s.beta[threadIdx.x] = b;
    }
    copy_wait<1>();
    __syncthreads();

    // Norms and the diagonal of A_qk, which no decay touches.
    float q_norm[2], k_norm[2], diagonal[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
        for (int slice = 0; slice < 4; ++slice) {
            const uint4 a = piece_of(s.q, row[i], 4 * slice + t);
            const uint4 b = piece_of(s.k, row[i], 4 * slice + t);
            const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float x0 = low_bf16(x[e]), x1 = high_bf16(x[e]);
                const float y0 = low_bf16(y[e]), y1 = high_bf16(y[e]);
                qq += x0 * x0 + x1 * x1;
                kk += y0 * y0 + y1 * y1;
                qk += x0 * y0 + x1 * y1;
            }
        }
#pragma unroll
        for (int m = 1; m < 4; m <<= 1) {
            qq += __shfl_xor_sync(~0u, qq, m);
            kk += __shfl_xor_sync(~0u, kk, m);
            qk += __shfl_xor_sync(~0u, qk, m);
        }
        q_norm[i] = L2NORM ? rsqrtf(qq + 1e-6f) : 1.0f;
        k_norm[i] = L2NORM ? rsqrtf(kk + 1e-6f) : 1.0f;
        diagonal[i] = qk * q_norm[i] * k_norm[i];
    }

    // Scores, 32 channels at a time. near[h][i]: level h inside the 8 tokens of half i, rows 0-7
    // for q and 8-15 for k; eight: between the halves; sixteen, thirty_two: with earlier blocks.
    float near[3][2][4] = {}, eight[4] = {};
    float q_sixteen[2][4] = {}, k_sixteen[2][4] = {}, q_thirty_two[4][4] = {}, k_thirty_two[4][4] = {};
#pragma unroll 1
    for (int slice = 0; slice < 4; ++slice) {
        float (&totals)[4][32] = s.totals[slice & 1];
        u32 qh[2][4], kh[2][4];
        float pre[2][8], suf[2][8];
        float bias[8] = {};
        if (GATE != 0 && p.dt_bias) {
            const float4* from =
                reinterpret_cast<const float4*>(p.dt_bias + head * D + 32 * slice + 8 * t);
            const float4 b0 = __ldg(from), b1 = __ldg(from + 1);
            bias[0] = b0.x, bias[1] = b0.y, bias[2] = b0.z, bias[3] = b0.w;
            bias[4] = b1.x, bias[5] = b1.y, bias[6] = b1.z, bias[7] = b1.w;
        }
        // near = what the row's half needs at the level at hand (pre in an upper half, suf in a
        // lower one), far = the other of the two
        float (&near_f)[2][8] = pre, (&far_f)[2][8] = suf;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 a = piece_of(s.q, row[i], 4 * slice + t);
            const uint4 b = piece_of(s.k, row[i], 4 * slice + t);
            const uint4 c = piece_of(s.g, row[i], 4 * slice + t);
            const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
            const u32 z[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                qh[i][e] = pack_fp16(low_bf16(x[e]) * q_norm[i], high_bf16(x[e]) * q_norm[i]);
                kh[i][e] = pack_fp16(low_bf16(y[e]) * k_norm[i], high_bf16(y[e]) * k_norm[i]);
                float d[2] = {decay(low_bf16(z[e]), bias[2 * e], rate, p.lower_bound),
                              decay(high_bf16(z[e]), bias[2 * e + 1], rate, p.lower_bound)};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (!valid[i]) d[j] = 1.0f;
                    near_f[i][2 * e + j] = (r & 1) ? d[j] : 1.0f;
                    far_f[i][2 * e + j] = (r & 1) ? 1.0f : d[j];
                }
            }
        }
#pragma unroll
        for (int level = 0; level < 3; ++level) {  // halves of 1, 2, 4 tokens: lanes apart
            // whether the row is in the same kind of half at the next level; after the last: upper
            const bool same = level < 2 ? ((r >> level) & 1) == ((r >> (level + 1)) & 1)
                                        : (r >> 2) & 1;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 qd[4], kd[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const u32 f = pack_fp16(near_f[i][2 * e], near_f[i][2 * e + 1]);
                    qd[e] = mul_fp16(qh[i][e], f);
                    kd[e] = mul_fp16(kh[i][e], f);
                }
                mma(near[level][i], qd[0], kd[0], qd[1], kd[1], kd[0], kd[1]);
                mma(near[level][i], qd[2], kd[2], qd[3], kd[3], kd[2], kd[3]);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const float total = near_f[i][e] * far_f[i][e];
                    const float grown =
                        near_f[i][e] * __shfl_xor_sync(~0u, total, 4 << level);
                    const float other = far_f[i][e];
                    near_f[i][e] = same ? grown : other;  // behind the last level: pre, suf
                    far_f[i][e] = same ? other : grown;
                }
            }
        }
        {  // halves of 8 tokens: the lane's own two
            u32 qd[4], kd[4], low[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 f = pack_fp16(pre[1][2 * e], pre[1][2 * e + 1]);
                qd[e] = mul_fp16(qh[1][e], f);
                kd[e] = mul_fp16(kh[1][e], f);
                low[e] = mul_fp16(kh[0][e], pack_fp16(suf[0][2 * e], suf[0][2 * e + 1]));
            }
            mma(eight, qd[0], kd[0], qd[1], kd[1], low[0], low[1]);
            mma(eight, qd[2], kd[2], qd[3], kd[3], low[2], low[3]);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float first = pre[0][e] * suf[0][e], second = pre[1][e] * suf[1][e];
                pre[1][e] *= first;
                suf[0][e] *= second;
                if (r == 0) totals[warp][8 * t + e] = first * second;
            }
        }
        __syncthreads();
        // Blocks 0 and 2 meet 1 and 3, then 0 and 1 meet 2 and 3: (k suf) of the lower blocks goes
        // through shared memory to the same lane of the warps that need it.
#pragma unroll
        for (int level = 0; level < 2; ++level) {
            const bool lower = level == 0 ? (warp & 1) == 0 : warp < 2;
            if (!lower) continue;
            const bool reach = level == 1 && warp == 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 low[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float f0 = suf[i][2 * e], f1 = suf[i][2 * e + 1];
                    if (reach) {
                        f0 *= totals[1][8 * t + 2 * e];
                        f1 *= totals[1][8 * t + 2 * e + 1];
                    }
                    low[e] = mul_fp16(kh[i][e], pack_fp16(f0, f1));
                }
                const int pair = level == 0 ? warp / 2 : 2 + warp;
                s.exchange[pair][i][lane] = make_uint4(low[0], low[1], low[2], low[3]);
            }
        }
        // Rows decayed from the chunk's start and to its end.
        float blocks[8];  // totals of the blocks before this one, then of those behind
#pragma unroll
        for (int e = 0; e < 8; ++e) blocks[e] = 1.0f;
#pragma unroll
        for (int b = 0; b < 3; ++b)
            if (b < warp) {
#pragma unroll
                for (int e = 0; e < 8; ++e) blocks[e] *= totals[b][8 * t + e];
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 in_q[4], in_k[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 f =
                    pack_fp16(pre[i][2 * e] * blocks[2 * e], pre[i][2 * e + 1] * blocks[2 * e + 1]);
                in_q[e] = mul_fp16(qh[i][e], f);
                in_k[e] = mul_fp16(kh[i][e], f);
            }
            *reinterpret_cast<uint4*>(tile + (Q_IN + slice / 2) * BLOCK_BYTES +
                                      square_offset(row[i], 4 * (slice % 2) + t)) =
                make_uint4(in_q[0], in_q[1], in_q[2], in_q[3]);
            char* to = reinterpret_cast<char*>(s.k) + wide_offset(row[i], 4 * slice + t);
            *reinterpret_cast<uint4*>(to) = make_uint4(in_k[0], in_k[1], in_k[2], in_k[3]);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) blocks[e] = 1.0f;
#pragma unroll
        for (int b = 1; b < 4; ++b)
            if (b > warp) {
#pragma unroll
                for (int e = 0; e < 8; ++e) blocks[e] *= totals[b][8 * t + e];
            }
        if (warp == 0 && r == 0) {  // a lane of the scan wants channels 2 e, 2 e + 1 of each 8
            float* to = p.totals + static_cast<i64>(index) * D + 2 * (t % 2);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                *reinterpret_cast<float2*>(to + 32 * e + 4 * ((2 * slice + t / 2) ^ (2 * e))) =
                    make_float2(totals[0][8 * t + 2 * e] * blocks[2 * e],
                                totals[0][8 * t + 2 * e + 1] * blocks[2 * e + 1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 out_k[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                out_k[e] = mul_fp16(kh[i][e], pack_fp16(suf[i][2 * e] * blocks[2 * e],
                                                        suf[i][2 * e + 1] * blocks[2 * e + 1]));
            *reinterpret_cast<uint4*>(tile + (K_OUT + slice / 2) * BLOCK_BYTES +
                                      square_offset(row[i], 4 * (slice % 2) + t)) =
                make_uint4(out_k[0], out_k[1], out_k[2], out_k[3]);
        }
        __syncthreads();
        if (warp & 1) {
            u32 qd[2][4], kd[2][4];
            scale_rows(qd, kd, qh, kh, pre);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const uint4 b = s.exchange[warp / 2][n][lane];
                mma_rows(q_sixteen[n], qd, b);
                mma_rows(k_sixteen[n], kd, b);
            }
        }
        if (warp >= 2) {
            u32 qd[2][4], kd[2][4];
            if (warp == 3) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    pre[0][e] *= totals[2][8 * t + e];
                    pre[1][e] *= totals[2][8 * t + e];
                }
            }
            scale_rows(qd, kd, qh, kh, pre);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const uint4 b = s.exchange[2 + n / 2][n % 2][lane];
                mma_rows(q_thirty_two[n], qd, b);
                mma_rows(k_thirty_two[n], kd, b);
            }
        }
    }
    __syncthreads();  // the exchange buffer becomes the diagonal blocks

    // A_qk to memory, L to shared memory: -L between blocks, L itself in the diagonal blocks.
    char* a_qk = tile + A_QK * BLOCK_BYTES;
    char* low = reinterpret_cast<char*>(s.low);
    auto put = [&](int i, int column, float a0, float a1, float l0, float l1, bool in_diagonal) {
        const u32 at = square_offset(row[i], column / 8) + 2 * (column % 8);
        *reinterpret_cast<u32*>(a_qk + at) = pack_fp16(a0, a1);
        const float beta = s.beta[row[i]];
        l0 *= beta, l1 *= beta;
        if (in_diagonal) {
            *reinterpret_cast<float2*>(&s.diagonal[warp][row[i] % 16][column % 16]) =
                make_float2(l0, l1);
        } else {
            *reinterpret_cast<u32*>(low + at) = pack_fp16(-l0, -l1);
        }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float a[2], l[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int c = 2 * t + j, apart = r ^ c;
            const float a_near = apart >= 4   ? near[2][i][j]
                                 : apart >= 2 ? near[1][i][j]
                                              : near[0][i][j];
            const float l_near = apart >= 4   ? near[2][i][2 + j]
                                 : apart >= 2 ? near[1][i][2 + j]
                                              : near[0][i][2 + j];
            a[j] = c < r ? a_near : c == r ? diagonal[i] : 0.0f;
            l[j] = c < r ? l_near : 0.0f;
        }
        put(i, 16 * warp + 8 * i + 2 * t, a[0], a[1], l[0], l[1], true);
    }
    put(1, 16 * warp + 2 * t, eight[0], eight[1], eight[2], eight[3], true);
    put(0, 16 * warp + 8 + 2 * t, 0.f, 0.f, 0.f, 0.f, true);
    if (warp & 1) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                put(i, 16 * (warp - 1) + 8 * n + 2 * t, q_sixteen[n][2 * i],
                    q_sixteen[n][2 * i + 1], k_sixteen[n][2 * i], k_sixteen[n][2 * i + 1], false);
    }
    if (warp >= 2) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                put(i, 8 * n + 2 * t, q_thirty_two[n][2 * i], q_thirty_two[n][2 * i + 1],
                    k_thirty_two[n][2 * i], k_thirty_two[n][2 * i + 1], false);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        if (n < 2 * (warp + 1)) continue;  // A_qk is zero behind the diagonal
#pragma unroll
        for (int i = 0; i < 2; ++i)
            *reinterpret_cast<u32*>(a_qk + square_offset(row[i], n) + 4 * t) = 0;
    }
    __syncwarp();

    // (I + L)^-1 of the warp's diagonal block in fp32: each of 16 lanes substitutes one column.
    {
        const int column = lane % 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (int m = 0; m < i; ++m) sum -= s.diagonal[warp][i][m] * x[m];
            x[i] = sum;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float right = __shfl_down_sync(~0u, x[i], 1);
            if (lane < 16 && (column & 1) == 0) {
                const int at = 16 * warp + column;
                *reinterpret_cast<u32*>(low + square_offset(16 * warp + i, at / 8) + 2 * (at % 8)) =
                    pack_fp16(x[i], right);
            }
        }
    }
    copy_wait<0>();
    __syncthreads();

    if (warp < 2) {
        solve<false>(s.k, s, 8 * (warp % 2), lane);
    } else {
        solve<true>(s.v, s, 8 * (warp % 2), lane);
    }
    __syncwarp();
    char* to = tile + (warp < 2 ? W + warp : U + warp - 2) * BLOCK_BYTES;
    const char* from = reinterpret_cast<const char*>(warp < 2 ? s.k : s.v);
    const u32 sign = warp < 2 ? 0x80008000u : 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int at = 4 * i + lane / 8, piece = lane % 8;
        uint4 x = *reinterpret_cast<const uint4*>(from + wide_offset(at, 8 * (warp % 2) + piece));
        x.x ^= sign, x.y ^= sign, x.z ^= sign, x.w ^= sign;
        *reinterpret_cast<uint4*>(to + square_offset(at, piece)) = x;
    }
}

__device__ __forceinline__ u32 started(const Params& p) {
    return *reinterpret_cast<const volatile u32*>(&p.sync->started);
}
// Should the multiprocessors be numbered otherwise than thought, the limited blocks make all tiles.
__device__ __forceinline__ bool nobody_else(const Params& p) { return started(p) < 0x10000; }

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) intra_chunk(const Params p) {
    u32 sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    const bool limited = sm >= p.first_scan_sm;
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        atomicAdd(&p.sync->started, limited ? 1 : 0x10001);
        s.left = limited ? p.limit : p.num_tiles;
        s.next = p.num_tiles;
        if (s.left == 0)  // leaving earlier, it would draw blocks here that are for the others
            while ((started(p) & 0xffff) < gridDim.x) __nanosleep(100);
        s.launch = p.sync->launches + 1;
        if (s.left || nobody_else(p)) s.next = atomicAdd(&p.sync->next, 1);
    }
    __syncthreads();
    let_next_kernel_start();  // it resets the numbers, so all blocks have their first by then
    for (;;) {
        const int number = __shfl_sync(~0u, s.next, 0);
        if (number >= p.num_tiles) return;
        const int chunk = p.chunk_order[number / p.num_value_heads];
        // behind the last chunk are only more of length 0: they take no number and set no flag
        if (p.chunk_len[chunk] == 0) return;
        int thread;  // read anew for each tile: addresses made from it would fill the registers
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        __syncthreads();
        // the shuffle tells the compiler that the warp's number is uniform
        const int tile = chunk * p.num_value_heads + number % p.num_value_heads;
        make_tile(p, s, tile, __shfl_sync(~0u, thread / 32, 0), thread % 32, [&] {
            if (threadIdx.x == 0)
                s.next = --s.left > 0 || nobody_else(p) ? atomicAdd(&p.sync->next, 1) : p.num_tiles;
        });
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.sync->flags() + tile),
                         "r"(s.launch) : "memory");
    }
}
