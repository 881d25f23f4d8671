// mbarriers, the copies that complete at them, and atomic variables of global memory.
#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>

#include "internal.h"

namespace host {

// ---- shared memory ----

unsigned char* shared_memory() { return current->cta->memory; }
static Cta& cta_at(uint32_t address) {
    Cta& own = *current->cta;
    const uint32_t rank = address / WINDOW;
    if (rank == 0) return own;
    if (rank > own.peers.size()) fail("an address is outside of the cluster: " + who(*current));
    Cta& cta = *own.peers[rank - 1];
    if (cta.threads == 0)
        fail("cluster: " + who(*current) + " accesses shared memory of CTA " + str(cta.index) +
             ", which has ended");
    return cta;
}
void* shared_at(uint32_t address) { return cta_at(address).memory + address % WINDOW; }
uint32_t address_at(uint32_t address, int rank) { return address % WINDOW + (rank + 1) * WINDOW; }

// ---- mbarriers ----

struct Barrier {
    uint32_t expected, pending;
    int64_t bytes = 0;
    unsigned phase = 0;
    Epoch init, fenced = 0;  // fence_barrier_init after it
    const void* place;
    Cta* cta;
    GatheredKnowledge gathered = {};
    Knowledge released = {};
};
static std::unordered_map<uint64_t*, Barrier> barriers;
constexpr uint64_t MAGIC = 0x6d62617272696572;

static std::string name_of(const uint64_t* barrier) {
    for (const auto& grid : grids)
        for (const auto& cta : grid->blocks) {
            const auto offset = reinterpret_cast<const unsigned char*>(barrier) - cta->memory;
            if (offset >= 0 && offset < grid->shared_bytes)
                return "the barrier at byte " + str(offset) + " of shared memory of CTA " +
                       str(cta->index) + " of " + grid->name;
        }
    return "a barrier that is not in shared memory";
}
static Barrier& barrier_of(uint64_t* barrier, const void* place, bool fenced) {
    access(view_of(*current), barrier, 8, READ | WRITE | ATOMIC, place);
    const auto found = barriers.find(barrier);
    if (*barrier != MAGIC || found == barriers.end())
        fail("barrier: " + where(place) + " (" + who(*current) + ") uses " + name_of(barrier) +
             ", which is not initialised or has been overwritten");
    Barrier& b = found->second;
    const View view = view_of(*current);
    const bool known = b.fenced && ordered(view, b.fenced, true) || proxied(view, b.init);
    if (fenced && !known)
        fail("missing barrier fence: " + where(place) + " (" + who(*current) + ") lets the copy " +
             "engine or another CTA use " + name_of(barrier) + ", which " + where(b.place) +
             " initialises; there is no fence_barrier_init in between");
    return b;
}
void barrier_init(uint64_t* barrier, int count) {
    access(view_of(*current), barrier, 8, WRITE, PLACE);
    *barrier = MAGIC;
    barriers[barrier] = {uint32_t(count), uint32_t(count), 0, 0, current->now(), 0, PLACE, current->cta};
}
void fence_barrier_init() {
    current->clock += 1;
    for (auto& [at, b] : barriers)
        if (!b.fenced && b.init >> 30 == current->now() >> 30) b.fenced = current->now();
    current->clock += 1;
}

enum class Kind { CP_ASYNC, CP_ASYNC_ARRIVE, TO_SHARED, STORE_READ, STORE_WRITE };
struct Pending {
    Kind kind;
    Fiber* owner;
    uint32_t clock;  // of the owner's cp.async
    std::function<void()> move;
    uint64_t* barrier = nullptr;
    unsigned bytes = 0;
    Epoch epoch = 0;
    int slot = -1;
    const void* place = nullptr;
    const void *to = nullptr, *from = nullptr;  // in shared memory, while they are needed
    std::function<Pending()> then;
};
static std::vector<Pending> pending;

static void complete_if_done(uint64_t* barrier) {
    Barrier& b = barriers[barrier];
    if (b.pending || b.bytes) return;
    for (const Pending& p : pending)
        if (p.barrier == barrier && p.kind == Kind::TO_SHARED)
            fail("barrier: a phase of " + name_of(barrier) + " ends while the " + str(p.bytes) +
                 " bytes of the copy that " + where(p.place) + " has begun are on their way to " +
                 "it: no arrive_and_expect_tx expects them");
    b.phase ^= 1, b.pending = b.expected;
    b.released = b.gathered.get();
    b.gathered = {};
    progress();
    wake_if(*b.cta, [&](Fiber& f) {
        return f.state == State::BARRIER && f.barrier == barrier && b.phase != f.parity;
    });
}
static void arrive(uint64_t* barrier, unsigned bytes, bool remote, const void* place) {
    Barrier& b = barrier_of(barrier, place, remote);
    if (b.pending == 0)
        fail("barrier: " + where(place) + " (" + who(*current) + ") arrives at " +
             name_of(barrier) + ", at which all " + str(b.expected) + " have arrived");
    b.bytes += bytes, b.pending -= 1;
    publish(*current, b.gathered);
    complete_if_done(barrier);
}
void barrier_arrive(uint64_t* barrier, unsigned bytes) { arrive(barrier, bytes, false, PLACE); }
void barrier_arrive_at(uint32_t address) {
    arrive(static_cast<uint64_t*>(shared_at(address)), 0, true, PLACE);
}
void barrier_wait(uint64_t* barrier, unsigned parity) {
    Barrier& b = barrier_of(barrier, PLACE, false);
    if (b.phase == (parity & 1)) {
        current->barrier = barrier, current->parity = parity & 1;
        wait(State::BARRIER, PLACE);
    }
    learn(*current, b.released);
}
std::string missing_at(uint64_t* barrier) {
    const Barrier& b = barriers[barrier];
    return name_of(barrier) + ", whose phase lacks " + str(b.pending) + " of " + str(b.expected) +
           " arrivals and " + str(b.bytes) + " bytes";
}

// ---- copies ----

static int take_slot() {
    Cta& cta = *current->cta;
    for (int tries = 0; tries < Grid::SLOTS; ++tries) {
        const int slot = random(Grid::SLOTS);
        if (cta.slot_taken[slot]) continue;
        cta.slot_taken[slot] = true, cta.slot_clocks[slot] += 1;
        return slot;
    }
    fail("more copies are on their way than the model can hold: " + who(*current));
}
static Epoch epoch_of_slot(int slot) {
    const Cta& cta = *current->cta;
    const Grid& grid = *cta.grid;
    const uint32_t agent = cta.first_agent + 2 * grid.threads + grid.warps() + slot;
    return epoch(cta.group, agent, cta.slot_clocks[slot]);
}
static void begin(Pending copy) {
    copy.owner = current;
    pending.push_back(std::move(copy));
}
static void complete(size_t index) {
    const Pending& at = pending[index];
    if (at.kind == Kind::CP_ASYNC_ARRIVE)  // after the copies that its thread began before
        for (size_t i = 0; i < index; ++i)
            if (pending[i].kind == Kind::CP_ASYNC && pending[i].owner == at.owner)
                return complete(i);
    const Pending p = std::move(pending[index]);
    pending.erase(pending.begin() + index);
    if (p.kind == Kind::CP_ASYNC_ARRIVE) {
        Barrier& b = barriers[p.barrier];
        b.gathered.known.add(p.epoch);
        b.pending -= 1;
        return complete_if_done(p.barrier);
    }
    p.move();
    if (p.slot >= 0) p.owner->cta->slot_taken[p.slot] = false;
    if (p.kind == Kind::STORE_READ) p.owner->stores_read.push_back(p.epoch);
    if (p.kind == Kind::STORE_WRITE) p.owner->stores_done.push_back(p.epoch);
    if (p.then) pending.push_back(p.then());
    if (p.barrier) {
        Barrier& b = barriers[p.barrier];
        b.gathered.known.add(p.epoch);
        b.bytes -= p.bytes;
        complete_if_done(p.barrier);
    }
}
bool complete_one() {
    if (pending.empty()) return false;
    complete(random(pending.size()));
    return true;
}
template <typename F>
static void complete_all(F matches) {
    for (size_t i = 0; i < pending.size();)
        if (pending[i].owner == current && matches(pending[i])) complete(i);
        else ++i;
}
void expect_nothing_for(const Cta& cta) {
    auto lies_here = [&](const void* p) {
        return size_t(static_cast<const unsigned char*>(p) - cta.memory) <
               size_t(cta.grid->shared_bytes);
    };
    for (const Pending& p : pending)
        if (lies_here(p.to) || lies_here(p.from))
            fail("CTA " + str(cta.index) + " of " + cta.grid->name + " ends while the copy that " +
                 where(p.place) + " has begun is on its way from or to its shared memory");
}
void forget_copies() {
    pending.clear(), barriers.clear();
}

static void copy_by_thread(void* to, const void* from, unsigned bytes, bool valid,
                           const void* place) {
    View view = view_of(*current);
    view.self = epoch(view.cta->group, current->agent() + view.cta->grid->threads,
                      current->cp_clock);
    if (uintptr_t(to) % bytes || valid && uintptr_t(from) % bytes)
        fail("alignment: the cp.async at " + where(place) + " (" + who(*current) + ") is of " +
             str(bytes) + " bytes that are not aligned to as many");
    if (valid) access(view, from, bytes, READ, place);
    access(view, to, bytes, WRITE, place);
    memset(to, 0xff, bytes);
    auto move = [=] {
        if (valid) memcpy(to, from, bytes);
        else memset(to, 0, bytes);
    };
    begin({Kind::CP_ASYNC, nullptr, current->cp_clock, move, nullptr, bytes, view.self, -1, place, to});
}
void cp_async(void* to, const void* from, unsigned bytes, bool valid) {
    copy_by_thread(to, from, bytes, valid, PLACE);
}
void cp_async_at(uint32_t to, const void* from, unsigned bytes, bool valid) {
    copy_by_thread(shared_at(to), from, bytes, valid, PLACE);
}
void cp_async_arrive(uint64_t* barrier) {
    barrier_of(barrier, PLACE, false);
    const uint32_t agent = current->agent() + current->cta->grid->threads;
    Pending arrival = {Kind::CP_ASYNC_ARRIVE, nullptr, current->cp_clock, {}, barrier};
    arrival.epoch = epoch(current->cta->group, agent, current->cp_clock), arrival.place = PLACE;
    begin(std::move(arrival));
    current->cp_clock += 1;
}
void cp_async_commit() { current->cp_clock += 1; }
void cp_async_wait(int left) {
    const uint32_t before = current->cp_clock - left;
    complete_all([&](const Pending& p) { return p.kind == Kind::CP_ASYNC && p.clock < before; });
    current->cp_known = std::max(current->cp_known, before - 1);
}

static void check_bulk(const void* to, const void* from, unsigned bytes, const void* place) {
    if (bytes % 16 || uintptr_t(from) % 16 || uintptr_t(to) % 16)
        fail("alignment: the bulk copy at " + where(place) + " (" + who(*current) +
             ") is not of whole, aligned 16-byte pieces");
}
static View view_of_slot(int slot) {
    View view = view_of(*current);
    view.self = epoch_of_slot(slot);
    return view;
}
static void to_shared(void* to, const void* from, unsigned bytes, uint64_t* barrier,
                      const void* place) {
    check_bulk(to, from, bytes, place);
    barrier_of(barrier, place, true);
    const int slot = take_slot();
    const View view = view_of_slot(slot);
    access(view, from, bytes, READ | ASYNC, place);
    access(view, to, bytes, WRITE | ASYNC, place);
    memset(to, 0xff, bytes);
    auto move = [=] { memcpy(to, from, bytes); };
    begin({Kind::TO_SHARED, nullptr, 0, move, barrier, bytes, view.self, slot, place, to, from});
}
void bulk_to_shared(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
    to_shared(to, from, bytes, barrier, PLACE);
}
static uint32_t address_of(const void* p) {
    return static_cast<const unsigned char*>(p) - shared_memory();
}
void bulk_to_rank(void* data, unsigned bytes, uint64_t* barrier, int rank) {
    to_shared(shared_at(address_at(address_of(data), rank)), data, bytes,
              static_cast<uint64_t*>(shared_at(address_at(address_of(barrier), rank))), PLACE);
}
void store_to_rank(float x, float* variable, uint64_t* barrier, int rank) {
    void* const to = shared_at(address_at(address_of(variable), rank));
    auto* const at = static_cast<uint64_t*>(shared_at(address_at(address_of(barrier), rank)));
    barrier_of(at, PLACE, true);
    const int slot = take_slot();
    const View view = view_of_slot(slot);
    access(view, to, 4, WRITE, PLACE);
    auto move = [=] { memcpy(to, &x, 4); };
    begin({Kind::TO_SHARED, nullptr, 0, move, at, 4, view.self, slot, PLACE, to});
}
// Reads shared memory first, and writes later.
void bulk_to_global(void* to, const void* from, unsigned bytes) {
    const void* const place = PLACE;
    check_bulk(to, from, bytes, place);
    const int reading = take_slot(), writing = take_slot();
    const View reads = view_of_slot(reading), writes = view_of_slot(writing);
    access(reads, from, bytes, READ | ASYNC, place);
    access(writes, to, bytes, WRITE | ASYNC, place);
    memset(to, 0xff, bytes);
    auto data = std::make_shared<std::vector<unsigned char>>(bytes);
    Pending write = {Kind::STORE_WRITE, current, 0, [=] { memcpy(to, data->data(), bytes); }};
    write.epoch = writes.self, write.slot = writing, write.place = place;
    Pending read = {Kind::STORE_READ, current, 0, [=] { memcpy(data->data(), from, bytes); }};
    read.epoch = reads.self, read.slot = reading, read.place = place, read.from = from;
    read.then = [=] { return write; };
    begin(std::move(read));
}
void wait_stores(bool written) {
    complete_all([](const Pending& p) { return p.kind == Kind::STORE_READ; });
    if (written) complete_all([](const Pending& p) { return p.kind == Kind::STORE_WRITE; });
    Gathered over;
    for (const Epoch e : current->stores_read) over.add(e);
    current->stores_read.clear();
    if (written) {
        for (const Epoch e : current->stores_done) over.add(e);
        current->stores_done.clear();
    }
    current->known = join(current->known, over.get());
}
void fence_proxy_async() {
    current->proxy = join(current->proxy, current->known);
    current->proxy_clock = current->clock, current->proxy_cp = current->cp_known;
    current->clock += 1;
}

// As the driver encodes it for the model: bf16 [extent 2, 1, 0] with strides in elements, in boxes
// of 64 channels and ``rows``.
struct TensorMap {
    uint64_t magic, address, extents[3], strides[2], rows;
};
constexpr uint64_t MAP_MAGIC = 0x70616d5f726f736e;
void tensor_to_shared(uint32_t to, const void* map, const int (&at)[3], uint64_t* barrier) {
    const void* const place = PLACE;
    TensorMap m;
    memcpy(&m, map, sizeof m);
    if (m.magic != MAP_MAGIC || uintptr_t(map) % 64)
        fail("tensor map: the copy at " + where(place) + " (" + who(*current) +
             ") has none on 64 bytes");
    if (to % 128)
        fail("tensor map: the copy at " + where(place) + " (" + who(*current) +
             ") writes to an address that is not on 128 bytes");
    barrier_of(barrier, place, true);
    const int slot = take_slot();
    const View view = view_of_slot(slot);
    auto* const box = static_cast<unsigned char*>(shared_at(to));
    std::vector<std::pair<unsigned char*, const unsigned char*>> pieces;  // of 16 bytes
    for (uint64_t row = 0; row < m.rows; ++row)
        for (int piece = 0; piece < 8; ++piece) {
            const uint64_t channel = at[0] + 8 * piece, r = at[1] + row, page = at[2];
            const bool inside = channel < m.extents[0] && r < m.extents[1] && page < m.extents[2];
            const uint64_t element = channel + r * m.strides[0] + page * m.strides[1];
            const auto* from = reinterpret_cast<const unsigned char*>(m.address) + 2 * element;
            const uint32_t swizzled = row * 128 + ((piece ^ (to + row * 128) >> 7 & 7) << 4);
            if (inside) access(view, from, 16, READ | ASYNC, place);
            pieces.emplace_back(box + swizzled, inside ? from : nullptr);
        }
    const unsigned bytes = m.rows * 128;
    access(view, box, bytes, WRITE | ASYNC, place);
    memset(box, 0xff, bytes);
    auto move = [=] {
        for (const auto& [piece, from] : pieces)
            if (from) memcpy(piece, from, 16);
            else memset(piece, 0, 16);
    };
    begin({Kind::TO_SHARED, nullptr, 0, move, barrier, bytes, view.self, slot, place, box});
}

// ---- atomic variables of global memory ----

static std::unordered_map<const void*, Knowledge> published;

void forget_atomics() { published.clear(); }
void learn_relaxed(const void* p) {
    const auto found = published.find(p);
    if (found != published.end()) current->relaxed = join(current->relaxed, found->second.known);
}
uint32_t atomic_add(uint32_t* p, uint32_t x) {
    access(view_of(*current), p, 4, READ | WRITE | ATOMIC, PLACE);
    learn_relaxed(p);
    Knowledge& to = published[p];
    to = {join(to.known, current->fenced.known), join(to.proxy, current->fenced.proxy)};
    progress();
    const uint32_t old = *p;
    *p += x;
    return old;
}
uint32_t load_acquire(const uint32_t* p) {
    const void* const place = PLACE;
    yield();  // it is polled
    access(view_of(*current), p, 4, READ | ATOMIC, place);
    const auto found = published.find(p);
    if (found != published.end()) learn(*current, found->second);
    return *p;
}
void store_release(uint32_t* p, uint32_t x) {
    access(view_of(*current), p, 4, WRITE | ATOMIC, PLACE);
    GatheredKnowledge all;
    publish(*current, all);
    published[p] = all.get();
    progress();
    *p = x;
}
void threadfence() {
    current->known = join(current->known, current->relaxed);
    GatheredKnowledge all;
    publish(*current, all);
    current->fenced = all.get();
}

}  // namespace host
