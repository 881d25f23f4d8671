// The scheduler: see runtime.h.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>

#include "internal.h"

extern "C" {
Index threadIdx, blockIdx, gridDim, blockDim;
}

namespace host {

Fiber* current;
std::vector<std::unique_ptr<Grid>> grids;
static std::vector<Fiber*> ready;
static std::vector<std::pair<int, int>> groups;  // of each: its grid, how many agents
static std::mt19937 generator;
static jmp_buf scheduler;
static std::string error;
static long idle;
static Cta* statics_of;  // whose __shared__ variables the library holds

// ---- reports ----

unsigned random(unsigned below) { return generator() % below; }
uint32_t agents_of_group(uint32_t group) { return groups[group].second; }
int grid_of(uint32_t group) { return groups[group].first; }

std::string where(const void* place) {
    Dl_info info;
    if (!place || !dladdr(place, &info)) return "the kernel's beginning";
    const auto offset = static_cast<const char*>(place) - static_cast<const char*>(info.dli_fbase);
    char text[32];
    snprintf(text, sizeof text, "%lx", long(offset) - 1);
    return std::string("{") + info.dli_fname + " 0x" + text + "}";
}
std::string who(const Fiber& f) {
    return f.cta->grid->name + ", CTA " + str(f.cta->index) + ", thread " + str(f.thread);
}
const char* name_of_agent(Epoch e, std::string& to) {
    const Grid& grid = *grids[grid_of(group_of(e))];
    const int dims = grid.agents_of_cta(), i = index_of(e) % dims, threads = grid.threads;
    const Cta* cta = nullptr;
    for (const auto& block : grid.blocks)
        if (block->group == group_of(e) && block->rank == int(index_of(e)) / dims)
            cta = block.get();
    to = grid.name + ", CTA " + str(cta->index);
    if (i < 2 * threads) to += ", thread " + str(i % threads);
    else if (i < 2 * threads + grid.warps()) to += ", warp " + str(i - 2 * threads);
    return to.c_str();
}
void fail(const std::string& message) {
    if (error.empty()) error = message;
    if (!current) throw std::runtime_error(error);  // in the scheduler itself
    current = nullptr;
    _longjmp(scheduler, 1);
}
void trap() { fail("a kernel has trapped (" + who(*current) + ")"); }

// ---- fibers ----

static void leave() {
    if (_setjmp(current->jump) == 0) _longjmp(scheduler, 1);
}
void wake(Fiber& fiber) {
    fiber.state = State::READY;
    ready.push_back(&fiber);
}
void wait(State state, const void* place) {
    current->state = state, current->place = place;
    leave();
}
void yield() {
    ready.push_back(current);
    leave();
}
void progress() { idle = 0; }
Fiber& lane_of(const Fiber& fiber, int lane) {
    return *fiber.cta->fibers[fiber.thread / 32 * 32 + lane];
}
void warp_collective(int operation, void* mine, const std::function<void(void**)>& all,
                     const void* place) {
    Warp& warp = current->cta->warps[current->thread / 32];
    if (warp.arrived && warp.operation != operation)
        fail("lanes of a warp have parted: one is at " + where(place) + " (" + who(*current) + ")");
    warp.operation = operation;
    warp.lanes[current->thread % 32] = mine;
    if (++warp.arrived < 32) return wait(State::WARP, place);
    all(warp.lanes);
    warp.arrived = 0;
    for (int i = 0; i < 32; ++i) {
        Fiber& fiber = lane_of(*current, i);
        fiber.met = fiber.clock++;
        if (&fiber != current) wake(fiber);
    }
}

// ---- grids ----

// One thread speaks for its CTA.
static void trigger(Fiber& fiber) {
    if (fiber.cta->triggered) return;
    fiber.cta->triggered = true;
    Grid& grid = *fiber.cta->grid;
    grid.untriggered -= 1;
    // whoever starts after this may rely on the kernels whose end this thread has waited for
    if (fiber.known) grid.known_at_trigger |= fiber.known->grids;
    GatheredKnowledge all;
    publish(fiber, all);
    grid.triggered.add(all.get().known);
    progress();
}
void launch_dependents() { trigger(*current); }
void wait_on_dependents() {
    Grid* before = current->cta->grid->before;
    if (!before) return;
    if (before->running) wait(State::GRID, PLACE);
    learn(*current, {before->end, before->end});
}
unsigned sm_index() {
    const Grid& grid = *current->cta->grid;
    const int sms = 132;
    return grid.ctas <= sms ? current->cta->index : current->cta->index % sms;
}

// Stacks are used again; what was written in one before counts as older than any warpgroup_arrive.
static std::vector<unsigned char*> free_stacks;
static uint32_t highest_arrives;
static int live;  // threads
static unsigned char* take_stack() {
    if (free_stacks.empty()) return static_cast<unsigned char*>(calloc(2, STACK));
    unsigned char* const stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
}
static void give_stack(Fiber& fiber) {
    if (fiber.stack) free_stacks.push_back(fiber.stack);
    highest_arrives = std::max(highest_arrives, fiber.arrives + 1);
    fiber.stack = nullptr;
}

static void finish(Fiber& self) {
    Grid& grid = *self.cta->grid;
    self.state = State::DONE;
    if (self.known) grid.known_at_end |= self.known->grids;
    Cta& cta = *self.cta;
    cta.threads -= 1, cta.cluster->threads -= 1;
    if (cta.threads == 0) {
        expect_nothing_for(cta);
        trigger(self);
    }
    self.known = self.proxy = self.relaxed = nullptr;
    live -= 1;
    complete_for(cta), complete_for(*cta.cluster);
    if (--grid.running == 0) {
        auto end = std::make_shared<Clock>();
        end->grids = grid.known_at_end | 1ull << grid.number;
        grid.end = end;
        for (auto& other : grids)
            for (auto& waiting : other->blocks)
                if (other->before == &grid)
                    wake_if(*waiting, [](Fiber& f) { return f.state == State::GRID; });
    }
    progress();
}
static void body() {
    Grid& grid = *current->cta->grid;
    grid.kernel(grid.params.data());
    finish(*current);
    current = nullptr;
    _longjmp(scheduler, 1);
}

static void start(Grid& grid) {
    grid.started = true;
    if (grid.before) {
        grid.known_at_start = grid.before->known_at_trigger;
        if (!grid.programmatic) grid.known_at_start |= grid.before->end->grids;
    }
    grid.known_at_end = grid.known_at_trigger = grid.known_at_start;
    auto known = std::make_shared<Clock>();
    known->grids = grid.known_at_start;
    grid.started_knows = known;
    if (grid.programmatic && grid.before)
        grid.started_relaxed = grid.before->triggered.get();
}
// Places the grid's next cluster.
static void place_cluster(Grid& grid) {
    const int dims = grid.agents_of_cta(), size = grid.cluster_size;
    grid.clusters.push_back(std::make_unique<Cluster>());
    Cluster& cluster = *grid.clusters.back();
    cluster.threads = size * grid.threads;
    groups.emplace_back(grid.number, size * dims);
    for (int rank = 0; rank < size; ++rank) {
        auto cta = std::make_unique<Cta>();
        const int number = grid.blocks.size();
        cta->grid = &grid, cta->cluster = &cluster;
        cta->index = number, cta->rank = rank, cta->threads = grid.threads;
        cta->group = groups.size() - 1, cta->first_agent = rank * dims;
        const std::string of = " of CTA " + str(number) + " of " + grid.name;
        cta->memory = allocate(grid.shared_bytes, 0, "shared memory" + of);
        const size_t statics = grid.static_end - grid.static_begin;
        cta->statics = allocate(statics, 0, "__shared__ variables" + of);
        cta->warps.resize(grid.warps());
        cta->slot_clocks.assign(Grid::SLOTS, 0), cta->slot_taken.assign(Grid::SLOTS, false);
        for (int t = 0; t < grid.threads; ++t) {
            auto fiber = std::make_unique<Fiber>();
            fiber->cta = cta.get(), fiber->thread = t;
            fiber->known = fiber->proxy = grid.started_knows;
            fiber->relaxed = grid.started_relaxed;
            ready.push_back(fiber.get());
            cta->fibers.push_back(std::move(fiber));
        }
        live += grid.threads;
        cluster.ctas.push_back(cta.get());
        grid.blocks.push_back(std::move(cta));
    }
    for (Cta* cta : cluster.ctas) cta->peers = cluster.ctas;
}
constexpr int MOST_THREADS = 8192;  // that a GPU has room for
static void start_what_may() {
    for (auto& grid : grids) {
        const Grid* before = grid->before;
        const bool may =
            !before || (before->started &&
                        (grid->programmatic ? before->untriggered == 0 : before->running == 0));
        if (!grid->started && may) start(*grid);
        while (grid->started && int(grid->blocks.size()) < grid->ctas && live < MOST_THREADS)
            place_cluster(*grid);
        if (int(grid->blocks.size()) < grid->ctas) return;
    }
}
static void swap_statics(Cta& cta) {
    const Grid& grid = *cta.grid;
    const size_t bytes = grid.static_end - grid.static_begin;
    if (bytes == 0 || statics_of == &cta) return;
    if (statics_of) {
        const Grid& old = *statics_of->grid;
        memcpy(statics_of->statics, old.static_begin, old.static_end - old.static_begin);
    }
    memcpy(grid.static_begin, cta.statics, bytes);
    statics_of = &cta;
}
static void resume(Fiber& fiber) {
    current = &fiber;
    swap_statics(*fiber.cta);
    threadIdx.x = fiber.thread, blockIdx.x = fiber.cta->index;
    gridDim.x = fiber.cta->grid->ctas, blockDim.x = fiber.cta->grid->threads;
    if (_setjmp(scheduler) == 0) {
        if (fiber.started) _longjmp(fiber.jump, 1);
        fiber.started = true, fiber.arrives = highest_arrives;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack = take_stack();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, body, 0);
        setcontext(&fiber.context);
    }
    current = nullptr;
    if (fiber.state == State::DONE) give_stack(fiber);
}

