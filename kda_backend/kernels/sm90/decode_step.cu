// One KDA decode step of a layer on Hopper, K = V = 128: what kernels/decode_step.py computes.
//
// A head's state is SPLIT shares of ROWS = 128 / SPLIT value rows, one for each CTA of a cluster.
// Each of a CTA's WARPS warps has rows of its own, which it fetches, updates in registers and
// stores without waiting for other warps:
//
//     kernel before    each thread                                   other CTAs of the head
//     still runs       if nothing in flight writes them
//                      (pdl_prefetch_safe): slot, state, window,
//                      weights are requested
//     has ended        tokens are requested                          (fetch_tokens)
//                      q, k, decay to shared memory; v stays
//                      -------- __syncthreads --------
//                      cluster_arrive                                have read the window
//                      chunk by chunk: o and the new state of each   (update_rows)
//                      row; the state is stored
//                      sum of o^2 of the warp                        (sum_of_squares)
//                      cluster_wait; the sum to all CTAs      ->   norm_ready
//                      shift the convolution's window
//                      o / rms, times the gate, is stored
//
// Eight lanes share a row, 16 channels each, so a warp has four rows at a time and the products
// with the state (S k and S q in one pass: o = S_old q + (k q) delta) take three shuffles. What
// concerns a row alone (v, norm, output) is done by one of its lanes.
//
// SPLIT and WARPS do not change the bits of a row: its sums are over eight lanes, and the norm's is a
// binary tree over the head's rows by fours (sum_of_squares, sum_of_warps). Multiplications that are
// added to are written as fmaf, since the compiler joins others by how far apart they stand.
//
// Compile-time: SPLIT, WARPS, MIN_BLOCKS per SM, LOAD_HINT and STORE_HINT (CacheHint), GATE, BETA,
// L2NORM, HAS_CONV, HAS_BIAS, HAS_NORM, DT_STATE (state_type.cuh), DT_* (decode_channels.cuh).

#include "decode_state.cuh"

// CTAs of a head wait for one another: for the window, and before they write to each other.
static constexpr bool NEEDS_CLUSTER_SYNC = SPLIT > 1 && (HAS_CONV || HAS_NORM);

__device__ __forceinline__ float dot(float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}
// Sum over the eight lanes that share a row.
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// A lane's 16 channels of the vectors, and what the norms make of them.
struct RowVectors {
    float4 q[4], k[4], decay[4];
    float qk;        // q k^T
    float r_q, r_k;  // factors of q and k

    __device__ __forceinline__ RowVectors(const Params& p, const Shared& s, int column) {
        float qq = 0.0f, kk = 0.0f;
        qk = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            q[j] = *reinterpret_cast<const float4*>(&s.q[32 * j + 4 * column]);
            k[j] = *reinterpret_cast<const float4*>(&s.k[32 * j + 4 * column]);
            decay[j] = *reinterpret_cast<const float4*>(&s.decay[32 * j + 4 * column]);
            qq += dot(q[j], q[j]);
            kk += dot(k[j], k[j]);
            qk += dot(q[j], k[j]);
        }
        qq = sum_of_row(qq);
        kk = sum_of_row(kk);
        qk = sum_of_row(qk);
        r_q = p.scale * (L2NORM ? rsqrtf(qq + 1e-6f) : 1.0f);
        r_k = L2NORM ? rsqrtf(kk + 1e-6f) : 1.0f;
    }
};

// Fours of a warp's rows.
static constexpr int FOURS = WARP_ROWS / 4;

// The new state and the output of a warp's rows; ``value`` is v of the thread's row, ``own`` the
// lane's first State4 in memory. Returns the output of row lane / 8 of four column % FOURS: the
// thread's own, if it has one.
__device__ __forceinline__ float update_rows(Shared& s, const Place& at, WarpState<DIRECT>& state,
                                             State4* own, const RowVectors& x, float beta,
                                             float value) {
    float out = 0.0f;
    const u64 keep = create_policy<STORE_HINT>();
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c) {
        float4 b_state[STEPS][4];
        float sk[STEPS], sq[STEPS];
        state.wait(s, at, c);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            sk[i] = sq[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float4 y = to_float4(state.get(c, i, j));
                y = make_float4(y.x * x.decay[j].x, y.y * x.decay[j].y, y.z * x.decay[j].z,
                                y.w * x.decay[j].w);
                sk[i] += dot(y, x.k[j]);
                sq[i] += dot(y, x.q[j]);
                b_state[i][j] = y;
            }
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int fours = c * STEPS + i;  // rows before, by fours
            const float v_i = __shfl_sync(0xffffffffu, value, (at.lane & 24) + fours);
            const float delta = beta * fmaf(-x.r_k, sum_of_row(sk[i]), v_i);
            const float step = x.r_k * delta;
            const float o = x.r_q * fmaf(step, x.qk, sum_of_row(sq[i]));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float4 y = b_state[i][j];
                y = make_float4(fmaf(step, x.k[j].x, y.x), fmaf(step, x.k[j].y, y.y),
                                fmaf(step, x.k[j].z, y.z), fmaf(step, x.k[j].w, y.w));
                store_global(own + 4 * fours * ROW4 + 8 * j, as_stored4(y), keep);
            }
            out = at.column % FOURS == fours ? o : out;
        }
    }
    return out;
}

