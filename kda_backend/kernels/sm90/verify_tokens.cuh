// The tokens of a draft and what is held of the draft before, in a verification from records.
//
// Of a head's 256 threads half 0 has a channel of q and one of v, half 1 one of k and of the gate.
// Up to CHUNK tokens are computed at a time.
#pragma once

#include "step_elements.cuh"
#include "params.cuh"

static constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = D / SPLIT;
static constexpr int CHUNK = 8;  // tokens: keys and queries fill a matrix instruction's 16 rows

static constexpr int GROUP = 4;  // tokens that a thread computes side by side

static constexpr int FACTOR = 2 * D + 16;  // of one token; of two, eight lanes have all banks

struct Place {
    int t, warp, lane, half, channel;
    int rank, head;  // CTA of the head's cluster; value head

    __device__ __forceinline__ explicit Place(int head)
        : t(reread_thread_index()), warp(t / 32), lane(t % 32), half(t / D), channel(t % D),
          rank(blockIdx.x % SPLIT), head(head) {}
};

// Elements of a tensor from one on, and so far apart: less than 2^27, which the host has made sure of.
struct Elements {
    void* ptr;
    int stride;

    template <int TYPE>
    __device__ __forceinline__ static Elements from(void* ptr, i64 first, i64 stride) {
        return {static_cast<char*>(ptr) + first * (TYPE == 2 ? 4 : 2), static_cast<int>(stride)};
    }
    template <int TYPE>
    __device__ __forceinline__ u32 load(int i) const {
        return load_bits<TYPE>(ptr, i * stride);
    }
    template <int TYPE>
    __device__ __forceinline__ void store(int i, u32 bits) const {
        store_bits<TYPE>(ptr, i * stride, bits);
    }
};

// A sequence's draft, and the CTA's value head.
struct Draft {
    i64 slot, row, first;  // of states; of records; its first token
    int tokens, accepted, head;

    Draft() = default;
    __device__ __forceinline__ Draft(const Params& p, i64 n, int head)
        : slot(p.indices[n]), row(p.record_indices[n]), first(n * p.tokens_per_sequence),
          tokens(p.tokens_per_sequence), accepted(p.num_accepted ? p.num_accepted[n] : 0),
          head(head) {
        if (p.cu_seqlens) {
            first = offset(p.cu_seqlens, n);
            tokens = static_cast<int>(offset(p.cu_seqlens, n + 1) - first);
        }
        tokens = min(tokens, p.max_tokens);
        accepted = max(min(accepted, p.max_tokens), 0);
    }
    __device__ __forceinline__ static i64 offset(const void* cu_seqlens, i64 n) {
        return CU_INT64 ? static_cast<const i64*>(cu_seqlens)[n]
                        : static_cast<i64>(static_cast<const int*>(cu_seqlens)[n]);
    }
    __device__ __forceinline__ int held() const { return row >= 0 ? accepted : 0; }
    // Records that are folded before the first chunk of tokens, in chunks of their own.
    __device__ __forceinline__ int early() const {
        return held() > CHUNK ? (held() - 1) / CHUNK * CHUNK : 0;
    }
    __device__ __forceinline__ bool padded(const Params& p) const {
        return slot < 0 || slot == p.null_slot;
    }
    // The CTA's rows of the state.
    __device__ __forceinline__ State* states(const Params& p, const Place& at) const {
        return static_cast<State*>(p.state.ptr) + slot * p.state.stride + at.head * (D * D) +
               at.rank * (ROWS * D);
    }
    // The correction of a token in the CTA's rows, token after token D elements further.
    __device__ __forceinline__ float* corrections(const Params& p, const Place& at,
                                                  int token) const {
        return static_cast<float*>(p.correction.ptr) + row * p.correction.stride +
               (at.head * p.max_tokens + token) * D + at.rank * ROWS;
    }
    // Of the thread's channel: the key of a token, its gate, those of the next token and so on.
    __device__ __forceinline__ Elements keys(const Params& p, const Place& at, int token) const {
        return Elements::from<DT_X>(p.key_gate.ptr,
                                    row * p.key_gate.stride +
                                        (at.head * p.max_tokens + token) * (2 * D) + at.channel,
                                    D);
    }
};

// The tokens of a draft from ``first`` on, or none while ``first`` is negative; before them ``folds``
// records of the tokens before are folded.
struct Chunk {
    int first, tokens, folds, phase;  // phase: parity
    bool begins, ends;

