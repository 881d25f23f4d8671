// One KDA decode step of a layer on Hopper, K = V = 128: what kernels/decode_step.py computes.
//
// A head's state is SPLIT tiles of ROWS = 128 / SPLIT value rows. A block has the tile of one head
// after another, in four warps that each stream their own rows: a chunk of rows comes by one bulk
// copy, is updated in shared memory and leaves by one bulk copy, and while the next chunks are at
// work the same rows of the block's next head take its place. What else the next head needs (its
// slot, tokens, window, taps) is loaded meanwhile too, so that nothing but bandwidth is waited for.
//
// The blocks of a head are a cluster: all have read the convolution's window before one of them
// shifts it, and the norm's sum goes over all of them.
//
// Eight lanes share a row, 16 channels each, so a warp has four rows at a time and the products
// with the state (S k and S q in one pass: o = S_old q + (k q) delta) take three shuffles.
//
// SPLIT, GATE, BETA, L2NORM, HAS_CONV, HAS_BIAS, HAS_NORM, STATE_BF16 and DT_* come as
// definitions: types of tensors are 0 (bf16), 1 (fp16) or 2 (fp32).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

static constexpr int D = 128, WARPS = 4, THREADS = 32 * WARPS, ROWS = D / SPLIT;
static constexpr int WARP_ROWS = ROWS / WARPS;
static constexpr int CHUNK_ROWS = WARP_ROWS < 8 ? WARP_ROWS : 8, CHUNKS = WARP_ROWS / CHUNK_ROWS;
static constexpr int STEPS = CHUNK_ROWS / 4;  // rows of a chunk, four at a time
// blocks of a head wait for one another: for the window, and before they write to each other
static constexpr bool MEETS = HAS_CONV || (HAS_NORM && SPLIT > 1);
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
    int heads, heads_per_key, null_slot, tasks;  // tasks: N * HV
    float lower_bound, scale, eps;
};
static_assert(sizeof(Params) == PARAM_BYTES, "struct Params differs from the host's");

#if STATE_BF16
typedef u16 State;
#else
typedef float State;
#endif

struct Shared {
    State tile[ROWS * D];
    float q[D], k[D], decay[D], v[ROWS], o[ROWS];
    float partial[WARPS];
    float squares[SPLIT];  // of each block of the head
    u64 arrived[WARPS][CHUNKS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "struct Shared differs from the host's");

__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ float from_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ u32 to_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ float from_fp16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ u16 to_fp16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
template <int TYPE>
__device__ __forceinline__ float load(const void* p, i64 i) {
    if (TYPE == 2) return static_cast<const float*>(p)[i];
    u16 x = static_cast<const u16*>(p)[i];
    return TYPE == 1 ? from_fp16(x) : from_bf16(x);
}
template <int TYPE>
__device__ __forceinline__ void store(void* p, i64 i, float x) {
    if (TYPE == 2) {
        static_cast<float*>(p)[i] = x;
    } else {
        static_cast<u16*>(p)[i] = TYPE == 1 ? to_fp16(x) : static_cast<u16>(to_bf16(x, 0.0f));
    }
}
// A row of four, for the taps of a channel; 16 or 8 bytes aligned.
template <int TYPE>
__device__ __forceinline__ float4 load4(const void* p, i64 row) {
    if (TYPE == 2) return static_cast<const float4*>(p)[row];
    uint2 x = static_cast<const uint2*>(p)[row];
    if (TYPE == 1) {
        return make_float4(from_fp16(x.x), from_fp16(x.x >> 16), from_fp16(x.y),
                           from_fp16(x.y >> 16));
    }
    return make_float4(from_bf16(x.x), __uint_as_float(x.x & 0xffff0000u), from_bf16(x.y),
                       __uint_as_float(x.y & 0xffff0000u));
}

__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float sigmoid(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + ex2(-LOG2E * x)));
    return y;
}
// log2(1 + e^x), without overflow for large x and without cancellation for very negative x
__device__ __forceinline__ float softplus_log2(float x) {
    float y = x * LOG2E, e = ex2(fminf(y, 40.0f));
    float series = LOG2E * e * (1.0f - e * (0.5f - e * (0.33333333f - e * 0.25f)));
    return e < 0.03f ? series : fmaxf(lg2(1.0f + e), y);
}

