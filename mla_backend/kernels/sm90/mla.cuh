// What MLA decode needs beside the core's instructions: tensor copies, and wgmma on bf16 operands that both
// lie in shared memory.
#pragma once
#include "hopper.cuh"
#include "softmax.cuh"

// Tells the compiler that all lanes have the same value, so that it may live in a uniform register.
__device__ __forceinline__ u32 warp_uniform(u32 x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ void prefetch_tma_descriptor(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of a rank-3 tensor map with coordinates (channel, row of the page, page); completes at the barrier.
// CUTLASS's TMA::CacheHintSm90: EVICT_FIRST 0x12F0000000000000, EVICT_NORMAL 0x1000000000000000.
__device__ __forceinline__ void tma_load_3d(u32 to, const void* map, int channel, int row, int page,
                                            ClusterTransactionBarrier& barrier, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(channel), "r"(row), "r"(page),
        "r"(barrier.address()), "l"(hint) : "memory");
}
// Two warpgroups meet.
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// Warpgroup matrix instructions. A shared-memory operand has the 128-byte swizzle: rows of 128 bytes,
// 1024 bytes from one group of eight rows to the next (the stride byte offset). The low word of its
// descriptor is made here; offsets are added to it in units of 16 bytes, one uniform add each. The
// leading byte offset is from one 128-byte column to the next, where the operand is MN-major and wider.
static constexpr u32 DESCRIPTOR_HIGH = 0x40000040;  // 128-byte swizzle, stride byte offset 1024
__device__ __forceinline__ u32 descriptor_low(u32 address, u32 leading_bytes = 16) {
    return ((address & 0x3ffff) >> 4) | (leading_bytes >> 4 << 16);
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
