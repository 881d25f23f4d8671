// One KDA decode step of a layer on Hopper, K = V = 128: what kernels/decode_step.py computes.
//
// A head's state is SPLIT shares of ROWS = 128 / SPLIT value rows, one for each block. Each of its
// WARPS warps has rows of its own, which it fetches, updates in registers and stores without
// waiting for other warps. Up to eight rows it fetches into registers (DIRECT), more by bulk copies
// into shared memory.
//
// What the kernel before this one does not write (slot, state, window and weights) is fetched while
// that kernel still runs, if the caller says so (settled).
//
// The blocks of a head are a cluster: all have read the convolution's window before one of them
// shifts it, and each sends its part of the norm's sum to all.
//
// Eight lanes share a row, 16 channels each, so a warp has four rows at a time and the products
// with the state (S k and S q in one pass: o = S_old q + (k q) delta) take three shuffles. What
// concerns a row alone (v, norm, output) is done by one of its lanes.
//
// SPLIT, WARPS, MIN_BLOCKS, LOAD_HINT, STORE_HINT, GATE, BETA, L2NORM, HAS_CONV, HAS_BIAS, HAS_NORM,
// STATE_BF16 and DT_* come as definitions: types of tensors are 0 (bf16), 1 (fp16) or 2 (fp32).

#include "step_device.cuh"

static constexpr int D = 128, THREADS = 32 * WARPS, ROWS = D / SPLIT;
static constexpr int WARP_ROWS = ROWS / WARPS;
static_assert(WARP_ROWS >= 4, "a warp has four rows at a time");
static_assert(WARP_ROWS <= 32, "a lane for each row");
#define DIRECT (128 / SPLIT / WARPS <= 8)
static constexpr int CHUNK_ROWS = WARP_ROWS < 8 ? WARP_ROWS : 8, CHUNKS = WARP_ROWS / CHUNK_ROWS;
static constexpr int STEPS = CHUNK_ROWS / 4;  // rows of a chunk, four at a time
static constexpr int FIRST_K = THREADS > D ? D : 0;  // thread of channel 0 of k
// blocks of a head wait for one another: for the window, and before they write to each other
static constexpr bool MEETS = SPLIT > 1 && (HAS_CONV || HAS_NORM);
static constexpr float LOG2E = 1.4426950408889634f;

struct Params {
    const void *q, *k, *v, *g, *beta;  // [N, H or HV, 128]; beta [N, HV]
    const void *a_log, *dt_bias;       // [HV], [HV, 128], or null
    void* state;                       // [slots, HV, 128, 128]
    const int* indices;                // [N]
    void* conv_state;                  // [slots, C, W] by strides
    const void *conv_weight, *conv_bias, *norm_weight, *norm_gate;
    void* out;                         // [N, HV, 128]
    i64 stride_q, stride_k, stride_v, stride_g, stride_beta, stride_state;
    i64 stride_conv_n, stride_conv_c, stride_conv_w, stride_gate, stride_out;
    int heads, heads_per_key, null_slot;
    float lower_bound, scale, eps;
    int settled;  // the kernel before writes neither pools, indices nor weights
};
static_assert(sizeof(Params) == PARAM_BYTES, "struct Params differs from the host's");

#if STATE_BF16
typedef u16 State;
typedef uint2 State4;
#else
typedef float State;
typedef float4 State4;
#endif

struct Shared {
#if !DIRECT
    State tile[ROWS * D];
#endif
    float q[D], k[D], decay[D];
    float squares[SPLIT][WARPS];  // of the outputs of each warp of the head
    u64 told;                     // the squares of all blocks are there
#if !DIRECT
    u64 arrived[WARPS][CHUNKS];
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "struct Shared differs from the host's");