// Who waits for what, where no thread can go on.
static std::string deadlock() {
    std::map<std::pair<const void*, State>, std::vector<Fiber*>> waiting;
    for (auto& grid : grids)
        for (auto& cta : grid->blocks)
            for (auto& fiber : cta->fibers)
                if (fiber->state != State::DONE)
                    waiting[{fiber->place, fiber->state}].push_back(fiber.get());
    std::string text = "deadlock: no thread can go on";
    for (auto& [key, fibers] : waiting) {
        Fiber& f = *fibers[0];
        text += "; " + str(fibers.size()) + " threads (" + who(f) + " the first) wait at " +
                where(f.place) + " for ";
        const Cta& cta = *f.cta;
        switch (f.state) {
            case State::WARP: text += "lanes of their warp, of which " +
                str(cta.warps[f.thread / 32].arrived) + " of 32 have come"; break;
            case State::PRODUCTS: text += "the other warps of their warpgroup"; break;
            case State::BARRIER: text += missing_at(f.barrier); break;
            case State::CTA: text += "their CTA, of which " + str(cta.all.arrived) + " of " +
                str(cta.threads) + " threads have come"; break;
            case State::NAMED: text += "a named barrier, to which " + str(cta.some.arrived) +
                " threads have come"; break;
            case State::CLUSTER: text += "their cluster, of which " + str(cta.cluster->arrived) +
                " of " + str(cta.cluster->threads) + " threads have arrived"; break;
            default: text += "the end of the kernel before";
        }
    }
    for (auto& grid : grids)
        if (!grid->started) text += "; " + grid->name + " waits for the launch before";
    return text;
}

}  // namespace host

