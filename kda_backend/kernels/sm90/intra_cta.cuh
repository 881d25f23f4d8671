// Shared memory of an intra-chunk CTA, where a lane stands in it, and how a tile's inputs get
// there.
#pragma once

#include "tile.cuh"
#include "params.cuh"

// The thread that acts for its CTA; its warp has the fewest products to compute.
static constexpr int LEADER_THREAD = 32;

// Where a tile's inputs lie.
struct TileSource {
    int head, key_head, chunk;
    int token, length;  // first token in the batch; tokens
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
        // operands for other warps: [k_suffix of row blocks 0, 1, 2; q_prefix, k_prefix of 3]
        // [half][lane]
        uint4 exchange[5][2][32];
        float diagonal[4][16][16];  // L's diagonal blocks
    };
    // Decays over the row blocks, of 16 channels the 2 t, 2 t + 1 of each 8 together; three blocks
    // of ones before and after.
    float4 block_decays[3 + 4 + 3][2][4];
    float beta[C];
    float bias[D];         // dt_bias of the head
    TileSource source[2];  // of this tile and of the next
    int next;              // the CTA's next tile, as a place in the order
    int tiles_left;        // that it may still make
    u32 launch;            // the number of this launch
};
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

// Byte offset of 16-byte piece c of row r in a block of 64 rows of 128 bytes with the 128-byte
// swizzle. A row of 128 channels continues in the next block.
__device__ __forceinline__ u32 swizzled(int r, int c) {
    return (c / 8) * BLOCK_BYTES + r * 128 + ((c % 8 ^ (r & 7)) << 4);
}

// Where a lane stands: warp w owns the 16 tokens of row block w.
struct Lane {
    int warp, lane;
    int r, t;               // fragment: rows r and r + 8, columns 2 t, 2 t + 1 of each 8
    int matrix, in_matrix;  // ldmatrix: gives the address of this row of this matrix
    u32 own_row;

    // ldmatrix's matrices are (tokens 0-7, channels 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
    __device__ __forceinline__ explicit Lane(int thread)
        // the shuffle tells the compiler that the warp's number is uniform
        : warp(__shfl_sync(~0u, thread / 32, 0)), lane(thread % 32), r(lane / 4), t(lane % 4),
          matrix(lane / 8), in_matrix(lane % 8),
          own_row((8 * (matrix % 2) + in_matrix) * 128 + ((matrix / 2 ^ in_matrix) << 4)) {}

    // The address this lane gives for channels 16 j on of a row block.
    __device__ __forceinline__ u32 address(const u16* rows, int row_block, int j) const {
        return cast_smem_ptr_to_uint(rows) + row_block * 16 * 128 + (j / 4) * BLOCK_BYTES +
               (own_row ^ (j % 4) << 5);
    }
};

