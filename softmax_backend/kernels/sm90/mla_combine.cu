// Merges the splits of output rows (mla_merge.cuh). A row with one split is left alone, since the main kernel
// wrote it.
//
// The plan lists the requests to merge, so CTAs beyond them leave at once. Few rows: a CTA has 64 channels of
// a row. More: a warp has 128 channels of a row and some of its splits, all of which it loads at once. Many,
// which have few splits each: a warp has a row.
// The main kernel lets this one start early; the plan's lists are read before waiting.
#include "mla_merge.cuh"
#include "params.cuh"

template __global__ void shared_bytes<0>();
static constexpr int MANY = 528;  // rows, of which a warp each has one: half a GPU's warps of this kernel

// The splits of a row: those of the shared prefix, then its own.
struct Splits {
    int prefix, own, count, prefix_slot, own_slot, prefix_row, row;
    __device__ __forceinline__ Splits(const Params& p, int request, int r) : row(r) {
        own_slot = p.num_splits[request], own = p.num_splits[request + 1] - own_slot;
        prefix = prefix_slot = prefix_row = 0;
        const int shared = p.prefix_tile ? p.prefix_tile[request] : -1;
        if (shared >= 0) {
            // rows of a tile beyond its 64 are in the next one
            const int number = p.prefix_row[request] + r;
            const int at = shared + number / 64;
            prefix_row = number % 64;
            prefix_slot = p.num_splits[at], prefix = p.num_splits[at + 1] - prefix_slot;
        }
        count = min(prefix + own, MOST);
    }
    __device__ __forceinline__ i64 index(const Params& p, int split) const {
        return split < prefix ? i64(prefix_slot + split) * p.partial_rows + prefix_row
                              : i64(own_slot + split - prefix) * p.partial_rows + row;
    }
};

// The request of the n-th to merge.
__device__ __forceinline__ int merged_request(const Params& p, int n) { return p.merges ? p.merges[1 + n] : n; }

// 64 channels of a row.
__device__ __forceinline__ void combine_slice(const Params& p, int item) {
    __shared__ float sums[8][64];
    const int number = item / 8, part = item % 8;
    const int request = merged_request(p, number / p.rows), r = number % p.rows;
    const Splits row(p, request, r);
    if (row.count <= 1) return;
    wait_on_dependent_grids();
    launch_dependent_grids();
    merge_slice(p, row, i64(request) * p.rows + r, r % p.heads, part, threadIdx.x, sums,
                [] { __syncthreads(); });
}

// 128 channels of a row by `ways` neighbouring warps, each with every ways-th split, eight at a time. An item
// that is not there takes part in the barriers alone.
__device__ __forceinline__ void combine_quarter(const Params& p, int item, int items, int ways) {
    constexpr int EACH = 8;
    __shared__ float sums[8][128];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, way = warp % ways;
    const bool there = item < items;
    const int number = there ? item / 4 : 0, part = item % 4;
    const int request = merged_request(p, number / p.rows), r = number % p.rows;
    const Splits row(p, request, r);
    const bool merges = there && row.count > 1;
    float4 y = make_float4(0, 0, 0, 0);
    float all = 0;
    if (merges) {
        const float* from = p.partial_out + part * 128 + lane * 4;
        float4 x[EACH];
        auto load = [&](int first) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int split = first + i * ways + way;
                if (split < row.count) x[i] = *reinterpret_cast<const float4*>(from + row.index(p, split) * 512);
            }
        };
        load(0);  // while the scales are found
        float scale[MOST / 32];
        all = scale_splits(p, row, r % p.heads, lane, scale);
        for (int first = 0; first < row.count; first += EACH * ways) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int split = first + i * ways + way;
                float k = scale[0];
