// Split-KV MLA decode for Hopper: up to 64 query rows (query tokens x heads) are the M side of wgmma.
//
//   S [rows, 64 tokens]    = scale Q [rows, 576] K^T
//   O [rows, 512 channels] += P [rows, 64] V             V = the first 512 channels of K's tile
//
// A CTA has one row of the work list: consecutive 64-token blocks of consecutive query tiles. One warp
// fetches K by TMA. Two warpgroups take turns with S and the softmax, a block each, and both multiply P and
// V, 256 channels each; so S of one block runs during the softmax of the other, and no outputs need merging.
// A tile of which one CTA has every block is written as bf16, others as fp32 partials with a base-2 LSE.
//
// Constants: ROWS, the query rows in shared memory (wgmma computes 64 and those beyond ROWS are garbage that
// stays in its own rows); HALVES, ROPES; READ_ONCE, for the L2 hint of a cache that is.
#include "decode_steps.cuh"

// Tensor maps must lie on 64 bytes.
struct __align__(64) AlignedParams : Params {};

// Tokens that row(i) of a tile sees, from the tile's first.
__device__ __forceinline__ void count_seen(const Params& p, const QueryTile& tile, const Lane& at, int (&seen)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        seen[i] = tile.kv_end;
        if (p.causal && !(tile.flags & NO_CAUSAL_MASK) && at.row(i) < tile.rows) {
            const Row q = query_row(p, tile, at.row(i));
            seen[i] = min(seen[i], p.lengths[q.request] - (p.query_tokens - 1 - q.token));
        }
        seen[i] -= tile.kv_begin;
    }
}

// Where a warpgroup is in the blocks of its CTA.
struct Walk {
    Ring ring;        // of the block whose P V is next
    u32 p_phase = 0;  // bit b: parity of p_ready[b]
};

// O += P V of the walk's block, whose P and maxima are those of buffer `buffer`.
__device__ __forceinline__ void add_values(Shared& s, float (&o)[128], float (&sum)[2], const Lane& at, Walk& walk,
                                           int buffer) {
    s.p_ready[buffer].wait(walk.p_phase >> buffer & 1);
    walk.p_phase ^= 1 << buffer;
    float keep[2] = {1, 1};
    if (at.active()) keep[0] = s.keep[buffer][at.row(0)], keep[1] = s.keep[buffer][at.row(1)];
    if (at.wg != buffer) sum[0] *= keep[0], sum[1] *= keep[1];
    multiply_values(s, o, at, walk.ring, keep);
    warpgroup_wait<0>();
    warpgroup_fence_operand(o);
    if (at.lane == 0) s.half_empty[walk.ring.half(at.wg)].arrive();
    if (at.lane == 1) s.rope_empty[walk.ring.rope()].arrive();
}

// P of block n of a tile, from S in x.
__device__ __forceinline__ void make_weights(Shared& s, float (&x)[32], float (&sum)[2], const QueryTile& tile,
                                             const Lane& at, const Ring& ring, int buffer, int n, bool first,
                                             const int (&seen)[2], float scale_log2) {
    const int position = n * BLOCK;
    const int visible[2] = {seen[0] - position, seen[1] - position};
    if (at.active()) softmax(s, x, sum, at, buffer, ring.rope(), first, visible, scale_log2);
    const int valid = tile.kv_end - tile.kv_begin - position;
    if (valid < BLOCK) clear_values(s, ring, valid, at.thread);
    tma_store_fence();
    __syncwarp();
    if (at.lane == 0) s.p_ready[buffer].arrive();
}

