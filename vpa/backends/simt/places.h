// Whose memory an address is, and the report of a fault at one.
//
// The shared memory of the block that runs lies at the addresses that the kernel uses. Other blocks of its cluster
// reach it through a window: the copy of it that is kept while they run. A place is named by the kernel's address and
// the block, whichever way it is reached.
#pragma once

static inline bool is_shared(const Region* r) {
    return r->space == SPACE_STATIC_SHARED || r->space == SPACE_DYNAMIC_SHARED;
}

static inline bool is_window(const Region* r) {
    return r->index >= MAX_REGIONS;
}

// The block that shared memory belongs to.
static inline Slot* owner_of(const Region* r) {
    return is_window(r) ? state.pool->slots[(r->index - MAX_REGIONS) / 2] : state.slot;
}

// The address at which the block itself finds what a window shows.
static inline uintptr_t own_address(const Region* window, uintptr_t address) {
    const Region* own = window->space == SPACE_STATIC_SHARED ? state.static_shared : state.dynamic_shared;
    return address - window->low + own->low;
}

// Where flags and counters publish: see fences.h.
struct Place {
    uintptr_t address;
    u32 owner;  // 1 + block, for shared memory
};

static Place place_of(const Region* r, uintptr_t address) {
    if (!is_shared(r))
        return {address, 0};
    return {is_window(r) ? own_address(r, address) : address, 1 + (u32)owner_of(r)->number};
}

static void locate(Report& report, const Region* r, uintptr_t address, u64 size) {
    report.address = address;
    report.size = size;
    report.space = r ? r->space : (u32)SPACE_NONE;
    report.owner = 0;
    if (r && is_window(r)) {
        report.address = own_address(r, address);
        report.owner = 1 + (u32)owner_of(r)->number;
    }
}

static void describe_access(Actor& actor, const Record& x) {
    actor.block = x.gid / state.threads;
    actor.thread = x.gid % state.threads;
    actor.flags = x.where & 7;
    actor.frame_count = 1;
    actor.frames[0] = x.where >> 3;
}

static void fault_at(
    Fault fault, const Region* r, uintptr_t address, u64 size, u32 flags, void* pc, const char* text = nullptr) {
    Report& report = state.launch->report;
    locate(report, r, address, size);
    describe(report.actor, state.current, pc, flags, nullptr);
    if (text)
        set_text(text);
    stop(fault);
}
