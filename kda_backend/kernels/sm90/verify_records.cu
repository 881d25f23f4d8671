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

#include "verify_tokens.cuh"

static constexpr int TILES = ROWS / 16;    // of rows: warps that share channels
static constexpr int BLOCKS = 8 / SPLIT;   // of 16 channels that a warp has
static constexpr int QUARTERS = 4 / SPLIT;  // of K that a warp has
static constexpr int FOLD_UNROLL = SPLIT == 4 ? 2 : 1;  // records at a time

__device__ __forceinline__ float dot(float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}
__device__ __forceinline__ float4 multiply(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 load4(const float* p) {
    return *reinterpret_cast<const float4*>(p);
}
// The part of a number that TF32 has.
__device__ __forceinline__ float high_tf32(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}
__device__ __forceinline__ float4 high_tf32(float4 x) {
    return make_float4(high_tf32(x.x), high_tf32(x.y), high_tf32(x.z), high_tf32(x.w));
}
__device__ __forceinline__ float4 subtract(float4 a, float4 b) {
    return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ __forceinline__ float4 select(bool first, float4 a, float4 b) {
    return make_float4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z,
                       first ? a.w : b.w);
}
// c += a b. Lane (g, l) has four channels of a state's row g, b, and by twos a has the same of k D
// and q D of token g: operand A of two products.
__device__ __forceinline__ void multiply_add(float (&c)[4], float4 a01, float4 a23, float4 b) {
    mma_m16n8k8_tf32(c, a01.x, a01.y, a01.z, a01.w, b.x, b.y);
    mma_m16n8k8_tf32(c, a23.x, a23.y, a23.z, a23.w, b.z, b.w);
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

// A warp's share of a state: 16 rows and BLOCKS of 16 channels.
struct WarpState {
    int row, column;  // the lane's first row of the CTA's, and its first channel
    float4 state[2][BLOCKS];

    __device__ __forceinline__ explicit WarpState(const Place& at)
        : row(at.warp % TILES * 16 + at.lane / 4),
          column(at.warp / TILES * (16 * BLOCKS) + at.lane % 4 * 4) {}

    // The element of the lane's State4 or float4 (r, b).
    __device__ __forceinline__ int place(int r, int b) const {
        return (row + 8 * r) * D + column + 16 * b;
    }
    // From what the copy has brought. Lanes of odd rows begin with the second block of two: rows lie
    // in the same banks.
    __device__ __forceinline__ void take(const Shared& s) {
        const State* const tile = reinterpret_cast<const State*>(s.tile) + place(0, 0);
        const bool odd = row % 2;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; b += 2) {
                const State* const from = tile + r * (8 * D) + 16 * b;
                const float4 x = to_float4(*reinterpret_cast<const State4*>(from + 16 * odd));
                const float4 y = to_float4(*reinterpret_cast<const State4*>(from + 16 * !odd));
                state[r][b] = select(odd, y, x);
                state[r][b + 1] = select(odd, x, y);
            }
    }
    __device__ __forceinline__ void put_back(Shared& s) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
                *reinterpret_cast<float4*>(s.tile + place(r, b)) = state[r][b];
    }
    __device__ __forceinline__ void take_back(const Shared& s) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) state[r][b] = load4(s.tile + place(r, b));
    }
    __device__ __forceinline__ void fold(const Shared& s, const Records& records, int count) {
#pragma unroll FOLD_UNROLL
        for (int t = 0; t < count; ++t) {
            const float u[2] = {s.u[t][row], s.u[t][row + 8]};
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const float4 k = load4(&records.k[t][column + 16 * b]);
                const float4 decay = load4(&records.decay[t][column + 16 * b]);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float4 y = multiply(state[r][b], decay);
                    state[r][b] = make_float4(fmaf(u[r], k.x, y.x), fmaf(u[r], k.y, y.y),
                                              fmaf(u[r], k.z, y.z), fmaf(u[r], k.w, y.w));
                }
            }
        }
    }
    // Stores the lane's share of the CTA's rows, ``to``, and goes on with it as it is stored.
    __device__ __forceinline__ void store(State* to) {
        State4* const own = reinterpret_cast<State4*>(to + place(0, 0));
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const State4 x = as_stored4(state[r][b]);
                own[2 * D * r + 4 * b] = x;
                state[r][b] = to_float4(x);
            }
    }
    // The products of the factors and the state, over the warp's channels.
    __device__ __forceinline__ void multiply_factors(Shared& s, const Place& at) const {
        const int g = at.lane / 4, l = at.lane % 4;
        const float* const from = &s.factors[g][2 * (column - 4 * l) + 4 * l];
        float sums[QUARTERS][2][4];
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) {
            float large[2][4] = {}, small[2][4] = {};
#pragma unroll
            for (int b = 2 * i; b < 2 * i + 2; ++b) {
                const float4 x01 = load4(from + 32 * b), x23 = load4(from + 32 * b + 16);
                const float4 high01 = high_tf32(x01), high23 = high_tf32(x23);
                const float4 low01 = subtract(x01, high01), low23 = subtract(x23, high23);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float4 high = high_tf32(state[r][b]);
                    const float4 low = subtract(state[r][b], high);
                    multiply_add(large[r], high01, high23, high);
                    multiply_add(small[r], low01, low23, high);
                    multiply_add(small[r], high01, high23, low);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][r][j] = large[r][j] + small[r][j];
            if (i % 2 == 1) add(sums[i - 1], sums[i]);
        }
        if (QUARTERS == 4) add(sums[0], sums[QUARTERS / 2]);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int kind = 0; kind < 2; ++kind)
                *reinterpret_cast<float2*>(
                    &s.products[at.warp / TILES][CHUNK * kind + g][row - g + 8 * r + 2 * l]) =
                    make_float2(sums[0][r][2 * kind], sums[0][r][2 * kind + 1]);
    }
    __device__ __forceinline__ static void add(float (&to)[2][4], const float (&x)[2][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int j = 0; j < 4; ++j) to[r][j] += x[r][j];
    }
};

