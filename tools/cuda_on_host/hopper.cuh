// What backend_core/cuda/hopper.cuh and CUDA give a kernel, on the CPU (runtime.h).
#pragma once

#include <cmath>
#include <cstring>

#include "runtime.h"

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;
using std::max;
using std::min;

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define INLINE inline __attribute__((always_inline))
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
// The scheduler puts each CTA's own there when it runs.
#define __shared__ static __attribute__((section("shared_memory")))

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
INLINE float2 make_float2(float x, float y) { return {x, y}; }
INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
INLINE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
INLINE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
INLINE int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

// ---- CUDA C++ ----

template <typename To, typename From>
INLINE To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, x);
}
INLINE float __uint_as_float(u32 x) { return bits_as<float>(x); }
INLINE float __int_as_float(int x) { return bits_as<float>(x); }
INLINE u32 __float_as_uint(float x) { return bits_as<u32>(x); }
INLINE float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
INLINE int __ffs(u32 x) { return __builtin_ffs(int(x)); }
INLINE void __syncthreads() { host::syncthreads(); }
INLINE void __syncwarp() { host::syncwarp(); }
INLINE void __threadfence() { host::threadfence(); }
INLINE void __threadfence_system() { host::threadfence(); }
INLINE void __trap() { host::trap(); }
INLINE void __nanosleep(unsigned) { host::yield(); }
INLINE u32 atomicAdd(u32* p, u32 x) { return host::atomic_add(p, x); }
template <typename T>
INLINE T __shfl_sync(u32, T x, int lane) {
    return bits_as<T>(host::collective(host::Lanes::SHUFFLE, bits_as<u32>(x), lane));
}
template <typename T>
INLINE T __shfl_xor_sync(u32 mask, T x, int lanes) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ lanes);
}
template <typename T>
INLINE T __shfl_up_sync(u32 mask, T x, int by) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, x, lane >= by ? lane - by : lane);
}
INLINE u32 __ballot_sync(u32, bool x) { return host::collective(host::Lanes::BALLOT, x, 0); }
INLINE int __reduce_add_sync(u32, int x) {
    return host::collective(host::Lanes::REDUCE_ADD, x, 0);
}
INLINE int __reduce_min_sync(u32, int x) {
    return host::collective(host::Lanes::REDUCE_MIN, x, 0);
}

// ---- numerics.cuh ----

INLINE float ex2(float x) { return std::exp2(x); }
INLINE float lg2(float x) { return std::log2(x); }
INLINE float rcp(float x) { return 1.0f / x; }
INLINE u32 bf16_bits(float x) {
    const u32 y = __float_as_uint(x);
    return x != x ? 0x7fff : (y + 0x7fff + (y >> 16 & 1)) >> 16;
}
INLINE u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
INLINE float low_bf16(u32 x) { return __uint_as_float(x << 16); }
INLINE float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
INLINE float from_fp16(u16 x) { return bits_as<_Float16>(x); }
INLINE u16 to_fp16(float x) { return bits_as<u16>(static_cast<_Float16>(x)); }
INLINE float low_fp16(u32 x) { return from_fp16(u16(x)); }
INLINE float high_fp16(u32 x) { return from_fp16(u16(x >> 16)); }
INLINE u32 pack_fp16(float low, float high) { return to_fp16(low) | u32(to_fp16(high)) << 16; }
INLINE u32 pack_fp16_satfinite(float low, float high) {
    auto bounded = [](float x) { return x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x; };
    return pack_fp16(bounded(low), bounded(high));
}
INLINE u32 mul_fp16x2(u32 a, u32 b) {
    return pack_fp16(low_fp16(a) * low_fp16(b), high_fp16(a) * high_fp16(b));
}
INLINE u32 neg_mul_fp16x2(u32 a, u32 b) { return mul_fp16x2(a ^ 0x80008000u, b); }
INLINE u32 max_fp16x2(u32 a, u32 b) {
    return pack_fp16(std::fmax(low_fp16(a), low_fp16(b)), std::fmax(high_fp16(a), high_fp16(b)));
}

