// Types and Hopper instructions of the sources in this folder, by CUTLASS's names where it has one.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define INF __int_as_float(0x7f800000)
static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ u32 cast_smem_ptr_to_uint(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
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
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// Tells the compiler that all lanes have the same value, so that it may live in a uniform register.
__device__ __forceinline__ u32 warp_uniform(u32 x) { return __shfl_sync(~0u, x, 0); }

// Programmatic dependent launch.
__device__ __forceinline__ void launch_dependent_grids() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_on_dependent_grids() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Barriers.
__device__ __forceinline__ void mbarrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(cast_smem_ptr_to_uint(barrier)), "r"(arrivals));
}
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(cast_smem_ptr_to_uint(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_and_expect_tx(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(cast_smem_ptr_to_uint(barrier)),
                 "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nwait:\n"
        "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
        "@p bra done;\nbra wait;\ndone:\n}" ::"r"(cast_smem_ptr_to_uint(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void named_barrier_sync(int threads, int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void fence_view_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies to shared memory. For !valid 16 zero bytes are written and nothing is read.
__device__ __forceinline__ void cp_async_zfill(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

struct __align__(64) TensorMap { u64 words[16]; };
__device__ __forceinline__ void prefetch_tma_descriptor(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of a rank-3 map with coordinates (channel, row of the page, page). The hint is CUTLASS's
// TMA::CacheHintSm90: EVICT_FIRST 0x12F0000000000000, EVICT_NORMAL 0x1000000000000000.
__device__ __forceinline__ void tma_load_3d(u32 to, const TensorMap* map, int channel, int row, int page,
                                            u64* barrier, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(channel), "r"(row), "r"(page),
        "r"(cast_smem_ptr_to_uint(barrier)), "l"(hint) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}

// Warpgroup matrix instructions. A shared-memory operand has the 128-byte swizzle: rows of 128 bytes,
// 1024 bytes from one group of eight rows to the next (the stride byte offset). The low word of its
// descriptor is made here; offsets are added to it in units of 16 bytes, one uniform add each. The
// leading byte offset is from one 128-byte column to the next, where the operand is MN-major and wider.
static constexpr u32 DESCRIPTOR_HIGH = 0x40000040;  // 128-byte swizzle, stride byte offset 1024
__device__ __forceinline__ u32 descriptor_low(u32 address, u32 leading_bytes = 16) {
    return ((address & 0x3ffff) >> 4) | (leading_bytes >> 4 << 16);
}
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit_batch() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler moves no use of an accumulator across this.
template <int COUNT>
__device__ __forceinline__ void warpgroup_fence_operand(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#define ACC4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define ACC16(c, i) ACC4(c, i), ACC4(c, i + 4), ACC4(c, i + 8), ACC4(c, i + 12)
#define ACC64(c, i) ACC16(c, i), ACC16(c, i + 16), ACC16(c, i + 32), ACC16(c, i + 48)

// c [64, 64] = a [64, 16] b [64, 16]^T, plus c where accumulate; both K-major in shared memory.
__device__ __forceinline__ void wgmma_m64n64k16(float (&c)[32], u32 a, u32 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %34, 0;\n"
        "mov.b64 da, {%32, %35};\nmov.b64 db, {%33, %35};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, da, db, p, 1, 1, 0, 0;\n}"
        : ACC16(c, 0), ACC16(c, 16)
        : "r"(a), "r"(b), "r"(accumulate), "n"(DESCRIPTOR_HIGH));
}
// c [64, 256] += a [64, 16] b [16, 256]; a K-major, b MN-major, both in shared memory.
__device__ __forceinline__ void wgmma_m64n256k16(float (&c)[128], u32 a, u32 b) {
    asm volatile(
        "{\n.reg .b64 da, db;\nmov.b64 da, {%128, %130};\nmov.b64 db, {%129, %130};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
        "da, db, 1, 1, 1, 0, 1;\n}"
        : ACC64(c, 0), ACC64(c, 64)
        : "r"(a), "r"(b), "n"(DESCRIPTOR_HIGH));
}
