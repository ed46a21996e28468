// Shadow memory: for every few bytes the last write and two other accesses, enough to see a race, and the check itself.
//
// A cell stands for 16 bytes until an access needs less; then the region's cells are split to that size. So sizes of
// 1, 2, 4, 8 and 16 bytes are exact, and a kernel that only uses wide accesses pays for wide cells. Of the readers
// since the last write two are kept, as far apart as possible (other block before other warp before other lane): a
// later write that is unordered with any of them is then unordered with one of the two, but for masks that order some
// lanes of a warp only.
#pragma once

struct Record {
    u32 stamp, gid;
    u32 where;  // return address relative to the module << 3 | Access flags
};
struct Cell {
    Record write, first, second;
};

static void release_cells(void*& cells, u64& bytes) {
    if (cells)
        munmap(cells, bytes);
    cells = nullptr;
    bytes = 0;
}

static void cells_reserve(void*& cells, u64& bytes, u64 need) {
    if (bytes >= need)
        return;
    release_cells(cells, bytes);
    need = (need + 65535) & ~(u64)65535;
    cells = mmap(nullptr, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED)
        abort();
    if (need >= (u64)4 << 20)
        madvise(cells, need, MADV_HUGEPAGE);
    bytes = need;
}

static u64 cells_size(const Region* r, u32 shift) {
    u64 span = r->low + r->size - (r->low & ~(uintptr_t)15);
    return ((span >> shift) + 2) * sizeof(Cell);
}

static void** cells_owner(Region* r, u64*& bytes) {
    if (r == state.static_shared || r == state.dynamic_shared) {
        u32 which = r == state.dynamic_shared;
        state.slot->shift[which] = r->shift + 1;  // 0: not known yet
        bytes = &state.slot->cell_bytes[which];
        return &state.slot->cells[which];
    }
    bytes = &state.pool->cell_bytes[r->index];
    return &state.pool->cells[r->index];
}

static void split_cells(Region* r, u32 shift) {
    ++state.busy;
    u32 old_shift = r->shift, ways = old_shift - shift;
    u64 count = cells_size(r, old_shift) / sizeof(Cell);
    r->shift = shift;
    u64* bytes;
    void** place = cells_owner(r, bytes);
    Cell* old = (Cell*)*place;
    u64 old_bytes = *bytes, need = cells_size(r, shift) + (sizeof(Cell) << ways);
    if (old_bytes < need) {
        *place = nullptr;
        *bytes = 0;
        cells_reserve(*place, *bytes, need);
    }
    Cell* fresh = (Cell*)*place;
    u64 top = cells_size(r, shift) / sizeof(Cell);
    for (u64 i = count; i-- > 0;) {  // downwards: in place, the cells grow over cells that were already copied
        Cell cell = old[i];
        for (u64 k = 0; k < (u64)1 << ways; ++k)
            if ((i << ways) + k < top)
                fresh[(i << ways) + k] = cell;
    }
    if (fresh != old)
        munmap(old, old_bytes);
    r->cells = fresh;
    --state.busy;
}

// --- Order ---

static bool ordered_slowly(const Record& x, const Fiber* f) {
    const Slot* slot = f->slot;
    u32 number = x.gid - slot->first_gid;
    if (number < slot->threads && number >> state.warp_shift == f->warp->number) {
        u32 other = number & (state.launch->warp_size - 1);
        if (x.stamp <= lane_known(f->warp, f->lane, other))
            return true;
    }
    if (!state.log_count)
        return false;
    u32 reader = (u32)slot->number, query = ++state.query;
    ++state.busy;
    bool known = acquired_covers(f->acquired, x.gid, x.stamp, reader, query) ||
                 acquired_covers(slot->acquired, x.gid, x.stamp, reader, query);
    --state.busy;
    return known;
}

// Whether access x of this launch happened before what thread f does now.
static inline bool ordered(const Record& x, const Fiber* f) {
    if (x.gid == f->gid)
        return true;
    if (x.gid - f->slot->first_gid < f->slot->threads && x.stamp <= f->slot->barrier_stamp)
        return true;
    return ordered_slowly(x, f);
}

