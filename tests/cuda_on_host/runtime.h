// A GPU in miniature: threads are fibers of one thread of the CPU, and a seeded scheduler says who
// runs next and when copies and matrix products complete. hopper.cuh here puts the kernels on it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

struct Index {
    unsigned x;
};
extern "C" Index threadIdx, blockIdx, gridDim;  // of the fiber that runs

namespace host {

struct Cta;
struct Fiber;

[[noreturn]] void fail(const char* message);  // ends the simulation; the run returns the message

unsigned char* shared_memory();        // of the running fiber's CTA
unsigned char* at(uint32_t address);   // of its CTA, or of another in the cluster
uint32_t address_at(uint32_t address, int rank);
unsigned random(unsigned below);

// Blocks until all 32 lanes of the warp have come here with the same ``operation``; the last calls
// ``all`` with what each brought.
void warp_collective(const void* operation, void* mine, void (*all)(void** lanes));
void syncthreads();
void cluster_arrive();
void cluster_wait();
void yield();  // a thread that looks again later

// mbarriers: their 64 bits are phase, expected and pending arrivals, and bytes to come.
void barrier_init(uint64_t* barrier, int count);
void barrier_arrive(uint64_t* barrier, int bytes_expected);
void barrier_wait(uint64_t* barrier, unsigned parity);
void complete_bytes(uint64_t* barrier, unsigned bytes);
uint64_t* barrier_at(uint32_t address);

enum class CopyKind { CP_ASYNC, CP_ASYNC_ARRIVE, TO_SHARED, TO_GLOBAL };
struct Copy {
    CopyKind kind;
    unsigned char* to;
    const unsigned char* from;  // null: zeros
    unsigned bytes;
    uint64_t* barrier;  // at which it completes, or null
};
void copy(const Copy& copy);         // begins it; what it writes to shared memory is NaN until then
void commit_cp_async();
void wait_cp_async(int pending);
void wait_stores();

// A product of one warp that may run any time until it is waited for.
void defer_product(std::function<void()> product);
void finish_products();

void launch_dependents();
void wait_on_dependents();
unsigned sm_index();

}  // namespace host
