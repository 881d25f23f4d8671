// Operations of a warp: shuffles, ldmatrix and stmatrix, mma, and wgmma, each warp its 16 rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "internal.h"

namespace host {

template <typename To, typename From>
static To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof(To));
    return y;
}
static float from_bf16(uint16_t x) { return bits_as<float>(uint32_t(x) << 16); }
static float from_fp16(uint16_t x) { return bits_as<_Float16>(x); }

struct Lane {
    uint32_t x;
    int from;
    uint32_t result;
};
uint32_t collective(Lanes operation, uint32_t x, int from) {
    Lane mine = {x, from, 0};
    auto all = [=](void** lanes) {
        auto lane = [&](int i) -> Lane& { return *static_cast<Lane*>(lanes[i]); };
        uint32_t all = operation == Lanes::REDUCE_MIN ? lane(0).x : 0;
        for (int i = 0; i < 32; ++i) {
            if (operation == Lanes::BALLOT) all |= lane(i).x << i;
            if (operation == Lanes::REDUCE_ADD) all += lane(i).x;
            if (operation == Lanes::REDUCE_MIN && int(lane(i).x) < int(all)) all = lane(i).x;
        }
        for (int i = 0; i < 32; ++i)
            lane(i).result = operation == Lanes::SHUFFLE ? lane(lane(i).from % 32).x : all;
    };
    warp_collective(int(operation), &mine, all, PLACE);
    return mine.result;
}

struct Move {
    uint32_t* x;
    unsigned char* row;  // that this lane gives the address of
};
void move_matrices(uint32_t* x, uint32_t address, bool transposed, bool store) {
    const void* const place = PLACE;
    Move mine = {x, static_cast<unsigned char*>(shared_at(address))};
    auto all = [=](void** lanes) {
        auto lane = [&](int i) -> Move& { return *static_cast<Move*>(lanes[i]); };
        for (int i = 0; i < 32; ++i)
            access(view_of(lane_of(*current, i)), lane(i).row, 16, store ? WRITE : READ, place);
        // element (row, column) of matrix m; lane (r, t) holds (r, 2 t), (r, 2 t + 1), or transposed
        for (int i = 0; i < 32; ++i)
            for (int m = 0; m < 4; ++m)
                for (int half = 0; half < 2; ++half) {
                    int row = i / 4, column = 2 * (i % 4) + half;
                    if (transposed) std::swap(row, column);
                    auto* const e = reinterpret_cast<uint16_t*>(lane(8 * m + row).row) + column;
                    uint32_t& word = lane(i).x[m];
                    if (store) *e = uint16_t(word >> 16 * half);
                    else word = half ? word | uint32_t(*e) << 16 : *e;
                }
    };
    warp_collective(16 + 2 * transposed + store, &mine, all, place);
}

// One warp's c [16, 8] += a [16, K] b [K, 8].
struct Product {
    float* c;
    uint32_t a[4], b[2];
};
void mma(Mma kind, float* c, const uint32_t* a, const uint32_t* b) {
    Product mine = {c, {a[0], a[1], 0, 0}, {b[0], 0}};
    if (kind != Mma::F16_K8) mine.a[2] = a[2], mine.a[3] = a[3], mine.b[1] = b[1];
    auto all = [=](void** lanes) {
        auto lane = [&](int i) -> Product& { return *static_cast<Product*>(lanes[i]); };
        const bool tf32 = kind == Mma::TF32_K8;
        const int depth = kind == Mma::F16_K8 || tf32 ? 8 : 16;
        float x[16][16], y[16][8];
        auto number = [=](uint32_t bits, int half) {
            const uint16_t part = bits >> 16 * half;
            return kind == Mma::BF16_K16 ? from_bf16(part) : from_fp16(part);
        };
        auto cut = [](uint32_t bits) { return bits_as<float>(bits & 0xffffe000u); };
        for (int i = 0; i < 32; ++i) {
            const int r = i / 4, t = i % 4;
            const Product& of = lane(i);
            for (int k = 0; k < 2 && tf32; ++k) {
                x[r][t + 4 * k] = cut(of.a[2 * k]), x[r + 8][t + 4 * k] = cut(of.a[2 * k + 1]);
                y[t + 4 * k][r] = cut(of.b[k]);
            }
            for (int k = 0; k < depth / 8 && !tf32; ++k)
                for (int half = 0; half < 2; ++half) {
                    const int column = 8 * k + 2 * t + half;
                    x[r][column] = number(of.a[2 * k], half);
                    x[r + 8][column] = number(of.a[2 * k + 1], half);
                    y[column][r] = number(of.b[k], half);
                }
        }
        for (int i = 0; i < 32; ++i)
            for (int e = 0; e < 4; ++e) {
                float sum = 0.0f;
                for (int k = 0; k < depth; ++k)
                    sum += x[i / 4 + 8 * (e / 2)][k] * y[k][2 * (i % 4) + e % 2];
                lane(i).c[e] += sum;
            }
    };
    warp_collective(32 + int(kind), &mine, all, PLACE);
}

