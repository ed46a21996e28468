// Whether an access races with one that its cell remembers, and what the cell remembers of it.
//
// Of the accesses since the last write two are kept, and those that more later accesses would clash with before others:
// plain before volatile before atomic, then as far apart as possible (other block before other warp before other lane).
// A later write that is unordered with any reader is then unordered with one of the two, but for masks and flags that
// order some threads only.
#pragma once

// --- Order ---

static bool ordered_slowly(const Record& x, const Fiber* f) {
    const Slot* slot = f->slot;
    u32 number = x.gid - slot->first_gid;
    if (number < slot->threads && number >> state.warp_shift == f->warp->number) {
        u32 other = number & (state.launch->warp_size - 1);
        if (x.stamp <= lane_known(f->warp, f->lane, other))
            return true;
    }
    const Cluster* cluster = slot->cluster;
    if (cluster->size > 1 && x.stamp <= cluster->barrier_stamp && in_cluster(x.gid, cluster))
        return true;
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
    return !((x.where | flags) & ATOMIC) && is_shared(r) &&
           (x.gid - f->slot->first_gid) >> state.warp_shift == f->warp->number;
}

// An atomic update with a fence before it is part of what its location publishes. Whoever has read all of that is after
// the update: so the last block may reset the counter that told it to be the last. `last`: the location's last write,
// which is ordered.
static bool observed(const Record& x, const Record& last, const Region* r, uintptr_t address, const Fiber* f) {
    if (!(x.where & ATOMIC) || !(x.where & WRITE) || !state.log_count)
        return false;
    Place place = place_of(r, address);
    Log* log = *log_place(place);
    if (!log)
        return false;
    u32 query = ++state.query;
    Links& work = state.scratch;
    bool all = false;
    ++state.busy;
    work.count = 0;
    const Links* known[2] = {&f->acquired, &f->slot->acquired};
    for (const Links* links : known)
        for (u32 i = 0; i < links->count; ++i)
            append(work.items, work.count, work.capacity, links->items[i]);
    while (work.count && !all) {  // what the thread has read, and what those had read who wrote that
        Link link = work.items[--work.count];
        Log* at = link.log;
        if (at == log && link.version + (log->last == last.gid) >= log->version) {
            all = true;
            break;
        }
        if (at->seen_query == query && at->seen_version >= link.version)
            continue;
        at->seen_query = query;
        at->seen_version = link.version;
        for (u32 i = 0; i < at->links.count; ++i)
            if (at->since[i] <= link.version)
                append(work.items, work.count, work.capacity, at->links.items[i]);
    }
    if (all) {
        Link whole = {log, log->version};
        const Links alone = {&whole, 1, 1};
        all = acquired_covers(alone, x.gid, 1, (u32)f->slot->number, ++state.query);
    }
    --state.busy;
    return all;
}

// --- Reads of what nobody has written ---

static bool never_written(const Region* r, uintptr_t address) {
    const Cell* cells = (const Cell*)r->cells;
    return cells[(address - (r->low & ~(uintptr_t)15)) >> r->shift].write.stamp < r->base;
}

// A structure that is copied as a whole has padding, which nobody writes: less than 16 bytes, not at the start, and up
// to an address that is a multiple of a power of two above their number.
static bool may_be_padding(const Region* r, uintptr_t address, u64 size) {
    if (size < 8)
        return false;
    u64 run = 0;
    for (u64 i = 0; i <= size; ++i) {
        if (i < size && never_written(r, address + i)) {
            ++run;
            continue;
        }
        if (run && (run > 15 || run == i))
            return false;
        for (u64 power = 2; run && power <= 16; power *= 2)
            if (run < power) {
                if ((address + i) % power)
                    return false;
                break;
            }
        run = 0;
    }
    return true;
}

