// The steps of one chunk of the scan, for 64 value rows in one warpgroup. With e what the state
// before the chunk misses of v (the prediction error),
//
//     e^T = v^T + S (-k_in)^T                      add_state_product
//     S   = S diag(chunk decay) + e^T (T^T k_out)  decay, add_error_keys
//     o^T = scale (S q_in^T + e^T (A_qk T)^T)      add_state_product, add_error_scores
//
// S stays in registers: as fp32 accumulators [64 values, 128 channels] of wgmma, and rounded to
// fp16 as its A operand, whose register layout is the accumulators' own. The same holds for e, so
// nothing of the recurrence S -> e -> S passes through shared memory.
#pragma once

#include "scan_state.cuh"

// Rows of v, and of the output on its way, lie 16 bytes further apart than they are long, so that
// the pieces of 8 rows at the same place are in different banks.
static constexpr int PITCH = ROW_BYTES + 16;

// Address of piece ``piece`` of 8 values of a token's row.
__device__ __forceinline__ u32 values_at(u32 rows, int row, int piece) {
    return rows + row * PITCH + piece * 16;
}
// e = v^T
__device__ __forceinline__ void load_values(float (&e)[ROWS / 2], u32 rows, const Lane& at) {
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i) {
        u32 x[4];
        ldmatrix_trans(x, values_at(rows, 16 * i + 8 * (at.matrix / 2) + at.in_matrix,
                                    2 * at.warp + at.matrix % 2));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            e[8 * i + 2 * j] = low_bf16(x[j]);
            e[8 * i + 2 * j + 1] = high_bf16(x[j]);
        }
    }
}
// A chunk's decay of the channels that this lane has.
__device__ __forceinline__ void load_decays(float2 (&decays)[16], const float* from, int t) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(from + 32 * t + 4 * (i ^ (2 * t)));
        decays[2 * i] = make_float2(x.x, x.y);
        decays[2 * i + 1] = make_float2(x.z, x.w);
    }
}
// Accumulators as an A operand.
template <int N>
__device__ __forceinline__ void round_to_operand(u32 (&operand)[N][4], const float (&x)[8 * N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            operand[i][e] = pack_operand(x[8 * i + 2 * e], x[8 * i + 2 * e + 1]);
}
__device__ __forceinline__ void decay(float (&state)[64], const float2 (&decays)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        state[4 * i] *= decays[i].x;
        state[4 * i + 1] *= decays[i].y;
        state[4 * i + 2] *= decays[i].x;
        state[4 * i + 3] *= decays[i].y;
    }
}

// c [64, tokens] = a [64, 16] b [16, tokens] (+ c)
__device__ __forceinline__ void add_product(float (&c)[32], const u32 (&a)[4], u64 b, int scale_d) {
    wgmma_m64n64k16_f16_rs(c, a, b, scale_d);
}
__device__ __forceinline__ void add_product(float (&c)[16], const u32 (&a)[4], u64 b, int scale_d) {
    wgmma_m64n32k16_f16_rs(c, a, b, scale_d);
}
__device__ __forceinline__ void add_product(float (&c)[8], const u32 (&a)[4], u64 b, int scale_d) {
    wgmma_m64n16k16_f16_rs(c, a, b, scale_d);
}
// Of 16 channels of the state alone, the i-th.
__device__ __forceinline__ void decay_slice(float (&state)[64], int i, const float* from, int t) {
    const float4 x = *reinterpret_cast<const float4*>(from + 32 * t + 4 * (i ^ (2 * t)));
#pragma unroll
    for (int j = 8 * i; j < 8 * i + 4; j += 2) {
        state[j] *= x.x, state[j + 1] *= x.y;
        state[j + 4] *= x.z, state[j + 5] *= x.w;
    }
}

