// The verification of drafts from records on Hopper, K = V = 128: what kernels/verify_records.py
// computes, with one pass over a state for eight tokens.
//
// Of a head's state S, after what is held has been folded into it, and with D_t the product of the
// decays of tokens 1 to t,
//
//     S_t k_t before its update = S D_t k_t + sum over i < t of (k_t D_t / D_i k_i) u_i
//     u_t = beta_t (v_t / |k_t| - that / |k_t|^2)         S_t = S D_t + sum over i <= t of u_i (..)
//     S_t q_t                   = S D_t q_t + sum over i <= t of (q_t D_t / D_i k_i) u_i
//
// so the state meets all tokens in one product, and what is left is a triangular recurrence for
// each value row. D_t / D_i is multiplied up from the decays in between: nothing is divided, and a
// decay may be 0.
//
// A head has SPLIT CTAs of eight warps, one for each 128 / SPLIT of its value rows, in a cluster:
//
//     threads  channels: convolution, norm's factors and gates of the tokens; decays of what is held
//              -------- __syncthreads --------            cluster_arrive: have read window, records
//     threads  factors k_t D_t and q_t D_t                                      (make_factors)
//     warps    token i: k_t D_t / D_i k_i, and of q_t, for all t                (multiply_tokens)
//              cluster_wait: windows and the keys and gates of records are stored
//              -------- __syncthreads --------
//     warps    16 rows, 128 / SPLIT channels: fold; store; S times the factors  (WarpState)
//     warps    ROWS / 8 rows: recurrence, records' corrections, outputs         (RowTokens)
//              squares of the outputs to all CTAs, norm, output
//
// The product is one of tensor cores with three passes of TF32: a number is the sum of two of its
// numbers. Lane (g, l) = (lane / 4, lane % 4) has rows g and g + 8 of the 16, and of each 16
// channels 4 l to 4 l + 3. They are operand B of two products as they lie there: a product may have
// its channels in any order, which is that of the factors, its operand A.
//
// A draft of more tokens is computed in chunks of eight. In between a state waits in shared memory,
// and the next chunk begins by folding the records of the chunk before. Of more than eight held
// records the first are folded likewise, in chunks without tokens.
//
// SPLIT does not change the bits: sums over K are those of its quarters, and the norm's is a binary
// tree over the head's rows. Nor does the number of tokens change those of an earlier one.
//
// Compile-time: SPLIT, MIN_BLOCKS per SM, GATE, BETA, L2NORM, HAS_CONV, HAS_BIAS, HAS_NORM,
// HAS_WINDOWS (buffers, else they roll in their pool), CU_INT64, DT_* (step_elements.cuh).

#include "verify_rows.cuh"
#include "verify_state.cuh"

__device__ __forceinline__ float dot(float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}
// The factors k D or q D of the chunk's tokens, of the thread's channel.
__device__ __forceinline__ void make_factors(Shared& s, const Records& own, const Place& at,
                                             int tokens) {
    const float* from = &(at.half ? own.k : s.q)[0][at.channel];
    const int block = at.channel / 16, l = at.channel / 4 % 4, j = at.channel % 4;
    float* const to = &s.factors[0][32 * block + 16 * (j / 2) + 4 * l + 2 * (j % 2) + !at.half];
    float decay = 1.0f;
#pragma unroll
    for (int first = 0; first < CHUNK; first += GROUP) {
        if (first >= tokens) break;
        float x[GROUP];
#pragma unroll
        for (int t = 0; t < GROUP; ++t) {
            decay *= own.decay[first + t][at.channel];
            x[t] = from[(first + t) * D] * decay;
        }
#pragma unroll
        for (int t = 0; t < GROUP; ++t) to[(first + t) * FACTOR] = x[t];
    }
}

// Halves the numbers that a lane has sums of: those with bit 2 N keep the upper N.
template <int N>
__device__ __forceinline__ void halve(float (&x)[16], int lane) {
    const bool upper = lane & (2 * N);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float kept = upper ? x[j + N] : x[j], given = upper ? x[j] : x[j + N];
        x[j] = kept + __shfl_xor_sync(0xffffffffu, given, 2 * N);
    }
}
// Sums of 16 numbers over a warp: that of x[j] in lanes 2 j and 2 j + 1.
__device__ __forceinline__ float sums_of_16(float (&x)[16], int lane) {
    halve<8>(x, lane);
    halve<4>(x, lane);
    halve<2>(x, lane);
    halve<1>(x, lane);
    return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 1);
}

// The products of the warp's token, k_i, with those from it on, and the norms of k_i and q_i.
__device__ __forceinline__ void multiply_tokens(const Params& p, Shared& s, const Records& own,
                                                const Place& at, int tokens) {
    const int i = at.warp, c = 4 * at.lane;
    if (i >= tokens) return;
    float4 k = load4(&own.k[i][c]);
    const float4 q = load4(&s.q[i][c]);
    float x[2 * CHUNK] = {dot(k, k), dot(q, k)};
#pragma unroll
    for (int d = 1; d < CHUNK; ++d) x[2 * d] = x[2 * d + 1] = 0.0f;
#pragma unroll
    for (int first = 0; first < CHUNK; first += GROUP) {
        if (i + max(first, 1) >= tokens) break;
#pragma unroll
        for (int d = max(first, 1); d < first + GROUP; ++d) {
            const int t = min(i + d, CHUNK - 1);  // what is not a token's is not taken
            k = multiply(k, load4(&own.decay[t][c]));
            x[2 * d] = dot(k, load4(&own.k[t][c]));
            x[2 * d + 1] = dot(k, load4(&s.q[t][c]));
        }
    }
    float qq = dot(q, q);
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) qq += __shfl_xor_sync(0xffffffffu, qq, lane);
    const float sum = sums_of_16(x, at.lane);
    const int t = i + at.lane / 4;
    if (at.lane == 0) {
        s.r_k[i] = L2NORM ? rsqrtf(sum + 1e-6f) : 1.0f;
        s.r_q[i] = p.scale * (L2NORM ? rsqrtf(qq + 1e-6f) : 1.0f);
    } else if (at.lane % 2 == 0 && t < tokens) {
        (at.lane % 4 ? s.qk : s.kk)[t][i] = sum;
    }
}

