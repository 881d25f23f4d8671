// Split-KV MLA decode for Hopper: up to 64 query rows (query tokens x heads) are the M side of wgmma.
//
//   S [rows, 64 tokens]    = scale Q [rows, 576] K^T
//   O [rows, 512 channels] += P [rows, 64] V             V = the first 512 channels of K's tile
//
// A CTA has one row of the work list: consecutive 64-token blocks of consecutive query tiles. One warp
// fetches K by TMA. Two warpgroups take turns with S and the softmax, a block each, and both multiply P and
// V, 256 channels each; so S of one block runs during the softmax of the other, and no outputs need merging.
// A tile of which one CTA has every block is written as bf16, others as fp32 partials with a base-2 LSE.
//
// Shared memory keeps ROPES boxes of 64 RoPE channels and HALVES halves of a block, 256 channels each. A
// block's P takes the place of its RoPE box, which S was the last to read.
//
// Constants: ROWS, the query rows in shared memory (wgmma computes 64 and those beyond ROWS are garbage that
// stays in its own rows); HALVES, ROPES; READ_ONCE, for the L2 hint of a cache that is.
// The page size is a multiple of 16: a block within one page is nine fetches, one across pages 36.
#include "mla.cuh"
#include "params.cuh"

// Tensor maps must lie on 64 bytes.
struct __align__(64) AlignedParams : Params {};

static constexpr int BLOCK = 64, PIECE = 16, BOX = BLOCK * 128, HALF = 4 * BOX;
static constexpr int FRAGMENT_ROWS = ROWS > 8 ? 2 : 1;  // rows of a thread that are not garbage

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

// 16 bytes of row `row` and chunk `chunk` of 128-byte rows with the 128-byte swizzle.
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
                                          ClusterTransactionBarrier& full, int channel, bool whole, int valid, int row, int page,
                                          int lane) {
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

__device__ __forceinline__ void attend(const Params& p, Shared& s, const int4& work, int first_split,
                                       const Lane& at) {
    const float scale_log2 = p.scale * LOG2E;
    Ring ring;        // of the block whose P V is next
    u32 p_phase = 0;  // bit b: parity of p_ready[b]
    QueryTile tile = query_tile(p, work.x);
    wait_on_dependent_grids();
    launch_dependent_grids();
    read_queries(p, s, tile, at.wg * 128 + at.thread);
    for (int number = work.x; number <= work.z; ++number) {
        const int slots = p.num_splits[number], splits = p.num_splits[number + 1] - slots;
        const bool partial = splits > 1 || tile.flags & ALWAYS_PARTIAL;
        int limit[2];  // tokens that row(i) sees, from the tile's first
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            limit[i] = tile.kv_end;
            if (p.causal && !(tile.flags & NO_CAUSAL_MASK) && at.row(i) < tile.rows) {
                const Row q = query_row(p, tile, at.row(i));
                limit[i] = min(limit[i], p.lengths[q.request] - (p.query_tokens - 1 - q.token));
            }
            limit[i] -= tile.kv_begin;
        }
        cp_async_fence(), cp_async_wait<0>();
        tma_store_fence();
        const Segment part(work, number, tile);
        sync_consumers();
        float o[128], sum[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < 128; ++e) o[e] = 0;
        // One copy of each step, for the instruction cache. A wgmma and its wait stand in the same
        // straight line of code: else the compiler serialises them.
        for (int n = part.begin - 1; n < part.end; ++n) {
            const bool mine = n + 1 < part.end && ((n + 1 - part.begin) & 1) == at.wg;
            const int buffer = (n + 1 - part.begin) & 1;
            Ring next = ring;
            if (n >= part.begin) ++next.block;
            float x[32];
#pragma unroll
            for (int e = 0; e < 32; ++e) x[e] = 0;
            if (mine) {
                multiply_keys(s, x, next);
                warpgroup_wait<0>();
                warpgroup_fence_operand(x);
            }
            if (n >= part.begin) {
                s.p_ready[buffer ^ 1].wait(p_phase >> (buffer ^ 1) & 1);
                p_phase ^= 1 << (buffer ^ 1);
                float keep[2] = {1, 1};
                if (at.active()) keep[0] = s.keep[buffer ^ 1][at.row(0)], keep[1] = s.keep[buffer ^ 1][at.row(1)];
                if (at.wg != (buffer ^ 1)) sum[0] *= keep[0], sum[1] *= keep[1];
                multiply_values(s, o, at, ring, keep);
                warpgroup_wait<0>();
                warpgroup_fence_operand(o);
                if (at.lane == 0) s.half_empty[ring.half(at.wg)].arrive();
                if (at.lane == 1) s.rope_empty[ring.rope()].arrive();
            }
            if (mine) {
                const int position = (n + 1) * BLOCK;
                const int visible[2] = {limit[0] - position, limit[1] - position};
                if (at.active()) softmax(s, x, sum, at, buffer, next.rope(), n + 1 == part.begin, visible,
                                         scale_log2);
                const int valid = tile.kv_end - tile.kv_begin - position;
                if (valid < BLOCK) clear_values(s, next, valid, at.thread);
                tma_store_fence();
                __syncwarp();
                if (at.lane == 0) s.p_ready[buffer].arrive();
            }
            ring = next;
        }
        const bool empty = part.begin == part.end;
        // All warps are done with the queries: those of the next tile may come.
        const QueryTile current = tile;
        if (number < work.z) {
            tile = query_tile(p, number + 1);
            read_queries(p, s, tile, at.wg * 128 + at.thread);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
            if (at.t == 0) s.sums[at.wg][at.row(i)] = sum[i];
        }
        sync_consumers();
        const int split = number == work.x ? first_split : 0;
        if (at.active())
            write_out(p, s, o, current, at, partial ? slots + split : -1, (part.end - part.begin - 1) & 1, empty);
    }
}

// The warpgroups that multiply take registers from the one that fetches.
extern "C" __global__ void __launch_bounds__(384, 1) mla_decode(const __grid_constant__ AlignedParams p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tma_descriptor(&p.rope), prefetch_tma_descriptor(&p.latent);
#pragma unroll
        for (int i = 0; i < ROPES; ++i) s.rope_full[i].init(1), s.rope_empty[i].init(8);
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            s.half_empty[i].init(4);
#pragma unroll
            for (int box = 0; box < 4; ++box) s.half_full[i][box].init(1);
        }
        s.p_ready[0].init(4), s.p_ready[1].init(4);
        fence_barrier_init();
    }
    if (!p.prefetch_safe) wait_on_dependent_grids();
    const int cta = blockIdx.x / p.row_tiles;
    const int4 work = p.work[2 * cta];
    const int split = p.work[2 * cta + 1].x;
    __syncthreads();
    if (work.x > work.z) return;
    if (warp >= 8) {
        warpgroup_reg_dealloc<24>();
        launch_dependent_grids();
        if (warp == 8) fetch_blocks(p, s, work, lane);
    } else {
        warpgroup_reg_alloc<240>();
        attend(p, s, work, split, {warp / 4, int(threadIdx.x) % 128, warp % 4, lane, lane / 4, lane % 4});
    }
}
