// Shared memory of an intra-chunk CTA, and how it finds its tiles.
#pragma once

#include "tile.cuh"
#include "params.cuh"

// The thread that acts for its CTA; its warp has the fewest products to compute.
static constexpr int LEADER_THREAD = 32;

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
#if CONV
        u16 halo[2][HALO][D];  // rows before the keys and the queries
#endif
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

#include "conv_rows.cuh"

__device__ __forceinline__ char* tile_block(const Params& p, i64 tile, int block) {
    return reinterpret_cast<char*>(p.tiles) + tile * TILE_BYTES + block * BLOCK_BYTES;
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
#if CONV
        cp_async_cachealways_zfill(&to.sequence, p.chunk_begins + to.chunk, true);
#endif
        if (p.a_log) cp_async_cachealways_zfill(&to.a_log, p.a_log + to.head, true);
        cp_async_fence();
    } else {
        cp_async_wait<0>();
    }
}
