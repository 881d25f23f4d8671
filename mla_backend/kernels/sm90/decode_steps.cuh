// The steps of a warpgroup: S of a block, its softmax, P V, and the output of a tile.
#pragma once
#include "decode_blocks.cuh"

static constexpr int FRAGMENT_ROWS = ROWS > 8 ? 2 : 1;  // rows of a thread that are not garbage

struct Lane {
    int wg, thread, warp, lane, r, t;  // warpgroup, then in it; row r (and r + 8), columns 2 t of a fragment
    __device__ __forceinline__ int row(int i) const { return 16 * warp + r + 8 * i; }
    __device__ __forceinline__ bool active() const { return 16 * warp < ROWS; }
};

// Begins S of a block, box by box as they come.
__device__ __forceinline__ void multiply_keys(Shared& s, float (&x)[32], const Ring& ring) {
    const u32 q = descriptor_low(cast_smem_ptr_to_uint(s.q));
    const u32 rope = warp_uniform(descriptor_low(cast_smem_ptr_to_uint(s.rope[ring.rope()])));
    const u32 half[2] = {warp_uniform(descriptor_low(cast_smem_ptr_to_uint(s.half[ring.half(0)]))),
                         warp_uniform(descriptor_low(cast_smem_ptr_to_uint(s.half[ring.half(1)])))};
    warpgroup_fence_operand(x);
#pragma unroll
    for (int i = 0; i < 9; ++i) {
        const int box = (i + 8) % 9;  // the order of the fetches
        const u32 k = box == 8 ? rope : half[box / 4] + box % 4 * (BOX >> 4);
        if (box == 8) s.rope_full[ring.rope()].wait(ring.rope_parity());
        else s.half_full[ring.half(box / 4)][box % 4].wait(ring.half_parity(box / 4));
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_m64n64k16(x, q + box * ROWS * 8 + step * 2, k + step * 2, i + step > 0);
    }
    warpgroup_commit_batch();
}

// Rows of the last block beyond the tile's keys may hold anything, NaN too: 0 * NaN must not reach O.
__device__ __forceinline__ void clear_values(Shared& s, const Ring& ring, int valid, int thread) {
    for (int i = thread; i < (BLOCK - valid) * 64; i += 128) {
        const int row = valid + i / 64, chunk = i % 64;
        unsigned char* box = s.half[ring.half(chunk / 32)] + chunk / 8 % 4 * BOX;
        *reinterpret_cast<uint4*>(box + swizzled(row, chunk % 8)) = make_uint4(0, 0, 0, 0);
    }
}