// A channel of the short convolution: the window, the taps, then both at work.
struct Channel {
    float x0, x1, x2, x;
    float4 taps;
    float bias;
    __device__ __forceinline__ void fetch(const Params& p, i64 slot, int channel) {
        if (!HAS_CONV) return;
        i64 at = slot * p.stride_conv_n + channel * p.stride_conv_c;
        x0 = load<DT_CONV>(p.conv_state, at);
        x1 = load<DT_CONV>(p.conv_state, at + p.stride_conv_w);
        x2 = load<DT_CONV>(p.conv_state, at + 2 * p.stride_conv_w);
        taps = load4<DT_TAPS>(p.conv_weight, channel);
        bias = HAS_BIAS ? load<DT_BIAS>(p.conv_bias, channel) : 0.0f;
    }
    __device__ __forceinline__ float activated() const {
        if (!HAS_CONV) return x;
        float y = bias + taps.x * x0 + taps.y * x1 + taps.z * x2 + taps.w * x;
        return y * sigmoid(y);
    }
    __device__ __forceinline__ void shift(const Params& p, i64 slot, int channel) const {
        i64 at = slot * p.stride_conv_n + channel * p.stride_conv_c;
        store<DT_CONV>(p.conv_state, at, x1);
        store<DT_CONV>(p.conv_state, at + p.stride_conv_w, x2);
        store<DT_CONV>(p.conv_state, at + 2 * p.stride_conv_w, x);
    }
};

__device__ __forceinline__ float4 read_state(const State* p) {
#if STATE_BF16
    uint2 x = *reinterpret_cast<const uint2*>(p);
    return make_float4(from_bf16(x.x), __uint_as_float(x.x & 0xffff0000u), from_bf16(x.y),
                       __uint_as_float(x.y & 0xffff0000u));
#else
    return *reinterpret_cast<const float4*>(p);
#endif
}
__device__ __forceinline__ void write_state(State* p, float4 x) {
#if STATE_BF16
    *reinterpret_cast<uint2*>(p) = make_uint2(to_bf16(x.x, x.y), to_bf16(x.z, x.w));
#else
    *reinterpret_cast<float4*>(p) = x;
#endif
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

__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
static constexpr u32 CHUNK_BYTES = sizeof(State) * CHUNK_ROWS * D;
__device__ __forceinline__ void init_barrier(u64* arrived) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(arrived)) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fetch_chunk(State* chunk, const State* from, u64* arrived) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
                 "r"(CHUNK_BYTES)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(chunk)),
        "l"(from), "r"(CHUNK_BYTES), "r"(shared_address(arrived)), "l"(evict_first())
        : "memory");
}
__device__ __forceinline__ void wait_for_chunk(u64* arrived, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(arrived)), "r"(parity)
            : "memory");
    }
}
__device__ __forceinline__ void write_chunk(State* to, const State* chunk) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
        "r"(shared_address(chunk)), "r"(CHUNK_BYTES), "l"(evict_first())
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the PENDING latest chunks that this thread wrote have been read from shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_for_writes() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// What threads did to shared memory comes before what bulk copies do to it.
__device__ __forceinline__ void fence_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes x to a shared variable of every block of the cluster.
__device__ __forceinline__ void tell_cluster(float* variable, float x) {
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) {
        u32 there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(there)
            : "r"(shared_address(variable)), "r"(rank));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
    }
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

// One head of one row, and what a thread has loaded for it.
struct Task {
    i64 n, slot;
    int head;
    bool live;
    Channel q, k, v;
    float g, beta, rate, bias, weight, gate;

