// The inputs of a decode step, and its channels of the short convolution.
#pragma once

#include "step_elements.cuh"
#include "params.cuh"

static constexpr int THREADS = 32 * WARPS, ROWS = D / SPLIT, WARP_ROWS = ROWS / WARPS;
static_assert(WARP_ROWS >= 4, "a warp has four rows at a time");
static_assert(WARP_ROWS <= 32, "a lane for each row");
static constexpr int FIRST_K_THREAD = THREADS > D ? D : 0;  // of channel 0 of k

// Where a thread stands in the step.
struct Place {
    int t, warp, lane, column;  // column: of the eight lanes that share a row
    int rank, head;             // CTA of the head's cluster; value head
    i64 n;                      // row of the batch
    int t_k, row;               // a thread has channel t of q and the decay, channel t_k of k, and
    bool has_q, has_k, has_row;  // value `row`, the lane / 8th of the column'th four of its warp

    __device__ __forceinline__ explicit Place(const Params& p)
        : t(threadIdx.x), warp(t / 32), lane(t % 32), column(lane % 8), rank(blockIdx.x % SPLIT),
          head(blockIdx.x / SPLIT % p.heads), n(blockIdx.x / SPLIT / p.heads),
          t_k(t - FIRST_K_THREAD), row(rank * ROWS + warp * WARP_ROWS + 4 * column + lane / 8),
          has_q(t < D), has_k(t_k >= 0 && t_k < D), has_row(column < WARP_ROWS / 4) {}
};

// A channel of the short convolution, or of its output where there is none.
struct Channel {
    u32 x0, x1, x2, x, bias;  // window, new token
    Taps taps;

    __device__ __forceinline__ void fetch_window(const Params& p, i64 slot, int channel) {
        if (!HAS_CONV) return;
        i64 at = slot * p.conv_state.stride_n + channel * p.conv_state.stride_c;
        x0 = load_bits<DT_CONV>(p.conv_state.ptr, at);
        x1 = load_bits<DT_CONV>(p.conv_state.ptr, at + p.conv_state.stride_w);
        x2 = load_bits<DT_CONV>(p.conv_state.ptr, at + 2 * p.conv_state.stride_w);
        taps = static_cast<const Taps*>(p.conv_weight)[channel];
        if (HAS_BIAS) bias = load_bits<DT_BIAS>(p.conv_bias, channel);
    }
    // silu of the convolution
    __device__ __forceinline__ float activated() const {
        if (!HAS_CONV) return to_float<DT_X>(x);
        return convolve(taps_of(taps), HAS_BIAS ? to_float<DT_BIAS>(bias) : 0.0f,
                        to_float<DT_CONV>(x0), to_float<DT_CONV>(x1), to_float<DT_CONV>(x2),
                        to_float<DT_X>(x));
    }
    __device__ __forceinline__ void shift_window(const Params& p, i64 slot, int channel) const {
        i64 at = slot * p.conv_state.stride_n + channel * p.conv_state.stride_c;
        store_bits<DT_CONV>(p.conv_state.ptr, at, x1);
        store_bits<DT_CONV>(p.conv_state.ptr, at + p.conv_state.stride_w, x2);
        store<DT_CONV>(p.conv_state.ptr, at + 2 * p.conv_state.stride_w, to_float<DT_X>(x));
    }
};

// A thread's inputs, as they lie in memory.
struct Inputs {
    Channel q, k, v;
    int c_q, c_k, c_v;  // their channels in the convolution
    u32 g, beta, a_log, dt_bias, norm_weight, norm_gate;

    // What only this kernel writes: windows and weights.
    __device__ __forceinline__ void fetch_state(const Params& p, const Place& at, i64 slot) {
        c_q = at.head * D + at.t;
        c_k = (p.heads + at.head) * D + at.t_k;
        c_v = (2 * p.heads + at.head) * D + at.row;
        if (at.has_q) {
            a_log = p.a_log ? load_bits<DT_A>(p.a_log, at.head) : 0;
            dt_bias = p.dt_bias ? load_bits<DT_DT>(p.dt_bias, at.head * D + at.t) : 0;
            q.fetch_window(p, slot, c_q);
        }
        if (at.has_k) k.fetch_window(p, slot, c_k);
        if (at.has_row) {
            v.fetch_window(p, slot, c_v);
            if (HAS_NORM) norm_weight = load_bits<DT_NORM>(p.norm_weight, at.row);
        }
    }
    // What the kernel before this one writes, whose end is waited for between addresses and loads.
    __device__ __forceinline__ void fetch_tokens(const Params& p, const Place& at) {
        const i64 n = at.n;
        const int key = at.head / p.heads_per_key * D;
        const i64 at_beta = compiler_fence(n * p.beta.stride + at.head);
        const i64 at_g = compiler_fence(n * p.g.stride + at.head * D + at.t);
        const i64 at_q = compiler_fence(n * p.q.stride + key + at.t);
        const i64 at_k = compiler_fence(n * p.k.stride + key + at.t_k);
        const i64 at_v = compiler_fence(n * p.v.stride + at.head * D + at.row);
        const i64 at_gate =
            HAS_NORM ? compiler_fence(n * p.norm_gate.stride + at.head * D + at.row) : 0;
        if (p.pdl_prefetch_safe) wait_on_dependent_grids();
        beta = load_bits<DT_BETA>(p.beta.ptr, at_beta);
        if (at.has_q) {
            g = load_bits<DT_G>(p.g.ptr, at_g);
            q.x = load_bits<DT_X>(p.q.ptr, at_q);
        }
        if (at.has_k) k.x = load_bits<DT_X>(p.k.ptr, at_k);
        if (at.has_row) {
            v.x = load_bits<DT_X>(p.v.ptr, at_v);
            if (HAS_NORM) norm_gate = load_bits<DT_Z>(p.norm_gate.ptr, at_gate);
        }
    }
    __device__ __forceinline__ float decay(const Params& p) const {
        return decay_of(to_float<DT_G>(g), to_float<DT_A>(a_log), to_float<DT_DT>(dt_bias),
                        p.lower_bound);
    }
    __device__ __forceinline__ void shift_windows(const Params& p, const Place& at,
                                                  i64 slot) const {
        if (at.has_q && at.rank == 0) q.shift_window(p, slot, c_q);
        if (at.has_k && at.rank == 0) k.shift_window(p, slot, c_k);
        if (at.has_row) v.shift_window(p, slot, c_v);
    }
};