// S of a block is in x, of which row(i) sees visible[i] tokens: makes P, and updates maxima and sums.
__device__ __forceinline__ void softmax(Shared& s, float (&x)[32], float (&sum)[2], const Lane& at, int buffer,
                                        int slot, bool first, const int (&visible)[2], float scale_log2) {
    if (visible[0] < BLOCK || visible[1] < BLOCK)
#pragma unroll
        for (int e = 0; e < 32; ++e)
            x[e] = e / 4 * 8 + 2 * at.t + e % 2 < visible[e / 2 % 2] ? x[e] : -INF;
#pragma unroll
    for (int i = 0; i < FRAGMENT_ROWS; ++i) {
        float top = -INF;
#pragma unroll
        for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(x[4 * j + 2 * i], x[4 * j + 2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float before = first ? -INF : s.top[buffer ^ 1][at.row(i)];
        top = fmaxf(before, top);
        const float shift = top == -INF ? 0.f : top * scale_log2;
        const float keep = ex2(before * scale_log2 - shift);
        if (at.t == 0) s.top[buffer][at.row(i)] = top, s.keep[buffer][at.row(i)] = keep;
        float total = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float &a = x[4 * j + 2 * i], &b = x[4 * j + 2 * i + 1];
            a = ex2(a * scale_log2 - shift), b = ex2(b * scale_log2 - shift);
            total += a + b;
        }
        sum[i] = sum[i] * keep + total;
    }
    // matrix m of a stmatrix: rows 8 (m % 2).., tokens 8 (j + m / 2)..
    const u32 p = cast_smem_ptr_to_uint(s.rope[slot]);
    const int row = 16 * at.warp + at.lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        stmatrix(p + swizzled(row, j + at.lane / 16),
                 {pack_bf16(x[4 * j], x[4 * j + 1]), pack_bf16(x[4 * j + 2], x[4 * j + 3]),
                  pack_bf16(x[4 * j + 4], x[4 * j + 5]), pack_bf16(x[4 * j + 6], x[4 * j + 7])});
}

// Begins O += P V of a block, this warpgroup's 256 channels.
__device__ __forceinline__ void multiply_values(Shared& s, float (&o)[128], const Lane& at, const Ring& ring,
                                                const float (&keep)[2]) {
#pragma unroll
    for (int e = 0; e < 128; ++e)
        if (e / 2 % 2 < FRAGMENT_ROWS) o[e] *= keep[e / 2 % 2];
    const u32 p = warp_uniform(descriptor_low(cast_smem_ptr_to_uint(s.rope[ring.rope()])));
    const u32 v = warp_uniform(descriptor_low(cast_smem_ptr_to_uint(s.half[ring.half(at.wg)]), BOX));
    warpgroup_fence_operand(o);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_m64n256k16(o, p + step * 2, v + step * 128);
    warpgroup_commit_batch();
}

// Row i of a fragment to memory, as bf16 or fp32: lanes 2 n and 2 n + 1 trade halves, so that each has four
// channels side by side.
__device__ __forceinline__ void store_row(const float (&o)[128], int i, float factor, u16* direct, float* partial,
                                          const Lane& at) {
    const bool odd = at.t & 1;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
        const float* a = o + 4 * j + 2 * i;
        const float* b = a + 4;
        const float x = __shfl_xor_sync(~0u, odd ? a[0] : b[0], 1), y = __shfl_xor_sync(~0u, odd ? a[1] : b[1], 1);
        float4 v = odd ? make_float4(x, y, b[0], b[1]) : make_float4(a[0], a[1], x, y);
        v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
        if (direct)
            *reinterpret_cast<uint2*>(direct + 8 * j) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        if (partial) *reinterpret_cast<float4*>(partial + 8 * j) = v;
    }
}

// O of a segment goes out. slot < 0: the tile has one split, and this is it.
__device__ __forceinline__ void write_out(const Params& p, Shared& s, const float (&o)[128], const QueryTile& tile,
                                          const Lane& at, int slot, int last_buffer, bool empty) {
#pragma unroll
    for (int i = 0; i < FRAGMENT_ROWS; ++i) {
        const int row = at.row(i);
        const bool valid = row < tile.rows;
        const Row q = query_row(p, tile, valid ? row : 0);
        const i64 direct = i64(q.request) * p.query_tokens * p.heads + q.index;
        const i64 partial = i64(slot) * p.partial_rows + (p.tiles ? row : q.index);
        const float total = s.sums[0][row] + s.sums[1][row];
        const bool none = empty || total == 0.f;
        const float top = none ? 0.f : s.top[last_buffer][row] * p.scale * LOG2E;
        const float lse = lg2(total) + top;
        if (at.wg == 0 && at.t == 0 && valid) {
            if (slot < 0) p.lse[direct] = none || total != total ? INF : lse * LN2;
            else p.partial_lse[partial] = none ? -INF : lse;
        }
        float weight = total;
        if (slot < 0 && p.sinks) weight += ex2(p.sinks[q.head] * LOG2E - top);
        const float factor = none ? 0.f : 1.f / weight;
        const int channel = 256 * at.wg + 8 * (at.t & 1) + 4 * (at.t >> 1);
        store_row(o, i, factor, valid && slot < 0 ? p.out + direct * 512 + channel : nullptr,
                  valid && slot >= 0 ? p.partial_out + partial * 512 + channel : nullptr, at);
    }
}
