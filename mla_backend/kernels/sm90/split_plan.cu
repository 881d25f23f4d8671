// The work list of one step, made on the GPU from the lengths alone: no host sync, fixed capacity. One CTA; a
// second one makes the list of the tiles of shared prefixes, which lie behind the requests' own.
//
// A tile has ceil(length / 64) blocks; a CTA pays `overhead` blocks for each tile that it touches. There are
// two ways to share the blocks out, and plan/split_kv.py has the same arithmetic in torch:
//
// Even: a tile is cut into ceil(blocks / c) splits, as even as can be, and each has a CTA of its own; c is the
// smallest candidate for which the CTAs suffice, if it is at most a 32nd above the contiguous plan's share.
// Contiguous: CTA g has the g-th of equal shares of the line on which each tile takes overhead + blocks. A
// boundary less than min_blocks from a tile's start or end moves there.
#include "hopper.cuh"
#include "params.cuh"

template __global__ void shared_bytes<4 * 2 * 4096>();
static constexpr int CANDIDATES = 17, NONE = 0x7fffffff;

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ u32 inclusive_sum(u32 x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += other;
    }
    return x;
}
// Exclusive prefix sums over the CTA's threads; total is their sum. One barrier; `warps` is used once.
__device__ __forceinline__ u32 exclusive_sum(u32 x, u32 (&warps)[32], u32& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 sum = inclusive_sum(x, lane);
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    const u32 y = lane < int(blockDim.x / 32) ? warps[lane] : 0, all = inclusive_sum(y, lane);
    total = __shfl_sync(~0u, all, 31);
    return __shfl_sync(~0u, all - y, warp) + sum - x;
}

// The last i with start[i] <= x, of count that ascend from 0.
__device__ __forceinline__ int last_at_most(const int* start, int count, int x) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (start[middle] <= x) low = middle; else high = middle;
    }
    return low;
}

// What the tiles take on the line; n < 0 is a tile that is not there.
struct Measure {
    int overhead, min_blocks, share, even;  // even: blocks of a split, or 0 for the contiguous plan
    __device__ __forceinline__ int pieces(int n) const { return n < 0 ? 0 : max(1, ceil_div(n, even)); }
    __device__ __forceinline__ int extent(int n) const { return even ? pieces(n) : n < 0 ? 0 : overhead + n; }
    // the first CTA that starts inside a tile that starts at `start`
    __device__ __forceinline__ int first_inside(int start) const {
        return ceil_div(start + overhead + min_blocks, share);
    }
    __device__ __forceinline__ int splits(int start, int n) const {
        if (even) return pieces(n);
        if (n < 0) return 0;
        return 1 + max(0, (start + overhead + n - min_blocks) / share - first_inside(start) + 1);
    }
};
struct Boundary { int tile, block, split; };  // split: number of the split that starts here

// The tiles of one list, and where it goes.
struct List {
    const int* lengths;
    int4* work;
    int* num_splits;
    int tiles, requests, first_slot;  // requests: the first tiles are their own
    __device__ __forceinline__ explicit List(const Params& p)
        : lengths(p.lengths), work(p.work), num_splits(p.num_splits), tiles(p.tiles), requests(p.requests),
          first_slot(0) {
        if (blockIdx.x == 0) return;
        lengths += p.tiles, work += 2 * p.ctas, num_splits += p.tiles + 1;
        tiles = p.prefix_tiles, requests = 0, first_slot = p.prefix_slot;
    }
};
// A row of the output merges at most 160 splits: 132 of a request's own, and these of its prefix.
static constexpr int MOST_PREFIX_SPLITS = 24;

