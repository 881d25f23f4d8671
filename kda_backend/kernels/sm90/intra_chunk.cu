// Intra-chunk stage of KDA prefill on Hopper: scores, triangular solve, decayed rows.
//
// Computes what intra.py computes (its docstring gives the equations), but for the solve, for bf16
// q, k, g and K = V = 128. A CTA of 4 warps makes one tile after the other, each of one chunk and
// value head; warp w owns the 16 tokens of row block w:
//
//     leader thread                    all four warps                            copy engine
//     take the next tile               request q, g, bias; load beta             k is on its way
//     its last tile's copies are over                                            k, q arrive
//                                      with CONV: convolve k and q in place
//     set the last tile's flag         norms, diagonal of A_qk   (compute_norms) g arrives
//                                      for each 32 channels:
//     where is the next tile?            log decays              (load_log_decays)
//       its chunk number                 rows decayed inside     (decay_rows)
//                                        their row block, scores there
//                                        operands to other warps (exchange_rows)
//       its tokens                       q_in, -k_in, k_out      (write_decayed_rows)
//                                        scores between blocks   (add_cross_block_scores)
//     q_in, -k_in: to memory             after 64 and 128 channels               q_in, -k_in leave
//                                      invert L's diagonal blocks
//                                      request the next tile's k                 k is on its way
//                                      A_qk T and T^T k_out      (solve)
//     T^T k_out, A_qk T: to memory                                               both leave
//
// The tile is made where its inputs lie: q becomes q_in, k -k_in, g k_out and then T^T k_out; the
// solve's operands lie where q_in has left.
//
// The solve is applied to k_out and A_qk, not to k_in and v: what the state misses of a chunk's
// values, v - k_in S^T, enters state and output through T (docs/families/kda.md), so T^T k_out and A_qk T
// serve as well, and neither v nor w nor u passes through here.
//
// CTAs are persistent and take tiles in the order in which the scan wants them. They wait for no
// other kernel, and the scan is placed only when all of them run, so it may wait for any tile. A
// CTA on an SM that is reserved for the scan makes reserved_sm_tile_cap tiles and ends.
//
// Compile-time: GATE, BETA (kda.cuh); L2NORM; BETA_FP32 (else bf16); MIN_BLOCKS per SM; CONV and
// what it needs (conv_rows.cuh).

#include "intra_cta.cuh"
#include "solve.cuh"

__device__ __forceinline__ void fetch_next_keys(const Params& p, Shared& s, const TileSource& from) {
    fetch_key_halo(p, s, from);
    fetch_keys(p, s, from);
}

