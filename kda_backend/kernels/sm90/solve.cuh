// The triangular solve of a chunk: T = (I + L)^-1 diag(beta), applied to k_out and A_qk.
//
// L has beta in its rows; its blocks of 16 tokens are inverted one by one in fp32, the rest is
// block substitution on the tensor cores.
#pragma once

#include "slice_rows.cuh"

// tf32 cuts 2^-11 / (2 ln 2) off each of two factors on average.
static constexpr float TF32_CUT = 1.0f + 0x1p-10f * 0.72134752f;

// A_qk of the warp's row block as a fragment; L's diagonal block, with beta, to shared memory.
__device__ __forceinline__ void diagonal_scores(u32 (&a_diagonal)[4], Shared& s,
                                                const Scores& scores, const Norms& norms,
                                                const RowLane& at) {
    const int r = at.r, t = at.t;
    const float beta0 = s.beta[16 * at.warp + r], beta1 = s.beta[16 * at.warp + r + 8];
    constexpr float CROSS = GATE == GATE_BOUNDED ? TF32_CUT : UNSHIFT * TF32_CUT;
    float a[2][2], l[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int c = 2 * t + j;
            a[i][j] = c < r    ? scores.same_half[i][j] * TF32_CUT
                      : c == r ? norms.diagonal[i]
                               : 0.0f;
            l[i][j] = c < r ? scores.same_half[i][2 + j] * TF32_CUT : 0.0f;
        }
    const float (&cross)[4] = scores.cross_half;
    a_diagonal[0] = pack_fp16(a[0][0], a[0][1]);
    a_diagonal[1] = pack_fp16(cross[0] * CROSS, cross[1] * CROSS);
    a_diagonal[2] = 0;
    a_diagonal[3] = pack_fp16(a[1][0], a[1][1]);
    float (&to)[16][16] = s.diagonal[at.warp];
    *reinterpret_cast<float2*>(&to[r][2 * t]) = make_float2(l[0][0] * beta0, l[0][1] * beta0);
    *reinterpret_cast<float2*>(&to[r + 8][2 * t]) =
        make_float2(cross[2] * (CROSS * beta1), cross[3] * (CROSS * beta1));
    *reinterpret_cast<float2*>(&to[r + 8][8 + 2 * t]) =
        make_float2(l[1][0] * beta1, l[1][1] * beta1);
}

// (I + L)^-1 of the warp's diagonal block in fp32: each of 16 lanes substitutes one column x.
__device__ __forceinline__ void invert_diagonal_block(float (&x)[16], const Shared& s,
                                                      const RowLane& at) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = i == at.lane % 16 ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 l = *reinterpret_cast<const float4*>(&s.diagonal[at.warp][i][m]);
            const float of_row[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (m + e < i) x[i] -= of_row[e] * x[m + e];
        }
    }
}

