// __syncthreads() and its counting forms, complete once every thread of the block that has not returned has come, and
// the barrier of a cluster.
#pragma once

enum : u32 { CLUSTER_BARRIER = 4 };  // the others are 0 to 3: see prelude.h

static void release_barrier(Slot* slot) {
    slot->result_sum = slot->sum;
    slot->result_all = slot->all;
    slot->result_any = slot->any;
    slot->sum = slot->any = 0;
    slot->all = 1;
    slot->arrived = 0;
    slot->mixed_barrier = slot->at_cluster_barrier = false;
    for (u32 w = 0; w < slot->warp_count; ++w)
        slot->warps[w].ready = slot->warps[w].live;
    for (u32 i = 0; i < slot->threads; ++i)
        if (slot->fibers[i].state == AT_BARRIER)
            slot->fibers[i].state = RUNNING;
    progress(slot);
}

// A cluster's barrier is complete once every thread that has not returned, of every block, has come.
static void complete_cluster_barrier(Cluster* cluster) {
    for (u32 i = 0; i < cluster->size; ++i)
        if (cluster->slots[i]->live && !cluster->slots[i]->at_cluster_barrier)
            return;
    for (u32 i = 0; i < cluster->size; ++i)
        release_barrier(cluster->slots[i]);
#ifdef SIMT_CHECKED
    if (state.deferred_slot && state.deferred_slot->cluster == cluster)
        return stop(FAULT_UNINITIALIZED);
    clock_cluster(cluster);
#endif
}

static void complete_barrier(Slot* slot) {
    if (slot->first_arrival->op == CLUSTER_BARRIER) {
        slot->at_cluster_barrier = true;
        return complete_cluster_barrier(slot->cluster);
    }
    release_barrier(slot);
#ifdef SIMT_CHECKED
    if (state.deferred_slot == slot && !state.deferred_remote)
        return stop(FAULT_UNINITIALIZED);
    clock_barrier(slot);
#endif
}

extern "C" int simt_barrier(int kind, int predicate) noexcept {
    Fiber* f = state.current;
    Slot* slot = f->slot;
    f->pc = __builtin_return_address(0);
    f->op = (u32)kind;
    f->state = AT_BARRIER;
    f->warp->ready &= ~bit(f->lane);
    slot->sum += predicate != 0;
    slot->all &= predicate != 0;
    slot->any |= predicate != 0;
    if (!slot->arrived++)
        slot->first_arrival = f;
    else if (!same_calls(f, slot->first_arrival) || f->op != slot->first_arrival->op)
        slot->mixed_barrier = true;
    if (slot->arrived == slot->live && !slot->mixed_barrier)
        complete_barrier(slot);
    suspend(f, slot->arrived ? f->warp : slot->warps);
    return kind == 1 ? slot->result_sum : kind == 2 ? slot->result_all : slot->result_any;
}

// Everybody who has not returned has arrived, but not from one return address: the compiler may have duplicated the
// call.
static void settle_mixed_barrier(Slot* slot) {
    Fiber* first = slot->first_arrival;
    for (u32 i = 0; i < slot->threads && slot->mixed_barrier; ++i) {
        Fiber* f = &slot->fibers[i];
        if (f->state != AT_BARRIER)
            continue;
        if (f->op != first->op || compare_in_source(f, first))
            return divergence(f, first, "barrier");
    }
    complete_barrier(slot);
}

// Nobody can run: some wait at the barrier, others in a warp operation.
static void deadlock(Slot* slot) {
    for (u32 i = 0; i < slot->threads; ++i) {
        Fiber* f = &slot->fibers[i];
        if (f->state != IN_OPERATION)
            continue;
        u64 missing = f->mask & f->warp->live;
        for (; missing; missing &= missing - 1) {
            Fiber* other = &f->warp->fibers[lowest(missing)];
            if (other->state != IN_OPERATION || other->op != f->op || other->mask != f->mask)
                return divergence(f, other, "mask");
        }
    }
    for (u32 i = 0; i < slot->threads; ++i)
        if (slot->fibers[i].state == IN_OPERATION)
            return divergence(&slot->fibers[i], slot->arrived ? slot->first_arrival : nullptr, "barrier");
    divergence(slot->first_arrival, nullptr, "barrier");
}
