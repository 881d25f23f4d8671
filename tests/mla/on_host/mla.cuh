// What kernels/sm90/mla.cuh gives MLA decode beside the core's instructions, on the CPU.
#pragma once
#include "hopper.cuh"
#include "softmax.cuh"

INLINE u32 warp_uniform(u32 x) { return __shfl_sync(~0u, x, 0); }
INLINE void prefetch_tma_descriptor(const void*) {}
INLINE void tma_load_3d(u32 to, const void* map, int channel, int row, int page,
                        ClusterTransactionBarrier& barrier, u64) {
    const int at[3] = {channel, row, page};
    host::tensor_to_shared(to, map, at, &barrier.state);
}
INLINE void sync_consumers() { host::named_barrier(256); }

// As on the GPU the low word of a descriptor: offsets are added to it in units of 16 bytes.
INLINE u32 descriptor_low(u32 address, u32 leading_bytes = 16) {
    return (address & 0x3ffff) >> 4 | leading_bytes >> 4 << 16;
}
// Of the operand with a row for each query there are ROWS rows; the kernel drops what the others give.
INLINE host::Wgmma of_shared(int n, bool mn_major, u32 a, u32 b, bool add) {
    auto address = [](u32 low) { return (low & 0x3fff) << 4; };
    return {n, true, mn_major, add, nullptr, address(a), address(b), b >> 16 << 4, 1024, ROWS};
}
INLINE void wgmma_m64n64k16(float (&c)[32], u32 a, u32 b, int accumulate) {
    host::wgmma(c, of_shared(64, false, a, b, accumulate));
}
INLINE void wgmma_m64n256k16(float (&c)[128], u32 a, u32 b) {
    host::wgmma(c, of_shared(256, true, a, b, true));
}
