// From one thread of a kernel to the next: who is resumed when a thread has to wait, gives way or sleeps.
#pragma once

#ifdef SIMT_CHECKED
enum { ATOMICS_PER_TURN = 1 << 30 };  // spinning is seen by its values instead
#else
enum { ATOMICS_PER_TURN = 1000 };
#endif
enum { READS_PER_TURN = 64 };  // atomic or volatile reads without a write in between: the thread polls

static i64 clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return (i64)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void resume(Fiber* next) {
    void** from = state.current ? &state.current->context : &state.main_context;
    state.current = next;
    threadIdx = next->index;
    state.budget = ATOMICS_PER_TURN;
    simt_switch(from, next->context);
}

static void leave_to_main() {
    Fiber* fiber = state.current;
    state.current = nullptr;
    simt_switch(&fiber->context, state.main_context);
}

static Fiber* ready_elsewhere(const Warp* w) {
    const Slot* slot = w->slot;
    for (u32 i = 1; i < slot->warp_count; ++i) {
        u32 other = w->number + i < slot->warp_count ? w->number + i : w->number + i - slot->warp_count;
        if (slot->warps[other].ready)
            return &slot->warps[other].fibers[lowest(slot->warps[other].ready)];
    }
    return nullptr;
}

// The next thread of the warp after the lane (63: from the lowest on), else the first of another warp.
static inline Fiber* next_ready(const Warp* w, u32 lane) {
    if (__builtin_expect(!w->ready, 0))
        return ready_elsewhere(w);
    u64 after = w->ready >> lane >> 1 << lane << 1;
    return &w->fibers[lowest(after ? after : w->ready)];
}

// Threads in turn until this one is ready again. If it is ready already, having completed what others wait for, the
// lowest of them goes first all the same: of several threads with one fault, the message then names the first.
static inline void suspend(Fiber* f, const Warp* first) {
    u32 from = f->warp->ready & bit(f->lane) ? 63 : f->lane;
    Fiber* next = state.tick ? nullptr : next_ready(first, from);
    if (next == f)
        return;
    if (next)
        resume(next);
    else
        leave_to_main();
}

// Some work belongs on the scheduler's own, large stack: what calls Python.
static void on_main(Fiber* f, void (*request)(Fiber*)) {
    state.request = request;
    state.requester = f;
    leave_to_main();
}

// The thread waits for another one in a loop: everybody else first.
static void sleep(Fiber* f) {
    f->slept = true;
    f->warp->ready &= ~bit(f->lane);
    f->warp->asleep |= bit(f->lane);
    suspend(f, f->warp);
}

#ifdef SIMT_CHECKED
// The timer has struck; whoever runs may be waiting for somebody.
static void give_way(void* pc) {
    state.current->pc = pc;
    sleep(state.current);
}
#endif

static void progress(Slot* slot) {
    ++state.progress;
    slot->idle_rounds = 0;
}

static u32 slot_number(const Slot* slot) {
    u32 i = 0;
    while (state.pool->slots[i] != slot)
        ++i;
    return i;
}
