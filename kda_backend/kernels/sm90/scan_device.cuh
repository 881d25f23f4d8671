// What scan.cu needs of Hopper: barriers and bulk copies of shared memory, clusters, wgmma with A in
// registers.
#pragma once

#include "device.cuh"

__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 y;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(y) : "l"(p) : "memory");
    return y;
}
__device__ __forceinline__ void barrier_init(u64* b, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes) : "memory");
}
// Arrives when the copies have that this thread has begun by copy_async.
__device__ __forceinline__ void copies_arrive(u64* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* b, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nwait:\n"
        "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
        "@p bra done;\nbra wait;\ndone:\n}" ::"r"(shared_address(b)), "r"(parity) : "memory");
}
// A shared variable's address at another block of the cluster.
__device__ __forceinline__ u32 shared_of(const void* p, int rank) {
    u32 y;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(shared_address(p)), "r"(rank));
    return y;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Copies shared memory to the other block of the cluster, counted at a barrier there.
__device__ __forceinline__ void send(void* data, int bytes, u64* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_of(data, 1)),
        "r"(shared_address(data)), "r"(bytes), "r"(shared_of(b, 1)) : "memory");
}
__device__ __forceinline__ void fetch(void* to, const void* from, int bytes, u64* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}

// Descriptor of a B operand in 128-byte-swizzled blocks; strides in bytes.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return (u64(1) << 62) | (u64(stride >> 4) << 32) | (u64(leading >> 4) << 16) |
           u64((address & 0x3ffff) >> 4);
}

#define ACC8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), \
                   "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])

// c [64, 64] = a [64, 16] b [16, 64] (+ c): b stored [64][16], contiguous in its 16.
__device__ __forceinline__ void wgmma_64(float (&c)[32], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
        : ACC8(c, 0), ACC8(c, 8), ACC8(c, 16), ACC8(c, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// c [64, 128] += a [64, 16] b [16, 128]: b stored [16][128], contiguous in its 128.
__device__ __forceinline__ void wgmma_128(float (&c)[64], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
        : ACC8(c, 0), ACC8(c, 8), ACC8(c, 16), ACC8(c, 24), ACC8(c, 32), ACC8(c, 40), ACC8(c, 48),
          ACC8(c, 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// An accumulator must not be read before its group has been waited for; the compiler is told so.
template <int N>
__device__ __forceinline__ void settled(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Moves registers between warpgroups, which start with 168 a thread.
template <int COUNT, bool MORE>
__device__ __forceinline__ void registers() {
    if (MORE)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
