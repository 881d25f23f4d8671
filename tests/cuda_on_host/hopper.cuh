// What backend_core/cuda/hopper.cuh and CUDA give a kernel, on the CPU (runtime.h).
//
// Of the GPU's memory model: copies and wgmma are asynchronous and complete in any order that their
// barriers and waits allow; what a copy will write is NaN before. Ordinary accesses are
// sequentially consistent, so a missing fence does not show.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __forceinline__ inline
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// ---- CUDA C++ ----

template <typename To, typename From>
To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof(To));
    return y;
}
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __ffs(u32 x) { return __builtin_ffs(int(x)); }
inline void __syncthreads() { host::syncthreads(); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __trap() { host::fail("a kernel has trapped"); }
inline void __nanosleep(unsigned) { host::yield(); }
inline u32 atomicAdd(u32* p, u32 x) {
    const u32 old = *p;
    *p += x;
    return old;
}
inline void __syncwarp() {
    static const char operation = 0;
    host::warp_collective(&operation, nullptr, [](void**) {});
}
struct Shuffle {
    u32 x;
    int from;
    u32 result;
};
inline u32 shuffle(u32 x, int from) {
    static const char operation = 0;
    Shuffle mine = {x, from, 0};
    host::warp_collective(&operation, &mine, [](void** lanes) {
        for (int i = 0; i < 32; ++i) {
            Shuffle& to = *static_cast<Shuffle*>(lanes[i]);
            to.result = static_cast<Shuffle*>(lanes[to.from % 32])->x;
        }
    });
    return mine.result;
}
template <typename T>
T __shfl_sync(u32, T x, int lane) { return bits_as<T>(shuffle(bits_as<u32>(x), lane)); }
template <typename T>
T __shfl_xor_sync(u32 mask, T x, int lanes) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ lanes);
}
inline u32 __ballot_sync(u32, bool x) {
    u32 y = 0;
    for (int i = 0; i < 32; ++i) y |= shuffle(x, i) << i;
    return y;
}

// ---- numerics.cuh ----

inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1.0f / x; }
inline u32 bf16_bits(float x) {
    const u32 y = __float_as_uint(x);
    return x != x ? 0x7fff : (y + 0x7fff + (y >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline float low_bf16(u32 x) { return __uint_as_float(x << 16); }
inline float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
inline float from_fp16(u16 x) { return bits_as<_Float16>(x); }
inline u16 to_fp16(float x) { return bits_as<u16>(static_cast<_Float16>(x)); }
inline float low_fp16(u32 x) { return from_fp16(u16(x)); }
inline float high_fp16(u32 x) { return from_fp16(u16(x >> 16)); }
inline u32 pack_fp16(float low, float high) { return to_fp16(low) | u32(to_fp16(high)) << 16; }
inline u32 pack_fp16_satfinite(float low, float high) {
    auto bounded = [](float x) { return std::fmin(std::fmax(x, -65504.0f), 65504.0f); };
    return pack_fp16(bounded(low), bounded(high));
}
inline u32 mul_fp16x2(u32 a, u32 b) {
    return pack_fp16(low_fp16(a) * low_fp16(b), high_fp16(a) * high_fp16(b));
}
inline u32 neg_mul_fp16x2(u32 a, u32 b) { return mul_fp16x2(a ^ 0x80008000u, b); }
inline u32 max_fp16x2(u32 a, u32 b) {
    return pack_fp16(std::fmax(low_fp16(a), low_fp16(b)), std::fmax(high_fp16(a), high_fp16(b)));
}

// ---- hopper.cuh, in its order ----

inline u32 sm_index() { return host::sm_index(); }
inline int reread_thread_index() { return threadIdx.x; }
inline i64 compiler_fence(i64 x) { return x; }
inline u32 compiler_fence(u32 x) { return x; }

inline u32 cast_smem_ptr_to_uint(const void* p) {
    return static_cast<const unsigned char*>(p) - host::shared_memory();
}
inline unsigned char* dynamic_shared_memory() { return host::shared_memory(); }
inline u32 load_acquire(const u32* p) {
    host::yield();  // it is polled
    return *p;
}
inline void store_release(u32* p, u32 x) { *p = x; }
inline uint4 load_shared(u32 from) { return *reinterpret_cast<uint4*>(host::at(from)); }
template <unsigned BYTES>
void shared_bytes() {}
enum CacheHint { EVICT_NORMAL = 0, EVICT_FIRST = 1, EVICT_LAST = 2 };
template <int HINT>
u64 create_policy() { return 0; }
template <typename T>
T load_global(const T* p, u64) { return *p; }
template <typename T>
void store_global(T* p, T x, u64) { *p = x; }

inline void launch_dependent_grids() { host::launch_dependents(); }
inline void wait_on_dependent_grids() { host::wait_on_dependents(); }
inline void cluster_arrive() { host::cluster_arrive(); }
inline void cluster_arrive_relaxed() { host::cluster_arrive(); }
inline void cluster_wait() { host::cluster_wait(); }
inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
inline u32 set_block_rank(u32 address, int rank) { return host::address_at(address, rank); }

struct ClusterBarrier {
    uint64_t state;

    u32 address() { return cast_smem_ptr_to_uint(&state); }
    void init(int count) { host::barrier_init(&state, count); }
    void arrive() { host::barrier_arrive(&state, 0); }
    void arrive(int rank) {
        host::barrier_arrive(host::barrier_at(set_block_rank(address(), rank)), 0);
    }
    void wait(u32 parity) { host::barrier_wait(&state, parity); }
};
struct ClusterTransactionBarrier : ClusterBarrier {
    void arrive_and_expect_tx(u32 bytes) { host::barrier_arrive(&state, bytes); }
};
inline void fence_barrier_init() {}

inline void cpasync_barrier_arrive_noinc(ClusterBarrier& barrier) {
    host::copy({host::CopyKind::CP_ASYNC_ARRIVE, nullptr, nullptr, 0, &barrier.state});
}
inline void cp_async(unsigned char* to, const void* from, u32 bytes, bool valid) {
    const auto* source = static_cast<const unsigned char*>(from);
    host::copy({host::CopyKind::CP_ASYNC, to, valid ? source : nullptr, bytes, nullptr});
}
inline void cp_async_cacheglobal_zfill(u32 to, const void* from, bool valid) {
    cp_async(host::at(to), from, 16, valid);
}
inline void cp_async_cachealways_zfill(void* to, const void* from, bool valid) {
    cp_async(static_cast<unsigned char*>(to), from, 4, valid);
}
inline void cp_async_fence() { host::commit_cp_async(); }
template <int PENDING>
void cp_async_wait() { host::wait_cp_async(PENDING); }

inline void tma_store_fence() {}
inline void fence_proxy_async() {}
inline void bulk_copy_g2s(void* to, const void* from, u32 bytes,
                          ClusterTransactionBarrier& barrier) {
    if (bytes % 16 || u64(from) % 16) host::fail("a bulk copy is not of whole 16-byte pieces");
    host::copy({host::CopyKind::TO_SHARED, static_cast<unsigned char*>(to),
                static_cast<const unsigned char*>(from), bytes, &barrier.state});
}
inline void bulk_copy_g2s(void* to, const void* from, u32 bytes,
                          ClusterTransactionBarrier& barrier, u64) {
    bulk_copy_g2s(to, from, bytes, barrier);
}
inline void bulk_copy_s2s(void* data, u32 bytes, ClusterTransactionBarrier& barrier, int rank) {
    const u32 from = cast_smem_ptr_to_uint(data);
    host::copy({host::CopyKind::TO_SHARED, host::at(set_block_rank(from, rank)), host::at(from),
                bytes, host::barrier_at(set_block_rank(barrier.address(), rank))});
}
inline void store_shared_remote(float x, float* variable, ClusterTransactionBarrier& barrier,
                                int rank) {
    const u32 to = set_block_rank(cast_smem_ptr_to_uint(variable), rank);
    uint64_t* const at = host::barrier_at(set_block_rank(barrier.address(), rank));
    memcpy(host::at(to), &x, 4);
    host::complete_bytes(at, 4);
}
inline void bulk_copy_s2g(void* to, const void* from, u32 bytes) {
    host::copy({host::CopyKind::TO_GLOBAL, static_cast<unsigned char*>(to),
                static_cast<const unsigned char*>(from), bytes, nullptr});
}
inline void tma_store_wait_read() { host::wait_stores(); }
inline void tma_store_wait() { host::wait_stores(); }

// ---- matrices ----

// Collects ``mine`` of each lane of the warp, and calls ``all`` once.
template <typename T, typename F>
void with_warp(T& mine, F) {
    static const char operation = 0;  // one per call site: F is a type of its own
    host::warp_collective(&operation, &mine, [](void** lanes) {
        T* all[32];
        for (int i = 0; i < 32; ++i) all[i] = static_cast<T*>(lanes[i]);
        F()(all);
    });
}
struct Move {
    u32* x;
    unsigned char* row;  // that this lane gives the address of
};
// Element (row, column) of matrix m; lane (r, t) holds (r, 2 t), (r, 2 t + 1), or transposed.
inline u16* element(Move* const* all, int m, int row, int column) {
    return reinterpret_cast<u16*>(all[8 * m + row]->row) + column;
}
template <bool TRANSPOSED, bool STORE>
void move_matrices(u32* x, u32 address) {
    Move mine = {x, host::at(address)};
    with_warp(mine, [](Move** all) {
        for (int lane = 0; lane < 32; ++lane)
            for (int m = 0; m < 4; ++m)
                for (int half = 0; half < 2; ++half) {
                    const int r = lane / 4, c = 2 * (lane % 4) + half;
                    u16* const e = TRANSPOSED ? element(all, m, c, r) : element(all, m, r, c);
                    u32& word = all[lane]->x[m];
                    if (STORE)
                        *e = u16(word >> 16 * half);
                    else
                        word = half ? word | u32(*e) << 16 : *e;
                }
    });
}
inline void ldmatrix(u32 (&x)[4], u32 from) { move_matrices<false, false>(x, from); }
inline void ldmatrix_trans(u32 (&x)[4], u32 from) { move_matrices<true, false>(x, from); }
inline void stmatrix(u32 to, const u32 (&x)[4]) {
    move_matrices<false, true>(const_cast<u32*>(x), to);
}
inline void stmatrix_trans(u32 to, const u32 (&x)[4]) {
    move_matrices<true, true>(const_cast<u32*>(x), to);
}

// One warp's c [16, 8] += a [16, 8] b [8, 8] per pair of a's registers, elements by ``number``.
struct Product {
    float* c;
    u32 a[4], b[2];
};
template <float (*NUMBER)(u16), int K>
void multiply(Product** all) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane)
        for (int half = 0; half < 2; ++half) {
            const int r = lane / 4, c = 2 * (lane % 4) + half;
            for (int k = 0; k < K / 8; ++k) {
                for (int i = 0; i < 2; ++i)
                    a[r + 8 * i][c + 8 * k] = NUMBER(u16(all[lane]->a[i + 2 * k] >> 16 * half));
                b[c + 8 * k][r] = NUMBER(u16(all[lane]->b[k] >> 16 * half));
            }
        }
    for (int lane = 0; lane < 32; ++lane)
        for (int e = 0; e < 4; ++e) {
            const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
            float sum = 0.0f;
            for (int k = 0; k < K; ++k) sum += a[row][k] * b[k][column];
            all[lane]->c[e] += sum;
        }
}
inline float number_bf16(u16 x) { return low_bf16(x); }
inline void mma_m16n8k16_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Product mine = {c, {a0, a1, a2, a3}, {b0, b1}};
    with_warp(mine, [](Product** all) { multiply<from_fp16, 16>(all); });
}
inline void mma_m16n8k16_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Product mine = {c, {a0, a1, a2, a3}, {b0, b1}};
    with_warp(mine, [](Product** all) { multiply<number_bf16, 16>(all); });
}
inline void mma_m16n8k8_f16(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    Product mine = {c, {a0, a1}, {b0}};
    with_warp(mine, [](Product** all) { multiply<from_fp16, 8>(all); });
}
inline void mma_m16n8k8_f16_from(float (&c)[4], float d, u32 a0, u32 a1, u32 b0) {
    c[0] = c[1] = c[2] = c[3] = d;
    mma_m16n8k8_f16(c, a0, a1, b0);
}
inline void mma_m16n8k16_f16_from(float (&c)[4], float d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                  u32 b1) {
    c[0] = c[1] = c[2] = c[3] = d;
    mma_m16n8k16_f16(c, a0, a1, a2, a3, b0, b1);
}
struct ProductTf32 {
    float *c, a[4], b[2];
};
inline void mma_m16n8k8_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0,
                             float b1) {
    auto cut = [](float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); };
    ProductTf32 mine = {c, {cut(a0), cut(a1), cut(a2), cut(a3)}, {cut(b0), cut(b1)}};
    with_warp(mine, [](ProductTf32** all) {
        for (int lane = 0; lane < 32; ++lane)
            for (int e = 0; e < 4; ++e) {
                const int r = lane / 4, column = 2 * (lane % 4) + e % 2;
                float sum = 0.0f;
                for (int k = 0; k < 8; ++k)
                    sum += all[4 * r + k % 4]->a[e / 2 + 2 * (k / 4)] *
                           all[4 * column + k % 4]->b[k / 4];
                all[lane]->c[e] += sum;
            }
    });
}

