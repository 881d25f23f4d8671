// Instructions of Hopper (sm_90a) that CUDA C++ has no function for, under the names that CUTLASS
// and CuTe give them. Every inline-assembly statement of the CUDA kernels is here or in
// numerics.cuh: a kernel reads as C++, and tests can put functions of the CPU in their place.
//
// u32 addresses are of the shared window (cast_smem_ptr_to_uint). "Completes" says which barrier
// hears of the end of an asynchronous copy.
#pragma once

#include "numerics.cuh"

// ---- threads and compiler fences ----

__device__ __forceinline__ u32 sm_index() {
    u32 y;
    asm("mov.u32 %0, %%smid;" : "=r"(y));
    return y;
}
// threadIdx.x, read anew at each call: addresses made from it cannot be hoisted out of a loop,
// where they would fill registers.
__device__ __forceinline__ int reread_thread_index() {
    int y;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(y));
    return y;
}
// x. The compiler moves no memory access across this point, and no use of the result above it.
__device__ __forceinline__ i64 compiler_fence(i64 x) {
    asm volatile("" : "+l"(x)::"memory");
    return x;
}
__device__ __forceinline__ u32 compiler_fence(u32 x) {
    asm volatile("" : "+r"(x)::"memory");
    return x;
}

// ---- memory ----

__device__ __forceinline__ u32 cast_smem_ptr_to_uint(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}
// The CTA's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
    extern __shared__ __align__(1024) unsigned char raw[];
    return raw;
}
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 y;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(y) : "l"(p) : "memory");
    return y;
}
__device__ __forceinline__ void store_release(u32* p, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}
// A kernel's source instantiates this with the size of its dynamic shared memory, which the host
// reads from the name of the instance. (A constant in the module would add time to each launch.)
template <unsigned BYTES>
__global__ void shared_bytes() {}
// How long the L2 cache keeps what is accessed.
enum CacheHint { EVICT_NORMAL = 0, EVICT_FIRST = 1, EVICT_LAST = 2 };
template <int HINT>
__device__ __forceinline__ u64 create_policy() {
    u64 y;
    if (HINT == EVICT_NORMAL)
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(y));
    if (HINT == EVICT_FIRST)
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(y));
    if (HINT == EVICT_LAST) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(y));
    return y;
}
__device__ __forceinline__ float4 load_global(const float4* p, u64 policy) {
    float4 x;
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p), "l"(policy) : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_global(const uint2* p, u64 policy) {
    uint2 x;
    asm volatile("ld.global.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(x.x), "=r"(x.y) : "l"(p), "l"(policy) : "memory");
    return x;
}
__device__ __forceinline__ void store_global(float4* p, float4 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;"
                 ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy) : "memory");
}
__device__ __forceinline__ void store_global(uint2* p, uint2 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;"
                 ::"l"(p), "r"(x.x), "r"(x.y), "l"(policy) : "memory");
}

// Asks for the 128 bytes around p in the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ---- programmatic dependent launch ----

// The next kernel in the stream may start once every CTA of this one has said so or has ended.
__device__ __forceinline__ void launch_dependent_grids() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernel before has ended and its writes can be read; nothing where the launch was
// not a programmatic one.
__device__ __forceinline__ void wait_on_dependent_grids() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- clusters ----

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
// Orders no memory access before it.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
// The address that a shared variable of this CTA has at CTA ``rank`` of the cluster.
__device__ __forceinline__ u32 set_block_rank(u32 address, int rank) {
    u32 y;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(rank));
    return y;
}

// ---- barriers in shared memory ----

// A phase is over when the count given to init has arrived. Waiting takes the parity of the phase:
// 0 for the first, then 1, 0, 1, ...
struct ClusterBarrier {
    u64 state;

    __device__ __forceinline__ u32 address() { return cast_smem_ptr_to_uint(&state); }
    __device__ __forceinline__ void init(int count) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    // At the same barrier of CTA ``rank`` of the cluster.
    __device__ __forceinline__ void arrive(int rank) {
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
                     ::"r"(set_block_rank(address(), rank)) : "memory");
    }
    __device__ __forceinline__ void wait(u32 parity) {
        asm volatile(
            "{\n.reg .pred p;\nTRY_WAIT_AGAIN:\n"
            "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
            "@p bra TRY_WAIT_DONE;\nbra TRY_WAIT_AGAIN;\nTRY_WAIT_DONE:\n}" ::"r"(address()), "r"(parity) : "memory");
    }
};
// Its phase also waits for the bytes of copies that complete at it.
struct ClusterTransactionBarrier : ClusterBarrier {
    __device__ __forceinline__ void arrive_and_expect_tx(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                     ::"r"(address()), "r"(bytes) : "memory");
    }
};
// Makes initialised barriers known to the cluster and to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, once, when all copies have that this thread has begun by cp_async.
__device__ __forceinline__ void cpasync_barrier_arrive_noinc(ClusterBarrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
                 ::"r"(barrier.address()) : "memory");
}

// ---- copies by threads (cp.async) ----

