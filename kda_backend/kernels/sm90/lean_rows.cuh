// The tile's decays and rows in fewer instructions (LEAN_TILES).
//
// What gates.cuh and scores.cuh compute, with the same operands of the same products, but
//   - the log decays of all channels come first, once, and take the place of their gates;
//   - decays over whole row blocks are then multiplied once for all warps, not by each for itself;
//   - a row is rounded to fp16 once: what is multiplied in tf32 for the scores inside a row block is
//     what is rounded for those between blocks, where else the row, its decay and their product are;
//   - a bounded gate's rows need no centring where keys and queries are normalised: 16 of its decays
//     are 2^-115.4 at least, and so their inverses are numbers of fp32 too;
//   - between blocks that do not follow one another the columns are scaled, which are one operand for
//     the rows of q and of k.
#pragma once

#include "scores.cuh"

// Products of the decays d0 .. d3 over the row blocks; their names are their factors. Warp w needs
// number AFTER + w, from its block's end to the chunk's, and BEFORE + w, from the chunk's start to its
// block's: ONE is the last warp's and the first's.
enum BlockDecay { D123 = 0, D23, D3, ONE, D0, D01, D012, D1, D2, D12, BLOCK_DECAYS };
static constexpr int AFTER = D123, BEFORE = ONE;
static_assert(sizeof(Shared::decays) == BLOCK_DECAYS * 2 * D);
static_assert(sizeof(Shared::bias) <= ONE * 2 * D);  // which stays where it is

// log2 of the decay, times LOG_SCALE. ``bias`` is dt_bias ``slope``.
static constexpr float SLOPE = GATE == GATE_BOUNDED ? -LOG2E / LOG_SCALE : LOG2E;
__device__ __forceinline__ float slope_of(float rate) {
    return GATE == GATE_BOUNDED ? SLOPE * rate : SLOPE;
}
__device__ __forceinline__ float lean_log_decay(float g, float bias, float slope, float rate,
                                                float lower_bound) {
    if constexpr (GATE == GATE_LOG) {
        return g * (LOG2E * LOG_SCALE);
    } else if constexpr (GATE == GATE_SOFTPLUS) {
        // log2(1 + 2^y) = max(y, 0) + log2(1 + e), e = 2^-|y|; log2(1 + e) / e as a polynomial, which
        // is off by 6e-5 at most where the result's fp16 is by 2.4e-4
        const float y = fmaf(g, slope, bias);
        const float e = ex2(-fabsf(y));
        float ratio = fmaf(e, 0.059650905f, -0.22711825f);
        ratio = fmaf(e, ratio, 0.44189817f);
        ratio = fmaf(e, ratio, -0.71698731f);
        ratio = fmaf(e, ratio, 1.44261324f);
        return -rate * fmaf(e, ratio, fmaxf(y, 0.0f));
    } else {
        return lower_bound * (LOG2E * LOG_SCALE) * rcp(1.0f + ex2(fmaf(g, slope, bias)));
    }
}

// Log decays of the warp's rows in place of their gates, as pairs of channels of fp16, and their sums over
// the row block.
__device__ __forceinline__ void take_log_decays(const Params& p, Shared& s, const RowLane& at,
                                                const SumMatrices& matrix, float rate,
                                                const u32 (&inside)[2]) {
    const float slope = slope_of(rate);
#pragma unroll 1
    for (int slice = 0; slice < 4; ++slice)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32 rows = at.address(s.g, at.warp, 2 * slice + j);
            float4 block;
            float(&total)[4] = reinterpret_cast<float(&)[4]>(block);
            u32 x[4];
            ldmatrix_trans(x, rows);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float bias =
                    GATE != GATE_LOG ? s.bias[32 * slice + 16 * j + 8 * m + at.r] * slope : 0.0f;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32& z = x[2 * m + i];
                    const float low = lean_log_decay(low_bf16(z), bias, slope, rate, p.lower_bound);
                    const float high = lean_log_decay(high_bf16(z), bias, slope, rate, p.lower_bound);
                    z = inside[i] & pack_fp16_satfinite(low, high);
                }
                float sums[4];
                mma_m16n8k8_f16_from(sums, 0.0f, matrix.through, matrix.all, x[2 * m]);
                mma_m16n8k8_f16(sums, matrix.through, matrix.all, x[2 * m + 1]);
                total[2 * m] = sums[2], total[2 * m + 1] = sums[3];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = at_least_2_to_minus_22(x[i]);
            stmatrix_trans(rows, x);
            if (at.r == 0)
                *reinterpret_cast<float4*>(&s.block_sums[at.warp][32 * slice + 16 * j + 4 * at.t]) =
                    block;
        }
}

