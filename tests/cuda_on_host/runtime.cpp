// The scheduler: see runtime.h.
#include "runtime.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

extern "C" {
Index threadIdx, blockIdx, gridDim;
}

namespace host {

struct Grid;
struct Warp {
    const void* operation = nullptr;
    void* lanes[32];
    int arrived = 0;
    std::deque<std::function<void()>> products;
};
struct Cluster {
    int arrived = 0, threads = 0;
    unsigned phase = 0;
};
struct Cta {
    Grid* grid;
    Cluster* cluster;
    int index, rank, arrived = 0;
    unsigned char* memory;
    std::vector<Warp> warps;
    std::vector<Cta*> peers;  // of the cluster, by rank
};
enum class State { READY, COLLECTIVE, BARRIER, BLOCK, CLUSTER, GRID, DONE };
struct Fiber {
    Cta* cta;
    int thread;
    State state = State::READY;
    uint64_t* barrier = nullptr;
    unsigned parity = 0, cluster_phase = 0;
    int group = 0;  // of cp.async
    bool triggered = false;
    ucontext_t context;
    std::unique_ptr<char[]> stack;
};
struct Grid {
    void (*kernel)(const void*);
    std::vector<unsigned char> params;
    int ctas, threads, cluster_size;
    bool programmatic;
    int untriggered, running;
    std::vector<std::unique_ptr<Cta>> blocks;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<std::unique_ptr<Fiber>> fibers;
    Grid* before = nullptr;
    bool started = false;
};
struct Pending {
    Copy copy;
    Fiber* owner;
    int group;
};

constexpr uint32_t WINDOW = 1u << 18, STACK = 128 << 10;
static std::vector<std::unique_ptr<Grid>> grids;
static std::vector<Fiber*> ready;
static std::vector<Pending> pending;
static std::mt19937 generator;
static Fiber* current;
static ucontext_t scheduler;
static std::string error;

unsigned random(unsigned below) { return generator() % below; }

void fail(const char* message) {
    if (error.empty()) {
        error = message;
        if (current)
            error += " (CTA " + std::to_string(current->cta->index) + ", thread " +
                     std::to_string(current->thread) + ")";
    }
    if (current) setcontext(&scheduler);
    throw std::runtime_error(error);  // in the scheduler itself
}

static void leave() {
    Fiber* self = current;
    swapcontext(&self->context, &scheduler);
}
static void wake(Fiber* fiber) {
    fiber->state = State::READY;
    ready.push_back(fiber);
}
template <typename F>
static void wake_if(F matches) {
    for (auto& grid : grids)
        for (auto& fiber : grid->fibers)
            if (fiber->state != State::READY && fiber->state != State::DONE && matches(*fiber))
                wake(fiber.get());
}
void yield() {
    ready.push_back(current);
    leave();
}

unsigned char* shared_memory() { return current->cta->memory; }
unsigned char* at(uint32_t address) {
    const uint32_t rank = address / WINDOW;
    if (rank == 0) return current->cta->memory + address;
    if (rank > current->cta->peers.size()) fail("an address is outside the cluster");
    return current->cta->peers[rank - 1]->memory + address % WINDOW;
}
uint32_t address_at(uint32_t address, int rank) { return address % WINDOW + (rank + 1) * WINDOW; }
uint64_t* barrier_at(uint32_t address) { return reinterpret_cast<uint64_t*>(at(address)); }
unsigned sm_index() {
    const Grid& grid = *current->cta->grid;
    const int sms = 132;
    return grid.ctas <= sms ? current->cta->index : current->cta->index % sms;
}

void warp_collective(const void* operation, void* mine, void (*all)(void**)) {
    Warp& warp = current->cta->warps[current->thread / 32];
    if (warp.arrived && warp.operation != operation) fail("lanes of a warp have parted");
    warp.operation = operation;
    warp.lanes[current->thread % 32] = mine;
    if (++warp.arrived < 32) {
        current->state = State::COLLECTIVE;
        leave();
        return;
    }
    all(warp.lanes);
    warp.arrived = 0;
    Grid* grid = current->cta->grid;
    const int first = current->cta->index * grid->threads + current->thread / 32 * 32;
    for (int i = first; i < first + 32; ++i)
        if (grid->fibers[i].get() != current) wake(grid->fibers[i].get());
}
void syncthreads() {
    Cta* cta = current->cta;
    if (++cta->arrived == cta->grid->threads) {
        cta->arrived = 0;
        wake_if([&](Fiber& f) { return f.cta == cta && f.state == State::BLOCK; });
    } else {
        current->state = State::BLOCK;
        leave();
    }
}
void cluster_arrive() {
    Cluster* cluster = current->cta->cluster;
    current->cluster_phase = cluster->phase;
    if (++cluster->arrived == cluster->threads) {
        cluster->arrived = 0;
        ++cluster->phase;
        wake_if([&](Fiber& f) { return f.cta->cluster == cluster && f.state == State::CLUSTER; });
    }
}
void cluster_wait() {
    if (current->cta->cluster->phase != current->cluster_phase) return;
    current->state = State::CLUSTER;
    leave();
}

struct Bits {
    int32_t bytes;
    uint32_t pending : 12, expected : 12, phase : 1, magic : 7;
};
static_assert(sizeof(Bits) == 8);
constexpr unsigned MAGIC = 0x2a;

static Bits& bits(uint64_t* barrier) {
    Bits& b = *reinterpret_cast<Bits*>(barrier);
    if (b.magic != MAGIC) fail("a barrier is used before it is initialised");
    return b;
}
static void complete_if_done(uint64_t* barrier) {
    Bits& b = bits(barrier);
    if (b.pending || b.bytes) return;
    b.phase ^= 1;
    b.pending = b.expected;
    wake_if([&](Fiber& f) {
        return f.state == State::BARRIER && f.barrier == barrier && b.phase != f.parity;
    });
}
void barrier_init(uint64_t* barrier, int count) {
    *reinterpret_cast<Bits*>(barrier) = {0, unsigned(count), unsigned(count), 0, MAGIC};
}
void barrier_arrive(uint64_t* barrier, int bytes_expected) {
    Bits& b = bits(barrier);
    if (b.pending == 0) fail("more have arrived at a barrier than it counts");
    b.bytes += bytes_expected;
    b.pending -= 1;
    complete_if_done(barrier);
}
void complete_bytes(uint64_t* barrier, unsigned bytes) {
    host::bits(barrier).bytes -= bytes;
    complete_if_done(barrier);
}
void barrier_wait(uint64_t* barrier, unsigned parity) {
    if (bits(barrier).phase != parity) return;
    current->barrier = barrier, current->parity = parity;
    current->state = State::BARRIER;
    leave();
}

static bool is_cp_async(const Pending& p) {
    return p.copy.kind == CopyKind::CP_ASYNC;
}
static void complete(size_t index) {
    Pending p = pending[index];
    if (p.copy.kind == CopyKind::CP_ASYNC_ARRIVE)  // after the copies that its thread began before
        for (size_t i = 0; i < index; ++i)
            if (is_cp_async(pending[i]) && pending[i].owner == p.owner) return complete(i);
    pending.erase(pending.begin() + index);
    if (p.copy.kind == CopyKind::CP_ASYNC_ARRIVE) return barrier_arrive(p.copy.barrier, 0);
    if (p.copy.from)
        memcpy(p.copy.to, p.copy.from, p.copy.bytes);
    else
        memset(p.copy.to, 0, p.copy.bytes);
    if (p.copy.barrier) complete_bytes(p.copy.barrier, p.copy.bytes);
}
void copy(const Copy& copy) {
    if (copy.kind == CopyKind::CP_ASYNC || copy.kind == CopyKind::TO_SHARED)
        memset(copy.to, 0xff, copy.bytes);
    pending.push_back({copy, current, current->group});
}
void commit_cp_async() { current->group += 1; }
template <typename F>
static void complete_all(F matches) {
    for (size_t i = 0; i < pending.size();)
        if (pending[i].owner == current && matches(pending[i]))
            complete(i);
        else
            ++i;
}
void wait_cp_async(int left) {
    const int before = current->group - left;
    complete_all([&](const Pending& p) { return is_cp_async(p) && p.group < before; });
}
void wait_stores() {
    complete_all([](const Pending& p) { return p.copy.kind == CopyKind::TO_GLOBAL; });
}

static void run_products(Warp& warp) {
    for (; !warp.products.empty(); warp.products.pop_front()) warp.products.front()();
}
void defer_product(std::function<void()> product) {
    Warp& warp = current->cta->warps[current->thread / 32];
    warp.products.push_back(std::move(product));
    if (random(4) == 0) run_products(warp);
}
void finish_products() { run_products(current->cta->warps[current->thread / 32]); }

static void trigger(Fiber* fiber) {
    if (fiber->triggered) return;
    fiber->triggered = true;
    fiber->cta->grid->untriggered -= 1;
}
void launch_dependents() { trigger(current); }
void wait_on_dependents() {
    Grid* before = current->cta->grid->before;
    if (!before || before->running == 0) return;
    current->state = State::GRID;
    leave();
}

static void body() {
    Grid* grid = current->cta->grid;
    grid->kernel(grid->params.data());
    Fiber* self = current;
    trigger(self);
    self->state = State::DONE;
    if (--grid->running == 0)
        wake_if([&](Fiber& f) { return f.state == State::GRID && f.cta->grid->before == grid; });
    setcontext(&scheduler);
}

static void start(Grid* grid, int shared_bytes) {
    grid->started = true;
    for (int i = 0; i < grid->ctas; ++i) {
        if (i % grid->cluster_size == 0) {
            grid->clusters.push_back(std::make_unique<Cluster>());
            grid->clusters.back()->threads = grid->cluster_size * grid->threads;
        }
        auto cta = std::make_unique<Cta>();
        cta->grid = grid, cta->cluster = grid->clusters.back().get();
        cta->index = i, cta->rank = i % grid->cluster_size;
        const size_t bytes = (shared_bytes + 1023) / 1024 * 1024 + 1024;
        cta->memory = static_cast<unsigned char*>(std::aligned_alloc(1024, bytes));
        memset(cta->memory, 0xff, bytes);
        cta->warps.resize(grid->threads / 32);
        grid->blocks.push_back(std::move(cta));
    }
    for (int i = 0; i < grid->ctas; ++i)
        for (int rank = 0; rank < grid->cluster_size; ++rank)
            grid->blocks[i]->peers.push_back(
                grid->blocks[i / grid->cluster_size * grid->cluster_size + rank].get());
    for (auto& cta : grid->blocks)
        for (int t = 0; t < grid->threads; ++t) {
            auto fiber = std::make_unique<Fiber>();
            fiber->cta = cta.get(), fiber->thread = t;
            fiber->stack = std::unique_ptr<char[]>(new char[STACK]);
            getcontext(&fiber->context);
            fiber->context.uc_stack.ss_sp = fiber->stack.get();
            fiber->context.uc_stack.ss_size = STACK;
            makecontext(&fiber->context, body, 0);
            ready.push_back(fiber.get());
            grid->fibers.push_back(std::move(fiber));
        }
}

static std::vector<int> shared_sizes;
static void start_what_may() {
    for (size_t i = 0; i < grids.size(); ++i) {
        Grid* grid = grids[i].get();
        const Grid* before = grid->before;
        const bool may =
            !before || (before->started &&
                        (grid->programmatic ? before->untriggered == 0 : before->running == 0));
        if (!grid->started && may) start(grid, shared_sizes[i]);
    }
}

}  // namespace host