using namespace host;

// Memory of the GPU for a tensor.
extern "C" void* place_tensor(size_t bytes, size_t address, const char* name) {
    return allocate(bytes, address % 1024, name);
}

// Puts a launch in the stream; nothing runs before ``run``.
extern "C" void launch(const char* name, void (*kernel)(const void*), void* const* library,
                       const void* params, int param_bytes, int ctas, int threads,
                       int cluster_size, int shared_bytes, int programmatic) {
    auto grid = std::make_unique<Grid>();
    const auto* bytes = static_cast<const unsigned char*>(params);
    auto at = [&](int i) { return static_cast<unsigned char*>(library[i]); };
    grid->name = name, grid->kernel = kernel, grid->params.assign(bytes, bytes + param_bytes);
    grid->library_begin = at(0), grid->library_end = at(1);
    grid->static_begin = at(2), grid->static_end = at(3);
    grid->number = grids.size(), grid->ctas = ctas, grid->threads = threads;
    grid->cluster_size = cluster_size, grid->shared_bytes = shared_bytes;
    grid->programmatic = programmatic;
    grid->untriggered = ctas, grid->running = ctas * threads;
    grid->before = grids.empty() ? nullptr : grids.back().get();
    grids.push_back(std::move(grid));
}

// Runs the stream's launches to their end; null, or what went wrong. Memory stays until ``forget``.
extern "C" const char* run(unsigned seed) {
    generator.seed(seed);
    error.clear(), idle = 0;
    current = nullptr, statics_of = nullptr;
    try {
        if (grids.size() > 64) fail("a run has at most 64 launches: a bit each says what has ended");
        while (error.empty()) {
            start_what_may();
            if ((ready.empty() || random(64) == 0) && complete_one()) progress();
            if (ready.empty()) {
                if (complete_one()) continue;
                const bool done = std::all_of(grids.begin(), grids.end(), [](auto& grid) {
                    return grid->started && !grid->running;
                });
                if (!done) error = deadlock();
                break;
            }
            if (++idle > 50'000'000) fail("threads look for something in vain");
            const size_t index = random(ready.size());
            std::swap(ready[index], ready.back());
            Fiber* next = ready.back();
            ready.pop_back();
            resume(*next);
        }
    } catch (const std::runtime_error&) {  // ``error`` says what
    }
    current = nullptr;
    return error.empty() ? nullptr : error.c_str();
}
extern "C" void forget() {
    forget_copies(), forget_atomics();
    for (auto& grid : grids)
        for (auto& cta : grid->blocks)
            for (auto& fiber : cta->fibers) give_stack(*fiber);
    live = 0;
    grids.clear(), ready.clear(), groups.clear();
    forget_memory();
}