#pragma unroll
                for (int j = 1; j < MOST / 32; ++j) k = split / 32 == j ? scale[j] : k;
                k = __shfl_sync(~0u, k, split % 32);
                if (split < row.count) add(y, x[i], k);
            }
            load(first + EACH * ways);
        }
    }
    if (ways > 1) {
        *reinterpret_cast<float4*>(&sums[warp][lane * 4]) = y;
        __syncthreads();
        for (int w = 1; w < ways && way == 0; ++w) {
            const float4 z = *reinterpret_cast<float4*>(&sums[warp + w][lane * 4]);
            y.x += z.x, y.y += z.y, y.z += z.z, y.w += z.w;
        }
        __syncthreads();
    }
    if (!merges || way > 0) return;
    const i64 to = i64(request) * p.rows + r;
    *reinterpret_cast<uint2*>(p.out + to * 512 + part * 128 + lane * 4) =
        make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
    if (lane == 0 && part == 0) p.lse[to] = all * LN2;
}

// A whole row by a warp, two splits at a time.
__device__ __forceinline__ void combine_row(const Params& p, int number) {
    const int lane = threadIdx.x % 32, request = merged_request(p, number / p.rows), r = number % p.rows;
    const Splits row(p, request, r);
    if (row.count <= 1) return;
    const float* from = p.partial_out + lane * 4;
    float4 x[2][4], y[4];
    auto load = [&](int buffer, int split) {
        const float* at = from + row.index(p, min(split, row.count - 1)) * 512;
#pragma unroll
        for (int e = 0; e < 4; ++e) x[buffer][e] = *reinterpret_cast<const float4*>(at + e * 128);
    };
    load(0, 0), load(1, 1);  // while the scales are found
    float scale[MOST / 32];
    const float all = scale_splits(p, row, r % p.heads, lane, scale);
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < MOST / 32; ++i)  // scale[i] needs a constant i
        for (int j = 0; j < 32 && i * 32 + j < row.count; j += 2) {
            const int split = i * 32 + j;
            const float a = __shfl_sync(~0u, scale[i], j), b = __shfl_sync(~0u, scale[i], j + 1);
#pragma unroll
            for (int e = 0; e < 4; ++e) add(y[e], x[0][e], a);
            if (split + 2 < row.count) load(0, split + 2);
#pragma unroll
            for (int e = 0; e < 4; ++e) add(y[e], x[1][e], b);  // b is 0 beyond the last split
            if (split + 3 < row.count) load(1, split + 3);
        }
    const i64 to = i64(request) * p.rows + r;
    if (lane == 0) p.lse[to] = all * LN2;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        *reinterpret_cast<uint2*>(p.out + to * 512 + e * 128 + lane * 4) =
            make_uint2(pack_bf16(y[e].x, y[e].y), pack_bf16(y[e].z, y[e].w));
}

extern "C" __global__ void __launch_bounds__(256) mla_combine(const __grid_constant__ Params p) {
    // the plan was over before the main kernel let this one start
    const int rows = (p.merges ? p.merges[0] : p.requests) * p.rows, ctas = gridDim.x;
    if (rows * 8 <= ctas) {
        if (int(blockIdx.x) < rows * 8) combine_slice(p, blockIdx.x);
        return;
    }
    if (rows > MANY) {
        if (int(blockIdx.x) * 8 >= rows) return;
        wait_on_dependent_grids();
        launch_dependent_grids();
        for (int row = blockIdx.x * 8 + threadIdx.x / 32; row < rows; row += ctas * 8) combine_row(p, row);
        return;
    }
    const int warps = ctas * 8, items = rows * 4;
    const int ways = items * 8 <= warps ? 8 : items * 4 <= warps ? 4 : items * 2 <= warps ? 2 : 1;
    const int each = 8 / ways;  // items of a CTA
    if (int(blockIdx.x) * each >= items) return;
    wait_on_dependent_grids();
    launch_dependent_grids();
    for (int base = blockIdx.x * each; base < items; base += ctas * each)
        combine_quarter(p, base + threadIdx.x / 32 / ways, items, ways);
}
