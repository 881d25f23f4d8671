// Memory of the GPU, and who may access it when: an access that no order puts after a conflicting
// one before is a race, one outside of every allocation an overrun.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "internal.h"

namespace host {

struct Cell {  // of two bytes
    Epoch write = 0, read = 0;
    uint64_t write_place = 0, read_place = 0;  // with ATOMIC_BIT
    uint32_t more = 0;                         // reads that are not ordered: more_reads[more]
};
constexpr uint64_t ATOMIC_BIT = 1ull << 62;
struct Allocation {
    unsigned char* begin;
    size_t bytes;
    std::string name;
    Cell* cells;
};
constexpr size_t REGION = 1ull << 31, PAGE = 4096;
static unsigned char* region;
static size_t used;
static std::vector<Allocation> allocations;
static std::vector<uint32_t> page_owner;  // 1 + number
static std::vector<std::vector<std::pair<Epoch, uint64_t>>> more_reads(1);

static void* reserve(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("the host has no memory for a GPU");
    return p;
}
unsigned char* allocate(size_t bytes, size_t misalignment, std::string name) {
    if (!region) {
        region = static_cast<unsigned char*>(reserve(REGION));
        page_owner.resize(REGION / PAGE);
    }
    const size_t begin = used + 4 * PAGE + misalignment;  // nothing belongs to four pages before
    used = (begin + bytes + PAGE - 1) / PAGE * PAGE;
    if (used + 4 * PAGE > REGION) fail("the model's memory of 2 GiB does not suffice");
    for (size_t page = begin / PAGE; page * PAGE < begin + bytes; ++page)
        page_owner[page] = allocations.size() + 1;
    Allocation a = {region + begin, bytes, std::move(name),
                    static_cast<Cell*>(reserve((bytes / 2 + 2) * sizeof(Cell)))};
    allocations.push_back(a);
    memset(a.begin, 0xff, bytes);
    return a.begin;
}
void forget_memory() {
    for (Allocation& a : allocations) munmap(a.cells, (a.bytes / 2 + 2) * sizeof(Cell));
    if (region) madvise(region, used, MADV_DONTNEED);
    std::fill_n(page_owner.begin(), used / PAGE, 0);
    allocations.clear(), more_reads.resize(1);
    used = 0;
}
static Allocation* allocation_of(const unsigned char* p) {
    const size_t offset = p - region;
    if (!region || offset >= REGION) return nullptr;
    const uint32_t owner = page_owner[offset / PAGE];
    return owner ? &allocations[owner - 1] : nullptr;
}
View view_of(const Fiber& f) { return {f.now(), &f, f.known.get(), f.proxy.get(), f.cta}; }

static bool knows(const Clock* clock, Epoch e) {
    if (!clock) return false;
    if (clock->grids >> grid_of(group_of(e)) & 1) return true;
    const Agents* agents = clock->find(group_of(e));
    return agents && (*agents)[index_of(e)] >= clock_of(e);
}
bool ordered(const View& v, Epoch e, bool write) {
    if (v.fiber && group_of(e) == v.cta->group) {
        const Fiber& f = *v.fiber;
        const uint32_t i = index_of(e) - v.cta->first_agent, threads = v.cta->grid->threads;
        if (i == uint32_t(f.thread)) return true;
        if (i == threads + f.thread && clock_of(e) <= f.cp_known) return true;
        if (i >= 2 * threads && (i - 2 * threads) / 4 == uint32_t(f.thread) / 128 &&
            i < 2 * threads + v.cta->grid->warps() && clock_of(e) <= f.products_known)
            return true;
    }
    return knows(v.known, e) || write && v.fiber && knows(v.fiber->relaxed.get(), e);
}
// Where lanes have met since, for a shuffle or a matrix, a warp has read what one of them writes now:
// its instructions are issued in order. (What one writes and another reads needs __syncwarp.)
static bool met(const View& v, Epoch e) {
    if (!v.fiber || group_of(e) != v.cta->group) return false;
    const uint32_t thread = index_of(e) - v.cta->first_agent;
    return thread < uint32_t(v.cta->grid->threads) &&
           int(thread / 32) == v.fiber->thread / 32 &&
           clock_of(e) <= lane_of(*v.fiber, thread % 32).met;
}
// May the async proxy read what was written at ``e``? Yes after a proxy fence; and what it has
// written itself for this CTA.
bool proxied(const View& v, Epoch e) {
    if (group_of(e) == v.cta->group) {
        const uint32_t i = index_of(e) - v.cta->first_agent, threads = v.cta->grid->threads;
        const uint32_t first_slot = 2 * threads + v.cta->grid->warps();
        if (i >= first_slot && i < first_slot + Grid::SLOTS) return true;
        const Fiber* f = v.fiber;
        if (f && i == uint32_t(f->thread) && clock_of(e) <= f->proxy_clock) return true;
        if (f && i == threads + f->thread && clock_of(e) <= f->proxy_cp) return true;
    }
    return knows(v.proxy, e);
}

static const char* verb(Epoch e, bool write) {
    const Grid& grid = *grids[grid_of(group_of(e))];
    const int i = index_of(e) % grid.agents_of_cta();
    if (i < grid.threads) return write ? "writes" : "reads";
    if (i < 2 * grid.threads) return write ? "a cp.async writes" : "a cp.async reads";
    if (i < 2 * grid.threads + grid.warps()) return "a wgmma reads";
    return write ? "an asynchronous copy writes" : "an asynchronous copy reads";
}
static std::string described(Epoch e, uint64_t place, bool write) {
    std::string agent;
    return where(reinterpret_cast<void*>(place & ~ATOMIC_BIT)) + " (" + name_of_agent(e, agent) +
           ") " + verb(e, write);
}
static std::string in_allocation(const Allocation& a, const unsigned char* p) {
    return "byte " + str(p - a.begin) + " of " + a.name;
}
[[noreturn]] static void overrun(const View& v, const unsigned char* p, size_t bytes, bool write,
                                 const void* place) {
    const Allocation* nearest = nullptr;
    auto distance = [&](const Allocation& a) {
        return p < a.begin ? a.begin - p : p - (a.begin + a.bytes) + 1;
    };
    for (const Allocation& a : allocations)
        if (!nearest || distance(a) < distance(*nearest)) nearest = &a;
    std::string text = "overrun: " + described(v.self, uint64_t(place), write) + " " +
                       str(bytes) + " bytes outside of all memory that the launch was given";
    if (nearest && size_t(p - region) < REGION)
        text += ", at " + in_allocation(*nearest, p) + ", which has " + str(nearest->bytes);
    fail(text);
}
[[noreturn]] static void race(const View& v, const Allocation& a, const unsigned char* p, Epoch e,
                              uint64_t other_place, bool other_write, bool write,
                              const void* place, bool proxy) {
    const std::string now = described(v.self, uint64_t(place), write);
    const std::string other = described(e, other_place, other_write);
    const std::string at = in_allocation(a, p);
    if (proxy)
        fail("missing proxy fence: " + now + " " + at + ", which " + other +
             " before; there is no fence.proxy.async in between");
    fail("race: " + now + " " + at + ", which " + other + "; nothing orders the two");
}

// Of each agent the last read is enough; twice as many as there are may be kept.
static void keep_read(std::vector<std::pair<Epoch, uint64_t>>& reads, Epoch e, uint64_t place) {
    if (reads.size() >= 16 && reads.size() == reads.capacity()) {
        std::sort(reads.begin(), reads.end(), std::greater<>());
        auto same = [](const auto& a, const auto& b) { return a.first >> 30 == b.first >> 30; };
        reads.erase(std::unique(reads.begin(), reads.end(), same), reads.end());
        if (2 * reads.size() > reads.capacity()) reads.reserve(2 * reads.capacity());
    }
    reads.emplace_back(e, place);
}

void access(const View& v, const void* at, size_t bytes, unsigned kind, const void* place) {
    const auto* p = static_cast<const unsigned char*>(at);
    const bool write = kind & WRITE, atomic = kind & ATOMIC, async = kind & ASYNC;
    Allocation* a = allocation_of(p);
    if (!a || p < a->begin || p + bytes > a->begin + a->bytes) overrun(v, p, bytes, write, place);
    Cell* cell = a->cells + (p - a->begin) / 2;
    Cell* const end = a->cells + (p + bytes - 1 - a->begin) / 2 + 1;
    const uint64_t mark = uint64_t(place) | (atomic ? ATOMIC_BIT : 0);
    Epoch fine_write = 0, fine_read = 0;  // known to come before
    auto check_read = [&](Epoch e, uint64_t at_place, const Cell* c) {
        if (e == 0 || e == fine_read || atomic && at_place & ATOMIC_BIT) return;
        if (!ordered(v, e, true) && !met(v, e))
            race(v, *a, a->begin + 2 * (c - a->cells), e, at_place, false, true, place, false);
        fine_read = e;
    };
    for (; cell < end; ++cell) {
        const Epoch w = cell->write;
        if (w && w != fine_write && !(atomic && cell->write_place & ATOMIC_BIT)) {
            const unsigned char* byte = a->begin + 2 * (cell - a->cells);
            if (!ordered(v, w, write))
                race(v, *a, byte, w, cell->write_place, true, write, place, false);
            if (async && !proxied(v, w))
                race(v, *a, byte, w, cell->write_place, true, write, place, true);
            fine_write = w;
        }
        if (write) {
            check_read(cell->read, cell->read_place, cell);
            if (cell->more) {
                for (const auto& [e, at_place] : more_reads[cell->more])
                    check_read(e, at_place, cell);
                more_reads[cell->more].clear();
            }
            cell->write = v.self, cell->write_place = mark, cell->read = 0;
        } else {
            const Epoch r = cell->read;
            if (r && r >> 30 != v.self >> 30 && r != fine_read) {
                if (ordered(v, r, false)) {
                    fine_read = r;
                } else {  // both are kept
                    if (!cell->more) {
                        cell->more = more_reads.size();
                        more_reads.emplace_back();
                    }
                    keep_read(more_reads[cell->more], r, cell->read_place);
                }
            }
            cell->read = v.self, cell->read_place = mark;
        }
    }
}

// ---- what the compiler has put before each of the kernel's accesses ----

static void registers(const unsigned char* p, size_t bytes, bool write, const void* place) {
    for (const Registers& r : current->registers)
        if (p < r.end && p + bytes > r.begin && (write || r.written))
            fail("wgmma: " + where(place) + (write ? " writes" : " reads") +
                 " registers that the wgmma begun at " + where(r.place) +
                 (r.written ? " accumulates in" : " reads") + ": there is no warpgroup_wait in " +
                 "between (" + who(*current) + ")");
    if (!write) return;
    const size_t offset = p - current->stack;
    auto* shadow = reinterpret_cast<uint32_t*>(current->stack + STACK);
    for (size_t word = offset / 4; word * 4 < offset + bytes; ++word)
        shadow[word] = current->arrives + 1;
}
static void touch(const void* address, size_t bytes, unsigned kind, const void* place) {
    if (!current || bytes == 0) return;
    const auto* p = static_cast<const unsigned char*>(address);
    if (size_t(p - current->stack) < STACK)
        return registers(p, bytes, kind & WRITE, place);
    const Cta& cta = *current->cta;
    const Grid& grid = *cta.grid;
    if (p >= grid.static_begin && p < grid.static_end)
        return access(view_of(*current), cta.statics + (p - grid.static_begin), bytes, kind, place);
    const auto in = [&](const void* begin, size_t size) {
        return size_t(p - static_cast<const unsigned char*>(begin)) < size;
    };
    if (!(kind & WRITE) &&
        (in(grid.params.data(), grid.params.size()) || in(&threadIdx, sizeof(Index)) ||
         in(&blockIdx, sizeof(Index)) || in(&gridDim, sizeof(Index)) ||
         in(&blockDim, sizeof(Index)) ||
         in(grid.library_begin, grid.library_end - grid.library_begin)))
        return;
    access(view_of(*current), p, bytes, kind, place);
    if (kind == ATOMIC) learn_relaxed(p);
}

}  // namespace host

using namespace host;
#define ACCESSES(BYTES)                                                                       \
    void __tsan_read##BYTES(void* p) { touch(p, BYTES, READ, PLACE); }                        \
    void __tsan_write##BYTES(void* p) { touch(p, BYTES, WRITE, PLACE); }                      \
    void __tsan_unaligned_read##BYTES(void* p) { touch(p, BYTES, READ, PLACE); }              \
    void __tsan_unaligned_write##BYTES(void* p) { touch(p, BYTES, WRITE, PLACE); }            \
    void __tsan_volatile_read##BYTES(void* p) { touch(p, BYTES, READ | ATOMIC, PLACE); }      \
    void __tsan_volatile_write##BYTES(void* p) { touch(p, BYTES, WRITE | ATOMIC, PLACE); }
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { touch(p, bytes, READ, PLACE); }
void __tsan_write_range(void* p, size_t bytes) { touch(p, bytes, WRITE, PLACE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
