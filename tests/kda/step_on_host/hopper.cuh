// What backend_core/cuda/hopper.cuh and CUDA give decode_step.cu, for threads of the CPU: a thread
// for each of a block's, barriers of C++20, and memory that a block has of its own.
#pragma once

#include <atomic>
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
#define __constant__
#define __align__(n) __attribute__((aligned(n)))
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
struct Index {
    int x;
};
inline thread_local Index threadIdx, blockIdx;
inline thread_local Block* block;
inline thread_local Cluster* cluster;
inline thread_local std::optional<std::barrier<>::arrival_token> arrival;

inline unsigned char* dynamic_shared_memory() { return block->memory.data(); }
inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void __syncwarp() { block->warps[threadIdx.x / 32]->arrive_and_wait(); }
inline float __shfl_sync(u32, float x, int lane) {
    block->lanes[threadIdx.x] = x;
    __syncwarp();
    const float y = block->lanes[threadIdx.x / 32 * 32 + lane];
    __syncwarp();
    return y;
}
inline float __shfl_xor_sync(u32 mask, float x, int lanes) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ lanes);
}

inline u32 pack_bf16(float low, float high) {
    auto round = [](float x) {
        u32 y;
        memcpy(&y, &x, 4);
        return (y + 0x7fff + (y >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
}
inline float low_bf16(u32 x) { return __uint_as_float(x << 16); }
inline float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
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

inline i64 compiler_fence(i64 x) { return x; }
inline u32 compiler_fence(u32 x) { return x; }

template <int HINT>
u64 create_policy() { return 0; }
template <typename T>
T load_global(const T* p, u64) { return *p; }
template <typename T>
void store_global(T* p, T x, u64) { *p = x; }

// A barrier of one phase is the number of bytes that are still to come.
struct ClusterBarrier {
    std::atomic<u64> state;

    void init(int) { state = ~0ull; }
    void wait(u32) {
        while (state != 0) std::this_thread::yield();
    }
};
struct ClusterTransactionBarrier : ClusterBarrier {
    void arrive_and_expect_tx(u32 bytes) { state += 1 + bytes; }
};
inline void fence_barrier_init() {}
inline void tma_store_fence() {}
inline void bulk_copy_g2s(void* to, const void* from, u32 bytes,
                          ClusterTransactionBarrier& barrier, u64) {
    memcpy(to, from, bytes);
    barrier.state -= bytes;
}
inline void wait_on_dependent_grids() {}
inline void launch_dependent_grids() {}
inline void cluster_arrive_relaxed() { arrival.emplace(cluster->arrivals.arrive()); }
inline void cluster_wait() {
    cluster->arrivals.wait(std::move(arrival.value()));
    arrival.reset();
}
// A shared variable of this block, at block ``rank`` of the cluster.
template <typename T>
T& at_rank(T& here, int rank) {
    unsigned char* there = cluster->blocks[rank].memory.data();
    const auto offset = reinterpret_cast<unsigned char*>(&here) - dynamic_shared_memory();
    return *reinterpret_cast<T*>(there + offset);
}
inline void store_shared_remote(float x, float* variable, ClusterTransactionBarrier& barrier,
                                int rank) {
    at_rank(*variable, rank) = x;
    at_rank(barrier, rank).state -= 4;
}
