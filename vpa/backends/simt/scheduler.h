// The loop that runs a launch: threads of a warp in turn, then the block's other warps, then barriers, then other
// blocks.
//
// Blocks run one after another in the order asked for. Only when every thread of a block waits in a spin loop is the
// next block started beside it; the two then take turns, each with its own copy of shared memory.
#pragma once

// Every thread of the block that can run waits in a loop: another block's turn.
static void rotate() {
    Slot* slot = state.slot;
    wake_all(slot);
    if (++slot->idle_rounds >= 2 && state.resident < state.resident_limit && start_blocks(state.resident))
        return;
    u32 from = slot_number(slot);
    for (u32 i = 1; i <= state.resident; ++i) {
        Slot* next = state.pool->slots[(from + i) % state.resident];
        if (!next->open || next->at_cluster_barrier)
            continue;
        if (next != slot)
            slot_activate(next);
        break;
    }
#ifdef SIMT_CHECKED
    watch_for_hang();
#endif
}

static bool asleep(const Slot* slot) {
    for (u32 w = 0; w < slot->warp_count; ++w)
        if (slot->warps[w].asleep)
            return true;
    return false;
}

static bool cluster_is_done(const Cluster* cluster) {
    for (u32 i = 0; i < cluster->size; ++i)
        if (cluster->slots[i]->open)
            return false;
    return true;
}

// A block of the cluster that does not wait at its barrier; the barrier is complete if there is none.
static bool run_another_of(Cluster* cluster) {
    complete_cluster_barrier(cluster);
    for (u32 i = 0; i < cluster->size; ++i)
        if (cluster->slots[i]->open && !cluster->slots[i]->at_cluster_barrier) {
            slot_activate(cluster->slots[i]);
            return true;
        }
    return false;
}

static u32 run() {
    bool ran = false;  // a busy host may take the processor away for longer than a slice
    for (;;) {
        if (state.fault)
            return STATUS_FAULT;
        if (state.request) {
            void (*request)(Fiber*) = state.request;
            state.request = nullptr;
            request(state.requester);
            continue;
        }
        if (state.tick) {
            state.tick = 0;
            if (ran && clock_ns(CLOCK_MONOTONIC) - state.slice_start > (i64)state.launch->slice_ms * 1000000)
                return STATUS_PAUSED;
        }
        Slot* slot = state.slot;
        Fiber* next = next_ready(slot->warps, 63);
        if (next) {
            ran = true;
            resume(next);
            continue;
        }
        if (!slot->live) {
            slot->open = false;
            bool last = cluster_is_done(slot->cluster);
            if (state.deferred_slot && state.deferred_slot->cluster == slot->cluster &&
                (last || (state.deferred_slot == slot && !state.deferred_remote))) {
                stop(FAULT_UNINITIALIZED);
                continue;
            }
            if (last ? start_blocks(slot_number(slot) / state.cluster_size * state.cluster_size)
                     : run_another_of(slot->cluster))
                continue;
            bool more = false;
            for (u32 i = 0; i < state.resident && !more; ++i)
                if (state.pool->slots[i]->open)
                    slot_activate(state.pool->slots[i]), more = true;
            if (!more)
                return STATUS_DONE;
            continue;
        }
        if (slot->at_cluster_barrier) {
            run_another_of(slot->cluster);
            continue;
        }
        if (warp_settle(slot))
            continue;
        if (slot->arrived == slot->live)
            settle_mixed_barrier(slot);
        else if (asleep(slot))
            rotate();
        else
            deadlock(slot);
    }
}
