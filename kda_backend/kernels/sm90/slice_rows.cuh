// A tile's decays and rows, 32 channels at a time: log decays, rows and decays over row blocks of the
// same channels follow one another.
#pragma once

#include "scores.cuh"

// Log decays of 32 channels as B operands [8 tokens, 8 channels], [group of 8 channels][half of the
// row block]: lane (r, t) has tokens 2 t and 2 t + 1, channel r. Of an unbounded gate also writes
// the decay over the row block; a bounded one's falls out of decay_bounded.
__device__ __forceinline__ void load_log_decays(u32 (&logs)[4][2], const Params& p, Shared& s,
                                                const RowLane& at, int slice, float rate,
                                                const u32 (&inside)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 x[4];
        ldmatrix_trans(x, at.address(s.g, at.warp, 2 * slice + j));
        float total[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const float bias =
                GATE != GATE_LOG ? s.bias[32 * slice + 16 * j + 8 * m + at.r] * LOG2E : 0.0f;
            float sums[4] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 z = x[2 * m + i];
                const float low = log_decay(low_bf16(z), bias, rate, p.lower_bound);
                const float high = log_decay(high_bf16(z), bias, rate, p.lower_bound);
                const u32 pair = inside[i] & pack_fp16_satfinite(low, high);
                if (GATE != GATE_BOUNDED) mma_m16n8k8_f16(sums, SumMatrices::all, 0, pair);
                logs[2 * j + m][i] = at_least_2_to_minus_22(pair);
            }
            total[m][0] = ex2(sums[0]), total[m][1] = ex2(sums[1]);
        }
        if (GATE != GATE_BOUNDED && at.r == 0)
            s.block_decays[3 + at.warp][j][at.t] =
                make_float4(total[0][0], total[0][1], total[1][0], total[1][1]);
    }
}

// Of 8 channels with a bounded gate: decays of the rows (prefix, suffix) and over the block (total,
// of the lane's two channels); adds to the scores within the row block.
__device__ __forceinline__ void decay_bounded(u32 (&prefix)[2], u32 (&suffix)[2],
                                              float (&total)[2], Scores& scores,
                                              const Channels& x, const u32 (&logs)[2],
                                              const SumMatrices& matrix, int t) {
    float sums[4], up[2][2], down[2][2], end[2];
    mma_m16n8k16_f16_from(sums, SHIFT, matrix.through, matrix.all, 0, matrix.through, logs[0],
                          logs[1]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        end[c] = ex2(__shfl_sync(~0u, sums[2 + c], 28 + t));
        total[c] = end[c] * UNSHIFT;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            up[i][c] = ex2(sums[2 * i + c]);
            down[i][c] = ex2(-sums[2 * i + c]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        prefix[i] = pack_fp16(up[i][0] * UNSHIFT, up[i][1] * UNSHIFT);
        suffix[i] = pack_fp16(end[0] * down[i][0], end[1] * down[i][1]);
        down[i][0] *= x.k[i][0];
        down[i][1] *= x.k[i][1];
    }
    mma_m16n8k8_tf32(scores.same_half[0], x.q[0][0] * up[0][0], x.k[0][0] * up[0][0],
                     x.q[0][1] * up[0][1], x.k[0][1] * up[0][1], down[0][0], down[0][1]);
    const float q_up[2] = {x.q[1][0] * up[1][0], x.q[1][1] * up[1][1]};
    const float k_up[2] = {x.k[1][0] * up[1][0], x.k[1][1] * up[1][1]};
    mma_m16n8k8_tf32(scores.same_half[1], q_up[0], k_up[0], q_up[1], k_up[1], down[1][0],
                     down[1][1]);
    mma_m16n8k8_tf32(scores.cross_half, q_up[0], k_up[0], q_up[1], k_up[1], down[0][0],
                     down[0][1]);
}

// Of 8 channels with any other gate, whose two halves of 8 tokens have sums of their own.
__device__ __forceinline__ void decay_unbounded(u32 (&prefix)[2], u32 (&suffix)[2], Scores& scores,
                                                const Channels& x, const u32 (&logs)[2],
                                                const SumMatrices& matrix) {
    // decays of the row from its half's first token on (shifted) and over the half; then those of
    // the column after its own token
    float up[2][2], end[2][2], after[2][2];
    float q_up[2][2], k_up[2][2], k_down[2][2], k_low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sums[4];
        mma_m16n8k8_f16_from(sums, SHIFT, matrix.through, matrix.all, logs[i]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            up[i][c] = ex2(sums[c]);
            q_up[i][c] = x.q[i][c] * up[i][c];
            k_up[i][c] = x.k[i][c] * up[i][c];
            const float down = ex2(-sums[c]);
            k_down[i][c] = x.k[i][c] * down;
            end[i][c] = ex2(sums[2 + c]);
            after[i][c] = end[i][c] * down;
        }
        mma_m16n8k8_tf32(scores.same_half[i], q_up[i][0], k_up[i][0], q_up[i][1], k_up[i][1],
                         k_down[i][0], k_down[i][1]);
    }
    k_low[0] = x.k[0][0] * after[0][0];
    k_low[1] = x.k[0][1] * after[0][1];
    constexpr float TWICE = UNSHIFT * UNSHIFT;
    suffix[0] =
        pack_fp16(after[0][0] * (end[1][0] * UNSHIFT), after[0][1] * (end[1][1] * UNSHIFT));
    suffix[1] = pack_fp16(after[1][0], after[1][1]);
    prefix[0] = pack_fp16(up[0][0] * UNSHIFT, up[0][1] * UNSHIFT);
    prefix[1] = pack_fp16(up[1][0] * (end[0][0] * TWICE), up[1][1] * (end[0][1] * TWICE));
    mma_m16n8k8_tf32(scores.cross_half, q_up[1][0], k_up[1][0], q_up[1][1], k_up[1][1], k_low[0],
                     k_low[1]);
}