extern "C" __global__ void __launch_bounds__(1024, 1) split_plan(const __grid_constant__ Params p) {
    const List list(p);
    int* const blocks = reinterpret_cast<int*>(dynamic_shared_memory());  // [tiles]
    int* const start = blocks + list.tiles;                               // [tiles]
    __shared__ int sums[3][32], candidates[CANDIDATES];
    __shared__ u32 warps[2][32];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, num_warps = blockDim.x / 32;
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int each = ceil_div(list.tiles, blockDim.x), first = min(list.tiles, thread * each);
    const int last = min(list.tiles, first + each);
    const int overhead = p.overhead;
    int mine = 0, there = 0, longest = 0;
    for (int i = first; i < last; ++i) {
        const int length = list.lengths[i];
        int n = -1;
        if (length >= 0) {
            n = (length + 63) / 64;
            mine += n, ++there, longest = max(longest, n);
        }
        blocks[i] = n;
    }
    mine = __reduce_add_sync(~0u, mine), there = __reduce_add_sync(~0u, there);
    longest = -__reduce_min_sync(~0u, -longest);
    if (lane == 0) sums[0][warp] = mine, sums[1][warp] = there, sums[2][warp] = longest;
    __syncthreads();
    const int all_blocks = __reduce_add_sync(~0u, lane < num_warps ? sums[0][lane] : 0);
    const int all_there = __reduce_add_sync(~0u, lane < num_warps ? sums[1][lane] : 0);
    longest = -__reduce_min_sync(~0u, lane < num_warps ? -sums[2][lane] : 0);
    const int min_blocks = max(p.min_blocks, blockIdx.x == 0 ? 1 : ceil_div(longest, MOST_PREFIX_SPLITS));
    const int least = max(min_blocks, ceil_div(all_blocks, p.ctas));
    const int share = max(min_blocks, ceil_div(all_blocks + overhead * all_there, p.ctas));
    const int most = share + share / 32;
    Measure measure{overhead, min_blocks, share, 0};
    for (int candidate = warp; candidate < CANDIDATES; candidate += num_warps) {
        measure.even = least + ceil_div(candidate * (most - least), CANDIDATES - 1);
        int splits = 0;
        for (int i = lane; i < list.tiles; i += 32) splits += measure.pieces(blocks[i]);
        splits = __reduce_add_sync(~0u, splits);
        if (lane == 0) candidates[candidate] = splits <= p.ctas ? measure.even : NONE;
    }
    __syncthreads();
    const int even = __reduce_min_sync(~0u, lane < CANDIDATES ? candidates[lane] : NONE);
    measure.even = even == NONE ? 0 : even;

    mine = 0;
    for (int i = first; i < last; ++i) mine += measure.extent(blocks[i]);
    u32 line, all, slots = 0;
    int at = exclusive_sum(mine, warps[0], line);
    const int total = line;
    // slots, and in the high bits requests to merge
    auto splits_of = [&](int i) -> u32 {
        const int n = measure.splits(start[i], blocks[i]);
        const bool merge = i < list.requests && (n > 1 || (p.prefix_tile && p.prefix_tile[i] >= 0));
        return u32(n) | u32(merge) << 20;
    };
    for (int i = first; i < last; ++i) {
        start[i] = at;
        at += measure.extent(blocks[i]);
        slots += splits_of(i);
    }
    slots = exclusive_sum(slots, warps[1], all);
    for (int i = first; i < last; ++i) {
        const u32 more = splits_of(i);
        list.num_splits[i] = list.first_slot + (slots & 0xfffff);
        if (more >> 20) p.merges[1 + (slots >> 20)] = i;
        slots += more;
    }
    if (thread == 0) {
        list.num_splits[list.tiles] = list.first_slot + (all & 0xfffff);
        if (list.requests) p.merges[0] = all >> 20;
    }

    const int end = last_at_most(start, list.tiles, total - 1) + 1;  // behind the last tile that is there
    auto boundary = [&](int cta) -> Boundary {
        const int x = cta * share;
        if (x >= total) return {end, 0, 0};
        const int tile = last_at_most(start, list.tiles, x), block = x - start[tile] - overhead;
        if (block < min_blocks) return {tile, 0, 0};
        if (blocks[tile] - block < min_blocks) return {tile + 1, 0, 0};
        return {tile, block, cta - measure.first_inside(start[tile]) + 1};
    };
    for (int cta = thread; cta < p.ctas; cta += blockDim.x) {
        int4 work = make_int4(end, 0, end - 1, 0);
        int split = 0;
        if (measure.even) {
            if (cta < total) {
                const int tile = last_at_most(start, list.tiles, cta), n = blocks[tile], of = measure.pieces(n);
                split = cta - start[tile];
                work = make_int4(tile, split * n / of, tile, (split + 1) * n / of);
            }
        } else {
            const Boundary from = boundary(cta), to = boundary(cta + 1);
            split = from.split;
            const int whole = to.tile > 0 ? max(blocks[to.tile - 1], 0) : 0;
            work = make_int4(from.tile, from.block, to.block ? to.tile : to.tile - 1, to.block ? to.block : whole);
        }
        list.work[2 * cta] = work;
        list.work[2 * cta + 1] = make_int4(split, 0, 0, 0);
    }
}
