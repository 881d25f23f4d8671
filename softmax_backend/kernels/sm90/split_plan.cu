// The work list of one step, made on the GPU from the lengths alone: no host sync, fixed capacity.
//
// A tile has ceil(length / 64) blocks; a CTA pays `overhead` blocks for each tile that it touches. There are
// two ways to share the blocks out, and plan/split_kv.py has the same arithmetic in torch:
//
// Even: a tile is cut into ceil(blocks / c) splits, as even as can be, and each has a CTA of its own; c is the
// smallest size for which the CTAs suffice. Chosen where c is at most the contiguous plan's share.
// Contiguous: CTA g has the g-th of equal shares of the line on which each tile takes overhead + blocks. A
// boundary less than min_blocks from a tile's start or end moves there.
#include "hopper.cuh"

struct Params {
    const int* lengths;  // [tiles] tokens; negative: the tile is not there
    int4* work;          // [ctas, 2]: first tile, first block, last tile, end block; first split
    int* num_splits;     // [tiles + 1], a prefix sum
    int tiles, ctas, overhead, min_blocks, chunk_blocks;
};
static constexpr int THREADS = 1024, WARPS = THREADS / 32;

// Exclusive prefix sums over the block's threads; total is their sum.
__device__ __forceinline__ int exclusive_sum(int x, int* warps, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    const int y = warps[lane];
    int all = y;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, all, d);
        if (lane >= d) all += other;
    }
    total = __shfl_sync(~0u, all, 31);
    const int before = __shfl_sync(~0u, all - y, warp);
    __syncthreads();
    return before + sum - x;
}
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The last i with start[i] <= x, of count that ascend from 0.
__device__ __forceinline__ int last_at_most(const int* start, int count, int x) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (start[middle] <= x) low = middle; else high = middle;
    }
    return low;
}

struct Boundary { int tile, block, split; };  // split: number of the split that starts here

// What the tiles take on the line; n < 0 is a tile that is not there.
struct Measure {
    int overhead, min_blocks, share, even;  // even: blocks of a split, or 0 for the contiguous plan
    bool chunked;
    __device__ __forceinline__ int pieces(int n) const { return n < 0 ? 0 : max(1, ceil_div(n, even)); }
    __device__ __forceinline__ int extent(int n) const { return even ? pieces(n) : n < 0 ? 0 : overhead + n; }
    // the first and the last CTA that starts inside a tile that starts at `start`
    __device__ __forceinline__ int first_inside(int start) const {
        return ceil_div(start + overhead + min_blocks, share);
    }
    __device__ __forceinline__ int splits(int start, int n) const {
        if (even) return pieces(n);
        if (chunked || n < 0) return max(n, 0);
        return 1 + max(0, (start + overhead + n - min_blocks) / share - first_inside(start) + 1);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) split_plan(const __grid_constant__ Params p) {
    extern __shared__ int memory[];
    int* const blocks = memory;           // [tiles]
    int* const start = memory + p.tiles;  // [tiles]
    __shared__ int warps[WARPS], candidates[WARPS];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int each = ceil_div(p.tiles, THREADS), first = min(p.tiles, thread * each);
    const int last = min(p.tiles, first + each);
    const bool chunked = p.chunk_blocks > 0;
    const int unit = max(p.chunk_blocks, 1), overhead = chunked ? 0 : p.overhead;
    int mine = 0, there = 0, total, count;
    for (int i = first; i < last; ++i) {
        const int length = p.lengths[i];
        int n = -1;
        if (length >= 0) {
            n = ceil_div(ceil_div(length, 64), unit);
            if (chunked) n = max(n, 1);
            mine += n, ++there;
        }
        blocks[i] = n;
    }
    exclusive_sum(mine, warps, total);
    exclusive_sum(there, warps, count);
    const int least = max(max(p.min_blocks, 1), ceil_div(total, p.ctas));
    Measure measure{overhead, p.min_blocks, max(max(p.min_blocks, 1), ceil_div(total + overhead * count, p.ctas)), 0,
                    chunked};
    // warp w tries splits of w more blocks than the least
    measure.even = least + warp;
    int splits = 0;
    for (int i = lane; i < p.tiles; i += 32) splits += measure.pieces(blocks[i]);
#pragma unroll
    for (int bit = 16; bit; bit /= 2) splits += __shfl_xor_sync(~0u, splits, bit);
    const bool fits = !chunked && splits <= p.ctas && measure.even <= measure.share;
    if (lane == 0) candidates[warp] = fits ? measure.even : 0x7fffffff;
    __syncthreads();
    int even = candidates[lane];
#pragma unroll
    for (int bit = 16; bit; bit /= 2) even = min(even, __shfl_xor_sync(~0u, even, bit));
    measure.even = even == 0x7fffffff ? 0 : even;

    mine = 0;
    for (int i = first; i < last; ++i) mine += measure.extent(blocks[i]);
    int at = exclusive_sum(mine, warps, total);
    count = 0;
    for (int i = first; i < last; ++i) {
        start[i] = at;
        count += measure.splits(at, blocks[i]);
        at += measure.extent(blocks[i]);
    }
    int all, slot = exclusive_sum(count, warps, all);
    for (int i = first; i < last; ++i) {
        p.num_splits[i] = slot;
        slot += measure.splits(start[i], blocks[i]);
    }
    if (thread == 0) p.num_splits[p.tiles] = all;
    __syncthreads();

    auto boundary = [&](int cta) -> Boundary {
        const int x = cta * measure.share;
        if (x >= total) return {p.tiles, 0, 0};
        const int tile = last_at_most(start, p.tiles, x), block = x - start[tile] - overhead;
        if (block < p.min_blocks) return {tile, 0, 0};
        if (blocks[tile] - block < p.min_blocks) return {tile + 1, 0, 0};
        return {tile, block * unit, cta - measure.first_inside(start[tile]) + 1};
    };
    for (int cta = thread; cta < p.ctas; cta += THREADS) {
        int4 work = make_int4(p.tiles, 0, p.tiles - 1, 0);
        int split = 0;
        if (measure.even) {
            if (cta < total) {
                const int tile = last_at_most(start, p.tiles, cta), n = blocks[tile], of = measure.pieces(n);
                split = cta - start[tile];
                work = make_int4(tile, split * n / of, tile, (split + 1) * n / of);
            }
        } else {
            const Boundary from = boundary(cta), to = boundary(cta + 1);
            split = from.split;
            const int whole = to.tile > 0 ? max(blocks[to.tile - 1], 0) * unit : 0;
            work = make_int4(from.tile, from.block, to.block ? to.tile : to.tile - 1, to.block ? to.block : whole);
        }
        p.work[2 * cta] = work;
        p.work[2 * cta + 1] = make_int4(split, 0, 0, 0);
    }
}
