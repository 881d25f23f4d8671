// A task: one sequence and value head, or a half of its value rows.
//
// Compile-time: SEGMENTS (tasks are segments of sequences, segments.cuh).
#pragma once

#include "offsets.cuh"
#include "params.cuh"
#ifndef SEGMENTS
#define SEGMENTS 0
#endif
#if SEGMENTS
#include "segments.cuh"
#endif

struct Task {
    int half;        // of the 128 value rows
    int head, n;     // value head; sequence
    i64 begin, end;  // its tokens
    int chunks;
    i64 first;  // chunk

#if SEGMENTS
    Segment segment;

    __device__ __forceinline__ Task(const Params& p, int number, int half_of_values)
        : Task(p, find_segment(p, number / p.num_value_heads), number % p.num_value_heads,
               half_of_values) {}
    __device__ __forceinline__ Task(const Params& p, const Segment& of, int value_head,
                                    int half_of_values)
        : half(half_of_values), head(value_head), n(of.n), segment(of) {
        const int before = of.index * p.segment_chunks;  // chunks of the sequence
        const i64 end_of_sequence = sequence_offset(p.cu_seqlens, n + 1);
        begin = sequence_offset(p.cu_seqlens, n) + static_cast<i64>(before) * C;
        end = min(begin + static_cast<i64>(p.segment_chunks) * C, end_of_sequence);
        chunks = of.count ? static_cast<int>((end - begin + (C - 1)) / C) : 0;
        first = p.chunk_offsets[n] + before;
    }
    // where segment i of the sequence has its results
    __device__ __forceinline__ i64 place(const Params& p, int i) const {
        return segment_and_head(p, segment.number - segment.index + i, head);
    }
    // Where the state lies that the segment starts from: the end of the one before. In place of the
    // last one's end is the sequence's own state, which may be overwritten before it is read here.
    __device__ __forceinline__ i64 place_of_start(const Params& p) const {
        return place(p, (segment.index ? segment.index : segment.count) - 1);
    }
#else
    __device__ __forceinline__ Task(const Params& p, int number, int half)
        : Task(p, number % p.num_value_heads, half,
               p.sequence_order[number / p.num_value_heads]) {}
    __device__ __forceinline__ Task(const Params& p, int head, int half, int n)
        : Task(p, head, half, n, sequence_offset(p.cu_seqlens, n),
               sequence_offset(p.cu_seqlens, n + 1)) {}
    __device__ __forceinline__ Task(const Params& p, int head, int half, int n, i64 begin, i64 end)
        : half(half), head(head), n(n), begin(begin), end(end),
          chunks(static_cast<int>((end - begin + C - 1) / C)), first(p.chunk_offsets[n]) {}
#endif
    // chunks of the sequence before the task's, and whether the task's are its last ones
#if SEGMENTS
    __device__ __forceinline__ int chunks_before(const Params& p) const {
        return segment.index * p.segment_chunks;
    }
    __device__ __forceinline__ bool ends_sequence() const {
        return segment.index + 1 == segment.count;
    }
#else
    __device__ __forceinline__ int chunks_before(const Params&) const { return 0; }
    __device__ __forceinline__ bool ends_sequence() const { return true; }
#endif
    // tokens of chunk c, if not more than it can have
    __device__ __forceinline__ int rows(int c) const {
        return static_cast<int>(end - begin) - c * C;
    }
    __device__ __forceinline__ i64 tile(const Params& p, int c) const {
        return (first + c) * p.num_value_heads + head;
    }
};