// Two accesses clash if one of them writes and not both are strong (atomic or volatile). Volatile accesses of one warp
// to shared memory do clash: that is warp-synchronous code without __syncwarp(), wrong since lanes are scheduled
// independently.
static inline bool clashes(const Record& x, u32 flags, const Fiber* f, const Region* r) {
    if (!((x.where | flags) & WRITE))
        return false;
    if (!(x.where & (ATOMIC | VOLATILE)) || !(flags & (ATOMIC | VOLATILE)))
        return true;
    return !((x.where | flags) & ATOMIC) && r->space != SPACE_GLOBAL && r->space != SPACE_VARIABLE &&
           (x.gid - f->slot->first_gid) >> state.warp_shift == f->warp->number;
}

static void fault_at(
    Fault fault, Region* r, uintptr_t address, u64 size, u32 flags, void* pc, const char* text = nullptr) {
    Report& report = state.launch->report;
    report.address = address;
    report.size = size;
    report.space = r ? r->space : (u32)SPACE_NONE;
    report.region = r ? (u32)(r - state.launch->regions) : 0xffffffffu;
    describe(report.actor, state.current, pc, flags, nullptr);
    if (text)
        set_text(text);
    stop(fault);
}

// Thread 0 runs first: where a barrier is missing it reads what nobody has written yet. If another thread writes there
// before the next barrier that is a race and will be reported as one; until then this is only a note.
static void defer_uninitialized(Region* r, uintptr_t address, u64 size, u32 flags, void* pc) {
    if (state.deferred_slot)
        return;
    Report& report = state.deferred;
    memset((void*)&report, 0, sizeof report);
    report.address = address;
    report.size = size;
    report.space = r->space;
    describe(report.actor, state.current, pc, flags, nullptr);
    state.deferred_slot = state.slot;
}

static void race(const Record& x, Region* r, uintptr_t address, u64 size, u32 flags, void* pc) {
    Actor& other = state.launch->report.other;
    state.launch->report.has_other = 1;
    other.block = x.gid / state.threads;
    other.thread = x.gid % state.threads;
    other.flags = x.where & 7;
    other.frame_count = 1;
    other.frames[0] = x.where >> 3;
    fault_at(FAULT_RACE, r, address, size, flags, pc);
}

// --- Cells ---

// 3: different blocks, 2: different warps, 1: different lanes.
static inline u32 distance(const Record& x, const Record& y, const Slot* slot) {
    u32 a = x.gid - slot->first_gid, b = y.gid - slot->first_gid;
    if (a >= slot->threads || b >= slot->threads) {  // the common case needs no division
        if (x.gid / state.threads != y.gid / state.threads)
            return 3;
        a = x.gid % state.threads;
        b = y.gid % state.threads;
    }
    return a >> state.warp_shift != b >> state.warp_shift ? 2 : a != b;
}

static inline void remember(Cell& cell, const Record& x, u32 base, const Fiber* f) {
    if (cell.first.stamp < base || cell.first.gid == x.gid || ordered(cell.first, f))
        cell.first = x;
    else if (cell.second.stamp < base || cell.second.gid == x.gid || ordered(cell.second, f))
        cell.second = x;
    else if (distance(x, cell.first, f->slot) > distance(cell.second, cell.first, f->slot))
        cell.second = x;
}

template <u32 FLAGS>
static inline void touch(Cell& cell, Region* r, Fiber* f, uintptr_t address, u64 size, void* pc) {
    const u32 base = r->base;
    const Record now = {f->stamp, f->gid, (u32)(relative(pc) << 3) | FLAGS};
    if (!(FLAGS & WRITE) || (FLAGS & ATOMIC)) {
        if (cell.write.stamp < base && (r->space == SPACE_STATIC_SHARED || r->space == SPACE_DYNAMIC_SHARED))
            defer_uninitialized(r, address, size, FLAGS, pc);
    }
    if (!(FLAGS & WRITE) && cell.first.stamp == now.stamp && cell.first.gid == now.gid && cell.first.where == now.where)
        return;
    const Record* earlier[3] = {&cell.write, &cell.first, &cell.second};
    for (const Record* x : earlier)
        if (x->stamp >= base && clashes(*x, FLAGS, f, r) && !ordered(*x, f))
            return race(*x, r, address, size, FLAGS, pc);
    if (!(FLAGS & WRITE)) {
        remember(cell, now, base, f);
    } else {
        // All ordered before a plain write. An atomic update follows the updates before it in the location's own order,
        // so whoever is ordered after this one is after those too; a volatile write has no such place.
        if (!(FLAGS & (ATOMIC | VOLATILE)))
            cell.first.stamp = cell.second.stamp = 0;
        else if (!(FLAGS & ATOMIC) && cell.write.stamp >= base && !ordered(cell.write, f))
            remember(cell, cell.write, base, f);
        cell.write = now;
    }
}