// ---- hopper.cuh, in its order ----

INLINE u32 sm_index() { return host::sm_index(); }
INLINE int reread_thread_index() { return threadIdx.x; }
INLINE i64 compiler_fence(i64 x) { return x; }
INLINE u32 compiler_fence(u32 x) { return x; }

INLINE u32 cast_smem_ptr_to_uint(const void* p) {
    return static_cast<const unsigned char*>(p) - host::shared_memory();
}
INLINE unsigned char* dynamic_shared_memory() { return host::shared_memory(); }
INLINE u32 load_acquire(const u32* p) { return host::load_acquire(p); }
INLINE void store_release(u32* p, u32 x) { host::store_release(p, x); }
INLINE uint4 load_shared(u32 from) { return *static_cast<uint4*>(host::shared_at(from)); }
template <unsigned BYTES>
__attribute__((used)) void shared_bytes() {}
enum CacheHint { EVICT_NORMAL = 0, EVICT_FIRST = 1, EVICT_LAST = 2 };
template <int HINT>
INLINE u64 create_policy() { return 0; }
template <typename T>
INLINE T load_global(const T* p, u64) { return *p; }
template <typename T>
INLINE void store_global(T* p, T x, u64) { *p = x; }

INLINE void prefetch_l2(const void*) {}

INLINE void launch_dependent_grids() { host::launch_dependents(); }
INLINE void wait_on_dependent_grids() { host::wait_on_dependents(); }
INLINE void cluster_arrive() { host::cluster_arrive(true); }
INLINE void cluster_arrive_relaxed() { host::cluster_arrive(false); }
INLINE void cluster_wait() { host::cluster_wait(); }
INLINE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
INLINE u32 set_block_rank(u32 address, int rank) { return host::address_at(address, rank); }

struct ClusterBarrier {
    uint64_t state;

    INLINE u32 address() { return cast_smem_ptr_to_uint(&state); }
    INLINE void init(int count) { host::barrier_init(&state, count); }
    INLINE void arrive() { host::barrier_arrive(&state, 0); }
    INLINE void arrive(int rank) { host::barrier_arrive_at(set_block_rank(address(), rank)); }
    INLINE void wait(u32 parity) { host::barrier_wait(&state, parity); }
};
struct ClusterTransactionBarrier : ClusterBarrier {
    INLINE void arrive_and_expect_tx(u32 bytes) { host::barrier_arrive(&state, bytes); }
};
INLINE void fence_barrier_init() { host::fence_barrier_init(); }

INLINE void cpasync_barrier_arrive_noinc(ClusterBarrier& barrier) {
    host::cp_async_arrive(&barrier.state);
}
INLINE void cp_async_cacheglobal_zfill(u32 to, const void* from, bool valid) {
    host::cp_async_at(to, from, 16, valid);
}
INLINE void cp_async_cachealways_zfill(void* to, const void* from, bool valid) {
    host::cp_async(to, from, 4, valid);
}
INLINE void cp_async_fence() { host::cp_async_commit(); }
template <int PENDING>
INLINE void cp_async_wait() { host::cp_async_wait(PENDING); }

template <int THREADS, int>
INLINE void named_barrier_sync() { host::named_barrier(THREADS); }
INLINE void tma_store_fence() { host::fence_proxy_async(); }
INLINE void fence_proxy_async() { host::fence_proxy_async(); }
INLINE void bulk_copy_g2s(void* to, const void* from, u32 bytes,
                          ClusterTransactionBarrier& barrier) {
    host::bulk_to_shared(to, from, bytes, &barrier.state);
}
INLINE void bulk_copy_g2s(void* to, const void* from, u32 bytes,
                          ClusterTransactionBarrier& barrier, u64) {
    host::bulk_to_shared(to, from, bytes, &barrier.state);
}
INLINE void bulk_copy_s2s(void* data, u32 bytes, ClusterTransactionBarrier& barrier, int rank) {
    host::bulk_to_rank(data, bytes, &barrier.state, rank);
}
INLINE void store_shared_remote(float x, float* variable, ClusterTransactionBarrier& barrier,
                                int rank) {
    host::store_to_rank(x, variable, &barrier.state, rank);
}
INLINE void bulk_copy_s2g(void* to, const void* from, u32 bytes) {
    host::bulk_to_global(to, from, bytes);
}
INLINE void tma_store_wait_read() { host::wait_stores(false); }
INLINE void tma_store_wait() { host::wait_stores(true); }

