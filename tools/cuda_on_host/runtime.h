// A GPU in miniature: threads are fibers of one thread of the CPU, and a seeded scheduler says who
// runs next and when copies and matrix products complete. hopper.cuh here puts the kernels on it.
//
// Functions take the address that they return to as the place in the kernel's source that a report
// names, so the wrappers in hopper.cuh have to be inlined.
#pragma once

#include <cstdint>

struct Index {
    unsigned x;
};
extern "C" Index threadIdx, blockIdx, gridDim, blockDim;  // of the fiber that runs

namespace host {

void trap();
unsigned char* shared_memory();  // of the running fiber's CTA
void* shared_at(uint32_t address);  // there, or in another CTA of the cluster
uint32_t address_at(uint32_t address, int rank);
unsigned sm_index();

// Warp-wide operations block until all 32 lanes of the warp have come to one.
void syncwarp();
enum class Lanes { SHUFFLE, BALLOT, REDUCE_ADD, REDUCE_MIN };
uint32_t collective(Lanes operation, uint32_t x, int from);

void syncthreads();
void named_barrier(int threads);
void cluster_arrive(bool release);
void cluster_wait();
void yield();  // a thread that looks again later

// Global memory: atomic accesses, and fences.
uint32_t atomic_add(uint32_t* p, uint32_t x);
uint32_t load_acquire(const uint32_t* p);
void store_release(uint32_t* p, uint32_t x);
void threadfence();

// mbarriers: what lies in their 64 bits is the scheduler's.
void barrier_init(uint64_t* barrier, int count);
void barrier_arrive(uint64_t* barrier, unsigned bytes_expected);
void barrier_arrive_at(uint32_t address);  // at another CTA's
void barrier_wait(uint64_t* barrier, unsigned parity);
void fence_barrier_init();
void fence_proxy_async();

void cp_async(void* to, const void* from, unsigned bytes, bool valid);
void cp_async_at(uint32_t to, const void* from, unsigned bytes, bool valid);
void cp_async_arrive(uint64_t* barrier);
void cp_async_commit();
void cp_async_wait(int pending);
void bulk_to_shared(void* to, const void* from, unsigned bytes, uint64_t* barrier);
void bulk_to_rank(void* data, unsigned bytes, uint64_t* barrier, int rank);
void store_to_rank(float x, float* variable, uint64_t* barrier, int rank);
void bulk_to_global(void* to, const void* from, unsigned bytes);
void wait_stores(bool written);
// A box of a rank-3 tensor map with the 128-byte swizzle.
void tensor_to_shared(uint32_t to, const void* map, const int (&at)[3], uint64_t* barrier);

void move_matrices(uint32_t* x, uint32_t address, bool transposed, bool store);
enum class Mma { F16_K16, BF16_K16, F16_K8, TF32_K8 };
void mma(Mma kind, float* c, const uint32_t* a, const uint32_t* b);
// A [64, 16] lies in registers, or in shared memory from a_address on; B [16, n] in shared memory.
struct Wgmma {
    int n;
    bool bf16, b_mn_major, add;
    const uint32_t* a;  // or null
    uint32_t a_address, b_address, leading, stride;
    int a_rows;  // in shared memory; others are NaN, for whatever lies there must not matter
};
void wgmma(float* c, const Wgmma& product);
void wgmma_arrive();
void wgmma_commit();
void wgmma_wait(int pending);

void launch_dependents();
void wait_on_dependents();

}  // namespace host
