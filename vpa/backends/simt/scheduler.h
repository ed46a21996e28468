// Which thread runs next: threads of a warp in turn, then the block's other warps, then barriers, then other blocks.
//
// Blocks run one after another in the order asked for. Only when every thread of a block waits in a spin loop is the next
// block started beside it; the two then take turns, each with its own copy of shared memory.
#pragma once


#ifdef SIMT_CHECKED
enum { ATOMICS_PER_TURN = 1 << 30 };  // spinning is seen by its values instead
#else
enum { ATOMICS_PER_TURN = 1000 };
#endif
enum { READS_PER_TURN = 64 };  // atomic or volatile reads without a write in between: the thread polls
enum { RESIDENT_THREADS = 8192 };  // stacks touch two pages a thread
static const i64 HANG_NS = 2000000000;

static i64 clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return (i64)now.tv_sec * 1000000000 + now.tv_nsec;
}

// --- From thread to thread ---------------------------------------------------------------------------------------------

static void resume(Fiber* next) {
    void** from = state.current ? &state.current->context : &state.main_context;
    state.current = next;
    threadIdx = next->index;
    state.budget = ATOMICS_PER_TURN;
    simt_switch(from, next->context);
}

static Fiber* next_ready(Slot* slot, u32 warp, u32 lane) {
    Warp* w = &slot->warps[warp];
    if (w->ready) {
        u64 after = w->ready >> lane >> 1 << lane << 1;
        return &w->fibers[lowest(after ? after : w->ready)];
    }
    for (u32 i = 1; i < slot->warp_count; ++i) {
        u32 other = warp + i < slot->warp_count ? warp + i : warp + i - slot->warp_count;
        if (slot->warps[other].ready) return &slot->warps[other].fibers[lowest(slot->warps[other].ready)];
    }
    return nullptr;
}

// Threads in turn until this one is ready again. If it is ready already, having completed what others wait for, the lowest
// of them goes first all the same: of several threads with one fault, the message then names the first.
static void suspend(Fiber* f, u32 first_warp) {
    u32 from = f->warp->ready & bit(f->lane) ? 63 : f->lane;  // 63: from the lowest lane on
    Fiber* next = state.tick ? nullptr : next_ready(f->slot, first_warp, from);
    if (next == f) return;
    if (next) resume(next);
    else leave_to_main();
}

// Some work belongs on the scheduler's own, large stack: what calls Python.
static void on_main(Fiber* f, void (*request)(Fiber*)) {
    state.request = request;
    state.requester = f;
    leave_to_main();
}

// The thread waits for another one in a loop: everybody else first.
static void sleep(Fiber* f) {
    f->warp->ready &= ~bit(f->lane);
    f->warp->asleep |= bit(f->lane);
    suspend(f, f->warp->number);
}

#ifdef SIMT_CHECKED
// The timer has struck; whoever runs may be waiting for somebody.
static void give_way(void* pc) {
    state.current->pc = pc;
    sleep(state.current);
}

static bool spinning(const Fiber* f) { return f->spin_count >= READS_PER_TURN; }
#endif

static void progress(Slot* slot) {
    ++state.progress;
    slot->idle_rounds = 0;
}

static void fiber_main() {
    Fiber* f = state.current;
    state.launch->call(state.launch->arguments);
    f->state = EXITED;
    f->warp->ready &= ~bit(f->lane);
    f->warp->live &= ~bit(f->lane);
    --f->slot->live;
    progress(f->slot);
    if (f->warp->waiting) warp_lane_exits(f);
    suspend(f, f->warp->number);
    __builtin_trap();
}

// --- Blocks ------------------------------------------------------------------------------------------------------------

static void release_stacks(Slot* slot) {
    if (slot->stacks) munmap(slot->stacks, (size_t)slot->capacity * STACK_BYTES);
    free(slot->fibers);
    free(slot->warps);
    slot->stacks = nullptr;
    slot->fibers = nullptr;
    slot->warps = nullptr;
    slot->capacity = 0;
}

