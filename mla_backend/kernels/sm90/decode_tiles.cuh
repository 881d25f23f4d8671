// What a CTA of MLA decode works on: tiles of query rows, and segments of the blocks of their keys.
#pragma once
#include "mla.cuh"
#include "params.cuh"

static constexpr int BLOCK = 64;  // tokens

// Query rows row_begin .. row_begin + rows of the members' rows one after the other (a member is a request;
// it has query_tokens x heads rows), and the keys that they all meet.
struct QueryTile {
    int member, row_begin, rows, kv_begin, kv_end;
    int flags;
};
static constexpr int ALWAYS_PARTIAL = 1, NO_CAUSAL_MASK = 2;

__device__ __forceinline__ QueryTile query_tile(const Params& p, int tile) {
    if (p.tiles) {
        const int4 a = p.tiles[2 * tile], b = p.tiles[2 * tile + 1];
        return {a.x, a.y, a.z, a.w, b.x, b.y};
    }
    const int begin = 64 * (blockIdx.x % p.row_tiles), rows = p.heads * p.query_tokens;
    return {tile, begin, min(64, rows - begin), 0, p.lengths[tile], 0};
}
__device__ __forceinline__ int request_of(const Params& p, int member) {
    return p.members ? p.members[member] : member;
}
struct Row { int request, token, head, index; };  // index: of the row in the request
__device__ __forceinline__ Row query_row(const Params& p, const QueryTile& tile, int row) {
    const int rows = p.heads * p.query_tokens, number = tile.row_begin + row;
    const int member = p.members ? number / rows : 0, index = number - member * rows;
    const int token = p.query_tokens > 1 ? index / p.heads : 0;
    return {request_of(p, tile.member + member), token, index - token * p.heads, index};
}

// The blocks [begin, end) of a tile that a CTA computes as one split.
struct Segment {
    int begin, end;
    __device__ __forceinline__ Segment(const int4& work, int number, const QueryTile& tile) {
        const int blocks = (tile.kv_end - tile.kv_begin + BLOCK - 1) / BLOCK;
        begin = number == work.x ? work.y : 0;
        end = number == work.z ? min(work.w, blocks) : blocks;
    }
};