    __device__ __forceinline__ Chunk(const Draft& draft, int first)
        : first(first), tokens(first < 0 ? 0 : min(draft.tokens - first, CHUNK)),
          folds(first == 0 ? draft.held() - draft.early() : CHUNK), phase(first / CHUNK & 1),
          begins(first == -draft.early()), ends(first + CHUNK >= draft.tokens) {}
};

// Keys and decays of up to CHUNK tokens.
struct Records {
    float k[CHUNK][D], decay[CHUNK][D];
};
struct __align__(128) Shared {
    float tile[ROWS * D];  // the state as memory has it, then in fp32 between two chunks
    Records records[2];    // of this chunk, and of the tokens before it
    Draft drafts[WARPS];   // for each warp to have its own
    float u[CHUNK][ROWS];  // corrections of those before, then of this chunk
    union {
        float q[CHUNK][D];
        float products[SPLIT][2 * CHUNK][ROWS + 8];  // of k, then of q, with S, by parts of K
    };
    float factors[CHUNK][FACTOR];  // k D and q D of the tokens, as operand A has them
    float v[CHUNK][ROWS], gate[CHUNK][ROWS];  // gate: of the norm, with its weight
    // of tokens t and i <= t: k_t and q_t times k_i, decayed by the tokens in between
    float kk[CHUNK][CHUNK], qk[CHUNK][CHUNK];
    float beta[CHUNK], r_q[CHUNK], r_k[CHUNK];  // step sizes; factors of q and k
    float squares[CHUNK][WARPS], totals[CHUNK][SPLIT];  // of the outputs, by warps and by CTAs
    ClusterTransactionBarrier arrived;     // the state is there
    ClusterTransactionBarrier norm_ready;  // the totals of all CTAs are there
};
// Read by the host from the compiled kernel.
template __global__ void shared_bytes<sizeof(Shared)>();

// A channel of the short convolution, or of its output where there is none: the tokens of a chunk,
// which begins with token ``first`` of the draft.
struct Channel {
    int number;
    Taps taps;
    u32 bias, window[3];  // the three inputs before, as the pool has them
    u32 x[CHUNK];

    __device__ __forceinline__ void fetch(const Params& p, const Draft& draft,
                                          const Elements& from, int channel, int first,
                                          int tokens) {
        number = channel;
#pragma unroll
        for (int t = 0; t < CHUNK; ++t)
            if (t < tokens) x[t] = from.load<DT_X>(t);
        if (!HAS_CONV) return;
        const int column = HAS_WINDOWS ? 0 : max(draft.accepted - 1, 0);
        const Elements kept = columns(p, draft, column);
#pragma unroll
        for (int i = 0; i < 3; ++i)
            window[i] = first > 0 ? as_kept(from.load<DT_X>(i - 3)) : kept.load<DT_CONV>(i);
        taps = static_cast<const Taps*>(p.conv_weight)[channel];
        if (HAS_BIAS) bias = load_bits<DT_BIAS>(p.conv_bias, channel);
    }
    // The pool's columns of the channel from one on.
    __device__ __forceinline__ Elements columns(const Params& p, const Draft& draft,
                                                int first) const {
        return Elements::from<DT_CONV>(p.conv_state.ptr,
                                       draft.slot * p.conv_state.stride_n +
                                           number * p.conv_state.stride_c +
                                           first * p.conv_state.stride_w,
                                       p.conv_state.stride_w);
    }
    __device__ __forceinline__ static u32 as_kept(u32 x) {
        return DT_CONV == DT_X ? x : to_bits<DT_CONV>(to_float<DT_X>(x));
    }
    // To y[token][channel]: the activated tokens, rounded to their type if ``rounds``. Of a group's
    // tokens that there are not, numbers that nobody takes.
    __device__ __forceinline__ void activate(float* y, int row, bool rounds, int tokens) const {
        float w[3] = {}, start = 0.0f;
        float4 by = {};
        if (HAS_CONV) {
            by = taps_of(taps);
            if (HAS_BIAS) start = to_float<DT_BIAS>(bias);
#pragma unroll
            for (int i = 0; i < 3; ++i) w[i] = to_float<DT_CONV>(window[i]);
        }
#pragma unroll
        for (int first = 0; first < CHUNK; first += GROUP) {
            if (first >= tokens) break;
            float z[GROUP];
#pragma unroll
            for (int t = 0; t < GROUP; ++t) {
                const float input = to_float<DT_X>(x[first + t]);
                z[t] = HAS_CONV ? convolve(by, start, w[0], w[1], w[2], input) : input;
                if (HAS_CONV && rounds) z[t] = to_float<DT_X>(to_bits<DT_X>(z[t]));
                w[0] = w[1];
                w[1] = w[2];
                w[2] = DT_CONV == DT_X ? input : to_float<DT_CONV>(as_kept(x[first + t]));
            }
#pragma unroll
            for (int t = 0; t < GROUP; ++t) y[(first + t) * row] = z[t];
        }
    }
    // Stores what the tokens leave of the window.
    __device__ __forceinline__ void store_window(const Params& p, const Draft& draft, int first,
                                                 int tokens) const {
        if (!HAS_CONV || (HAS_WINDOWS && draft.row < 0)) return;
        if (!HAS_WINDOWS) {
            const Elements to = columns(p, draft, first);
            if (first == 0) {
                to.store<DT_CONV>(0, window[1]);
                to.store<DT_CONV>(1, window[2]);
            }
#pragma unroll
            for (int t = 0; t < CHUNK; ++t)
                if (t < tokens) to.store<DT_CONV>(2 + t, as_kept(x[t]));
            return;
        }
        const i64 at = draft.row * p.windows.stride_n + first * p.windows.stride_t +
                       number * p.windows.stride_c;
        u32 w[3] = {window[0], window[1], window[2]};
#pragma unroll
        for (int t = 0; t < CHUNK; ++t)
            if (t < tokens) {
                w[0] = w[1];
                w[1] = w[2];
                w[2] = as_kept(x[t]);
                const Elements to = Elements::from<DT_WINDOWS>(
                    p.windows.ptr, at + t * p.windows.stride_t, p.windows.stride_w);
#pragma unroll
                for (int i = 0; i < 3; ++i)
                    to.store<DT_WINDOWS>(i, to_bits<DT_WINDOWS>(to_float<DT_CONV>(w[i])));
            }
    }
};

