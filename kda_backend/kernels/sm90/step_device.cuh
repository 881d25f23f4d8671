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

__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void init_barrier(u64* arrived) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(arrived)) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// A bulk copy to shared memory, for which arrived then has a phase completed.
__device__ __forceinline__ void fetch(void* to, const void* from, u32 bytes, u64* arrived) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(arrived)), "l"(evict_first())
        : "memory");
}
__device__ __forceinline__ void wait_for_fetch(u64* arrived) {
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
// A bulk copy out of shared memory.
__device__ __forceinline__ void write(void* to, const void* from, u32 bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
        "r"(shared_address(from)), "r"(bytes), "l"(evict_first())
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until what this thread wrote has been read from shared memory.
__device__ __forceinline__ void wait_for_writes() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// What threads did to shared memory comes before what bulk copies do to it.
__device__ __forceinline__ void fence_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes x to a shared variable of block `rank` of the cluster.
__device__ __forceinline__ void tell_block(float* variable, int rank, float x) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(shared_address(variable)), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