__device__ __forceinline__ char* tile_block(const Params& p, i64 tile, int block) {
    return reinterpret_cast<char*>(p.tiles) + tile * TILE_BYTES + block * BLOCK_BYTES;
}
// First row of a tile in q, k or g.
__device__ __forceinline__ const u16* rows_of(const Rows& x, const TileSource& from, int head) {
    return static_cast<const u16*>(x.ptr) + from.token * x.stride_t + head * x.stride_h;
}
// A chunk's rows to shared memory, zeros after the last.
__device__ __forceinline__ void fetch_rows(u16* to, const void* from, i64 stride, int length) {
    const int row = threadIdx.x / 16, piece = threadIdx.x % 16;
    const char* source = static_cast<const char*>(from) + 16 * piece;
    const u32 at = cast_smem_ptr_to_uint(to) + swizzled(row, piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        cp_async_cacheglobal_zfill(at + 8 * i * 128, source + 2 * (row + 8 * i) * stride,
                                   row + 8 * i < length);
    }
}
__device__ __forceinline__ void fetch_keys(const Params& p, Shared& s, const TileSource& from) {
    fetch_rows(s.k, rows_of(p.k, from, from.key_head), p.k.stride_t, from.length);
}
// Two groups of copies: q; then g and dt_bias.
__device__ __forceinline__ void fetch_queries_and_gates(const Params& p, Shared& s,
                                                        const TileSource& from, int head,
                                                        int length) {
    fetch_rows(s.q, rows_of(p.q, from, from.key_head), p.q.stride_t, length);
    cp_async_fence();
    fetch_rows(s.g, rows_of(p.g, from, head), p.g.stride_t, length);
    if (GATE != GATE_LOG) {
        const bool has_bias = p.dt_bias != nullptr;
        cp_async_cachealways_zfill(
            &s.bias[threadIdx.x],
            has_bias ? p.dt_bias + head * D + threadIdx.x : p.g.ptr,
            has_bias);
    }
    cp_async_fence();
}
// Beta of the chunk's tokens, and the ones around block_decays.
__device__ __forceinline__ void load_beta(const Params& p, Shared& s, const TileSource& source,
                                          int head, int length) {
    if (threadIdx.x < C) {
        float b = 0.f;
        if (threadIdx.x < length) {
            const i64 at = static_cast<i64>(source.token + threadIdx.x) * p.beta.stride_t +
                           head * p.beta.stride_h;
            b = BETA_FP32 ? static_cast<const float*>(p.beta.ptr)[at]
                          : low_bf16(static_cast<const u16*>(p.beta.ptr)[at]);
            b = activate_beta<BETA>(b);
        }
        s.beta[threadIdx.x] = b;
    } else if (threadIdx.x < C + 8) {
        const int j = (threadIdx.x - C) / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 3; ++i)
            s.block_decays[i][j][t] = s.block_decays[7 + i][j][t] =
                make_float4(1.f, 1.f, 1.f, 1.f);
    }
}

__device__ __forceinline__ u32 started(const Params& p) {
    return *reinterpret_cast<const volatile u32*>(&p.progress->started_intra_ctas);
}
// Should the SMs be numbered otherwise than thought, the CTAs on reserved ones make all tiles.
__device__ __forceinline__ bool all_on_reserved_sms(const Params& p) {
    return started(p) < 0x10000;
}
// Until every CTA of this launch has started.
__device__ __forceinline__ void wait_for_all_ctas(const Params& p) {
    for (u32 polls = 0; (started(p) & 0xffff) < gridDim.x;) {
        __nanosleep(100);
        if (++polls == MAX_POLLS) give_up(p.fault, NO_START, 0, started(p) & 0xffff, gridDim.x);
    }
}
__device__ __forceinline__ int take_tile(const Params& p, const Shared& s) {
    const bool may = s.tiles_left > 0 || all_on_reserved_sms(p);
    return may ? atomicAdd(&p.progress->next_tile, 1) : p.num_tiles;
}
// The leader finds out about tile s.next in three steps, each of which uses what the one before has
// fetched: which chunk it is, then where that lies.
__device__ __forceinline__ void find_source(const Params& p, Shared& s, int turn, int step) {
    if (s.next >= p.num_tiles) return;
    TileSource& to = s.source[turn];
    if (step == 1) {
        to.head = s.next % p.num_value_heads;
        to.key_head = to.head / p.heads_per_key;
        cp_async_cachealways_zfill(&to.chunk, p.chunk_order + s.next / p.num_value_heads, true);
        cp_async_fence();
    } else if (step == 2) {
        cp_async_wait<0>();
        cp_async_cachealways_zfill(&to.token, p.chunk_start + to.chunk, true);
        cp_async_cachealways_zfill(&to.length, p.chunk_len + to.chunk, true);
        if (p.a_log) cp_async_cachealways_zfill(&to.a_log, p.a_log + to.head, true);
        cp_async_fence();
    } else {
        cp_async_wait<0>();
    }
}