inline u64 make_gmma_desc_sw128(u32 address, u32 leading, u32 stride) {
    return u64(address) << 32 | leading << 16 | stride;
}
// wgmma, each warp its 16 rows. B's place of (k, n) is a byte offset before the swizzle.
struct Wgmma {
    float* c;
    const u32* a;
    u64 b;
    int scale_d;
};
template <int N, bool MN_MAJOR>
void wgmma(const std::vector<Wgmma>& lanes) {
    const u32 start = lanes[0].b >> 32, leading = lanes[0].b >> 16 & 0xffff;
    const u32 stride = lanes[0].b & 0xffff;
    float b[16][N];
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < N; ++n) {
            const u32 address =
                start + (MN_MAJOR ? n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2
                                  : n / 8 * stride + n % 8 * 128 + k * 2);
            const u32 swizzled = address ^ (address >> 7 & 7) << 4;
            b[k][n] = from_fp16(*reinterpret_cast<u16*>(host::at(swizzled)));
        }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < N / 2; ++i) {
            const int half = i / 2 % 2, n = i / 4 * 8 + 2 * (lane % 4) + i % 2;
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) {
                const u32 pair = lanes[lane / 4 * 4 + k / 2 % 4].a[half + 2 * (k / 8)];
                sum += (k % 2 ? high_fp16(pair) : low_fp16(pair)) * b[k][n];
            }
            float& c = lanes[lane].c[i];
            c = (lanes[lane].scale_d ? c : 0.0f) + sum;
        }
}
template <int N, bool MN_MAJOR>
void defer_wgmma(float* c, const u32* a, u64 b, int scale_d) {
    Wgmma mine = {c, a, b, scale_d};
    with_warp(mine, [](Wgmma** all) {
        std::vector<Wgmma> lanes;
        for (int i = 0; i < 32; ++i) lanes.push_back(*all[i]);
        host::defer_product([lanes] { wgmma<N, MN_MAJOR>(lanes); });
    });
}
inline void wgmma_m64n64k16_f16_rs(float (&c)[32], const u32 (&a)[4], u64 b, int scale_d) {
    defer_wgmma<64, false>(c, a, b, scale_d);
}
inline void wgmma_m64n128k16_f16_rs_mn(float (&c)[64], const u32 (&a)[4], u64 b) {
    defer_wgmma<128, true>(c, a, b, 1);
}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <int PENDING>
void warpgroup_wait() {
    static_assert(PENDING == 0);
    struct None {} none;
    with_warp(none, [](None**) { host::finish_products(); });
}
template <int N>
void warpgroup_fence_operand(float (&)[N]) {}
template <int REGISTERS>
void warpgroup_reg_alloc() {}
template <int REGISTERS>
void warpgroup_reg_dealloc() {}
