// Merging inside the main kernel: when all splits of a tile have come, and who merges which of its rows.
//
// A tile has a word in global memory, 0 between launches. Its low bits count the splits whose partials lie in
// memory. LAST: whoever brings the last split merges all rows. TOGETHER: each waits for the others, and the
// k-th to come merges the k-th share. No result depends on the order, since splits are summed in theirs.
//
// Nobody has to wait for a CTA that has not started: one that has looked POLLS times in vain leaves, and so do
// the others then; the last to come, who learns of it as it arrives, merges all rows.
#pragma once
#include "mla.cuh"
#include "mla_merge.cuh"

enum { COMBINE = 0, LAST = 1, TOGETHER = 2 };  // MERGE: in a kernel of its own, or here
static constexpr u32 ARRIVED = 0x3ff, LEFT = 0x400, DONE = 0x10000;
static constexpr int FEW = 4;  // splits that a warp merges by itself

struct OwnSplits {
    int slot, count, row;
    template <typename Params>
    __device__ __forceinline__ i64 index(const Params& p, int split) const {
        return i64(slot + split) * p.partial_rows + row;
    }
};

struct Share { int number, of; };  // of == 0: none

// The partial tiles of a CTA: its first and its last at most, since it has those between whole.
struct PartialTile {
    int tile, slot, splits;
    u32 before;  // what arriving has read
};
struct PartialTiles {
    int count;
    PartialTile of[2];

    // One thread, after all have met that wrote a split's partials.
    __device__ __forceinline__ void arrive(u32* word, int tile, int slot, int splits) {
        fence_acq_rel();
        of[count++] = {tile, slot, splits, atomicAdd(word, 1)};
    }
};

// One thread of a CTA that has arrived: waits if it has to. `clears`: this CTA is the last to look at the word.
__device__ __forceinline__ Share share_of(u32* word, u32 before, int splits, bool& clears) {
    const bool last = (before & ARRIVED) + 1 == splits;
    Share share = {0, last};
    clears = last;
    if (MERGE == TOGETHER) {
        u32 seen = before + 1;
        for (int polls = 0; (seen & ARRIVED) != splits && !(seen & LEFT); ++polls) {
            if (polls < POLLS) {
                seen = load_acquire(word);
            } else {
                const u32 found = atomicCAS(word, seen, seen | LEFT);
                seen = found == seen ? seen | LEFT : found;
            }
        }
        if (!(seen & LEFT)) share = {int(before & ARRIVED), splits};
    }
    fence_acq_rel();
    if (MERGE == TOGETHER) clears = atomicAdd(word, DONE) / DONE + 1 == splits;
    return share;
}

// Two rows by a warp, two splits at a time; the second may be the first again.
template <typename Params>
__device__ __forceinline__ void merge_rows(const Params& p, const OwnSplits (&row)[2], i64 to, int lane) {
    const float* from = p.partial_out + lane * 4;
    const int count = row[0].count;
    float4 x[2][2][4], y[2][4];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* at = from + row[i % 2].index(p, min(first + i / 2, count - 1)) * 512;
#pragma unroll
            for (int e = 0; e < 4; ++e) x[i % 2][i / 2][e] = *reinterpret_cast<const float4*>(at + e * 128);
        }
    };
    load(0);  // while the scales are found
    float scale[2][MOST / 32], all[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        all[r] = scale_splits(p, row[r], row[r].row % p.heads, lane, scale[r]);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[r][e] = make_float4(0, 0, 0, 0);
    }
    for (int first = 0; first < count; first += 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // a scale beyond the last split is 0
            const float k = __shfl_sync(~0u, scale[i % 2][0], first + i / 2);
#pragma unroll
            for (int e = 0; e < 4; ++e) add(y[i % 2][e], x[i % 2][i / 2][e], k);
        }
        if (first + 2 < count) load(first + 2);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i64 at = to + row[r].row;
        if (r && row[1].row == row[0].row) break;
        if (lane == 0) p.lse[at] = all[r] * LN2;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            *reinterpret_cast<uint2*>(p.out + at * 512 + e * 128 + lane * 4) =
                make_uint2(pack_bf16(y[r][e].x, y[r][e].y), pack_bf16(y[r][e].z, y[r][e].w));
    }
}

// A share of the rows [begin, end) of a request, by 256 threads. `to` is its first row of the outputs.
template <typename Params>
__device__ __forceinline__ void merge_share(const Params& p, Share share, int slot, int splits, int begin, int end,
                                            i64 to, int thread, float (*sums)[64]) {
    const int count = min(splits, MOST), warp = thread / 32;
    if (count > FEW) {
        for (int item = begin * 8 + share.number; item < end * 8; item += share.of) {
            const OwnSplits row = {slot, count, item / 8};
            merge_slice(p, row, to + row.row, row.row % p.heads, item % 8, thread, sums,
                        [] { sync_consumers(); });
            sync_consumers();
        }
        return;
    }
    const int warps = share.of * 8;
    for (int r = begin + share.number * 8 + warp; r < end; r += 2 * warps) {
        const OwnSplits rows[2] = {{slot, count, r}, {slot, count, r + warps < end ? r + warps : r}};
        merge_rows(p, rows, to, thread % 32);
    }
}