// The norm's sum over a warp's rows, in every lane: the rows of each four, then pairs of fours,
// pairs of these and so on.
__device__ __forceinline__ float sum_of_squares(float out) {
    float sum = fmaf(out, out, 0.0f);
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
#pragma unroll
    for (int lane = 1; lane < FOURS; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    return sum;
}
// The same tree's upper part: over the warps of all CTAs.
__device__ __forceinline__ float sum_of_warps(const float (&squares)[SPLIT][WARPS]) {
    float sums[SPLIT * WARPS / 4];
#pragma unroll
    for (int i = 0; i < SPLIT * WARPS / 4; ++i) {
        const float4 x = reinterpret_cast<const float4*>(squares)[i];
        sums[i] = (x.x + x.y) + (x.z + x.w);
    }
#pragma unroll
    for (int n = SPLIT * WARPS / 8; n > 0; n /= 2)
#pragma unroll
        for (int i = 0; i < n; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    return sums[0];
}

// After the rows: the CTAs of the head meet, the window is shifted, the output normalised.
__device__ __forceinline__ float normalise(const Params& p, Shared& s, const Place& at,
                                           const Inputs& x, i64 slot, float out) {
    float square = 0.0f;
    if (HAS_NORM) {
        square = sum_of_squares(out);
        out *= to_float<DT_NORM>(x.norm_weight) * sigmoid(to_float<DT_Z>(x.norm_gate));
    }
    if (NEEDS_CLUSTER_SYNC) cluster_wait();
    if (HAS_NORM && SPLIT > 1 && at.lane < SPLIT)
        store_shared_remote(square, &s.squares[at.rank][at.warp], s.norm_ready, at.lane);
    if (HAS_CONV && SPLIT > 1) x.shift_windows(p, at, slot);
    if (!HAS_NORM) return out;
    if (SPLIT > 1) {
        s.norm_ready.wait(0);
    } else {
        if (at.lane == 0) s.squares[0][at.warp] = square;
        __syncthreads();
    }
    return out * rsqrtf(sum_of_warps(s.squares) * (1.0f / D) + p.eps);
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS)
    decode_step(const __grid_constant__ Params p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared_memory());
    const Place at(p);
    launch_dependent_grids();
    if (!p.pdl_prefetch_safe) wait_on_dependent_grids();
    const i64 slot = p.indices[at.n];
    WarpState<DIRECT> state;
    if (HAS_NORM && SPLIT > 1 && at.t == 0) {
        s.norm_ready.init(1);
        s.norm_ready.arrive_and_expect_tx(sizeof(s.squares));
    }
    state.init(s, at);
    if (at.lane == 0) {
        fence_barrier_init();
        tma_store_fence();
    }
    __syncwarp();
    const i64 out_at = at.n * p.out.stride + at.head * D + at.row;
    if (slot < 0 || slot == p.null_slot) {  // the same in all CTAs of the head
        if (p.pdl_prefetch_safe) wait_on_dependent_grids();
        if (at.has_row) store<DT_X>(p.out.ptr, out_at, 0.0f);
        return;
    }
    // the states of this warp, and of this lane
    State* const tile = static_cast<State*>(p.state.ptr) + slot * p.state.stride +
                        at.head * (D * D) + (at.rank * ROWS + at.warp * WARP_ROWS) * D;
    State4* const own = reinterpret_cast<State4*>(tile) + at.lane / 8 * ROW4 + at.column;
    state.fetch(s, at, tile, own);
    Inputs inputs = {};
    inputs.fetch_state(p, at, slot);
    inputs.fetch_tokens(p, at);

    if (at.has_q) {
        const float decay = inputs.decay(p);
        s.q[at.t] = inputs.q.activated();
        s.decay[at.t] = decay;
    }
    if (at.has_k) s.k[at.t_k] = inputs.k.activated();
    const float value = inputs.v.activated();
    __syncthreads();
    if (NEEDS_CLUSTER_SYNC) cluster_arrive_relaxed();  // started, and has read the window
    if (HAS_CONV && SPLIT == 1) inputs.shift_windows(p, at, slot);

    const RowVectors vectors(p, s, at.column);
    const float beta = activate_beta<BETA>(to_float<DT_BETA>(inputs.beta));
    const float rows = update_rows(s, at, state, own, vectors, beta, value);
    const float output = normalise(p, s, at, inputs, slot, rows);
    if (at.has_row) store<DT_X>(p.out.ptr, out_at, output);
}
