// What kda_backend/kernels/sm90/step_device.cuh and CUDA give decode_step.cu, for threads of the
// CPU: a thread for each of a block's, barriers of C++20, and memory that a block has of its own.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct float4 {
    float x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float __uint_as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

struct Block {
    std::barrier<> all{32 * WARPS};
    std::vector<std::barrier<>*> warps;
    float lanes[32 * WARPS];
    std::vector<unsigned char> memory;
};
struct Cluster {
    std::barrier<> arrivals{32 * WARPS * SPLIT};
    Block blocks[SPLIT];
};
struct Copy {
    void* to;
    const void* from;
    u32 bytes;
};
struct Index {
    int x;
};
inline thread_local Index threadIdx, blockIdx;
inline thread_local Block* block;
inline thread_local Cluster* cluster;
inline thread_local std::optional<std::barrier<>::arrival_token> arrival;
inline thread_local std::vector<Copy> writes;  // not done yet

inline unsigned char* shared_memory() { return block->memory.data(); }
inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void __syncwarp() { block->warps[threadIdx.x / 32]->arrive_and_wait(); }
inline float __shfl_xor_sync(u32, float x, int lanes) {
    block->lanes[threadIdx.x] = x;
    __syncwarp();
    const float y = block->lanes[threadIdx.x ^ lanes];
    __syncwarp();
    return y;
}

inline u32 to_bf16(float low, float high) {
    auto round = [](float x) {
        u32 y;
        memcpy(&y, &x, 4);
        return (y + 0x7fff + (y >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
}
inline float from_fp16(u16 x) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return y;
}
inline u16 to_fp16(float x) {
    const _Float16 y = static_cast<_Float16>(x);
    u16 bits;
    memcpy(&bits, &y, 2);
    return bits;
}
inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1.0f / x; }

// A fetch is there at once and a write as late as may be, so a wait that lacks for a write shows.
inline void init_barrier(u64* arrived) { *arrived = 0; }
inline void publish_barriers() {}
inline void fetch(void* to, const void* from, u32 bytes, u64* arrived) {
    memcpy(to, from, bytes);
    ++*arrived;
}
inline void wait_for_fetch(u64* arrived) {
    if (*static_cast<volatile u64*>(arrived) != 1) std::abort();  // would wait for ever
}
inline void write(void* to, const void* from, u32 bytes) { writes.push_back({to, from, bytes}); }
inline void wait_for_writes() {
    for (const Copy& copy : writes) memcpy(copy.to, copy.from, copy.bytes);
    writes.clear();
}
inline void fence_bulk_copies() {}
inline void wait_for_kernel_before() {}
inline void let_next_kernel_start() {}
inline void cluster_arrive() { arrival.emplace(cluster->arrivals.arrive()); }
inline void cluster_wait() {
    cluster->arrivals.wait(std::move(arrival.value()));
    arrival.reset();
}
inline void tell_block(float* variable, int rank, float x) {
    const auto offset = reinterpret_cast<unsigned char*>(variable) - shared_memory();
    memcpy(cluster->blocks[rank].memory.data() + offset, &x, 4);
}
