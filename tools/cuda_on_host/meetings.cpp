// What threads know of one another, and the barriers of warps, CTAs and clusters that tell them.
#include "internal.h"

namespace host {

// ---- knowledge ----

void publish(Fiber& f, GatheredKnowledge& to) {
    const Cta& cta = *f.cta;
    const uint32_t cp = f.agent() + cta.grid->threads;
    to.known.add(f.known);
    to.known.add(f.now());
    to.known.add(epoch(cta.group, cp, f.cp_known));
    const uint32_t first_product = cta.first_agent + 2 * cta.grid->threads + f.thread / 128 * 4;
    for (int i = 0; i < 4 && f.products_known; ++i)
        to.known.add(epoch(cta.group, first_product + i, f.products_known));
    to.proxy.add(f.proxy);
    to.proxy.add(epoch(cta.group, f.agent(), f.proxy_clock));
    to.proxy.add(epoch(cta.group, cp, f.proxy_cp));
    f.clock += 1;
}
void learn(Fiber& f, const Knowledge& from) {
    f.known = join(f.known, from.known);
    f.proxy = join(f.proxy, from.proxy);
}

// ---- meetings ----

static void arrive(Meeting& meeting, bool release) {
    if (release) {
        publish(*current, meeting.gathered);
    } else {  // what has been read, it tells; not what has been written
        GatheredKnowledge all;
        publish(*current, all);
        meeting.gathered_relaxed.add(all.get().known);
    }
    meeting.arrived += 1;
}
static bool complete(Meeting& meeting, int threads) {
    if (meeting.arrived == 0 || meeting.arrived < threads) return false;
    meeting.released = meeting.gathered.get();
    meeting.released_relaxed = meeting.gathered_relaxed.get();
    meeting.gathered = {}, meeting.gathered_relaxed = {};
    meeting.arrived = 0, meeting.phase ^= 1;
    progress();
    return true;
}
void complete_for(Cta& cta) {
    if (complete(cta.all, cta.threads))
        wake_if(cta, [](Fiber& f) { return f.state == State::CTA; });
}
void complete_for(Cluster& cluster) {
    if (complete(cluster, cluster.threads))
        for (Cta* cta : cluster.ctas)
            wake_if(*cta, [](Fiber& f) { return f.state == State::CLUSTER; });
}
void syncthreads() {
    Cta& cta = *current->cta;
    const unsigned phase = cta.all.phase;
    arrive(cta.all, true);
    complete_for(cta);
    if (cta.all.phase == phase) wait(State::CTA, PLACE);
    learn(*current, cta.all.released);
}
void named_barrier(int threads) {
    Cta& cta = *current->cta;
    const unsigned phase = cta.some.phase;
    arrive(cta.some, true);
    if (complete(cta.some, threads))
        wake_if(cta, [](Fiber& f) { return f.state == State::NAMED; });
    if (cta.some.phase == phase) wait(State::NAMED, PLACE);
    learn(*current, cta.some.released);
}
void cluster_arrive(bool release) {
    current->cluster_phase = current->cta->cluster->phase + 2;
    arrive(*current->cta->cluster, release);
    complete_for(*current->cta->cluster);
}
void cluster_wait() {
    Cluster& cluster = *current->cta->cluster;
    if (current->cluster_phase < 2)
        fail("cluster: " + where(PLACE) + " waits for the cluster without having arrived (" +
             who(*current) + ")");
    if (cluster.phase == current->cluster_phase - 2) wait(State::CLUSTER, PLACE);
    current->cluster_phase = 0;
    learn(*current, cluster.released);
    current->relaxed = join(current->relaxed, cluster.released_relaxed);
}
void syncwarp() {
    auto all = [](void**) {
        GatheredKnowledge gathered;
        for (int i = 0; i < 32; ++i) publish(lane_of(*current, i), gathered);
        const Knowledge released = gathered.get();
        for (int i = 0; i < 32; ++i) learn(lane_of(*current, i), released);
    };
    warp_collective(-2, nullptr, all, PLACE);
}

}  // namespace host