// 16 bytes to shared memory, or zeros; for zeros nothing is read.
__device__ __forceinline__ void cp_async_cacheglobal_zfill(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// 4 bytes, likewise.
__device__ __forceinline__ void cp_async_cachealways_zfill(void* to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(cast_smem_ptr_to_uint(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_fence() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most ``PENDING`` groups of this thread are on their way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// CUTLASS's NamedBarrier::sync: so many threads meet, wherever in the code they are (barrier.sync;
// bar.sync is the aligned form). __syncthreads is for places that all threads reach by the same
// branches.
template <int THREADS, int ID>
__device__ __forceinline__ void named_barrier_sync() {
    asm volatile("barrier.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// ---- bulk copies (the asynchronous proxy) ----

// Makes this thread's writes to shared memory visible to bulk copies and to wgmma.
__device__ __forceinline__ void tma_store_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// As tma_store_fence, of global memory too: what this thread has acquired may be copied.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}
// Global to shared memory; completes at the barrier.
__device__ __forceinline__ void bulk_copy_g2s(void* to, const void* from, u32 bytes,
                                              ClusterTransactionBarrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(cast_smem_ptr_to_uint(to)), "l"(from), "r"(bytes), "r"(barrier.address()) : "memory");
}
__device__ __forceinline__ void bulk_copy_g2s(void* to, const void* from, u32 bytes,
                                              ClusterTransactionBarrier& barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;"
        ::"r"(cast_smem_ptr_to_uint(to)), "l"(from), "r"(bytes), "r"(barrier.address()),
        "l"(policy) : "memory");
}
// Shared memory to the same place in CTA ``rank`` of the cluster; completes at the barrier there.
__device__ __forceinline__ void bulk_copy_s2s(void* data, u32 bytes,
                                              ClusterTransactionBarrier& barrier, int rank) {
    const u32 from = cast_smem_ptr_to_uint(data);
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(set_block_rank(from, rank)), "r"(from), "r"(bytes),
        "r"(set_block_rank(barrier.address(), rank)) : "memory");
}
// x to the same variable in CTA ``rank`` of the cluster; completes at the barrier there.
__device__ __forceinline__ void store_shared_remote(float x, float* variable,
                                                    ClusterTransactionBarrier& barrier, int rank) {
    const u32 to = set_block_rank(cast_smem_ptr_to_uint(variable), rank);
    const u32 at = set_block_rank(barrier.address(), rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 ::"r"(to), "f"(x), "r"(at) : "memory");
}
// Shared to global memory, a group by itself.
__device__ __forceinline__ void bulk_copy_s2g(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;"
                 ::"l"(to), "r"(cast_smem_ptr_to_uint(from)), "r"(bytes) : "memory");
}
// Waits until this thread's bulk copies have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until this thread's bulk copies have written global memory.
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- matrices: one warp ----

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and
// lane (l / 4, l % 4) = (r, t) gets elements (r, 2 t) and (r, 2 t + 1) of each.
__device__ __forceinline__ void ldmatrix(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// c [16, 8] += a [16, K] b [K, 8]
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                 u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                  u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k8_f16(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
// Reads the upper 19 bits of each operand: what it drops is cut off, not rounded.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], float a0, float a1, float a2,
                                                 float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
          "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// c = a b + d in each element: the products of K = 8 or 16 with one number to start from.
__device__ __forceinline__ void mma_m16n8k8_f16_from(float (&c)[4], float d, u32 a0, u32 a1,
                                                     u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%7,%7,%7,%7};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(b0), "f"(d));
}
__device__ __forceinline__ void mma_m16n8k16_f16_from(float (&c)[4], float d, u32 a0, u32 a1,
                                                      u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(d));
}

// ---- matrices: one warpgroup (wgmma) ----

// Descriptor of an operand in blocks with the 128-byte swizzle; strides in bytes.
__device__ __forceinline__ u64 make_gmma_desc_sw128(u32 address, u32 leading, u32 stride) {
    return (u64(1) << 62) | (u64(stride >> 4) << 32) | (u64(leading >> 4) << 16) |
           u64((address & 0x3ffff) >> 4);
}

#define ACC8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), \
                   "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])

// c [64, 64] = a [64, 16] b [16, 64] (+ c where scale_d is not 0). a lies in registers (RS), laid
// out as the accumulators of 16 columns are, in fp16; b is K-major, stored [64][16].
__device__ __forceinline__ void wgmma_m64n64k16_f16_rs(float (&c)[32], const u32 (&a)[4], u64 b,
                                                       int scale_d) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
        : ACC8(c, 0), ACC8(c, 8), ACC8(c, 16), ACC8(c, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));
}
// The same with b [16, 32] and b [16, 16].
__device__ __forceinline__ void wgmma_m64n32k16_f16_rs(float (&c)[16], const u32 (&a)[4], u64 b,
                                                       int scale_d) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "{%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"
        : ACC8(c, 0), ACC8(c, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));
}
__device__ __forceinline__ void wgmma_m64n16k16_f16_rs(float (&c)[8], const u32 (&a)[4], u64 b,
                                                       int scale_d) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
        : ACC8(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));
}
// c [64, 128] += a [64, 16] b [16, 128]: b is MN-major, stored [16][128].
__device__ __forceinline__ void wgmma_m64n128k16_f16_rs_mn(float (&c)[64], const u32 (&a)[4],
                                                           u64 b) {
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
// Orders register accesses before the wgmma that follow.
__device__ __forceinline__ void warpgroup_arrive() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit_batch() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accesses of an accumulator into the time of an asynchronous wgmma.
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
// Registers per thread from here on, taken from or given to the other warpgroups of the CTA.
template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