// y [64, tokens] = S rows^T (+ y); rows [tokens, 128] of two blocks
__device__ __forceinline__ void add_state_product(float (&y)[ROWS / 2], const u32 (&operand)[8][4],
                                                  u32 rows, bool add) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 columns = rows + (i / 4) * BLOCK_BYTES + (i % 4) * 32;
        add_product(y, operand[i], make_gmma_desc_sw128(columns, 16, 1024), add || i > 0);
    }
    warpgroup_commit_batch();
}
// o += e^T (A_qk T)^T
__device__ __forceinline__ void add_error_scores(float (&o)[ROWS / 2],
                                                 const u32 (&operand)[ROW_BLOCKS][4],
                                                 u32 scores) {
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i)
        add_product(o, operand[i], make_gmma_desc_sw128(scores + i * 32, 16, 1024), 1);
    warpgroup_commit_batch();
}
// S += e^T (T^T k_out)
__device__ __forceinline__ void add_error_keys(float (&state)[64],
                                               const u32 (&operand)[ROW_BLOCKS][4], u32 keys) {
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i)
        wgmma_m64n128k16_f16_rs_mn(state, operand[i],
                                   make_gmma_desc_sw128(keys + i * 2048, BLOCK_BYTES, 1024));
    warpgroup_commit_batch();
}

// o^T to rows [tokens, 64 values] of shared memory, each warp to its own 16 values.
__device__ __forceinline__ void write_output(const float (&o)[ROWS / 2], float scale, u32 rows,
                                             const Lane& at) {
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i) {
        u32 x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            x[e] = pack_bf16(o[8 * i + 2 * e] * scale, o[8 * i + 2 * e + 1] * scale);
        stmatrix_trans(values_at(rows, 16 * i + 8 * (at.matrix / 2) + at.in_matrix,
                                 2 * at.warp + at.matrix % 2),
                       x);
    }
    __syncwarp();
}
// Where a piece of 8 values of a task's row goes.
__device__ __forceinline__ u16* output_of(const Params& p, const Task& task, int row, int piece) {
    return static_cast<u16*>(p.o.ptr) + (task.begin + row) * p.o.stride_t +
           task.head * p.o.stride_h + 64 * task.half + 8 * piece;
}
// Four pieces of 8 values, STEP rows apart, from ``from`` in shared memory to ``to``: those of the
// first ``rows`` rows. ``after_read`` is called when all have been read.
template <int STEP, typename F>
__device__ __forceinline__ void store_output(u16* to, i64 stride, int rows, u32 from,
                                             F after_read) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = load_shared(from + STEP * i * PITCH);
    after_read();
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (STEP * i < rows) *reinterpret_cast<uint4*>(to + STEP * i * stride) = x[i];
}

// One warp's loop over a task's values: 64 rows of v of each chunk, zeros after the sequence's end.
// ``before``: chunks of the tasks before; stages take turns over all of them.
template <int STAGES, typename Full>
__device__ __forceinline__ void fetch_values(const Params& p,
                                             unsigned char (&v)[STAGES][C * PITCH],
                                             Full (&full)[STAGES], ClusterBarrier (&empty)[STAGES],
                                             const Task& task, int lane, int& before) {
    constexpr int PIECES = ROW_BYTES / 16, STEP = 32 / PIECES;  // rows at once
    const int row = lane / PIECES, piece = lane % PIECES;
    const u16* from = static_cast<const u16*>(p.v.ptr) + (task.begin + row) * p.v.stride_t +
                      task.head * p.v.stride_h + 64 * task.half + 8 * piece;
    for (int c = 0; c < task.chunks; ++c, ++before) {
        const int stage = before % STAGES;
        if (before >= STAGES) empty[stage].wait((before / STAGES - 1) & 1);
        const u32 to = values_at(cast_smem_ptr_to_uint(v[stage]), row, piece);
        const int rows = task.rows(c) - row;
#pragma unroll 8
        for (int i = 0; i < C; i += STEP, from += STEP * p.v.stride_t)
            cp_async_cacheglobal_zfill(to + i * PITCH, from, i < rows);
        cpasync_barrier_arrive_noinc(full[stage]);
    }
}