// A thread's inputs of a chunk: of q or k, and of v or the gate.
struct Inputs {
    Channel key, value;
    u32 beta, a_log, dt_bias;

    // A channel of tokens from one on.
    __device__ __forceinline__ static Elements elements_of(const Rows& x, i64 token, int channel) {
        return Elements::from<DT_X>(x.ptr, token * x.stride + channel, x.stride);
    }
    __device__ __forceinline__ static bool has_value(const Place& at) {
        return at.half == 0 && at.channel < ROWS;
    }
    __device__ __forceinline__ void fetch(const Params& p, const Place& at, const Draft& draft,
                                          int first, int tokens) {
        const i64 token = draft.first + first;
        const int own = at.head * D + at.channel, row = own + at.rank * ROWS;
        key.fetch(p, draft,
                  elements_of(at.half ? p.k : p.q, token,
                              at.head / p.heads_per_key * D + at.channel),
                  at.half * p.heads * D + own, first, tokens);
        if (at.half) {
            const Elements gates = elements_of(p.g, token, own);
#pragma unroll
            for (int t = 0; t < CHUNK; ++t)
                if (t < tokens) value.x[t] = gates.load<DT_X>(t);
        } else if (has_value(at)) {
            value.fetch(p, draft, elements_of(p.v, token, row), 2 * p.heads * D + row, first,
                        tokens);
        }
        a_log = p.a_log ? load_bits<DT_A>(p.a_log, at.head) : 0;
        dt_bias = p.dt_bias ? load_bits<DT_DT>(p.dt_bias, own) : 0;
        if (at.t < tokens)
            beta = load_bits<DT_BETA>(p.beta.ptr, (token + at.t) * p.beta.stride + at.head);
    }
    // Its decay_of a gate in the tokens' type.
    __device__ __forceinline__ float decay(const Params& p, u32 gate) const {
        return decay_of(to_float<DT_X>(gate), to_float<DT_A>(a_log), to_float<DT_DT>(dt_bias),
                        p.lower_bound);
    }
    // q, k, v, decays and step sizes of the chunk's tokens. Behind a convolution k is rounded to the
    // tokens' type, so that its record is exact.
    __device__ __forceinline__ void activate(const Params& p, Shared& s, Records& own,
                                             const Place& at, int tokens) const {
        key.activate(&(at.half ? own.k : s.q)[0][at.channel], D, at.half, tokens);
        if (at.half) {
#pragma unroll
            for (int first = 0; first < CHUNK; first += GROUP) {
                if (first >= tokens) break;
                float y[GROUP];
#pragma unroll
                for (int t = 0; t < GROUP; ++t) y[t] = decay(p, value.x[first + t]);
#pragma unroll
                for (int t = 0; t < GROUP; ++t) own.decay[first + t][at.channel] = y[t];
            }
        } else if (has_value(at)) {
            value.activate(&s.v[0][at.channel], ROWS, false, tokens);
        }
        if (at.t < tokens) s.beta[at.t] = activate_beta<BETA>(to_float<DT_BETA>(beta));
    }
    // Windows of the convolution, and keys and gates of records, for which every CTA of the head
    // must have read those before.
    __device__ __forceinline__ void store_tokens(const Params& p, const Records& own,
                                                 const Place& at, const Draft& draft, int first,
                                                 int tokens) const {
        if (has_value(at)) value.store_window(p, draft, first, tokens);
        if (at.rank != 0) return;
        key.store_window(p, draft, first, tokens);
        if (at.half == 0 || draft.row < 0) return;
        const Elements keys = draft.keys(p, at, first);
#pragma unroll
        for (int t = 0; t < CHUNK; ++t)
            if (t < tokens) {
                keys.store<DT_X>(2 * t, to_bits<DT_X>(own.k[t][at.channel]));
                keys.store<DT_X>(2 * t + 1, value.x[t]);
            }
    }
};