// Of 8 channels of any gate: the rows are rounded, their decays are rounded, and so is the product.
__device__ __forceinline__ void decay_channels(DecayedRows& rows, int e, float (&total)[2],
                                               Scores& scores, const Channels& x,
                                               const u32 (&logs)[2], const SumMatrices& matrix,
                                               int t) {
    u32 q[2], k[2], prefix[2], suffix[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        q[i] = pack_fp16(x.q[i][0], x.q[i][1]);
        k[i] = pack_fp16(x.k[i][0], x.k[i][1]);
    }
    if constexpr (GATE == GATE_BOUNDED)
        decay_bounded(prefix, suffix, total, scores, x, logs, matrix, t);
    else
        decay_unbounded(prefix, suffix, scores, x, logs, matrix);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.q_prefix[i][e] = mul_fp16x2(q[i], prefix[i]);
        rows.k_prefix[i][e] = mul_fp16x2(k[i], prefix[i]);
        rows.k_suffix[i][e] = mul_fp16x2(k[i], suffix[i]);
    }
}

// Decays the warp's rows of 32 channels inside their row block, and adds to the scores there.
__device__ __forceinline__ void decay_rows(DecayedRows& rows, Scores& scores, Shared& s,
                                           const RowLane& at, int slice, const Norms& norms,
                                           const u32 (&logs)[4][2], const SumMatrices& matrix) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 x[4], y[4];
        ldmatrix(x, at.address(s.q, at.warp, 2 * slice + j));
        ldmatrix(y, at.address(s.k, at.warp, 2 * slice + j));
        float total[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int e = 2 * j + m;
            decay_channels(rows, e, total[m], scores, normalised(x, y, m, norms), logs[e], matrix,
                           at.t);
        }
        if (GATE == GATE_BOUNDED && at.r == 0)
            s.block_decays[3 + at.warp][j][at.t] =
                make_float4(total[0][0], total[0][1], total[1][0], total[1][1]);
    }
}

