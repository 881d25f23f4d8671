// Blocks of keys and tiles of queries on their way into shared memory.
//
// Shared memory keeps ROPES boxes of 64 RoPE channels and HALVES halves of a block, 256 channels each. A
// block's P takes the place of its RoPE box, which S was the last to read.
// The page size is a multiple of 16: a block within one page is nine fetches, one across pages 36.
#pragma once
#include "decode_tiles.cuh"

static constexpr int PIECE = 16, BOX = BLOCK * 128, HALF = 4 * BOX;

struct __align__(1024) Shared {
    unsigned char q[9][ROWS * 128];
    unsigned char rope[ROPES][BOX];    // then P [64 rows, 64 tokens]
    unsigned char half[HALVES][HALF];
    float keep[2][64], top[2][64];     // what of O stays; the highest logit so far
    float sums[2][64];
    ClusterTransactionBarrier rope_full[ROPES], half_full[HALVES][4];
    ClusterBarrier rope_empty[ROPES], half_empty[HALVES], p_ready[2];
};
static_assert(ROWS % 8 == 0 && ROWS <= 64, "rows");
static_assert(sizeof(Shared) <= 232448, "shared memory");
template __global__ void shared_bytes<sizeof(Shared)>();

// Byte offset of 16-byte chunk `chunk` of row `row`, in rows of 128 bytes with the 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

struct Ring {  // blocks so far
    int block = 0;
    __device__ __forceinline__ int rope() const { return block % ROPES; }
    __device__ __forceinline__ u32 rope_parity() const { return block / ROPES & 1; }
    __device__ __forceinline__ int half(int which) const { return (2 * block + which) % HALVES; }
    __device__ __forceinline__ u32 half_parity(int which) const { return (2 * block + which) / HALVES & 1; }
};

static constexpr u64 HINT = READ_ONCE ? 0x12F0000000000000 : 0x1000000000000000;

// One box of 64 channels: whole, or in pieces of 16 rows that lie in several pages. All lanes call it.
__device__ __forceinline__ void fetch_box(const TensorMap* map, const TensorMap* pieces, unsigned char* to,
                                          ClusterTransactionBarrier& full, int channel, bool whole, int valid, int row,
                                          int page, int lane) {
    if (lane == 0) full.arrive_and_expect_tx(whole ? BOX : valid * PIECE * 128);
    __syncwarp();
    if (whole ? lane == 0 : lane < valid)
        tma_load_3d(cast_smem_ptr_to_uint(to) + (whole ? 0 : lane * PIECE * 128), whole ? map : pieces, channel,
                    row, page, full, HINT);
}

__device__ __forceinline__ void fetch_blocks(const Params& p, Shared& s, const int4& work, int lane) {
    constexpr int PIECES = BLOCK / PIECE, AHEAD = 32 / PIECES;  // blocks whose pages a warp holds
    Ring ring;
    bool waited = false;
    for (int number = work.x; number <= work.z; ++number) {
        const QueryTile tile = query_tile(p, number);
        const int* pages = p.block_table + i64(request_of(p, tile.member)) * p.table_stride;
        const Segment all(work, number, tile);
        for (int base = all.begin; base < all.end; base += AHEAD) {
            const int position = tile.kv_begin + base * BLOCK + lane * PIECE;
            const int number_of_page = position / p.page_size;
            int page = 0;
            if (position < tile.kv_end && position < tile.kv_begin + all.end * BLOCK) page = pages[number_of_page];
            const int row = position - number_of_page * p.page_size;
            const int count = min(AHEAD, all.end - base);
            if (!waited) wait_on_dependent_grids(), waited = true;  // the cache may be the last kernel's work
            for (int i = 0; i < count; ++i, ++ring.block) {
                const int left = tile.kv_end - tile.kv_begin - (base + i) * BLOCK;
                const int valid = min(PIECES, (left + PIECE - 1) / PIECE);
                const bool whole = __shfl_sync(~0u, row, i * PIECES) + BLOCK <= p.page_size;
                const int piece = i * PIECES + (whole ? 0 : lane % PIECES);
                const int r = __shfl_sync(~0u, row, piece), g = __shfl_sync(~0u, page, piece);
                s.rope_empty[ring.rope()].wait(ring.rope_parity() ^ 1);
                fetch_box(&p.rope, &p.rope_pieces, s.rope[ring.rope()], s.rope_full[ring.rope()], 0, whole, valid,
                          r, g, lane);
#pragma unroll
                for (int box = 0; box < 8; ++box) {
                    const int half = ring.half(box / 4);
                    if (box % 4 == 0) s.half_empty[half].wait(ring.half_parity(box / 4) ^ 1);
                    fetch_box(&p.latent, &p.latent_pieces, s.half[half] + box % 4 * BOX,
                              s.half_full[half][box % 4], 64 * box, whole, valid, r, g, lane);
                }
            }
        }
    }
}

// Begins to copy a tile's queries; 256 threads.
__device__ __forceinline__ void read_queries(const Params& p, Shared& s, const QueryTile& tile, int thread) {
#pragma unroll 3
    for (int i = thread; i < ROWS * 72; i += 256) {
        const int row = i / 72, chunk = i - row * 72;
        const bool valid = row < tile.rows;
        const Row at = query_row(p, tile, valid ? row : 0);
        const i64 token = i64(at.request) * p.query_tokens + at.token;
        const u16* from = chunk < 64
            ? p.q_latent + token * p.stride_q_latent_t + at.head * p.stride_q_latent_h + chunk * 8
            : p.q_rope + token * p.stride_q_rope_t + at.head * p.stride_q_rope_h + (chunk - 64) * 8;
        cp_async_cacheglobal_zfill(cast_smem_ptr_to_uint(s.q[chunk / 8] + swizzled(row, chunk % 8)), from, valid);
    }
}
