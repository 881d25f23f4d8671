// Segments of a sequence, which are scanned at the same time (docs/families/kda.md).
//
// A sequence is cut every segment_chunks chunks from its start; an empty one has one segment. A segment turns the state S that it
// starts from into S A + B. Three kernels follow the tiles; each finds by flags what the one before
// has ready, and starts when every CTA of that one has started:
//
//     segment_ends     per head: B of every segment but the last (of the first from the sequence's
//                      own state, which is its end), and A of those between first and last. In
//                      place of the last one's end it leaves the sequence's own state
//     merge_segments   the end of each segment between first and last, in order: S A + B
//     scan             every segment from the end of the one before: the output, the last state
//
// Ends and A of segment and head lie as the kernels keep them: an end as each thread's accumulators
// of 64 value rows, A - diag(decay) as fp16 blocks that wgmma reads (tile.cuh), its decay, over the
// segment, as a chunk's (intra_chunk.cu).
#pragma once

#include "tile.cuh"
#include "params.cuh"

static constexpr int END_BYTES = D * D * 4;             // of 128 value rows
static constexpr int HALF_END_BYTES = END_BYTES / 2;
static constexpr int TRANSITION_BYTES = 4 * BLOCK_BYTES;  // [128, 128]: rows 0 to 63, 64 to 127

// A warp's part of a segment's results lies in memory when its flag holds the number of this
// launch. Flags of a segment and head: of each of the eight warps that share the value rows the
// local end (from zero), the rows of A, and the end itself.
enum SegmentFlag { LOCAL_END = 0, TRANSITION = 8, END = 16, SEGMENT_FLAGS = 24 };

struct Segment {
    int n;       // sequence
    int index;   // in the sequence
    int count;   // segments of the sequence
    int number;  // in the batch
};

__device__ __forceinline__ int segments_of(const Params& p, int n) {
    if (n >= p.num_sequences) return 0;
    const int chunks = p.chunk_offsets[n + 1] - p.chunk_offsets[n];
    return max(1, (chunks + p.segment_chunks - 1) / p.segment_chunks);
}
__device__ __forceinline__ int sum_of_lanes_before_and_own(int x, int lane) {
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, x, by);
        if (lane >= by) x += other;
    }
    return x;
}
// By a whole warp: the sequence with place ``place`` of the batch, where a sequence of m segments
// has places_of(m) places; Segment::index is the place in the sequence, Segment::number the
// number of the sequence's first segment. Past the last place, a sequence of no segments.
template <typename F>
__device__ __forceinline__ Segment find_sequence(const Params& p, int place, F places_of) {
    const int lane = threadIdx.x % 32;
    int first = 0;
    for (int n = 0; n < p.num_sequences; n += 32) {
        const int segments = segments_of(p, n + lane), places = places_of(segments);
        const int segments_to = sum_of_lanes_before_and_own(segments, lane);
        const int places_to = sum_of_lanes_before_and_own(places, lane);
        const u32 there = __ballot_sync(~0u, place < places_to);
        if (there) {
            const int from = __ffs(there) - 1;
            return {n + from, place - __shfl_sync(~0u, places_to - places, from),
                    __shfl_sync(~0u, segments, from),
                    first + __shfl_sync(~0u, segments_to - segments, from)};
        }
        place -= __shfl_sync(~0u, places_to, 31);
        first += __shfl_sync(~0u, segments_to, 31);
    }
    return {0, 0, 0, 0};
}
__device__ __forceinline__ Segment find_segment(const Params& p, int number) {
    Segment x = find_sequence(p, number, [](int segments) { return segments; });
    x.number += x.index;
    return x;
}

__device__ __forceinline__ i64 segment_and_head(const Params& p, int segment, int head) {
    return static_cast<i64>(segment) * p.num_value_heads + head;
}
// The accumulators of a lane, four side by side and those of a warpgroup's threads one after the
// other: 16 times [128 threads][4].
__device__ __forceinline__ float4* end_of(const Params& p, i64 place, int half) {
    return reinterpret_cast<float4*>(p.segment_ends) + (place * 2 + half) * (HALF_END_BYTES / 16) +
           threadIdx.x % 128;
}
__device__ __forceinline__ u32* segment_flag(const Params& p, i64 place, int flag) {
    return p.segment_flags + place * SEGMENT_FLAGS + flag;
}
// Of a whole warp, after all its lanes have stored.
__device__ __forceinline__ void set_segment_flag(const Params& p, i64 place, int flag, u32 launch) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) store_release(segment_flag(p, place, flag), launch);
}
// Until the flag of each lane holds the number of this launch; a lane may have none (null). Not by a
// warp that multiplies: ptxas serialises wgmma where such a loop is.
__device__ __forceinline__ void wait_for_segment(const Params& p, const u32* flag, u32 launch) {
    u32 missing = 1;
    for (u32 polls = 0; missing && polls != MAX_POLLS; ++polls)
        missing = __ballot_sync(~0u, flag != nullptr && load_acquire(flag) != launch);
    if (missing && threadIdx.x % 32 == __ffs(missing) - 1)
        give_up(p.fault, NO_SEGMENT, flag - p.segment_flags, *flag, launch);
    __syncwarp();
}

__device__ __forceinline__ void store_end(float4* to, const float (&state)[64]) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
        to[128 * i] = make_float4(state[4 * i], state[4 * i + 1], state[4 * i + 2],
                                  state[4 * i + 3]);
}
__device__ __forceinline__ void load_end(const float4* from, float (&state)[64]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float4 x = from[128 * i];
        state[4 * i] = x.x, state[4 * i + 1] = x.y;
        state[4 * i + 2] = x.z, state[4 * i + 3] = x.w;
    }
}
