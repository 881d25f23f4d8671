// Who knows of what: vector clocks.
//
// An agent is a thread, a thread's cp.async copies, a warp's wgmma, or one of a CTA's slots for
// copies by the copy engine. Agents of a cluster are one group. What an agent does has an epoch:
// its group, its index there and its clock. One clock holds for each agent up to which of its own
// clocks its accesses are known to have happened; all of a grid's are known once its end is.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace host {

typedef uint64_t Epoch;  // 0: never
inline Epoch epoch(uint32_t group, uint32_t index, uint32_t clock) {
    return Epoch(group) << 44 | Epoch(index) << 30 | clock;
}
inline uint32_t group_of(Epoch e) { return e >> 44; }
inline uint32_t index_of(Epoch e) { return e >> 30 & 0x3fff; }
inline uint32_t clock_of(Epoch e) { return e & 0x3fffffff; }

typedef std::vector<uint32_t> Agents;  // a clock for each of a group
struct Clock {
    uint64_t grids = 0;  // bit g: all that grid g has done is known
    std::vector<std::pair<uint32_t, std::shared_ptr<const Agents>>> groups;

    const Agents* find(uint32_t group) const {
        for (const auto& [number, agents] : groups)
            if (number == group) return agents.get();
        return nullptr;
    }
};
typedef std::shared_ptr<const Clock> ClockPtr;  // null: nothing is known

// Both together; the same pointers have the same result for as long as they are remembered.
ClockPtr join(const ClockPtr& a, const ClockPtr& b);

// A clock under construction: what arrives at a barrier.
class Gathered {
  public:
    void add(const ClockPtr& clock) { base = join(base, clock); }
    void add(Epoch own) {
        if (clock_of(own)) epochs.push_back(own);
    }
    ClockPtr get() const;

  private:
    ClockPtr base;
    std::vector<Epoch> epochs;
};
// What a thread publishes: what it knows, and what of that the copy engine may read (the async
// proxy).
struct Knowledge {
    ClockPtr known, proxy;
};
struct GatheredKnowledge {
    Gathered known, proxy;
    Knowledge get() const { return {known.get(), proxy.get()}; }
};
uint32_t agents_of_group(uint32_t group);  // how many

}  // namespace host
