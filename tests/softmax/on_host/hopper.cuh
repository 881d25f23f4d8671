// Stands in for kernels/sm90/hopper.cuh where a kernel runs on the host: a thread of the operating system for
// each of a CTA's, CTAs one after another. Enough for kernels without TMA and matrix instructions.
#pragma once
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;
using std::max;
using std::min;
struct int4 { int x, y, z, w; };
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static  // CTAs run one after another

struct Dim { u32 x; };
static Dim blockDim, gridDim, blockIdx;
static thread_local Dim threadIdx;

struct Warp {
    std::barrier<> barrier{32};
    u32 slots[32];
};
static std::vector<std::unique_ptr<Warp>> warps_of_cta;
static std::unique_ptr<std::barrier<>> cta_barrier;
alignas(16) static unsigned char shared_words[1 << 17];
inline unsigned char* dynamic_shared_memory() { return shared_words; }
template <unsigned BYTES>
void shared_bytes() {}

inline void __syncthreads() { cta_barrier->arrive_and_wait(); }
template <typename Of>
u32 exchange(u32 x, Of of) {
    Warp& warp = *warps_of_cta[threadIdx.x / 32];
    warp.slots[threadIdx.x % 32] = x;
    warp.barrier.arrive_and_wait();
    const u32 y = of(warp.slots, int(threadIdx.x % 32));
    warp.barrier.arrive_and_wait();
    return y;
}
template <typename T>
T bits(u32 x) { T y; std::memcpy(&y, &x, 4); return y; }
template <typename T>
u32 bits_of(T x) { u32 y; std::memcpy(&y, &x, 4); return y; }
template <typename T>
T __shfl_sync(u32, T x, int lane) {
    return bits<T>(exchange(bits_of(x), [=](u32* s, int) { return s[lane & 31]; }));
}
template <typename T>
T __shfl_xor_sync(u32, T x, int mask) {
    return bits<T>(exchange(bits_of(x), [=](u32* s, int lane) { return s[lane ^ mask]; }));
}
template <typename T>
T __shfl_up_sync(u32, T x, int by) {
    return bits<T>(exchange(bits_of(x), [=](u32* s, int lane) { return s[lane >= by ? lane - by : lane]; }));
}
inline int __reduce_add_sync(u32, int x) {
    return exchange(x, [](u32* s, int) { u32 y = 0; for (int i = 0; i < 32; ++i) y += s[i]; return y; });
}
inline int __reduce_min_sync(u32, int x) {
    return exchange(x, [](u32* s, int) { int y = s[0]; for (int i = 1; i < 32; ++i) y = min(y, int(s[i])); return u32(y); });
}
inline float __int_as_float(int x) { return bits<float>(x); }
inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline u32 to_bf16(float x) {
    const u32 y = bits_of(x);
    return (x != x) ? 0x7fff : (y + 0x7fff + (y >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline void launch_dependent_grids() {}
inline void wait_on_dependent_grids() {}

template <typename Kernel, typename Params>
void launch(Kernel kernel, int grid, int block, const Params& params) {
    blockDim.x = block, gridDim.x = grid;
    for (int cta = 0; cta < grid; ++cta) {
        blockIdx.x = cta;
        warps_of_cta.clear();
        for (int i = 0; i < block / 32; ++i) warps_of_cta.push_back(std::make_unique<Warp>());
        cta_barrier = std::make_unique<std::barrier<>>(block);
        std::vector<std::thread> threads;
        for (int i = 0; i < block; ++i)
            threads.emplace_back([&, i] {
                threadIdx.x = i;
                kernel(params);
                cta_barrier->arrive_and_drop();
                warps_of_cta[i / 32]->barrier.arrive_and_drop();
            });
        for (auto& thread : threads) thread.join();
    }
}