    __device__ __forceinline__ void locate(const Params& p, int task) {
        head = task % p.heads;
        n = task / p.heads;
        slot = task < p.tasks ? p.indices[n] : -1;
        live = slot >= 0 && slot != p.null_slot;
    }
    __device__ __forceinline__ State* tile(const Params& p, int rank) const {
        return static_cast<State*>(p.state) + slot * p.stride_state + head * (D * D) +
               rank * (ROWS * D);
    }
    __device__ __forceinline__ void load_inputs(const Params& p, int t, int row) {
        if (!live) return;
        const int key_head = head / p.heads_per_key, at = head * D + t;
        q.x = load<DT_X>(p.q, n * p.stride_q + key_head * D + t);
        k.x = load<DT_X>(p.k, n * p.stride_k + key_head * D + t);
        g = load<DT_G>(p.g, n * p.stride_g + at);
        beta = load<DT_BETA>(p.beta, n * p.stride_beta + head);
        rate = p.a_log ? load<DT_A>(p.a_log, head) : 0.0f;
        bias = p.dt_bias ? load<DT_DT>(p.dt_bias, at) : 0.0f;
        q.fetch(p, slot, at);
        k.fetch(p, slot, p.heads * D + at);
        if (t >= ROWS) return;
        v.x = load<DT_X>(p.v, n * p.stride_v + head * D + row);
        v.fetch(p, slot, (2 * p.heads + head) * D + row);
        if (HAS_NORM) {
            weight = load<DT_NORM>(p.norm_weight, row);
            gate = load<DT_Z>(p.norm_gate, n * p.stride_gate + head * D + row);
        }
    }
};

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 3)
    decode_step(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    const int t = threadIdx.x, warp = t / 32, lane = t % 32, column = 4 * (lane % 8);
    const int rank = blockIdx.x % SPLIT, row = rank * ROWS + t;
    const int stride = gridDim.x / SPLIT;
    State* rows = s.tile + warp * WARP_ROWS * D;  // of this warp
    u64* arrived = s.arrived[warp];
    if (lane == 0) {
        for (int c = 0; c < CHUNKS; ++c) init_barrier(&arrived[c]);
        publish_barriers();
    }
    __syncwarp();
    // The kernel before this one may still run while blocks of this one are placed; both lines are
    // nothing for a launch that does not overlap.
    wait_for_kernel_before();
    let_next_kernel_start();

    auto fetch = [&](const Task& task, int c) {
        const int first = warp * WARP_ROWS + c * CHUNK_ROWS;
        fetch_chunk(rows + c * CHUNK_ROWS * D, task.tile(p, rank) + first * D, &arrived[c]);
    };
    Task next = {};
    int index = blockIdx.x / SPLIT;
    next.locate(p, index);
    if (next.live && lane == 0) {
        for (int c = 0; c < CHUNKS; ++c) fetch(next, c);
    }
    next.load_inputs(p, t, row);
    i64 following = index + stride < p.tasks ? p.indices[(index + stride) / p.heads] : -1;

    u32 parity = 0;
    for (; index < p.tasks; index += stride) {
        Task task = next;
        next = {};
        next.head = (index + stride) % p.heads;
        next.n = (index + stride) / p.heads;
        next.slot = following;
        next.live = following >= 0 && following != p.null_slot;
        const int after = index + 2 * stride;
        following = after < p.tasks ? p.indices[after / p.heads] : -1;
        const i64 out_at = task.n * p.stride_out + task.head * D + row;
        if (!task.live) {  // the same in all blocks of the head
            if (t < ROWS) store<DT_X>(p.out, out_at, 0.0f);
            if (next.live && lane == 0) {
                for (int c = 0; c < CHUNKS; ++c) fetch(next, c);
            }
            next.load_inputs(p, t, row);
            continue;
        }

        float beta = task.beta, decay = task.g * LOG2E;
        if (BETA) beta = (BETA == 2 ? 2.0f : 1.0f) * sigmoid(beta);
        const float rate = ex2(task.rate * LOG2E), raw_gate = task.g + task.bias;
        if (GATE == 1) decay = -rate * softplus_log2(raw_gate);
        if (GATE == 2) decay = p.lower_bound * LOG2E * sigmoid(rate * raw_gate);
        s.q[t] = task.q.activated();
        s.k[t] = task.k.activated();
        s.decay[t] = ex2(decay);
        if (t < ROWS) s.v[t] = task.v.activated();
        if (HAS_CONV) {
            // nobody but this thread reads these channels of the window of this block's v, nor, in
            // a head of one block, of q and k
            if (SPLIT == 1) {
                task.q.shift(p, task.slot, task.head * D + t);
                task.k.shift(p, task.slot, (p.heads + task.head) * D + t);
            }
            if (t < ROWS) task.v.shift(p, task.slot, (2 * p.heads + task.head) * D + row);
        }
        __syncthreads();
        if (MEETS) cluster_arrive();  // this block has started, and has read the window
        next.load_inputs(p, t, row);

        float4 b_q[4], b_k[4], b_decay[4];
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            b_q[j] = *reinterpret_cast<const float4*>(&s.q[32 * j + column]);
            b_k[j] = *reinterpret_cast<const float4*>(&s.k[32 * j + column]);
            b_decay[j] = *reinterpret_cast<const float4*>(&s.decay[32 * j + column]);
            qq += dot(b_q[j], b_q[j]);
            kk += dot(b_k[j], b_k[j]);
            qk += dot(b_q[j], b_k[j]);
        }
        qq = sum_of_row(qq);
        kk = sum_of_row(kk);
        qk = sum_of_row(qk);
        const float r_q = p.scale * (L2NORM ? rsqrtf(qq + 1e-6f) : 1.0f);
        const float r_k = L2NORM ? rsqrtf(kk + 1e-6f) : 1.0f;

        State* const home = task.tile(p, rank) + warp * WARP_ROWS * D;
#pragma unroll 1
        for (int c = 0; c < CHUNKS; ++c) {
            State* chunk = rows + c * CHUNK_ROWS * D;
            const int first = warp * WARP_ROWS + c * CHUNK_ROWS + lane / 8;
            float4 b_state[STEPS][4];
            float sk[STEPS], sq[STEPS];
            wait_for_chunk(&arrived[c], parity);
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                sk[i] = sq[i] = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float4 x = read_state(&s.tile[(first + 4 * i) * D + 32 * j + column]);
                    x = make_float4(x.x * b_decay[j].x, x.y * b_decay[j].y, x.z * b_decay[j].z,
                                    x.w * b_decay[j].w);
                    sk[i] += dot(x, b_k[j]);
                    sq[i] += dot(x, b_q[j]);
                    b_state[i][j] = x;
                }
            }
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const int r = first + 4 * i;
                const float delta = beta * (s.v[r] - r_k * sum_of_row(sk[i]));
                const float step = r_k * delta;
                const float o = r_q * (sum_of_row(sq[i]) + step * qk);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float4 x = b_state[i][j];
                    x = make_float4(x.x + step * b_k[j].x, x.y + step * b_k[j].y,
                                    x.z + step * b_k[j].z, x.w + step * b_k[j].w);
                    write_state(&s.tile[r * D + 32 * j + column], x);
                }
                if (lane % 8 == 0) s.o[r] = o;
            }
            fence_bulk_copies();
            __syncwarp();
            if (lane == 0) {
                write_chunk(home + c * CHUNK_ROWS * D, chunk);
                if (c > 0 && next.live) {
                    wait_for_writes<1>();
                    fetch(next, c - 1);
                }
            }
        }
        parity ^= 1;
        __syncthreads();

        if (MEETS && SPLIT > 1) cluster_wait();
        if (HAS_CONV && SPLIT > 1 && rank == 0) {
            task.q.shift(p, task.slot, task.head * D + t);
            task.k.shift(p, task.slot, (p.heads + task.head) * D + t);
        }
        float o = t < ROWS ? s.o[t] : 0.0f;
        if (HAS_NORM) {
            float square = o * o;
#pragma unroll
            for (int l = 1; l < 32; l *= 2) square += __shfl_xor_sync(0xffffffffu, square, l);
            if (lane == 0) s.partial[warp] = square;
            __syncthreads();
            square = s.partial[0] + s.partial[1] + s.partial[2] + s.partial[3];
            if (SPLIT > 1) {
                if (t == 0) tell_cluster(&s.squares[rank], square);
                cluster_arrive();
                cluster_wait();
                square = 0.0f;
#pragma unroll
                for (int r = 0; r < SPLIT; ++r) square += s.squares[r];
            }
            o *= rsqrtf(square * (1.0f / D) + p.eps) * task.weight * sigmoid(task.gate);
        }
        if (t < ROWS) store<DT_X>(p.out, out_at, o);
        if (lane == 0) {
            wait_for_writes<0>();
            if (next.live) fetch(next, CHUNKS - 1);
        }
    }
}