static Slot* slot_take(u32 number) {
    Pool* pool = state.pool;
    if (number == pool->slot_count) pool->slots[pool->slot_count++] = (Slot*)calloc(1, sizeof(Slot));
    Slot* slot = pool->slots[number];
    if (slot->capacity >= state.threads) return slot;
    release_stacks(slot);
    u32 capacity = (state.threads + 31) & ~31u;
    slot->fibers = (Fiber*)aligned_alloc(alignof(Fiber), capacity * sizeof(Fiber));
    memset((void*)slot->fibers, 0, capacity * sizeof(Fiber));
    slot->warps = (Warp*)calloc(capacity / 32 + 1, sizeof(Warp));
    slot->stacks = (char*)mmap(nullptr, (size_t)capacity * STACK_BYTES, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (slot->stacks == MAP_FAILED) abort();
    for (u32 i = 0; i < capacity; ++i) mprotect(slot->stacks + (size_t)i * STACK_BYTES, GUARD_BYTES, PROT_NONE);
    slot->capacity = capacity;
    return slot;
}

static void slot_open(Slot* slot, u64 number) {
    const Launch* launch = state.launch;
    slot->number = number;
    slot->index = {(u32)(number % launch->grid[0]), (u32)(number / launch->grid[0] % launch->grid[1]),
                   (u32)(number / launch->grid[0] / launch->grid[1])};
    slot->first_gid = (u32)(number * state.threads);
    slot->threads = slot->live = state.threads;
    slot->warp_count = (state.threads + launch->warp_size - 1) >> state.warp_shift;
    slot->arrived = slot->idle_rounds = slot->barrier_stamp = 0;
    slot->sum = slot->any = 0;
    slot->all = 1;
    slot->mixed_barrier = false;
    slot->open = true;
    slot->saved = false;
    slot->fence = nullptr;
    slot->acquired = {};
#ifdef SIMT_CHECKED
    slot->start = next_stamp();
#endif
    for (u32 w = 0; w < slot->warp_count; ++w) {
        u32 first = w << state.warp_shift, lanes = state.threads - first;
        u64 exists = lanes >= launch->warp_size ? ~(u64)0 >> (64 - launch->warp_size) : bit(lanes) - 1;
        slot->warps[w] = {exists, exists, exists, 0, 0, slot->fibers + first, slot, nullptr, w, false, 0, nullptr};
    }
    Dim index = {0, 0, 0};
    for (u32 i = 0; i < state.threads; ++i) {
        Fiber* f = &slot->fibers[i];
        char* bottom = slot->stacks + (size_t)i * STACK_BYTES;
        // Tops at one page offset would compete for the same cache sets.
        char* top = bottom + STACK_BYTES - i * 5 % 64 * 64;
        f->index = index;
        f->gid = slot->first_gid + i;
        f->number = i;
        f->lane = i & (launch->warp_size - 1);
        f->state = RUNNING;
            f->warp = &slot->warps[i >> state.warp_shift];
        f->slot = slot;
        f->stamp = slot->start;
        f->depth = f->spin_count = 0;
        f->fence = nullptr;
        f->acquired = {};
        f->pc = nullptr;
        f->stack_low = (uintptr_t)bottom;
        f->stack_high = (uintptr_t)bottom + STACK_BYTES;
        f->context = fiber_prepare(bottom + GUARD_BYTES, top);
        if (++index.x == launch->block[0]) {
            index.x = 0;
            if (++index.y == launch->block[1]) index.y = 0, ++index.z;
        }
    }
    progress(slot);
}

// Makes a resident block the one whose shared memory lies at the addresses that the kernel uses.
static void slot_activate(Slot* slot) {
    if (state.slot && state.slot != slot && state.slot->open && state.tls_size) {
        Slot* old = state.slot;
        if (old->image_size < state.tls_size) {
            free(old->image);
            old->image = (u8*)malloc(old->image_size = state.tls_size);
        }
        memcpy(old->image, (void*)state.tls_low, state.tls_size);
        old->saved = true;
    }
    if (state.slot != slot && slot->saved) memcpy((void*)state.tls_low, slot->image, state.tls_size);
    slot->saved = false;
    state.slot = slot;
    blockIdx = slot->index;
#ifdef SIMT_CHECKED
    Region* regions[2] = {state.static_shared, state.dynamic_shared};
    for (int i = 0; i < 2; ++i) {
        if (!regions[i]->size) continue;
        regions[i]->shift = slot->shift[i] ? slot->shift[i] - 1 : 4;
        cells_reserve(slot->cells[i], slot->cell_bytes[i], cells_size(regions[i], regions[i]->shift));
        regions[i]->cells = slot->cells[i];
        regions[i]->base = slot->start;
    }
#endif
}

static bool start_block(u32 resident) {
    if (state.next_block == state.block_count) return false;
    u64 number = state.launch->order ? state.launch->order[state.next_block] : state.next_block;
    ++state.next_block;
    Slot* slot = slot_take(resident);
    slot_open(slot, number);
    if (resident == state.resident) ++state.resident;
    slot_activate(slot);
    return true;
}

static void wake_all(Slot* slot) {
    for (u32 w = 0; w < slot->warp_count; ++w) {
        slot->warps[w].ready |= slot->warps[w].asleep;
        slot->warps[w].asleep = 0;
    }
}

static u32 slot_number(Slot* slot) {
    u32 i = 0;
    while (state.pool->slots[i] != slot) ++i;
    return i;
}

// Every thread of the block that can run waits in a loop: another block's turn.
static void rotate() {
    Slot* slot = state.slot;
    wake_all(slot);
    if (++slot->idle_rounds >= 2 && state.resident < state.resident_limit && start_block(state.resident)) return;
    u32 from = slot_number(slot);
    for (u32 i = 1; i <= state.resident; ++i) {
        Slot* next = state.pool->slots[(from + i) % state.resident];
        if (!next->open) continue;
        if (next != slot) slot_activate(next);
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
            if (f->state != RUNNING) continue;
            if (!spinning(f)) stuck = false;
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
        if (slot->warps[w].asleep) return true;
    return false;
}

// --- Barriers ----------------------------------------------------------------------------------------------------------

static bool same_calls(const Fiber* a, const Fiber* b) {
    return a->pc == b->pc && a->depth == b->depth &&
           (a->depth <= 1 || !memcmp(a->calls + 1, b->calls + 1, (a->depth < MAX_CALLS ? a->depth - 1 : MAX_CALLS - 1) * sizeof(void*)));
}

static i32 compare_in_source(const Fiber* a, const Fiber* b) {
    if (same_calls(a, b)) return 0;
    static Actor one, two;
    describe(one, a, a->pc, 0, nullptr);
    describe(two, b, b->pc, 0, nullptr);
    return state.launch->compare_sites(&one, &two);
}

static const char* doing(const Fiber* f) {
    static const char* const barriers[] = {"__syncthreads()", "__syncthreads_count()", "__syncthreads_and()", "__syncthreads_or()"};
    if (f->state == AT_BARRIER) return barriers[f->op & 3];
    if (f->state == IN_OPERATION) return operation_name(f->op);
    return f->state == EXITED ? "returned" : "runs";
}

static void divergence(const Fiber* f, const Fiber* other, const char* text) {
    Report& report = state.launch->report;
    describe(report.actor, f, f->pc, 0, doing(f));
    if (other) {
        report.has_other = 1;
        describe(report.other, other, other->state == EXITED ? nullptr : other->pc, 0, doing(other));
    }
    set_text(text);
    stop(FAULT_DIVERGENCE);
}

static void complete_barrier(Slot* slot) {
    slot->result_sum = slot->sum;
    slot->result_all = slot->all;
    slot->result_any = slot->any;
    slot->sum = slot->any = 0;
    slot->all = 1;
    slot->arrived = 0;
    slot->mixed_barrier = false;
    for (u32 w = 0; w < slot->warp_count; ++w) slot->warps[w].ready = slot->warps[w].live;
    for (u32 i = 0; i < slot->threads; ++i)
        if (slot->fibers[i].state == AT_BARRIER) slot->fibers[i].state = RUNNING;
#ifdef SIMT_CHECKED
    if (state.deferred_slot == slot) return stop(FAULT_UNINITIALIZED);
    clock_barrier(slot);
#endif
    progress(slot);
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
    if (!slot->arrived++) slot->first_arrival = f;
    else if (!same_calls(f, slot->first_arrival) || f->op != slot->first_arrival->op) slot->mixed_barrier = true;
    if (slot->arrived == slot->live && !slot->mixed_barrier) complete_barrier(slot);
    suspend(f, slot->arrived ? f->warp->number : 0);
    return kind == 1 ? slot->result_sum : kind == 2 ? slot->result_all : slot->result_any;
}

// Everybody who has not returned has arrived, but not from one return address: the compiler may have duplicated the call.
static void settle_mixed_barrier(Slot* slot) {
    Fiber* first = slot->first_arrival;
    for (u32 i = 0; i < slot->threads && slot->mixed_barrier; ++i) {
        Fiber* f = &slot->fibers[i];
        if (f->state != AT_BARRIER) continue;
        if (f->op != first->op || compare_in_source(f, first)) return divergence(f, first, "barrier");
    }
    complete_barrier(slot);
}

// Nobody can run: some wait at the barrier, others in a warp operation.
static void deadlock(Slot* slot) {
    for (u32 i = 0; i < slot->threads; ++i) {
        Fiber* f = &slot->fibers[i];
        if (f->state != IN_OPERATION) continue;
        u64 missing = f->mask & f->warp->live;
        for (; missing; missing &= missing - 1) {
            Fiber* other = &f->warp->fibers[lowest(missing)];
            if (other->state != IN_OPERATION || other->op != f->op || other->mask != f->mask) return divergence(f, other, "mask");
        }
    }
    for (u32 i = 0; i < slot->threads; ++i)
        if (slot->fibers[i].state == IN_OPERATION) return divergence(&slot->fibers[i], slot->first_arrival, "barrier");
    divergence(slot->first_arrival, nullptr, "barrier");
}

// --- The loop ----------------------------------------------------------------------------------------------------------

static u32 run() {
    for (;;) {
        if (state.fault) return STATUS_FAULT;
        if (state.request) {
            void (*request)(Fiber*) = state.request;
            state.request = nullptr;
            request(state.requester);
            continue;
        }
        if (state.tick) {
            state.tick = 0;
            if (clock_ns(CLOCK_MONOTONIC) - state.slice_start > (i64)state.launch->slice_ms * 1000000) return STATUS_PAUSED;
        }
        Slot* slot = state.slot;
        Fiber* next = next_ready(slot, 0, 63);
        if (next) {
            resume(next);
            continue;
        }
        if (!slot->live) {
            if (state.deferred_slot == slot) {
                stop(FAULT_UNINITIALIZED);
                continue;
            }
            slot->open = false;
            if (start_block(slot_number(slot))) continue;
            bool more = false;
            for (u32 i = 0; i < state.resident && !more; ++i)
                if (state.pool->slots[i]->open) slot_activate(state.pool->slots[i]), more = true;
            if (!more) return STATUS_DONE;
            continue;
        }
        if (warp_settle(slot)) continue;
        if (slot->arrived == slot->live) settle_mixed_barrier(slot);
        else if (asleep(slot)) rotate();
        else deadlock(slot);
    }
}