__device__ __forceinline__ float from_bf16(u32 x) { return __uint_as_float(x << 16); }
// An element as it lies in memory. What is made of it waits for it, and so would the loads behind.
template <int TYPE>
__device__ __forceinline__ u32 load_bits(const void* p, i64 i) {
    return TYPE == 2 ? static_cast<const u32*>(p)[i] : static_cast<const u16*>(p)[i];
}
template <int TYPE>
__device__ __forceinline__ float to_float(u32 bits) {
    bits = known(bits);
    return TYPE == 2 ? __uint_as_float(bits) : TYPE == 1 ? from_fp16(bits) : from_bf16(bits);
}
template <int TYPE>
__device__ __forceinline__ void store_bits(void* p, i64 i, u32 bits) {
    if (TYPE == 2) {
        static_cast<u32*>(p)[i] = bits;
    } else {
        static_cast<u16*>(p)[i] = bits;
    }
}
template <int TYPE>
__device__ __forceinline__ void store(void* p, i64 i, float x) {
    if (TYPE == 2) {
        static_cast<float*>(p)[i] = x;
    } else {
        static_cast<u16*>(p)[i] = TYPE == 1 ? to_fp16(x) : static_cast<u16>(to_bf16(x, 0.0f));
    }
}
// The four taps of a channel as they lie in memory, 16 or 8 bytes aligned.
#if DT_TAPS == 2
typedef float4 Taps;
__device__ __forceinline__ float4 taps_of(Taps x) { return x; }
#else
typedef uint2 Taps;
__device__ __forceinline__ float4 taps_of(Taps x) {
    return make_float4(to_float<DT_TAPS>(x.x & 0xffff), to_float<DT_TAPS>(x.x >> 16),
                       to_float<DT_TAPS>(x.y & 0xffff), to_float<DT_TAPS>(x.y >> 16));
}
#endif

__device__ __forceinline__ float sigmoid(float x) {
    return rcp(1.0f + ex2(-LOG2E * x));
}
// log2(1 + e^x), without overflow for large x and without cancellation for very negative x
__device__ __forceinline__ float softplus_log2(float x) {
    float y = x * LOG2E, e = ex2(fminf(y, 40.0f));
    float series = LOG2E * e * (1.0f - e * (0.5f - e * (0.33333333f - e * 0.25f)));
    return e < 0.03f ? series : fmaxf(lg2(1.0f + e), y);
}

// A channel of the short convolution: the window, the taps, then both at work.
struct Channel {
    u32 x0, x1, x2, x, bias;
    Taps taps;
    __device__ __forceinline__ void fetch(const Params& p, i64 slot, int channel) {
        if (!HAS_CONV) return;
        i64 at = slot * p.stride_conv_n + channel * p.stride_conv_c;
        x0 = load_bits<DT_CONV>(p.conv_state, at);
        x1 = load_bits<DT_CONV>(p.conv_state, at + p.stride_conv_w);
        x2 = load_bits<DT_CONV>(p.conv_state, at + 2 * p.stride_conv_w);
        taps = static_cast<const Taps*>(p.conv_weight)[channel];
        if (HAS_BIAS) bias = load_bits<DT_BIAS>(p.conv_bias, channel);
    }
    __device__ __forceinline__ float activated() const {
        if (!HAS_CONV) return to_float<DT_X>(x);
        const float4 w = taps_of(taps);
        float y = HAS_BIAS ? to_float<DT_BIAS>(bias) : 0.0f;
        y += w.x * to_float<DT_CONV>(x0) + w.y * to_float<DT_CONV>(x1);
        y += w.z * to_float<DT_CONV>(x2) + w.w * to_float<DT_X>(x);
        return y * sigmoid(y);
    }
    __device__ __forceinline__ void shift(const Params& p, i64 slot, int channel) const {
        i64 at = slot * p.stride_conv_n + channel * p.stride_conv_c;
        store_bits<DT_CONV>(p.conv_state, at, x1);
        store_bits<DT_CONV>(p.conv_state, at + p.stride_conv_w, x2);
        store<DT_CONV>(p.conv_state, at + 2 * p.stride_conv_w, to_float<DT_X>(x));
    }
};

