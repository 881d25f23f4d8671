// Merges the splits of an output row by their log-sum-exp.
//
//   LSE = log2(sum_s 2^lse_s),  out = sum_s 2^(lse_s - LSE) partial_s
//
// FlashMLA's semantics (its combine kernel of April 2025): a row with one split is left alone, since the main
// kernel wrote it; all -inf gives LSE +inf and output 0; a split of scale 0 adds nothing, whatever it holds;
// a sum that is NaN gives LSE +inf. Partial LSEs are base 2, the output's is natural. A sink takes its part of
// the weights and none of the LSE.
//
// The plan lists the requests to merge, so CTAs beyond them leave at once. Few rows: a CTA has 64 channels of
// a row. More: a warp has 128 channels of a row and some of its splits, all of which it loads at once. Many,
// which have few splits each: a warp has a row.
// The main kernel lets this one start early; the plan's lists are read before waiting.
#include "hopper.cuh"
#include "params.cuh"
#include "softmax.cuh"

template __global__ void shared_bytes<0>();
static constexpr int MOST = 160;      // splits of a row
static constexpr int TILE_ROWS = 64;  // of a slot of a shared prefix
static constexpr int MANY = 528;      // rows, of which a warp each has one: half a GPU's warps of this kernel

// The splits of a row: those of the shared prefix, then its own. Split n's partial row is n times as far behind
// the first as a slot has rows.
struct Splits {
    int prefix, count, prefix_begin, own_begin, own_rows;
    __device__ __forceinline__ Splits(const Params& p, int request, int r) : own_rows(p.partial_rows) {
        const int own_slot = p.num_splits[request], own = p.num_splits[request + 1] - own_slot;
        prefix = prefix_begin = 0;
        const int shared = p.prefix_tile ? p.prefix_tile[request] : -1;
        if (shared >= 0) {
            // rows of a tile beyond its own are in the next one
            const int number = p.prefix_row[request] + r;
            const int at = shared + number / TILE_ROWS, slot = p.num_splits[at];
            prefix = p.num_splits[at + 1] - slot, prefix_begin = slot * TILE_ROWS + number % TILE_ROWS;
        }
        own_begin = (own_slot - prefix) * own_rows + r;
        count = min(prefix + own, MOST);
    }
    __device__ __forceinline__ i64 index(int split) const {
        return split < prefix ? prefix_begin + split * TILE_ROWS : own_begin + split * own_rows;
    }
};

// Scales of a row's splits, lane by lane; returns the row's LSE in base 2.
__device__ __forceinline__ float scale_splits(const Params& p, const Splits& row, int head, int lane,
                                              float (&scale)[MOST / 32]) {
    float top = -INF, sum = 0;
#pragma unroll
    for (int i = 0; i < MOST / 32; ++i) {
        const int split = i * 32 + lane;
        scale[i] = split < row.count ? p.partial_lse[row.index(split)] : -INF;
        top = fmaxf(top, scale[i]);
    }
#pragma unroll
    for (int bit = 16; bit; bit /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
    if (top == -INF) top = 0;
#pragma unroll
    for (int i = 0; i < MOST / 32; ++i) sum += ex2(scale[i] - top);
#pragma unroll
    for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    const float all = sum == 0.f || sum != sum ? INF : lg2(sum) + top;
    const float weight = p.sinks && all != INF ? lg2(sum + ex2(p.sinks[head] * LOG2E - top)) + top : all;
#pragma unroll
    for (int i = 0; i < MOST / 32; ++i) scale[i] = ex2(scale[i] - weight);
    return all;
}

__device__ __forceinline__ void add(float4& y, const float4& x, float scale) {
    if (scale == 0.f) return;
    y.x += scale * x.x, y.y += scale * x.y, y.z += scale * x.z, y.w += scale * x.w;
}

// The request of the n-th to merge.
__device__ __forceinline__ int merged_request(const Params& p, int n) { return p.merges ? p.merges[1 + n] : n; }

// 64 channels of a row: 16 lanes of four channels, 16 splits at a time.
__device__ __forceinline__ void combine_slice(const Params& p, int item) {
    constexpr int WAYS = 16, EACH = MOST / WAYS;
    __shared__ float sums[8][64];
    const int number = item / 8, part = item % 8;
    const int request = merged_request(p, number / p.rows), r = number % p.rows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, way = threadIdx.x / 16;
    const Splits row(p, request, r);
    if (row.count <= 1) return;
    wait_on_dependent_grids();
    launch_dependent_grids();
    const float* from = p.partial_out + part * 64 + threadIdx.x % 16 * 4;
    float4 x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i * WAYS + way < row.count)
            x[i] = *reinterpret_cast<const float4*>(from + row.index(i * WAYS + way) * 512);
    float scale[MOST / 32];
    const float all = scale_splits(p, row, r % p.heads, lane, scale);
    float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const float k = __shfl_sync(~0u, scale[i / 2], way + WAYS * (i & 1));
        if (i * WAYS + way < row.count) add(y, x[i], k);
    }
    y.x += __shfl_xor_sync(~0u, y.x, 16), y.y += __shfl_xor_sync(~0u, y.y, 16);
    y.z += __shfl_xor_sync(~0u, y.z, 16), y.w += __shfl_xor_sync(~0u, y.w, 16);
    if (lane < 16) *reinterpret_cast<float4*>(&sums[warp][lane * 4]) = y;
    __syncthreads();
    if (threadIdx.x < 32) {
        float a = 0, b = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) a += sums[w][2 * lane], b += sums[w][2 * lane + 1];
        const i64 to = i64(request) * p.rows + r;
        *reinterpret_cast<u32*>(p.out + to * 512 + part * 64 + 2 * lane) = pack_bf16(a, b);
        if (threadIdx.x == 0 && part == 0) p.lse[to] = all * LN2;
    }
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
                if (split < row.count) x[i] = *reinterpret_cast<const float4*>(from + row.index(split) * 512);
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
        const float* at = from + row.index(min(split, row.count - 1)) * 512;
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
