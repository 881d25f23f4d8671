// The instructions of decode_step.cu that are neither arithmetic nor loads and stores.
// tests/kda/step_on_host/ has them for threads of the CPU.
#pragma once

#include "device.cuh"

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char raw[];
    return raw;
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

// x; what comes from it is computed behind here, and what it comes from before.
__device__ __forceinline__ i64 known(i64 x) {
    asm volatile("" : "+l"(x)::"memory");
    return x;
}
__device__ __forceinline__ u32 known(u32 x) {
    asm volatile("" : "+r"(x)::"memory");
    return x;
}

// How long the L2 cache keeps what is accessed: 0 as usual, 1 evicted first, 2 evicted last.
template <int HINT>
__device__ __forceinline__ u64 policy() {
    u64 policy;
    if (HINT == 0) asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    if (HINT == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if (HINT == 2) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ float4 load_global(const float4* p, u64 policy) {
    float4 x;
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p), "l"(policy)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_global(const uint2* p, u64 policy) {
    uint2 x;
    asm volatile("ld.global.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(p), "l"(policy)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_global(float4* p, float4 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void store_global(uint2* p, uint2 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(x.x),
                 "r"(x.y), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void init_barrier(u64* arrived) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(arrived)) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The phase of arrived is over when so many bytes have come.
__device__ __forceinline__ void expect(u64* arrived, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
                 "r"(bytes)
                 : "memory");
}
// A bulk copy to shared memory, for which arrived then has its phase completed.
__device__ __forceinline__ void fetch(void* to, const void* from, u32 bytes, u64* arrived,
                                      u64 policy) {
    expect(arrived, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(arrived)), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void wait_for_bytes(u64* arrived) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(arrived))
            : "memory");
    }
}
__device__ __forceinline__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Blocks of a cluster have all arrived before one of them goes on; of memory this says nothing but
// that their barriers, once published, are there.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes x to a shared variable of block `rank` of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void tell_block(float* variable, u64* arrived, int rank, float x) {
    u32 there, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(shared_address(variable)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(barrier)
        : "r"(shared_address(arrived)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     there),
                 "f"(x), "r"(barrier)
                 : "memory");
}