// A thread's value row, and every so many-th token of a chunk.
struct RowShare {
    static constexpr int EACH = THREADS / ROWS, TOKENS = CHUNK / EACH;
    int row, token;

    __device__ __forceinline__ explicit RowShare(const Place& at)
        : row(at.t % ROWS), token(at.t / ROWS) {}
    __device__ __forceinline__ int of(int i) const { return token + EACH * i; }
};

// The norm's gates.
struct NormGates {
    u32 weight, gate[RowShare::TOKENS];

    __device__ __forceinline__ void fetch(const Params& p, const Place& at, const Draft& draft,
                                          int first, int tokens) {
        if (!HAS_NORM) return;
        const RowShare share(at);
        const int row = at.rank * ROWS + share.row;
        const Elements from = Elements::from<DT_Z>(
            p.norm_gate.ptr,
            (draft.first + first + share.token) * p.norm_gate.stride + at.head * D + row,
            share.EACH * p.norm_gate.stride);
#pragma unroll
        for (int i = 0; i < RowShare::TOKENS; ++i)
            if (share.of(i) < tokens) gate[i] = from.load<DT_Z>(i);
        weight = load_bits<DT_NORM>(p.norm_weight, row);
    }
    __device__ __forceinline__ void activate(Shared& s, const Place& at) const {
        if (!HAS_NORM) return;
        const RowShare share(at);
        const float by = to_float<DT_NORM>(weight);
#pragma unroll
        for (int i = 0; i < RowShare::TOKENS; ++i)
            s.gate[share.of(i)][share.row] = by * sigmoid(to_float<DT_Z>(gate[i]));
    }
};

// A thread's share of up to CHUNK records that are held: keys and gates those of its half's parity.
struct Held {
    u32 k[CHUNK / 2], g[CHUNK / 2];
    float u[RowShare::TOKENS];

    __device__ __forceinline__ void fetch(const Params& p, const Place& at, const Draft& draft,
                                          int first, int count) {
        const RowShare share(at);
        const Elements keys = draft.keys(p, at, first + at.half);
        const float* const from = draft.corrections(p, at, first + share.token) + share.row;
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i)
            if (2 * i + at.half < count) {
                k[i] = keys.load<DT_X>(4 * i);
                g[i] = keys.load<DT_X>(4 * i + 1);
            }
#pragma unroll
        for (int i = 0; i < RowShare::TOKENS; ++i)
            if (share.of(i) < count) u[i] = from[share.EACH * i * D];
    }
    __device__ __forceinline__ void to_shared(const Params& p, Shared& s, Records& to,
                                              const Place& at, const Inputs& inputs,
                                              int count) const {
        const RowShare share(at);
#pragma unroll
        for (int first = 0; first < CHUNK / 2; first += 2) {
            if (2 * first >= count) break;
            const float decays[2] = {inputs.decay(p, g[first]), inputs.decay(p, g[first + 1])};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int t = 2 * (first + i) + at.half;
                to.k[t][at.channel] = to_float<DT_X>(k[first + i]);
                to.decay[t][at.channel] = decays[i];
            }
        }
#pragma unroll
        for (int i = 0; i < RowShare::TOKENS; ++i) s.u[share.of(i)][share.row] = u[i];
    }
};