__device__ __forceinline__ float4 product(const float4& a, const float4& b, const float4& c) {
    return make_float4(a.x * b.x * c.x, a.y * b.y * c.y, a.z * b.z * c.z, a.w * b.w * c.w);
}
// Rows decayed from the chunk's start (q_in, -k_in) and to its end (k_out), in place of q, k and g;
// the chunk's decay to ``chunk_decays``. ``reach``: decays over the block before the warp's, and over block 1
// where the warp's scores pass over two blocks.
__device__ __forceinline__ void write_decayed_rows(u32 (&reach)[2][4], float* chunk_decays,
                                                   Shared& s, const DecayedRows& rows,
                                                   const RowLane& at, int slice) {
    const float4 (*const decays)[2][4] = s.block_decays + 3 + at.warp;  // the warp's own
    const int t = at.t;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float4 x0 = decays[-1][j][t], x1 = decays[-2][j][t], x2 = decays[-3][j][t];
        const float4 y0 = decays[1][j][t], y1 = decays[2][j][t], y2 = decays[3][j][t];
        const float4 after = product(y0, y1, y2);
        const u32 after_h[2] = {pack_fp16(after.x, after.y), pack_fp16(after.z, after.w)};
        const float4 before = product(x0, x1, x2);
        const u32 before_h[2] = {pack_fp16(before.x, before.y), pack_fp16(before.z, before.w)};
        const float4 second = at.warp == 3 ? x1 : x0;
        reach[0][2 * j] = pack_fp16(x0.x, x0.y), reach[0][2 * j + 1] = pack_fp16(x0.z, x0.w);
        reach[1][2 * j] = pack_fp16(second.x, second.y);
        reach[1][2 * j + 1] = pack_fp16(second.z, second.w);
        u32 q_in[4], k_in[4], k_out[4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                q_in[2 * m + i] = mul_fp16x2(rows.q_prefix[i][2 * j + m], before_h[m]);
                k_in[2 * m + i] = neg_mul_fp16x2(rows.k_prefix[i][2 * j + m], before_h[m]);
                k_out[2 * m + i] = mul_fp16x2(rows.k_suffix[i][2 * j + m], after_h[m]);
            }
        stmatrix(at.address(s.q, at.warp, 2 * slice + j), q_in);
        stmatrix(at.address(s.k, at.warp, 2 * slice + j), k_in);
        stmatrix(at.address(s.g, at.warp, 2 * slice + j), k_out);
        if (at.warp == 0 && at.r == 0) {  // scan: a lane has channels 2 t, 2 t + 1 of each 8
            const float4 own = decays[0][j][t];
            const int place = 32 * t + 4 * ((2 * slice + j) ^ (2 * t));
            *reinterpret_cast<float4*>(chunk_decays + place) = make_float4(
                own.x * after.x, own.y * after.y, own.z * after.z, own.w * after.w);
        }
    }
}

// Rows [16 tokens, 32 channels] of fp16 pairs times f, the same for all.
__device__ __forceinline__ void scale_rows(u32 (&x)[2][4], const u32 (&f)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] = mul_fp16x2(x[i][e], f[e]);
}
// Adds to the scores with earlier row blocks. Warp 0, whose own rows have none, takes those of row
// block 3 with block 2.
__device__ __forceinline__ void add_cross_block_scores(Scores& scores, DecayedRows& rows,
                                                       const Shared& s, const RowLane& at,
                                                       const u32 (&reach)[2][4]) {
    int columns = at.warp - 1;  // the row block of the columns
    if (ROW_BLOCKS < 4 && at.warp == 0) return;
    if (at.warp == 0) {
        columns = 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unpack(rows.q_prefix[i], s.exchange[3][i][at.lane]);
            unpack(rows.k_prefix[i], s.exchange[4][i][at.lane]);
        }
    } else if (at.warp == 3) {
        columns = 1;
        scale_rows(rows.q_prefix, reach[0]);
        scale_rows(rows.k_prefix, reach[0]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const uint4 b = s.exchange[columns][n][at.lane];
        mma_rows(scores.q_cross_block[0][n], rows.q_prefix, b);
        mma_rows(scores.k_cross_block[0][n], rows.k_prefix, b);
    }
    if (at.warp >= 2) {
        scale_rows(rows.q_prefix, reach[1]);
        scale_rows(rows.k_prefix, reach[1]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint4 b = s.exchange[0][n][at.lane];
            mma_rows(scores.q_cross_block[1][n], rows.q_prefix, b);
            mma_rows(scores.k_cross_block[1][n], rows.k_prefix, b);
        }
    }
}

// Rows and scores of 32 channels, all warps; ``meet`` is their barrier. Their other barrier follows.
template <class Meet>
__device__ __forceinline__ void make_slice(Scores& scores, const Params& p, Shared& s,
                                           const RowLane& at, int slice, const Norms& norms,
                                           const SumMatrices& matrix, float rate,
                                           const u32 (&inside)[2], float* chunk_decays, Meet meet) {
    u32 logs[4][2], reach[2][4];
    DecayedRows rows;
    load_log_decays(logs, p, s, at, slice, rate, inside);
    decay_rows(rows, scores, s, at, slice, norms, logs, matrix);
    exchange_rows(s, rows, at);
    meet();
    write_decayed_rows(reach, chunk_decays, s, rows, at, slice);
    add_cross_block_scores(scores, rows, s, at, reach);
}
