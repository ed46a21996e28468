// Shared memory of the other blocks of a cluster: windows onto it, and the checks that the block is there.
//
// While a block runs, the shared memory of the others lies in their images; a pointer that __simt_cluster_map() gives
// points there. It is checked as any other: the window has the cells and the permissions of what it shows. To the other
// blocks of its cluster a block's start and its exit count as writes to its shared memory.
#pragma once

static inline bool ordered(const Record& x, const Fiber* f);

static bool in_cluster(u32 gid, const Cluster* cluster) {
    for (u32 i = 0; i < cluster->size; ++i)
        if (gid - cluster->slots[i]->first_gid < state.threads)
            return true;
    return false;
}

// The cells of the block's static (0) or dynamic (1) shared memory, which other blocks may have split meanwhile.
static void attach_cells(Region* r, Slot* slot, u32 which) {
    r->shift = slot->shift[which] ? slot->shift[which] - 1 : 4;
    cells_reserve(slot->cells[which], slot->cell_bytes[which], cells_size(r, r->shift));
    r->cells = slot->cells[which];
    r->base = slot->start;
}

static void open_windows(Slot* slot) {
    const Region* own[2] = {state.static_shared, state.dynamic_shared};
    u32 number = slot_number(slot);
    for (u32 i = 0; i < 2; ++i) {
        slot->windows[i] = *own[i];
        slot->windows[i].low = (uintptr_t)slot->image + (own[i]->low - state.tls_low);
        slot->windows[i].index = MAX_REGIONS + 2 * number + i;
    }
    memset((void*)slot->remote, 0, sizeof slot->remote);
}

// What another block does to this one's shared memory, and why that is a fault: "start" or "exit".
static void not_there(const Slot* slot, const char* text) {
    Report& report = state.launch->report;
    report.has_other = 1;
    describe(report.other, &slot->fibers[0], nullptr, WRITE, text);
    set_text(text);
}

static void check_presence(Slot* slot, const Region* window, uintptr_t address, u64 size, u32 flags, void* pc) {
    Fiber* f = state.current;
    const Record start = {slot->start, slot->first_gid, WRITE};
    if (!slot->open || !ordered(start, f)) {
        not_there(slot, slot->open ? "start" : "exit");
        fault_at(FAULT_RACE, window, address, size, flags, pc);
    }
    u32 rank = f->slot->rank;
    if (slot->remote[rank].stamp <= f->stamp) {
        slot->remote[rank] = {f->stamp, f->gid, (u32)(relative(pc) << 3) | (flags & 7)};
        slot->remote_address[rank] = own_address(window, address);
    }
}

// The window that holds the address; a fault if it is just outside one.
static Region* find_window(uintptr_t address, u64 size, u32 flags, void* pc) {
    const Cluster* cluster = state.slot->cluster;
    for (u32 rank = 0; rank < cluster->size && cluster->size > 1; ++rank) {
        Slot* slot = cluster->slots[rank];
        if (address - (uintptr_t)slot->image + IMAGE_MARGIN >= state.tls_size + 2 * IMAGE_MARGIN)
            continue;
        if (slot == state.slot)
            fault_at(FAULT_OUT_OF_BOUNDS, nullptr, address, size, flags, pc,
                     "its own block's shared memory through a pointer that another block has mapped");
        for (u32 i = 0; i < 2; ++i) {
            Region* window = &slot->windows[i];
            if (address - window->low >= window->size || window->size - (address - window->low) < size)
                continue;
            attach_cells(window, slot, i);
            check_presence(slot, window, address, size, flags, pc);
            return window;
        }
        u32 nearest = slot->windows[0].size && address < slot->windows[0].low + slot->windows[0].size + 64 ? 0 : 1;
        fault_at(FAULT_OUT_OF_BOUNDS, &slot->windows[nearest], address, size, flags, pc);
    }
    return nullptr;
}

// A thread returns. Of what other blocks have done to its block's shared memory all must have happened before some
// thread's return, since the block stays until the last one has returned.
static void leave_windows(Fiber* f) {
    Slot* slot = f->slot;
    for (u32 rank = 0; rank < slot->cluster->size && slot->cluster->size > 1; ++rank) {
        Record& x = slot->remote[rank];
        if (x.stamp < slot->start)
            continue;
        if (ordered(x, f)) {
            x.stamp = 0;
        } else if (!slot->live) {
            Report& report = state.launch->report;
            report.address = slot->remote_address[rank];
            report.size = 1;
            report.owner = 1 + (u32)slot->number;
            describe_access(report.actor, x);
            not_there(slot, "exit");
            stop(FAULT_RACE);
        }
    }
}
