// The proof that a launch will not end: every thread that can run goes round in a loop, and nobody writes.
//
// A thread that waits in vain comes back to where it was: its registers and its stack are what they were at an earlier
// turn. If nothing was written in between, no barrier completed and no clock was read, it will go round for ever. A
// poll that counts its rounds is never twice in one state, so it has until the launch's time limit.
#pragma once

enum : i64 { QUIET_NS = 500000000 };  // memory that other threads of the process write is seen to be quiet for so long

// The registers lie on the stack of a thread that does not run, so its stack is all of its state.
static u64 state_of(const Fiber* f) {
    u64 hash = 0;
    const u64* top = (const u64*)((uintptr_t)stack_top((char*)f->stack_low, f->number) & ~(uintptr_t)7);
    for (const u64* word = (const u64*)f->context; word < top; ++word) {
        hash = (hash ^ *word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

// Compares a thread that has given way with a state that it was in before; which one changes at the 1st, 2nd, 4th, ...
// look, so that a loop of any length is found.
static void look_at(Fiber* f) {
    if (!f->slept || !STATE_ON_STACK)
        return;
    f->slept = false;
    u64 now = state_of(f);
    if (f->seen_epoch != state.epoch) {
        f->seen_epoch = state.epoch;
        f->looks = 0;
    } else if (f->seen == now) {
        f->stuck_epoch = state.epoch;
    }
    if (!(f->looks & (f->looks - 1)))
        f->seen = now;
    ++f->looks;
}

// Called whenever all threads of a block have given way.
static void watch_for_hang() {
    if (state.progress != state.progress_seen || state.writes != state.writes_seen || !state.epoch) {
        state.progress_seen = state.progress;
        state.writes_seen = state.writes;
        ++state.epoch;
        state.quiet_since = clock_ns(CLOCK_MONOTONIC);
        return;
    }
    const Fiber* stuck = nullptr;
    bool all = true;
    for (u32 s = 0; s < state.resident; ++s) {
        const Slot* slot = state.pool->slots[s];
        for (u32 i = 0; i < slot->threads && slot->open; ++i) {
            Fiber* f = &slot->fibers[i];
            if (f->state != RUNNING)
                continue;
            look_at(f);
            all &= f->stuck_epoch == state.epoch;
            if (!stuck || f->spin_count > stuck->spin_count)
                stuck = f;
        }
    }
    if (!stuck || !all || clock_ns(CLOCK_MONOTONIC) - state.quiet_since < QUIET_NS)
        return;
    describe(state.launch->report.actor, stuck, stuck->pc, VOLATILE, nullptr);
    set_text(stuck->spin_count >= READS_PER_TURN ? "spin" : "loop");
    stop(FAULT_HANG);
}
