// Scores of a chunk, 32 channels at a time, and its rows decayed to the chunk's start and end.
//
// Within 8 tokens: the row's decay from the first of them on times the inverse of the column's, a
// product in tf32, whose range is that of fp32. Of a bounded gate 16 tokens stay in that range, and
// are taken at once, centred by 2^60.
// Between the halves of 16, 32 and 64 tokens: rows of the upper half decay from its first token on,
// those of the lower half to its last, so nothing exceeds 1 and fp16 will do.
// Any gate is exact, and row r depends on tokens up to r alone.
#pragma once

#include "gates.cuh"

// A warp's part of A_qk (rows of q) and of k k^T with its decays (rows of k), as accumulators.
struct Scores {
    // in the warp's row block: within the 8 tokens of half i, and between the halves; rows 0-7 are
    // q's, 8-15 k's
    float same_half[2][4], cross_half[4];
    // with earlier row blocks, [which of two][8 columns]: block 1 with 0 (warp 1), 2 and 3 with 0
    // and 1 (warps 2 and 3), 3 with 2 (warp 0)
    float q_cross_block[2][2][4], k_cross_block[2][2][4];
};
// What needs no decay: the norms of the lane's two tokens, and the diagonal of A_qk.
struct Norms {
    float q[2], k[2], diagonal[2];
};
// A warp's rows of 32 channels in fp16, [half][group of 8 channels]: decayed from the row block's
// first token through their own (prefix), and after their own to the block's last (suffix).
struct DecayedRows {
    u32 q_prefix[2][4], k_prefix[2][4], k_suffix[2][4];
};
// q and k of the lane's two tokens, two channels of one group of 8, normalised.
struct Channels {
    float q[2][2], k[2][2];  // [half][channel]
};

// Norms and diagonal are diagonals of products.
__device__ __forceinline__ Norms compute_norms(const Shared& s, const RowLane& at) {
    Norms norms;
    float with_q[2][4] = {}, with_k[2][4] = {};  // rows 0-7 are q's, 8-15 k's
    // lane groups of 8 read channels 0-7 of q, of k, 8-15 of q, of k; and of k, k, q, q
    const u32 rows = 16 * at.warp * 128 + at.in_matrix * 128;
    const u32 q_rows = cast_smem_ptr_to_uint(s.q) + rows;
    const u32 k_rows = cast_smem_ptr_to_uint(s.k) + rows;
    const u32 a_rows = at.matrix % 2 ? k_rows : q_rows, b_rows = at.matrix / 2 ? q_rows : k_rows;
    const u32 a_piece = (at.matrix / 2 ^ at.in_matrix) << 4;
    const u32 b_piece = (at.matrix % 2 ^ at.in_matrix) << 4;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 block = (j / 4) * BLOCK_BYTES + i * 8 * 128;
            u32 a[4], b[4];
            ldmatrix(a, a_rows + block + (a_piece ^ (j % 4) << 5));
            ldmatrix(b, b_rows + block + (b_piece ^ (j % 4) << 5));
            mma_m16n8k16_bf16(with_k[i], a[0], a[1], a[2], a[3], b[0], b[1]);
            if (L2NORM) mma_m16n8k16_bf16(with_q[i], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    const int r = at.r;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        auto own = [&](float even, float odd) {  // column r of row r
            return __shfl_sync(~0u, r & 1 ? odd : even, 4 * r + r / 2);
        };
        norms.q[i] = L2NORM ? rsqrtf(own(with_q[i][0], with_q[i][1]) + 1e-6f) : 1.0f;
        norms.k[i] = L2NORM ? rsqrtf(own(with_k[i][2], with_k[i][3]) + 1e-6f) : 1.0f;
        norms.diagonal[i] = own(with_k[i][0], with_k[i][1]) * norms.q[i] * norms.k[i];
    }
    return norms;
}

// Group m of 8 channels of two, of q and k as fragments.
__device__ __forceinline__ Channels normalised(const u32 (&q)[4], const u32 (&k)[4], int m,
                                               const Norms& norms) {
    Channels of;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        of.q[i][0] = low_bf16(q[2 * m + i]) * norms.q[i];
        of.q[i][1] = high_bf16(q[2 * m + i]) * norms.q[i];
        of.k[i][0] = low_bf16(k[2 * m + i]) * norms.k[i];
        of.k[i][1] = high_bf16(k[2 * m + i]) * norms.k[i];
    }
    return of;
}

__device__ __forceinline__ uint4 packed(const u32 (&x)[4]) {
    return make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void unpack(u32 (&to)[4], const uint4& x) {
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
// What other warps need goes to the same lane there through shared memory.
__device__ __forceinline__ void exchange_rows(Shared& s, const DecayedRows& rows, const RowLane& at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (at.warp < 3) {
            s.exchange[at.warp][i][at.lane] = packed(rows.k_suffix[i]);
        } else {
            s.exchange[3][i][at.lane] = packed(rows.q_prefix[i]);
            s.exchange[4][i][at.lane] = packed(rows.k_prefix[i]);
        }
    }
}

__device__ __forceinline__ void mma_rows(float (&c)[4], const u32 (&a)[2][4], const uint4& b) {
    mma_m16n8k16_f16(c, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
    mma_m16n8k16_f16(c, a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
}
