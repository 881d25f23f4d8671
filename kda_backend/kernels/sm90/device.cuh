// Types and instructions of every source in this folder.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 shared_address(const void* p) {
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
__device__ __forceinline__ float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 to_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ uint4 packed(const u32 (&x)[4]) {
    return make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void unpack(u32 (&to)[4], const uint4& x) {
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
// 16 bytes to shared memory, or zeros, without waiting for them; for zeros nothing is read.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0) : "memory");
}
// Programmatic dependent launch: the next kernel may start when every block has said so.
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
