#include "clocks.h"

#include <algorithm>

namespace host {

static ClockPtr united(const ClockPtr& a, const ClockPtr& b) {
    auto both = std::make_shared<Clock>(*a);
    bool is_a = (a->grids | b->grids) == a->grids;
    bool is_b = (a->grids | b->grids) == b->grids && a->groups.size() <= b->groups.size();
    both->grids |= b->grids;
    for (const auto& [number, agents] : b->groups) {
        const auto found = std::find_if(both->groups.begin(), both->groups.end(),
                                        [&](const auto& x) { return x.first == number; });
        if (found == both->groups.end()) {
            both->groups.emplace_back(number, agents);
            is_a = false;
        } else if (found->second != agents) {
            auto merged = std::make_shared<Agents>(*found->second);
            uint32_t more = 0, less = 0;
            const uint32_t* from = agents->data();
            uint32_t* to = merged->data();
            for (size_t i = 0; i < agents->size(); ++i) {
                more |= from[i] > to[i], less |= from[i] < to[i];
                to[i] = std::max(to[i], from[i]);
            }
            is_a &= !more, is_b &= !less;
            found->second = !more ? found->second : !less ? agents : std::move(merged);
        }
    }
    if (is_a) return a;
    if (is_b && both->groups.size() == b->groups.size()) return b;
    return both;
}

ClockPtr join(const ClockPtr& a, const ClockPtr& b) {
    if (!b || a == b) return a;
    if (!a) return b;
    struct Kept {
        ClockPtr a, b, both;
    };
    static std::vector<Kept> kept(256);
    const uintptr_t place = uintptr_t(a.get()) * 31 + uintptr_t(b.get());
    Kept& entry = kept[(place >> 4 ^ place >> 12) % kept.size()];
    if (entry.a != a || entry.b != b) entry = {a, b, united(a, b)};
    return entry.both;
}

ClockPtr Gathered::get() const {
    if (epochs.empty()) return base;
    auto all = base ? std::make_shared<Clock>(*base) : std::make_shared<Clock>();
    std::shared_ptr<Agents> agents;
    uint32_t group = ~0u;
    for (const Epoch e : epochs) {
        if (group_of(e) != group) {
            group = group_of(e);
            auto found = std::find_if(all->groups.begin(), all->groups.end(),
                                      [&](const auto& x) { return x.first == group; });
            if (found == all->groups.end()) {
                agents = std::make_shared<Agents>(agents_of_group(group));
                all->groups.emplace_back(group, agents);
            } else {
                agents = std::make_shared<Agents>(*found->second);
                found->second = agents;
            }
        }
        (*agents)[index_of(e)] = std::max((*agents)[index_of(e)], clock_of(e));
    }
    return all;
}

}  // namespace host