INLINE void ldmatrix(u32 (&x)[4], u32 from) { host::move_matrices(x, from, false, false); }
INLINE void ldmatrix_trans(u32 (&x)[4], u32 from) { host::move_matrices(x, from, true, false); }
INLINE void stmatrix(u32 to, const u32 (&x)[4]) {
    host::move_matrices(const_cast<u32*>(x), to, false, true);
}
INLINE void stmatrix_trans(u32 to, const u32 (&x)[4]) {
    host::move_matrices(const_cast<u32*>(x), to, true, true);
}
INLINE void multiply(host::Mma kind, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                     u32 b1) {
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    host::mma(kind, c, a, b);
}
INLINE void mma_m16n8k16_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(host::Mma::F16_K16, c, a0, a1, a2, a3, b0, b1);
}
INLINE void mma_m16n8k16_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(host::Mma::BF16_K16, c, a0, a1, a2, a3, b0, b1);
}
INLINE void mma_m16n8k8_f16(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    multiply(host::Mma::F16_K8, c, a0, a1, 0, 0, b0, 0);
}
INLINE void mma_m16n8k8_f16_from(float (&c)[4], float d, u32 a0, u32 a1, u32 b0) {
    c[0] = c[1] = c[2] = c[3] = d;
    mma_m16n8k8_f16(c, a0, a1, b0);
}
INLINE void mma_m16n8k16_f16_from(float (&c)[4], float d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                  u32 b1) {
    c[0] = c[1] = c[2] = c[3] = d;
    mma_m16n8k16_f16(c, a0, a1, a2, a3, b0, b1);
}
INLINE void mma_m16n8k8_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0,
                             float b1) {
    auto bits = [](float x) { return __float_as_uint(x); };
    multiply(host::Mma::TF32_K8, c, bits(a0), bits(a1), bits(a2), bits(a3), bits(b0), bits(b1));
}

INLINE u64 make_gmma_desc_sw128(u32 address, u32 leading, u32 stride) {
    return u64(address) << 32 | leading << 16 | stride;
}
INLINE host::Wgmma with_b(int n, bool mn_major, const u32* a, u64 b, bool add) {
    return {n, false, mn_major, add, a, 0, u32(b >> 32), u32(b >> 16 & 0xffff), u32(b & 0xffff), 64};
}
INLINE void wgmma_m64n64k16_f16_rs(float (&c)[32], const u32 (&a)[4], u64 b, int scale_d) {
    host::wgmma(c, with_b(64, false, a, b, scale_d));
}
INLINE void wgmma_m64n32k16_f16_rs(float (&c)[16], const u32 (&a)[4], u64 b, int scale_d) {
    host::wgmma(c, with_b(32, false, a, b, scale_d));
}
INLINE void wgmma_m64n16k16_f16_rs(float (&c)[8], const u32 (&a)[4], u64 b, int scale_d) {
    host::wgmma(c, with_b(16, false, a, b, scale_d));
}
INLINE void wgmma_m64n128k16_f16_rs_mn(float (&c)[64], const u32 (&a)[4], u64 b) {
    host::wgmma(c, with_b(128, true, a, b, true));
}
INLINE void warpgroup_arrive() { host::wgmma_arrive(); }
INLINE void warpgroup_commit_batch() { host::wgmma_commit(); }
template <int PENDING>
INLINE void warpgroup_wait() {
    host::wgmma_wait(PENDING);
}
template <int N>
INLINE void warpgroup_fence_operand(float (&)[N]) {}
template <int REGISTERS>
INLINE void warpgroup_reg_alloc() {}
template <int REGISTERS>
INLINE void warpgroup_reg_dealloc() {}