// ---- wgmma ----

struct Registered {
    float* c;
    Wgmma product;
};
static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
// B's place of (k, n) is a byte offset before the swizzle; A's rows are of 128 bytes.
static uint32_t place_of_b(const Wgmma& p, int k, int n) {
    return swizzled(p.b_address +
                    (p.b_mn_major ? n / 64 * p.leading + k / 8 * p.stride + k % 8 * 128 + n % 64 * 2
                                  : n / 8 * p.stride + n % 8 * 128 + k * 2));
}
static uint32_t place_of_a(const Wgmma& p, int row, int k) {
    return swizzled(p.a_address + row / 8 * 1024 + row % 8 * 128 + k * 2);
}
static void multiply(const std::vector<Registered>& lanes, unsigned char* memory, int warp) {
    const Wgmma& p = lanes[0].product;
    auto number = [&](uint16_t x) { return p.bf16 ? from_bf16(x) : from_fp16(x); };
    auto shared = [&](uint32_t at) { return number(*reinterpret_cast<uint16_t*>(memory + at)); };
    static float a[16][16], b[16][256];
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < p.n; ++n) b[k][n] = shared(place_of_b(p, k, n));
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) {
            if (!p.a) {
                const bool there = 16 * warp + row < p.a_rows;
                a[row][k] = there ? shared(place_of_a(p, 16 * warp + row, k)) : NAN;
                continue;
            }
            const uint32_t pair =
                lanes[row % 8 * 4 + k / 2 % 4].product.a[row / 8 + 2 * (k / 8)];
            a[row][k] = number(pair >> 16 * (k % 2));
        }
    for (int row = 0; row < 16; ++row) {
        float sums[256] = {};
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < p.n; ++n) sums[n] += a[row][k] * b[k][n];
        for (int n = 0; n < p.n; ++n) {
            const Registered& lane = lanes[row % 8 * 4 + n % 8 / 2];
            float& c = lane.c[n / 8 * 4 + row / 8 * 2 + n % 2];
            c = (lane.product.add ? c : 0.0f) + sums[n];
        }
    }
}
// Those of a warp's products that are not over, up to the ``last`` that it has begun.
static void run_products(Warp& warp, uint32_t last) {
    auto& products = warp.products;
    const uint32_t over = warp.begun - products.size();
    const size_t count = std::min<size_t>(products.size(), last > over ? last - over : 0);
    for (size_t i = 0; i < count; ++i) products[i]();
    products.erase(products.begin(), products.begin() + count);
}
// Registers have to lie still: from the last warpgroup_arrive on, until the wait.
static void take_registers(Fiber& f, const void* p, size_t bytes, bool written, uint32_t number,
                           const void* place) {
    const auto* begin = static_cast<const unsigned char*>(p);
    const auto* shadow = reinterpret_cast<const uint32_t*>(f.stack + STACK);
    const size_t offset = begin - f.stack;
    for (size_t word = offset / 4; word * 4 < offset + bytes && offset < STACK; ++word)
        if (shadow[word] > f.arrives)
            fail("wgmma: registers of the wgmma at " + where(place) +
                 " have been written since the last warpgroup_arrive (" + who(f) + ")");
    for (Registers& r : f.registers)
        if (r.begin == begin && r.written == written) {
            r.number = number;
            return;
        }
    f.registers.push_back({begin, begin + bytes, written, number, place});
}
void wgmma(float* c, const Wgmma& product) {
    const void* const place = PLACE;
    Registered mine = {c, product};
    auto all = [=](void** given) {
        std::vector<Registered> lanes;
        GatheredKnowledge gathered;
        const uint32_t begun = current->cta->warps[current->thread / 32].begun + 1;
        for (int i = 0; i < 32; ++i) {
            Fiber& f = lane_of(*current, i);
            lanes.push_back(*static_cast<Registered*>(given[i]));
            take_registers(f, lanes[i].c, lanes[i].product.n * 2, true, begun, place);
            if (lanes[i].product.a) take_registers(f, lanes[i].product.a, 16, false, begun, place);
            const uint32_t now = f.clock;
            publish(f, gathered);
            f.clock = now;
        }
        Cta& cta = *current->cta;
        const int number = current->thread / 32;
        Warp& warp = cta.warps[number];
        const Knowledge knows = gathered.get();
        const uint32_t agent = cta.first_agent + 2 * cta.grid->threads + number;
        const View view = {epoch(cta.group, agent, ++warp.begun), nullptr, knows.known.get(),
                           knows.proxy.get(), &cta};
        const Wgmma& p = lanes[0].product;
        auto read = [&](uint32_t at) { access(view, cta.memory + at, 16, READ | ASYNC, place); };
        for (int k = 0; k < 16; k += p.b_mn_major ? 1 : 8)
            for (int n = 0; n < p.n; n += p.b_mn_major ? 8 : 1) read(place_of_b(p, k, n));
        const int first = 16 * (number % 4), rows = p.a ? 0 : std::min(16, p.a_rows - first);
        for (int row = 0; row < rows; ++row)
            for (int k = 0; k < 16; k += 8) read(place_of_a(p, first + row, k));
        warp.products.push_back(
            [=, memory = cta.memory] { multiply(lanes, memory, number % 4); });
        if (random(4) == 0) run_products(warp, warp.begun);
        for (int i = 0; i < 128; ++i)  // who waits for this warp's part
            if (Fiber& f = lane_of(*current, i - current->thread / 32 % 4 * 32);
                f.state == State::PRODUCTS)
                wake(f);
    };
    warp_collective(64, &mine, all, place);
}
void wgmma_arrive() { current->arrives += 1; }
void wgmma_commit() {
    current->groups.push_back(current->cta->warps[current->thread / 32].begun);
}
// Of the whole warpgroup: a warp goes on when all four have begun what it has, and all of that is
// over, but for the last ``pending`` groups that it has committed.
void wgmma_wait(int pending) {
    Cta& cta = *current->cta;
    const int number = current->thread / 32, first = number / 4 * 4;
    auto& groups = current->groups;
    if (pending > 0 && groups.size() <= size_t(pending)) return;
    const size_t over = groups.size() - pending;
    const uint32_t begun = pending > 0 ? groups[over - 1] : cta.warps[number].begun;
    for (int i = first; i < first + 4; ++i)
        while (cta.warps[i].begun < begun) wait(State::PRODUCTS, PLACE);
    for (int i = first; i < first + 4; ++i) run_products(cta.warps[i], begun);
    current->products_known = begun;
    groups.erase(groups.begin(), pending > 0 ? groups.begin() + over : groups.end());
    std::erase_if(current->registers, [&](const Registers& r) { return r.number <= begun; });
}

}  // namespace host