// --- One access ---

static Region* find_region(uintptr_t address, u64 size, u32 flags, void* pc) {
    Fiber* f = state.current;
    if (address - f->stack_low < f->stack_high - f->stack_low)
        return nullptr;
    if (address - (uintptr_t)__start_simt_builtin < (uintptr_t)(__stop_simt_builtin - __start_simt_builtin))
        return nullptr;
    Launch* launch = state.launch;
    for (u32 i = 0; i < launch->region_count; ++i) {
        Region* r = &launch->regions[i];
        if (address - r->low < r->size) {
            if (r->size - (address - r->low) >= size)
                return state.last = r;
            fault_at(FAULT_OUT_OF_BOUNDS, r, address, size, flags, pc);
        }
    }
    if (address - launch->constant_low < launch->constant_high - launch->constant_low) {
        if (flags & WRITE)
            fault_at(FAULT_READ_ONLY, nullptr, address, size, flags, pc, "a constant of the module");
        return nullptr;
    }
    if (address < 0x400000)
        fault_at(FAULT_NULL, nullptr, address, size, flags, pc);
    const char* text = nullptr;
    for (u32 i = 0; i < state.resident; ++i) {
        Slot* slot = state.pool->slots[i];
        if (address - (uintptr_t)slot->stacks < (uintptr_t)slot->capacity * STACK_BYTES)
            text = "another thread's local memory";
    }
    fault_at(FAULT_OUT_OF_BOUNDS, nullptr, address, size, flags, pc, text);
    return nullptr;
}

static void check_permissions(Region* r, uintptr_t address, u64 size, u32 flags, void* pc) {
    const u8* permissions = r->permissions + (address - r->low);
    u8 all = PERMIT_READ | PERMIT_WRITE;
    for (u64 i = 0; i < size; ++i)
        all &= permissions[i];
    if (!(all & PERMIT_READ))
        fault_at(FAULT_OUT_OF_BOUNDS, r, address, size, flags, pc, "gap");
    if ((flags & WRITE) && !(all & PERMIT_WRITE))
        fault_at(FAULT_READ_ONLY, r, address, size, flags, pc);
}

static void give_way(void* pc);

// Returns the region, or null for the thread's own stack and for constants.
template <u32 FLAGS>
static inline Region* check(uintptr_t address, u64 size, void* pc) {
    if (__builtin_expect(!state.current, 0))
        return nullptr;  // a constructor that runs when the module is loaded
    if (__builtin_expect(state.tick, 0))
        give_way(pc);
    Region* r = state.last;
    u64 offset = address - r->low;
    if (__builtin_expect(offset >= r->size || r->size - offset < size, 0)) {
        r = find_region(address, size, FLAGS, pc);
        if (!r)
            return nullptr;
    }
    if ((FLAGS & WRITE) && __builtin_expect(!(r->permit & PERMIT_WRITE), 0))
        fault_at(FAULT_READ_ONLY, r, address, size, FLAGS, pc);
    if (r->permissions)
        check_permissions(r, address, size, FLAGS, pc);
    if (FLAGS & WRITE) {
        r->written = 1;
        ++state.writes;
        state.current->spin_count = 0;
    }
    if (!r->cells)
        return r;
    u32 alignment = (u32)__builtin_ctzll(address | size | 16);
    if (__builtin_expect(alignment < r->shift, 0))
        split_cells(r, alignment);
    Fiber* f = state.current;
    Cell* cells = (Cell*)r->cells;
    u64 first = (address - (r->low & ~(uintptr_t)15)) >> r->shift;
    u32 long_one = size > 64;  // the timer must not strike in the middle
    state.busy += long_one;
    for (u64 i = 0; i < size >> r->shift; ++i)
        touch<FLAGS>(cells[first + i], r, f, address, size, pc);
    state.busy -= long_one;
    return r;
}