// Makes the tile of ``s.source[turn]``, whose keys are on their way, and finds out about the next
// one. At the end its copies to memory have read shared memory, but may not have arrived: the call
// for the next tile waits for that and sets the flag of ``previous`` (a tile, or -1).
__device__ __forceinline__ void make_tile(const Params& p, Shared& s, int turn, const RowLane& at,
                                          i64 tile, i64 previous) {
    const TileSource& source = s.source[turn];
    const int head = source.head, length = source.length;
    const bool is_leader = threadIdx.x == LEADER_THREAD;
    __syncthreads();  // the last tile has been read, and s.next
    fetch_query_halo(p, s, source);
    fetch_queries_and_gates(p, s, source, head, length);
    if (is_leader) {
        --s.tiles_left;
        s.next = take_tile(p, s);
    }
    const float rate = decay_rate(source.a_log);
    load_beta(p, s, source, head, length);
    if (is_leader) tma_store_wait();
    cp_async_wait<1>();
    __syncthreads();
    if (is_leader && previous >= 0) store_release(p.progress->flags() + previous, s.launch);

    convolve_chunk(p, s, source, length);
    const Norms norms = compute_norms(s, at);
    cp_async_wait<0>();
    shift_bias(s.bias, source.a_log);
    __syncthreads();

    const SumMatrices matrix(at);
    u32 inside[2];
    tokens_inside(inside, at, length);
    Scores scores = {};
    const auto meet = [] { __syncthreads(); };
    float* const chunk_decays = p.chunk_decays + tile * D;
#pragma unroll 1
    for (int slice = 0; slice < 4; ++slice) {
        make_slice(scores, p, s, at, slice, norms, matrix, rate, inside, chunk_decays, meet);
        if (slice % 2) tma_store_fence();
        if (slice > 0 && is_leader) find_source(p, s, turn ^ 1, slice);
        __syncthreads();
        if (slice % 2 && is_leader) {  // 64 channels are complete
            const int half = slice / 2, begin = half * (BLOCK_BYTES / 2);
            bulk_copy_s2g(tile_block(p, tile, Q_IN + half), s.q + begin, BLOCK_BYTES);
            bulk_copy_s2g(tile_block(p, tile, K_IN + half), s.k + begin, BLOCK_BYTES);
            if (half) tma_store_wait_read();
        }
    }

    u32 a_diagonal[4];
    float inverse[16];
    diagonal_scores(a_diagonal, s, scores, norms, at);
    __syncwarp();
    invert_diagonal_block(inverse, s, at);
    __syncthreads();  // q_in and k_in have left
    if (s.next < p.num_tiles) fetch_next_keys(p, s, s.source[turn ^ 1]);
    write_solve_operands(s, scores, a_diagonal, inverse, at);
    __syncthreads();
    solve<false>(s.a_qk, at.warp, s, at.lane);
#pragma unroll 1
    for (int m = 2 * at.warp; m < 2 * at.warp + 2; ++m) solve<true>(s.g, m, s, at.lane);
    tma_store_fence();
    __syncthreads();
    if (is_leader) {
        bulk_copy_s2g(tile_block(p, tile, K_OUT), s.g, 2 * BLOCK_BYTES);
        bulk_copy_s2g(tile_block(p, tile, A_QK), s.a_qk, BLOCK_BYTES);
        tma_store_wait_read();
    }
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) intra_chunk(const Params p) {
    const bool on_reserved_sm = sm_index() >= p.first_scan_sm;
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const bool is_leader = threadIdx.x == LEADER_THREAD;
    if (is_leader) {
        atomicAdd(&p.progress->started_intra_ctas, on_reserved_sm ? 1 : 0x10001);
        s.tiles_left = on_reserved_sm ? p.reserved_sm_tile_cap : p.num_tiles;
        s.next = p.num_tiles;
        // If this CTA ended now, the hardware would place a pending CTA on this SM.
        if (s.tiles_left == 0) wait_for_all_ctas(p);
        s.launch = p.progress->launches + 1;
        s.next = take_tile(p, s);
        s.source[0].a_log = s.source[1].a_log = 0.0f;
    }
    __syncthreads();
    launch_dependent_grids();  // the scan resets the counters: every CTA has used them by then
    if (is_leader) {
#pragma unroll
        for (int step = 1; step <= 3; ++step) find_source(p, s, 0, step);
    }
    __syncthreads();
    if (s.next < p.num_tiles) fetch_next_keys(p, s, s.source[0]);
    i64 previous = -1;  // the tile before, which has no flag yet
    // After the last chunk the order has only more of length 0, which are not made.
    for (int turn = 0; s.next < p.num_tiles && s.source[turn].length; turn ^= 1) {
        const i64 tile =
            static_cast<i64>(s.source[turn].chunk) * p.num_value_heads + s.source[turn].head;
        make_tile(p, s, turn, RowLane(reread_thread_index()), tile, previous);
        previous = tile;
    }
    cp_async_fence();
    cp_async_wait<0>();  // keys of a chunk after the last
    if (is_leader) tma_store_wait();
    __syncthreads();
    if (is_leader && previous >= 0) store_release(p.progress->flags() + previous, s.launch);
}