// O of a tile over the blocks of a segment. In each turn S of the next block, which every other time is this
// warpgroup's, stands before P V of the current one.
// One copy of each step, for the instruction cache. A wgmma and its wait stand in the same straight line of code:
// else the compiler serialises them.
__device__ __forceinline__ void attend_segment(Shared& s, float (&o)[128], float (&sum)[2], const QueryTile& tile,
                                               const Segment& part, const Lane& at, Walk& walk, const int (&seen)[2],
                                               float scale_log2) {
    for (int n = part.begin - 1; n < part.end; ++n) {
        const bool mine = n + 1 < part.end && ((n + 1 - part.begin) & 1) == at.wg;
        const int buffer = (n + 1 - part.begin) & 1;
        Ring next = walk.ring;
        if (n >= part.begin) ++next.block;
        float x[32];
#pragma unroll
        for (int e = 0; e < 32; ++e) x[e] = 0;
        if (mine) {
            multiply_keys(s, x, next);
            warpgroup_wait<0>();
            warpgroup_fence_operand(x);
        }
        if (n >= part.begin) add_values(s, o, sum, at, walk, buffer ^ 1);
        if (mine) make_weights(s, x, sum, tile, at, next, buffer, n + 1, n + 1 == part.begin, seen, scale_log2);
        walk.ring = next;
    }
}

__device__ __forceinline__ void attend(const Params& p, Shared& s, const int4& work, int first_split,
                                       const Lane& at) {
    const float scale_log2 = p.scale * LOG2E;
    Walk walk;
    QueryTile tile = query_tile(p, work.x);
    wait_on_dependent_grids();
    launch_dependent_grids();
    read_queries(p, s, tile, at.wg * 128 + at.thread);
    for (int number = work.x; number <= work.z; ++number) {
        const int slots = p.num_splits[number], splits = p.num_splits[number + 1] - slots;
        const bool partial = splits > 1 || tile.flags & ALWAYS_PARTIAL;
        int seen[2];
        count_seen(p, tile, at, seen);
        cp_async_fence(), cp_async_wait<0>();
        tma_store_fence();
        const Segment part(work, number, tile);
        sync_consumers();
        float o[128], sum[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < 128; ++e) o[e] = 0;
        attend_segment(s, o, sum, tile, part, at, walk, seen, scale_log2);
        // All warps are done with the queries: those of the next tile may come.
        const QueryTile current = tile;
        if (number < work.z) {
            tile = query_tile(p, number + 1);
            read_queries(p, s, tile, at.wg * 128 + at.thread);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
            if (at.t == 0) s.sums[at.wg][at.row(i)] = sum[i];
        }
        sync_consumers();
        const int split = number == work.x ? first_split : 0;
        if (at.active())
            write_out(p, s, o, current, at, partial ? slots + split : -1, (part.end - part.begin - 1) & 1,
                      part.begin == part.end);
    }
}

// The warpgroups that multiply take registers from the one that fetches.
extern "C" __global__ void __launch_bounds__(384, 1) mla_decode(const __grid_constant__ AlignedParams p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tma_descriptor(&p.rope), prefetch_tma_descriptor(&p.latent);
#pragma unroll
        for (int i = 0; i < ROPES; ++i) s.rope_full[i].init(1), s.rope_empty[i].init(8);
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            s.half_empty[i].init(4);
#pragma unroll
            for (int box = 0; box < 4; ++box) s.half_full[i][box].init(1);
        }
        s.p_ready[0].init(4), s.p_ready[1].init(4);
        fence_barrier_init();
    }
    if (!p.prefetch_safe) wait_on_dependent_grids();
    const int cta = blockIdx.x / p.row_tiles;
    const int4 work = p.work[2 * cta];
    const int split = p.work[2 * cta + 1].x;
    __syncthreads();
    if (work.x > work.z) return;
    if (warp >= 8) {
        warpgroup_reg_dealloc<24>();
        launch_dependent_grids();
        if (warp == 8) fetch_blocks(p, s, work, lane);
    } else {
        warpgroup_reg_alloc<240>();
        attend(p, s, work, split, {warp / 4, int(threadIdx.x) % 128, warp % 4, lane, lane / 4, lane % 4});
    }
}