// Scores [16, 16] as a fragment.
__device__ __forceinline__ void pack_scores(u32 (&x)[4], const float (&c)[2][4], float f) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        x[2 * n] = pack_fp16(c[n][0] * f, c[n][1] * f);
        x[2 * n + 1] = pack_fp16(c[n][2] * f, c[n][3] * f);
    }
}
// The solve's operands to shared memory: ``low`` with -L below its diagonal blocks and their T on
// the diagonal (columns ``inverse``), and all of A_qk.
__device__ __forceinline__ void write_solve_operands(Shared& s, const Scores& scores,
                                                     const u32 (&a_diagonal)[4],
                                                     const float (&inverse)[16], const RowLane& at) {
    const int warp = at.warp;
    {  // lanes from 16 on write the odd rows
        const int column = at.lane % 16, odd = at.lane / 16;
        const float beta = s.beta[16 * warp + column];
        char* const to =
            reinterpret_cast<char*>(s.low) + (16 * warp + odd) * 128 + 2 * (column % 8);
        const int piece = 2 * warp + column / 8 ^ odd;
#pragma unroll
        for (int i = 0; i < 16; i += 2)
            *reinterpret_cast<u16*>(to + i * 128 + ((piece ^ i % 8) << 4)) =
                static_cast<u16>(pack_fp16((odd ? inverse[i + 1] : inverse[i]) * beta, 0.f));
    }
    stmatrix(at.address(s.a_qk, warp, warp), a_diagonal);
    const u32 zeros[4] = {};
#pragma unroll
    for (int n = 1; n < 4; ++n)
        if (n > warp) stmatrix(at.address(s.a_qk, warp, n), zeros);
    if (ROW_BLOCKS < 4 && warp == 0) return;
    const int rows = warp == 0 ? 3 : warp, columns = warp == 0 ? 2 : warp == 3 ? 1 : warp - 1;
    u32 y[4];
    pack_scores(y, scores.q_cross_block[0], 1.0f);
    stmatrix(at.address(s.a_qk, rows, columns), y);
    pack_scores(y, scores.k_cross_block[0], -1.0f);
    stmatrix(at.address(s.low, rows, columns), y);
    if (warp >= 2) {
        pack_scores(y, scores.q_cross_block[1], 1.0f);
        stmatrix(at.address(s.a_qk, rows, 0), y);
        pack_scores(y, scores.k_cross_block[1], -1.0f);
        stmatrix(at.address(s.low, rows, 0), y);
    }
}

// Applies T by block backward substitution to 16 rows x over the chunk's tokens, in place:
//     y_i = (x_i - sum over j > i of y_j L_ji) T_ii,
// where y and T have beta in them and L has not. KEYS: the rows are channels, ``rows`` is which 16,
// of k_out, whose tokens lie one below the other. Else they are tokens of A_qk, of row block
// ``rows``, and there is nothing after it. ``blocks``: row blocks that the chunk has; the others are
// left alone.
template <bool KEYS>
__device__ __forceinline__ void solve(u16* x_rows, int rows, const Shared& s, int lane,
                                      int blocks = ROW_BLOCKS) {
    const u32 low_base = cast_smem_ptr_to_uint(s.low), x_base = cast_smem_ptr_to_uint(x_rows);
    const int in_matrix = lane % 8, first = 8 * (lane / 8 % 2), second = lane / 16;
    u32 solved[ROW_BLOCKS][4] = {};
#pragma unroll
    for (int i = ROW_BLOCKS - 1; i >= 0; --i) {
        if (i >= blocks || (!KEYS && i > rows)) continue;
        // matrices, of x and of what is stored: (tokens 0-7, rows 0-7), (0-7, 8-15), (8-15, 0-7),
        // ..
        const u32 x_address =
            x_base + (KEYS ? swizzled(16 * i + 8 * second + in_matrix, 2 * rows + first / 8)
                           : swizzled(16 * rows + first + in_matrix, 2 * i + second));
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
        auto add_product = [&](const u32 (&y)[4], int j) {  // acc += y low_ji
            u32 l[4];
            ldmatrix_trans(l, low_base + swizzled(16 * j + first + in_matrix, 2 * i + second));
            mma_m16n8k16_f16(acc[0], y[0], y[1], y[2], y[3], l[0], l[1]);
            mma_m16n8k16_f16(acc[1], y[0], y[1], y[2], y[3], l[2], l[3]);
        };
#pragma unroll
        for (int j = i + 1; j < ROW_BLOCKS; ++j)
            if (j < blocks && (KEYS || j <= rows)) add_product(solved[j], j);
        u32 z[4];
        pack_scores(z, acc, 1.0f);
#pragma unroll
        for (int n = 0; n < 2; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
        add_product(z, i);
        pack_scores(solved[i], acc, 1.0f);
        if (KEYS)
            stmatrix_trans(x_address, solved[i]);
        else
            stmatrix(x_address, solved[i]);
    }
}