// Decays over row blocks from their sums, of one channel by each thread; those over the chunk to
// ``chunk_decays``, in the scan's order: a lane has channels 2 t, 2 t + 1 of each 8.
__device__ __forceinline__ void multiply_block_decays(float* chunk_decays, Shared& s,
                                                      const RowLane& at) {
    const int slice = at.warp, j = at.lane / 16, t = at.lane / 4 % 4, c = at.lane % 4;
    float d[4];
#pragma unroll
    for (int block = 0; block < 4; ++block) d[block] = ex2(s.block_sums[block][32 * slice + at.lane]);
    const float d01 = d[0] * d[1], d12 = d[1] * d[2], d23 = d[2] * d[3];
    u16* const to = reinterpret_cast<u16*>(&s.decays[0][slice][t]) + 4 * j + c;
    auto write = [&](BlockDecay which, float x) { to[which * D] = to_fp16(x); };
    write(D0, d[0]), write(D1, d[1]), write(D2, d[2]), write(D3, d[3]);
    write(D01, d01), write(D12, d12), write(D23, d23);
    write(D012, d01 * d[2]), write(D123, d[1] * d23);
    chunk_decays[32 * t + 4 * ((2 * slice + j) ^ (2 * t)) + c] = d01 * d23;
}

// Of 8 channels with a bounded gate: the rows, and the scores within the row block.
__device__ __forceinline__ void lean_bounded(DecayedRows& rows, int e, Scores& scores,
                                             const Channels& x, const u32 (&logs)[2],
                                             const SumMatrices& matrix, int t) {
    constexpr float CENTRE = L2NORM ? 0.0f : SHIFT, UNCENTRE = L2NORM ? 1.0f : UNSHIFT;
    float sums[4], q_up[2][2], k_up[2][2], k_down[2][2], total[2];
    mma_m16n8k16_f16_from(sums, CENTRE, matrix.through, matrix.all, 0, matrix.through, logs[0],
                          logs[1]);
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float up = ex2(sums[2 * i + c]);
            q_up[i][c] = x.q[i][c] * up;
            k_up[i][c] = x.k[i][c] * up;
            k_down[i][c] = x.k[i][c] * ex2(-sums[2 * i + c]);
            if (i) total[c] = __shfl_sync(~0u, up, 28 + t);
        }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.q_prefix[i][e] = pack_fp16(q_up[i][0] * UNCENTRE, q_up[i][1] * UNCENTRE);
        rows.k_prefix[i][e] = pack_fp16(k_up[i][0] * UNCENTRE, k_up[i][1] * UNCENTRE);
        rows.k_suffix[i][e] = pack_fp16(k_down[i][0] * total[0], k_down[i][1] * total[1]);
        mma_m16n8k8_tf32(scores.same_half[i], q_up[i][0], k_up[i][0], q_up[i][1], k_up[i][1],
                         k_down[i][0], k_down[i][1]);
    }
    mma_m16n8k8_tf32(scores.cross_half, q_up[1][0], k_up[1][0], q_up[1][1], k_up[1][1],
                     k_down[0][0], k_down[0][1]);
}