// Sums by a binary tree.
__device__ __forceinline__ float sum_of_parts(const float (&x)[SPLIT]) {
    float pairs[2] = {x[0], 0.0f};
#pragma unroll
    for (int i = 0; i < SPLIT / 2; ++i) pairs[i] = x[2 * i] + x[2 * i + 1];
    return SPLIT == 4 ? pairs[0] + pairs[1] : pairs[0];
}
__device__ __forceinline__ float sum_of_8(const float (&x)[8]) {
    const float4 a = load4(x), b = load4(x + 4);
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// The recurrence of a warp's ROWS / 8 rows: each has 2 SPLIT lanes, whose tokens are its own and
// every 2 SPLIT-th after it.
struct RowTokens {
    static constexpr int COUNT = ROWS / WARPS, LANES = 32 / COUNT, TOKENS = CHUNK / LANES;
    int lane, row;  // of the row's lanes; of the CTA's rows
    float u[CHUNK], out[TOKENS];

    __device__ __forceinline__ explicit RowTokens(const Place& at)
        : lane(at.lane / COUNT), row(at.warp * COUNT + at.lane % COUNT) {}

    // The state's product with k of a token, or q of token ``factor`` - CHUNK.
    __device__ __forceinline__ float product(const Shared& s, int factor) const {
        float x[SPLIT];
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) x[i] = s.products[i][factor][row];
        return sum_of_parts(x);
    }
    // Makes the corrections, and stores them. Of tokens that there are not, u is nothing that an
    // earlier token takes.
    __device__ __forceinline__ void correct(const Params& p, Shared& s, const Place& at,
                                            const Draft& draft, int first, int tokens) {
        float* const to = draft.corrections(p, at, first) + row;
        float delta[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            float x = product(s, t);
#pragma unroll
            for (int i = 0; i < t; ++i) x = fmaf(s.kk[t][i], u[i], x);
            delta[t] = s.beta[t] * fmaf(-s.r_k[t], x, s.v[t][row]);
            u[t] = s.r_k[t] * delta[t];
        }
#pragma unroll
        for (int t = 0; t < CHUNK; ++t)
            if (t < tokens && lane == t % LANES) {
                s.u[t][row] = u[t];
                if (draft.row >= 0)
                    to[t * D] = p.by_norm ? u[t] : delta[t];
            }
    }
    __device__ __forceinline__ void multiply(const Shared& s) {
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            const int t = LANES * j + lane;
            float y = product(s, CHUNK + t);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) y = i <= t ? fmaf(s.qk[t][i], u[i], y) : y;
            out[j] = s.r_q[t] * y;
        }
    }
    // Divides by the root mean square over the head's rows; ``phase``: the chunk's parity.
    __device__ __forceinline__ void normalise(const Params& p, Shared& s, const Place& at,
                                              int tokens, int phase) {
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            const int t = LANES * j + lane;
            float sum = fmaf(out[j], out[j], 0.0f);
#pragma unroll
            for (int x = 1; x < COUNT; x *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
            if (t < tokens) {
                out[j] *= s.gate[t][row];
                if (at.lane % COUNT == 0) s.squares[t][at.warp] = sum;
            }
        }
        __syncthreads();
        if (SPLIT > 1) {
            const int t = at.t / SPLIT;
            if (t < tokens)
                store_shared_remote(sum_of_8(s.squares[t]), &s.totals[t][at.rank],
                                    s.norm_ready, at.t % SPLIT);
            s.norm_ready.wait(phase);
        }
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            const int t = LANES * j + lane;
            if (t >= tokens) continue;
            const float sum = SPLIT == 1 ? sum_of_8(s.squares[t]) : sum_of_parts(s.totals[t]);
            out[j] *= rsqrtf(sum * (1.0f / D) + p.eps);
        }
    }
    __device__ __forceinline__ void store_out(const Params& p, const Place& at, const Draft& draft,
                                              int first, int tokens) const {
        const Elements to = Elements::from<DT_X>(
            p.out.ptr,
            (draft.first + first + lane) * p.out.stride + at.head * D + at.rank * ROWS + row,
            LANES * p.out.stride);
#pragma unroll
        for (int j = 0; j < TOKENS; ++j)
            if (LANES * j + lane < tokens) to.store<DT_X>(j, to_bits<DT_X>(out[j]));
    }
};

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

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

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
