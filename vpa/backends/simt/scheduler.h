// The loop that runs a launch: threads of a warp in turn, then the block's other warps, then barriers, then other
// blocks.
//
// Blocks run one after another in the order asked for. Only when every thread of a block waits in a spin loop is the
// next block started beside it; the two then take turns, each with its own copy of shared memory.
#pragma once

static const i64 HANG_NS = 2000000000;

// Every thread of the block that can run waits in a loop: another block's turn.
static void rotate() {
    Slot* slot = state.slot;
    wake_all(slot);
    if (++slot->idle_rounds >= 2 && state.resident < state.resident_limit && start_block(state.resident))
        return;
    u32 from = slot_number(slot);
    for (u32 i = 1; i <= state.resident; ++i) {
        Slot* next = state.pool->slots[(from + i) % state.resident];
        if (!next->open)
            continue;
        if (next != slot)
            slot_activate(next);
        break;
    }
#ifdef SIMT_CHECKED
    // Everybody polls, and nobody has written, arrived or returned for a while: it will stay so.
    bool stuck = state.progress == state.progress_seen && state.writes == state.writes_seen;
    const Fiber* poller = nullptr;
    for (u32 s = 0; s < state.resident && stuck; ++s) {
        const Slot* resident = state.pool->slots[s];
        for (u32 i = 0; i < resident->threads && resident->open; ++i) {
            const Fiber* f = &resident->fibers[i];
            if (f->state != RUNNING)
                continue;
            if (!spinning(f))
                stuck = false;
            poller = f;
        }
    }
    if (!stuck || !poller) {
        state.progress_seen = state.progress;
        state.writes_seen = state.writes;
        state.stuck_since = clock_ns(CLOCK_MONOTONIC);
    } else if (clock_ns(CLOCK_MONOTONIC) - state.stuck_since > HANG_NS) {
        describe(state.launch->report.actor, poller, poller->pc, VOLATILE, nullptr);
        set_text("spin");
        stop(FAULT_HANG);
    }
#endif
}

static bool asleep(const Slot* slot) {
    for (u32 w = 0; w < slot->warp_count; ++w)
        if (slot->warps[w].asleep)
            return true;
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
            if (state.deferred_slot == slot) {
                stop(FAULT_UNINITIALIZED);
                continue;
            }
            slot->open = false;
            if (start_block(slot_number(slot)))
                continue;
            bool more = false;
            for (u32 i = 0; i < state.resident && !more; ++i)
                if (state.pool->slots[i]->open)
                    slot_activate(state.pool->slots[i]), more = true;
            if (!more)
                return STATUS_DONE;
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