// Thread 0 runs first: where a barrier is missing it reads what nobody has written yet. If another thread writes there
// before the next barrier that is a race and will be reported as one; until then this is only a note.
static void defer_uninitialized(Region* r, uintptr_t address, u64 size, u32 flags, void* pc) {
    if (state.deferred_slot || (!(flags & ATOMIC) && may_be_padding(r, address, size)))
        return;
    Report& report = state.deferred;
    memset((void*)&report, 0, sizeof report);
    locate(report, r, address, size);
    describe(report.actor, state.current, pc, flags, nullptr);
    state.deferred_slot = state.slot;
    state.deferred_remote = is_window(r);
}

// --- Cells ---

static void race(const Record& x, Region* r, uintptr_t address, u64 size, u32 flags, void* pc) {
    state.launch->report.has_other = 1;
    describe_access(state.launch->report.other, x);
    fault_at(FAULT_RACE, r, address, size, flags, pc);
}

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

static inline u32 weakness(const Record& x) {
    return x.where & ATOMIC ? 0 : x.where & VOLATILE ? 1 : 2;
}

// Whether all that clashes with x clashes with y.
static inline bool covers(const Record& y, const Record& x) {
    return weakness(y) >= weakness(x) && ((y.where & WRITE) || !(x.where & WRITE));
}

// x happened before `now`: whoever is unordered with x and clashes with it is then unordered with `now`.
static inline void forget_covered(Record& x, const Record& now, u32 base, const Fiber* f) {
    if (x.stamp >= base && covers(now, x) && ordered(x, f))
        x.stamp = 0;
}

static inline void remember(Cell& cell, const Record& x, u32 base, const Slot* slot) {
    Record* places[2] = {&cell.first, &cell.second};
    for (Record* place : places)
        if (place->stamp < base || (place->gid == x.gid && place->stamp <= x.stamp && covers(x, *place))) {
            *place = x;
            return;
        }
    u32 victim = weakness(cell.first) >= weakness(cell.second);
    const Record& kept = *places[!victim];
    Record& place = *places[victim];
    if (weakness(x) > weakness(place) ||
        (weakness(x) == weakness(place) && distance(x, kept, slot) > distance(place, kept, slot)))
        place = x;
}

template <u32 FLAGS>
static inline void touch(Cell& cell, Region* r, Fiber* f, uintptr_t address, u64 size, void* pc) {
    const u32 base = r->base;
    const Record now = {f->stamp, f->gid, (u32)(relative(pc) << 3) | (FLAGS & 7)};
    if (!(FLAGS & WRITE) || (FLAGS & (ATOMIC | OVERWRITE)) == ATOMIC) {
        if (cell.write.stamp < base && is_shared(r))
            defer_uninitialized(r, address, size, FLAGS, pc);
    }
    if (!(FLAGS & WRITE) && cell.first.stamp == now.stamp && cell.first.gid == now.gid && cell.first.where == now.where)
        return;
    const Record* earlier[3] = {&cell.write, &cell.first, &cell.second};
    for (const Record* x : earlier)
        if (x->stamp >= base && clashes(*x, FLAGS, f, r) && !ordered(*x, f) &&
            (x == &cell.write || !(FLAGS & WRITE) || !observed(*x, cell.write, r, address, f)))
            return race(*x, r, address, size, FLAGS, pc);
    if ((FLAGS & WRITE) && !(FLAGS & (ATOMIC | VOLATILE))) {  // all are ordered before a plain write
        cell.first.stamp = cell.second.stamp = 0;
        cell.write = now;
        return;
    }
    forget_covered(cell.first, now, base, f);
    if (!(FLAGS & WRITE) && cell.first.stamp < base) {
        cell.first = now;
        return;
    }
    forget_covered(cell.second, now, base, f);
    if (!(FLAGS & WRITE)) {
        remember(cell, now, base, f->slot);
        return;
    }
    if (cell.write.stamp >= base && !(covers(now, cell.write) && ordered(cell.write, f)))
        remember(cell, cell.write, base, f->slot);
    cell.write = now;
}