// Of 8 channels with any other gate, whose two halves of 8 tokens have sums of their own.
__device__ __forceinline__ void lean_unbounded(DecayedRows& rows, int e, Scores& scores,
                                               const Channels& x, const u32 (&logs)[2],
                                               const SumMatrices& matrix) {
    float q_up[2][2], k_up[2][2], k_after[2][2];  // up: centred by 2^SHIFT; after: to the half's end
    float first[2], second[2];                    // decays over the halves, and UNSHIFT
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sums[4], k_down[2];
        mma_m16n8k8_f16_from(sums, SHIFT, matrix.through, matrix.all, logs[i]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float up = ex2(sums[c]), end = ex2(sums[2 + c]);
            q_up[i][c] = x.q[i][c] * up;
            k_up[i][c] = x.k[i][c] * up;
            k_down[c] = x.k[i][c] * ex2(-sums[c]);
            k_after[i][c] = k_down[c] * end;
            (i ? second : first)[c] = end * (i ? UNSHIFT : UNSHIFT * UNSHIFT);
        }
        mma_m16n8k8_tf32(scores.same_half[i], q_up[i][0], k_up[i][0], q_up[i][1], k_up[i][1],
                         k_down[0], k_down[1]);
    }
    mma_m16n8k8_tf32(scores.cross_half, q_up[1][0], k_up[1][0], q_up[1][1], k_up[1][1],
                     k_after[0][0], k_after[0][1]);
    rows.q_prefix[0][e] = pack_fp16(q_up[0][0] * UNSHIFT, q_up[0][1] * UNSHIFT);
    rows.k_prefix[0][e] = pack_fp16(k_up[0][0] * UNSHIFT, k_up[0][1] * UNSHIFT);
    rows.q_prefix[1][e] = pack_fp16(q_up[1][0] * first[0], q_up[1][1] * first[1]);
    rows.k_prefix[1][e] = pack_fp16(k_up[1][0] * first[0], k_up[1][1] * first[1]);
    rows.k_suffix[0][e] = pack_fp16(k_after[0][0] * second[0], k_after[0][1] * second[1]);
    rows.k_suffix[1][e] = pack_fp16(k_after[1][0], k_after[1][1]);
}

// The warp's rows of 32 channels decayed inside their row block; adds to the scores there.
__device__ __forceinline__ void decay_rows(DecayedRows& rows, Scores& scores, const Shared& s,
                                                const RowLane& at, int slice, const Norms& norms,
                                                const SumMatrices& matrix) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 x[4], y[4], z[4];
        ldmatrix_trans(z, at.address(s.g, at.warp, 2 * slice + j));
        ldmatrix(x, at.address(s.q, at.warp, 2 * slice + j));
        ldmatrix(y, at.address(s.k, at.warp, 2 * slice + j));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const Channels of = normalised(x, y, m, norms);
            const u32 logs[2] = {z[2 * m], z[2 * m + 1]};
            if constexpr (GATE == GATE_BOUNDED)
                lean_bounded(rows, 2 * j + m, scores, of, logs, matrix, at.t);
            else
                lean_unbounded(rows, 2 * j + m, scores, of, logs, matrix);
        }
    }
}

// Rows decayed from the chunk's start (q_in, -k_in) and to its end (k_out), in place of q, k and the log decays.
__device__ __forceinline__ void write_decayed_rows(Shared& s, const DecayedRows& rows,
                                                const RowLane& at, int slice) {
    u32 before[4], after[4];
    unpack(before, s.decays[BEFORE + at.warp][slice][at.t]);
    unpack(after, s.decays[AFTER + at.warp][slice][at.t]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 q_in[4], k_in[4], k_out[4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int e = 2 * j + m;
                q_in[2 * m + i] = mul_fp16x2(rows.q_prefix[i][e], before[e]);
                k_in[2 * m + i] = neg_mul_fp16x2(rows.k_prefix[i][e], before[e]);
                k_out[2 * m + i] = mul_fp16x2(rows.k_suffix[i][e], after[e]);
            }
        stmatrix(at.address(s.q, at.warp, 2 * slice + j), q_in);
        stmatrix(at.address(s.k, at.warp, 2 * slice + j), k_in);
        stmatrix(at.address(s.g, at.warp, 2 * slice + j), k_out);
    }
}

