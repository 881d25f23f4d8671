// What the parts of the model share: grids, CTAs and fibers, their memory, reports.
#pragma once

#include <csetjmp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ucontext.h>

#include "clocks.h"
#include "runtime.h"

#define PLACE __builtin_return_address(0)  // in the kernel's library

namespace host {

struct Grid;
struct Cta;
struct Fiber;

struct Meeting {  // of the threads of a CTA or a cluster
    int arrived = 0;
    unsigned phase = 0;
    GatheredKnowledge gathered;
    Gathered gathered_relaxed;
    Knowledge released;
    ClockPtr released_relaxed;
};
struct Warp {
    int operation = -1, arrived = 0;
    void* lanes[32];
    uint32_t begun = 0;  // wgmma so far, which are the epochs of what they read
    std::vector<std::function<void()>> products;
};
struct Cluster : Meeting {
    int threads = 0;  // that have not ended
    std::vector<Cta*> ctas;  // by rank
};
struct Cta {
    Grid* grid;
    Cluster* cluster;
    int index, rank, threads;  // that have not ended
    bool triggered = false;    // the next launch may start
    uint32_t group, first_agent;
    unsigned char *memory, *statics;  // shared memory: dynamic, and that of __shared__ variables
    Meeting all, some;                // __syncthreads, and the one named barrier
    std::vector<Warp> warps;
    std::vector<Cta*> peers;  // of the cluster, by rank
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<uint32_t> slot_clocks;
    std::vector<bool> slot_taken;
};
enum class State { READY, WARP, PRODUCTS, BARRIER, CTA, NAMED, CLUSTER, GRID, DONE };
struct Registers {  // of a wgmma that is not over
    const unsigned char *begin, *end;
    bool written;     // by it; else read
    uint32_t number;  // of the last such wgmma of the warp
    const void* place;
};
struct Fiber {
    Cta* cta;
    int thread;
    State state = State::READY;
    const void* place = nullptr;  // where it waits
    uint64_t* barrier = nullptr;
    unsigned parity = 0, cluster_phase = 0;
    bool started = false;

    // Its clock, and when its warp last met for a shuffle or the like; of its cp.async copies the next one's and the last that it has waited for, and of
    // its warpgroup's wgmma the last; what it knows of others; what relaxed accesses have told it, which
    // orders its writes and, after a fence, all. What the async proxy may read of that.
    uint32_t clock = 1, met = 0, cp_clock = 1, cp_known = 0, products_known = 0;
    ClockPtr known, relaxed, proxy;
    uint32_t proxy_clock = 0, proxy_cp = 0;
    Knowledge fenced;  // at the last __threadfence
    std::vector<Epoch> stores_read, stores_done;  // its bulk stores that are over

    uint32_t arrives = 0;  // warpgroup_arrive so far
    std::vector<Registers> registers;
    std::vector<uint32_t> groups;  // wgmma that its warp had begun at each commit, from the last wait on
    ucontext_t context;
    jmp_buf jump;
    unsigned char* stack = nullptr;  // and after it, by words: ``arrives`` at the last write

    uint32_t agent() const { return cta->first_agent + thread; }
    Epoch now() const { return epoch(cta->group, agent(), clock); }
};
struct Grid {
    std::string name;
    void (*kernel)(const void*);
    std::vector<unsigned char> params;
    int number, ctas, threads, cluster_size, shared_bytes;
    bool programmatic, started = false;
    int untriggered, running;
    unsigned char *library_begin, *library_end, *static_begin, *static_end;
    Grid* before = nullptr;
    std::vector<std::unique_ptr<Cta>> blocks;
    std::vector<std::unique_ptr<Cluster>> clusters;
    uint64_t known_at_start = 0, known_at_trigger = 0, known_at_end = 0;  // grids
    Gathered triggered;
    ClockPtr started_knows, started_relaxed, end;

    int warps() const { return threads / 32; }
    static constexpr int SLOTS = 128;
    int agents_of_cta() const { return 2 * threads + warps() + SLOTS; }
};

constexpr uint32_t WINDOW = 1u << 18, STACK = 64 << 10;
extern Fiber* current;
extern std::vector<std::unique_ptr<Grid>> grids;

// ---- reports ----
[[noreturn]] void fail(const std::string& message);  // ends the simulation; the run returns it
std::string where(const void* place);                // for the driver, which finds the line
std::string who(const Fiber& fiber);
inline std::string str(long long x) { return std::to_string(x); }

// ---- scheduler ----
unsigned random(unsigned below);
void progress();  // something has happened that others may wait for
void wait(State state, const void* place);
void wake(Fiber& fiber);
template <typename F>
void wake_if(Cta& cta, F matches);
void warp_collective(int operation, void* mine, const std::function<void(void**)>& all,
                     const void* place);
Fiber& lane_of(const Fiber& fiber, int lane);
int grid_of(uint32_t group);
const char* name_of_agent(Epoch e, std::string& to);

// ---- knowledge ----
void publish(Fiber& fiber, GatheredKnowledge& to);  // what it knows, and its own accesses so far
void learn(Fiber& fiber, const Knowledge& from);
void complete_for(Cta& cta);  // its barriers, where a thread has ended
void complete_for(Cluster& cluster);
void learn_relaxed(const void* p);  // a relaxed read of an atomic variable
void forget_atomics();

// ---- memory ----
enum Access : unsigned { READ = 0, WRITE = 1, ATOMIC = 2, ASYNC = 4 };
struct View {  // of memory: who accesses it, and what it may rely on
    Epoch self;
    const Fiber* fiber;  // whose own accesses come before, or null
    const Clock *known, *proxy;
    const Cta* cta;
};
View view_of(const Fiber& fiber);
void access(const View& view, const void* p, size_t bytes, unsigned kind, const void* place);
unsigned char* allocate(size_t bytes, size_t misalignment, std::string name);
bool ordered(const View& view, Epoch e, bool write);
bool proxied(const View& view, Epoch e);
void forget_memory();

// ---- asynchronous ----
bool complete_one();  // a copy on its way; false where there is none
void forget_copies();
void expect_nothing_for(const Cta& cta);  // as it ends
std::string missing_at(uint64_t* barrier);

template <typename F>
void wake_if(Cta& cta, F matches) {
    for (auto& fiber : cta.fibers)
        if (fiber->state != State::READY && fiber->state != State::DONE && matches(*fiber))
            wake(*fiber);
}

}  // namespace host