__device__ __forceinline__ float4 to_float4(float4 x) { return x; }
__device__ __forceinline__ float4 to_float4(uint2 x) {
    return make_float4(from_bf16(x.x), __uint_as_float(x.x & 0xffff0000u), from_bf16(x.y),
                       __uint_as_float(x.y & 0xffff0000u));
}
__device__ __forceinline__ void store4(float4* p, float4 x, u64 policy) {
    store_global(p, x, policy);
}
__device__ __forceinline__ void store4(uint2* p, float4 x, u64 policy) {
    store_global(p, make_uint2(to_bf16(x.x, x.y), to_bf16(x.z, x.w)), policy);
}
__device__ __forceinline__ float dot(float4 a, float4 b) {
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
// Sum over the eight lanes that share a row.
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

static constexpr u32 CHUNK_BYTES = sizeof(State) * CHUNK_ROWS * D;
static constexpr int ROW4 = D / 4;  // of a row of states, by fours
#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS)
    decode_step(const __grid_constant__ Params p) {
    Shared& s = *reinterpret_cast<Shared*>(shared_memory());
    const int t = threadIdx.x, warp = t / 32, lane = t % 32, column = lane % 8;
    const int rank = blockIdx.x % SPLIT, head = blockIdx.x / SPLIT % p.heads;
    const i64 n = blockIdx.x / SPLIT / p.heads;
    // a thread has channel t of q and the decay, channel t_k of k, and row `row` of the head's
    // values, the lane / 8th of the column'th four rows of its warp
    const int t_k = t - FIRST_K, row = rank * ROWS + warp * WARP_ROWS + 4 * column + lane / 8;
    const bool has_q = t < D, has_k = t_k >= 0 && t_k < D, has_row = column < WARP_ROWS / 4;
    // The kernel before this one may still run while blocks of this one are placed; these lines are
    // nothing for a launch that does not overlap.
    let_next_kernel_start();
    if (!p.settled) wait_for_kernel_before();
    const i64 slot = p.indices[n];
    if (HAS_NORM && SPLIT > 1 && t == 0) {
        init_barrier(&s.told);
        expect(&s.told, sizeof(s.squares));
    }
#if !DIRECT
    u64* arrived = s.arrived[warp];
    if (lane == 0) {
        for (int c = 0; c < CHUNKS; ++c) init_barrier(&arrived[c]);
    }
#endif
    if (lane == 0) publish_barriers();
    __syncwarp();
    const i64 out_at = n * p.stride_out + head * D + row;
    if (slot < 0 || slot == p.null_slot) {  // the same in all blocks of the head
        if (p.settled) wait_for_kernel_before();
        if (has_row) store<DT_X>(p.out, out_at, 0.0f);
        return;
    }
    // the states of this warp
    State* const tile = static_cast<State*>(p.state) + slot * p.stride_state + head * (D * D) +
                        (rank * ROWS + warp * WARP_ROWS) * D;
    // of this lane: every fourth row, every eighth four channels
    State4* const state = reinterpret_cast<State4*>(tile) + lane / 8 * ROW4 + column;
#if DIRECT
    State4 fetched[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            fetched[i][j] = load_global(state + 4 * i * ROW4 + 8 * j, policy<LOAD_HINT>());
        }
    }
#else
    const State4* const shared_state =
        reinterpret_cast<State4*>(s.tile + (warp * WARP_ROWS + lane / 8) * D) + column;
    if (lane == 0) {
        for (int c = 0; c < CHUNKS; ++c) {
            fetch(s.tile + (warp * WARP_ROWS + c * CHUNK_ROWS) * D, tile + c * CHUNK_ROWS * D,
                  CHUNK_BYTES, &arrived[c], policy<LOAD_HINT>());
        }
    }
#endif

    const int c_q = head * D + t, c_k = (p.heads + head) * D + t_k;
    const int c_v = (2 * p.heads + head) * D + row;
    Channel q = {}, k = {}, v = {};
    u32 g = 0, rate = 0, bias = 0, weight = 0, gate = 0;
    if (has_q) {
        rate = p.a_log ? load_bits<DT_A>(p.a_log, head) : 0;
        bias = p.dt_bias ? load_bits<DT_DT>(p.dt_bias, head * D + t) : 0;
        q.fetch(p, slot, c_q);
    }
    if (has_k) k.fetch(p, slot, c_k);
    if (has_row) {
        v.fetch(p, slot, c_v);
        if (HAS_NORM) weight = load_bits<DT_NORM>(p.norm_weight, row);
    }
    const int key = head / p.heads_per_key * D;
    const i64 at_beta = known(n * p.stride_beta + head);
    const i64 at_g = known(n * p.stride_g + head * D + t);
    const i64 at_q = known(n * p.stride_q + key + t), at_k = known(n * p.stride_k + key + t_k);
    const i64 at_v = known(n * p.stride_v + head * D + row);
    const i64 at_gate = HAS_NORM ? known(n * p.stride_gate + head * D + row) : 0;
    if (p.settled) wait_for_kernel_before();
    const u32 beta_bits = load_bits<DT_BETA>(p.beta, at_beta);
    if (has_q) {
        g = load_bits<DT_G>(p.g, at_g);
        q.x = load_bits<DT_X>(p.q, at_q);
    }
    if (has_k) k.x = load_bits<DT_X>(p.k, at_k);
    if (has_row) {
        v.x = load_bits<DT_X>(p.v, at_v);
        if (HAS_NORM) gate = load_bits<DT_Z>(p.norm_gate, at_gate);
    }

    if (has_q) {
        const float r = ex2(to_float<DT_A>(rate) * LOG2E), x = to_float<DT_G>(g);
        const float raw_gate = x + to_float<DT_DT>(bias);
        float decay = x * LOG2E;
        if (GATE == 1) decay = -r * softplus_log2(raw_gate);
        if (GATE == 2) decay = p.lower_bound * LOG2E * sigmoid(r * raw_gate);
        s.q[t] = q.activated();
        s.decay[t] = ex2(decay);
    }
    if (has_k) s.k[t_k] = k.activated();
    const float value = v.activated();
    __syncthreads();
    if (MEETS) cluster_arrive();  // this block has started, and has read the window
    auto shift_window = [&] {
        if (has_q && rank == 0) q.shift(p, slot, c_q);
        if (has_k && rank == 0) k.shift(p, slot, c_k);
        if (has_row) v.shift(p, slot, c_v);
    };
    if (HAS_CONV && SPLIT == 1) shift_window();

    float4 b_q[4], b_k[4], b_decay[4];
    float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        b_q[j] = *reinterpret_cast<const float4*>(&s.q[32 * j + 4 * column]);
        b_k[j] = *reinterpret_cast<const float4*>(&s.k[32 * j + 4 * column]);
        b_decay[j] = *reinterpret_cast<const float4*>(&s.decay[32 * j + 4 * column]);
        qq += dot(b_q[j], b_q[j]);
        kk += dot(b_k[j], b_k[j]);
        qk += dot(b_q[j], b_k[j]);
    }
    qq = sum_of_row(qq);
    kk = sum_of_row(kk);
    qk = sum_of_row(qk);
    float beta = to_float<DT_BETA>(beta_bits);
    if (BETA) beta = (BETA == 2 ? 2.0f : 1.0f) * sigmoid(beta);
    const float r_q = p.scale * (L2NORM ? rsqrtf(qq + 1e-6f) : 1.0f);
    const float r_k = L2NORM ? rsqrtf(kk + 1e-6f) : 1.0f;

    float output = 0.0f;  // of row `row`
    float square = 0.0f;  // of the outputs of this lane's rows
    const u64 keep = policy<STORE_HINT>();
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c) {
        float4 b_state[STEPS][4];
        float sk[STEPS], sq[STEPS];
#if !DIRECT
        wait_for_bytes(&arrived[c]);
#endif
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            sk[i] = sq[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#if DIRECT
                float4 x = to_float4(fetched[i][j]);
#else
                float4 x = to_float4(shared_state[(c * CHUNK_ROWS + 4 * i) * ROW4 + 8 * j]);
#endif
                x = make_float4(x.x * b_decay[j].x, x.y * b_decay[j].y, x.z * b_decay[j].z,
                                x.w * b_decay[j].w);
                sk[i] += dot(x, b_k[j]);
                sq[i] += dot(x, b_q[j]);
                b_state[i][j] = x;
            }
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int fours = c * STEPS + i;  // rows before, by fours
            const float v_i = __shfl_sync(0xffffffffu, value, (lane & 24) + fours);
            const float delta = beta * (v_i - r_k * sum_of_row(sk[i]));
            const float step = r_k * delta;
            const float o = r_q * (sum_of_row(sq[i]) + step * qk);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float4 x = b_state[i][j];
                x = make_float4(x.x + step * b_k[j].x, x.y + step * b_k[j].y,
                                x.z + step * b_k[j].z, x.w + step * b_k[j].w);
                store4(state + 4 * fours * ROW4 + 8 * j, x, keep);
            }
            output = column == fours ? o : output;
            square += o * o;
        }
    }
    if (HAS_NORM) {
        square += __shfl_xor_sync(0xffffffffu, square, 8);
        square += __shfl_xor_sync(0xffffffffu, square, 16);
        output *= to_float<DT_NORM>(weight) * sigmoid(to_float<DT_Z>(gate));
    }
    if (MEETS) cluster_wait();
    if (HAS_NORM && SPLIT > 1 && lane < SPLIT) {
        tell_block(&s.squares[rank][warp], &s.told, lane, square);
    }
    if (HAS_CONV && SPLIT > 1) shift_window();
    if (HAS_NORM && SPLIT > 1) {
        wait_for_bytes(&s.told);
    } else if (HAS_NORM) {
        if (lane == 0) s.squares[0][warp] = square;
        __syncthreads();
    }
    if (HAS_NORM) {
        float4 sum = {};
#pragma unroll
        for (int i = 0; i < SPLIT * WARPS / 4; ++i) {
            const float4 x = reinterpret_cast<const float4*>(s.squares)[i];
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
        square = (sum.x + sum.y) + (sum.z + sum.w);
        output *= rsqrtf(square * (1.0f / D) + p.eps);
    }
    if (has_row) store<DT_X>(p.out, out_at, output);
}