using namespace host;

// Puts a launch in the stream; nothing runs before ``run``.
extern "C" void launch(void (*kernel)(const void*), const void* params, int param_bytes, int ctas,
                       int threads, int cluster_size, int shared_bytes, int programmatic) {
    auto grid = std::make_unique<Grid>();
    const auto* bytes = static_cast<const unsigned char*>(params);
    grid->kernel = kernel, grid->params.assign(bytes, bytes + param_bytes);
    grid->ctas = ctas, grid->threads = threads, grid->cluster_size = cluster_size;
    grid->programmatic = programmatic;
    grid->untriggered = grid->running = ctas * threads;
    grid->before = grids.empty() ? nullptr : grids.back().get();
    grids.push_back(std::move(grid));
    shared_sizes.push_back(shared_bytes);
}

// Runs the stream's launches to their end; null, or what went wrong.
extern "C" const char* run(unsigned seed) {
    generator.seed(seed);
    error.clear();
    long idle = 0;
    getcontext(&scheduler);
    current = nullptr;
    while (error.empty()) {
        start_what_may();
        if (!pending.empty() && (ready.empty() || random(64) == 0)) {
            try {
                complete(random(pending.size()));
            } catch (const std::runtime_error&) {
                break;  // ``error`` says what
            }
            idle = 0;
        }
        if (ready.empty()) {
            if (!pending.empty()) continue;
            const bool done = std::all_of(grids.begin(), grids.end(), [](auto& grid) {
                return grid->started && !grid->running;
            });
            if (!done) error = "no thread can go on: a barrier or a flag is waited for in vain";
            break;
        }
        if (++idle > 200'000'000) error = "threads look for something in vain";
        const size_t index = random(ready.size());
        std::swap(ready[index], ready.back());
        current = ready.back();
        ready.pop_back();
        threadIdx.x = current->thread, blockIdx.x = current->cta->index;
        gridDim.x = current->cta->grid->ctas;
        current->context.uc_link = nullptr;
        ucontext_t* to = &current->context;
        swapcontext(&scheduler, to);
        current = nullptr;
    }
    for (auto& grid : grids)
        for (auto& cta : grid->blocks) std::free(cta->memory);
    grids.clear(), shared_sizes.clear(), ready.clear(), pending.clear();
    return error.empty() ? nullptr : error.c_str();
}