// Columns of a row block, which another warp has left for this lane, times decays.
__device__ __forceinline__ uint4 times(const uint4& x, const uint4& decays) {
    return make_uint4(mul_fp16x2(x.x, decays.x), mul_fp16x2(x.y, decays.y),
                      mul_fp16x2(x.z, decays.z), mul_fp16x2(x.w, decays.w));
}
// Adds to the scores with earlier row blocks. Warp 0, whose own rows have none, takes those of row
// block 3 with block 2.
__device__ __forceinline__ void add_cross_block_scores(Scores& scores, DecayedRows& rows, const Shared& s,
                                                const RowLane& at, int slice) {
    int columns = at.warp == 3 ? 1 : at.warp - 1;  // the row block of the columns
    if (ROW_BLOCKS < 4 && at.warp == 0) return;
    if (at.warp == 0) {
        columns = 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unpack(rows.q_prefix[i], s.exchange[3][i][at.lane]);
            unpack(rows.k_prefix[i], s.exchange[4][i][at.lane]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        uint4 b = s.exchange[columns][n][at.lane];
        if (at.warp == 3) b = times(b, s.decays[D2][slice][at.t]);
        mma_rows(scores.q_cross_block[0][n], rows.q_prefix, b);
        mma_rows(scores.k_cross_block[0][n], rows.k_prefix, b);
    }
    if (at.warp >= 2) {
        const uint4 between = s.decays[at.warp == 2 ? D1 : D12][slice][at.t];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint4 b = times(s.exchange[0][n][at.lane], between);
            mma_rows(scores.q_cross_block[1][n], rows.q_prefix, b);
            mma_rows(scores.k_cross_block[1][n], rows.k_prefix, b);
        }
    }
}

// Before any tile.
__device__ __forceinline__ void begin_tiles(Shared& s) {
    if (threadIdx.x < 16)
        s.decays[ONE][threadIdx.x / 4][threadIdx.x % 4] =
            make_uint4(0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u);
}
// What comes before the first slice, all warps; ``meet`` is their barrier.
template <class Meet>
__device__ __forceinline__ void begin_slices(const Params& p, Shared& s, const RowLane& at,
                                             const SumMatrices& matrix, float rate,
                                             const u32 (&inside)[2], float* chunk_decays,
                                             Meet meet) {
    take_log_decays(p, s, at, matrix, rate, inside);
    meet();
    multiply_block_decays(chunk_decays, s, at);
    meet();
}
// Rows and scores of 32 channels, all warps. Their other barrier follows.
template <class Meet>
__device__ __forceinline__ void make_slice(Scores& scores, const Params&, Shared& s,
                                           const RowLane& at, int slice, const Norms& norms,
                                           const SumMatrices& matrix, float, const u32 (&)[2],
                                           float*, Meet meet) {
    DecayedRows rows;
    decay_rows(rows, scores, s, at, slice, norms, matrix);
    exchange_rows(s, rows, at);
    write_decayed_rows(s, rows, at, slice);
    meet();
    add_cross_block_scores(scores, rows, s, at, slice);
}
// The beginning of a warp whose row block has no tokens: it decays nothing, and meets the others.
template <class Meet>
__device__ __forceinline__ void pass_beginning(Shared& s, const RowLane& at, float* chunk_decays,
                                               Meet meet) {
    *reinterpret_cast<float4*>(&s.block_sums[at.warp][4 * at.lane]) =
        make_float4(0.f, 0.f, 0.f, 0.f);
    meet();
    multiply_block_decays(chunk_decays, s, at);
    meet();
}