// The totals of so many tokens will come from the head's CTAs.
__device__ __forceinline__ void expect_totals(Shared& s, const Place& at, int tokens) {
    if (HAS_NORM && SPLIT > 1 && at.t == 0 && tokens > 0)
        s.norm_ready.arrive_and_expect_tx(min(tokens, CHUNK) * sizeof(s.totals[0]));
}
// Begins to copy the CTA's rows of the state.
__device__ __forceinline__ void fetch_state(Shared& s, const Place& at, const State* from) {
    constexpr u32 BYTES = sizeof(State) * ROWS * D;
    if (at.t != 0) return;
    s.arrived.init(1);
    if (HAS_NORM && SPLIT > 1) s.norm_ready.init(1);
    fence_barrier_init();
    tma_store_fence();
    s.arrived.arrive_and_expect_tx(BYTES);
    bulk_copy_g2s(s.tile, from, BYTES, s.arrived, create_policy<EVICT_NORMAL>());
}

// From what memory has of a chunk to what its tokens and records are to a state.
__device__ __forceinline__ void prepare(const Params& p, Shared& s, int first) {
    const Draft draft = s.drafts[reread_thread_index() / 32];
    const Place at(draft.head);
    const Chunk chunk(draft, first);
    Records& own = s.records[chunk.phase];
    Inputs inputs = {};
    inputs.fetch(p, at, draft, first, chunk.tokens);
    NormGates gates = {};
    gates.fetch(p, at, draft, first, chunk.tokens);
    if (first <= 0) {
        Held held = {};
        held.fetch(p, at, draft, first + draft.early(), chunk.folds);
        held.to_shared(p, s, s.records[1 - chunk.phase], at, inputs, chunk.folds);
    }
    inputs.activate(p, s, own, at, chunk.tokens);
    gates.activate(s, at);
    __syncthreads();
    if (SPLIT > 1 && first == 0) cluster_arrive_relaxed();  // has read windows and records
    make_factors(s, own, at, chunk.tokens);
    multiply_tokens(p, s, own, at, chunk.tokens);
    if (SPLIT > 1 && first == 0) cluster_wait();
    inputs.store_tokens(p, own, at, draft, first, chunk.tokens);
    __syncthreads();
}

// The state through the records before the chunk, and its products with the chunk's tokens.
__device__ __forceinline__ void advance(const Params& p, Shared& s, int first) {
    const Draft draft = s.drafts[reread_thread_index() / 32];
    const Place at(draft.head);
    const Chunk chunk(draft, first);
    WarpState state(at);
    if (chunk.begins) {
        s.arrived.wait(0);
        state.take(s);
    } else {
        state.take_back(s);
    }
    state.fold(s, s.records[1 - chunk.phase], chunk.folds);
    if (first == 0 && draft.held() > 0) state.store(draft.states(p, at));
    if (!chunk.ends) {
        if (DT_STATE != 2) __syncthreads();  // all have taken what the copy has brought
        state.put_back(s);
    }
    if (first < 0) return;
    state.multiply_factors(s, at);
    if (SPLIT == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

// The chunk's corrections and outputs.
__device__ __forceinline__ void finish(const Params& p, Shared& s, int first) {
    const Draft draft = s.drafts[reread_thread_index() / 32];
    const Place at(draft.head);
    const Chunk chunk(draft, first);
    RowTokens rows(at);
    rows.correct(p, s, at, draft, first, chunk.tokens);
    rows.multiply(s);
    if (HAS_NORM) rows.normalise(p, s, at, chunk.tokens, chunk.phase);
    rows.store_out(p, at, draft, first, chunk.tokens);
    expect_totals(s, at, draft.tokens - first - CHUNK);
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS)
    verify_records(const __grid_constant__ Params p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const int number = blockIdx.x / SPLIT, sequence = number / p.heads;
    const Place at(number - sequence * p.heads);
    launch_dependent_grids();
    wait_on_dependent_grids();
    Draft draft(p, sequence, at.head);
    // what a sequence without tokens holds, it goes on holding
    if (draft.padded(p) || draft.tokens <= 0) {  // the same in all CTAs of the head
        RowTokens rows(at);
        for (int j = 0; j < RowTokens::TOKENS; ++j) rows.out[j] = 0.0f;
        for (int first = 0; first < draft.tokens; first += CHUNK)
            rows.store_out(p, at, draft, first, draft.tokens - first);
        return;
    }
    fetch_state(s, at, draft.states(p, at));
    expect_totals(s, at, draft.tokens);
    draft.row = compiler_fence(draft.row);  // which nothing above waits for
    if (at.lane == 0) s.drafts[at.warp] = draft;
    __syncwarp();
#pragma unroll 1
    for (int first = -draft.early();; first += CHUNK) {
        prepare(p, s, first);
        advance(p, s, first);
        if (first >= 0) finish(p, s, first);
        if (first + CHUNK >= s.drafts[at.warp].tokens) return;
        if (SPLIT == 1) {
            __syncthreads();
        } else {
            cluster_sync();
        }
    }
}
