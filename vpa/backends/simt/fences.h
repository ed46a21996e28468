// Fences with flags and atomics: what a fence covers, and the log of the location that publishes it.
//
// A fence followed by an atomic (or a volatile write) appends what the fence covered to that location's log; whoever
// reads the location afterwards knows the log up to its present length. A log may refer to others: what its writer had
// read itself.
#pragma once

static u32 next_stamp() {
    state.stamp = ++state.pool->stamp;  // kept by the pool at once: a launch may be left at any time
    if (state.stamp == 0xfffffff0u) {
        set_text("more than four billion synchronisations in one launch");
        stop(FAULT_HANG);
    }
    return state.stamp;
}

// Every access of `entity` up to `stamp`. An entity is a thread, a warp or a block of the grid.
enum EntityKind : u64 { THREAD = (u64)1 << 62, WARP = (u64)2 << 62, BLOCK = (u64)3 << 62 };
struct Entry {
    u64 entity;
    u32 stamp;
    u32 scope;     // 0: for everyone; else 1 + the only block that may rely on it (a block-scope fence)
    u32 version;   // of the log when it was appended
    u32 previous;  // 1 + index of this entity's entry before it, in a log
};

struct Fence {
    Entry* entries;
    u32 count, capacity;
    Links links;
    bool shared;  // by several threads: no longer to be changed in place
};

struct Log {
    Place place;
    u32 version, count, capacity;
    u32 last;  // the thread that published version `version`
    Entry* entries;
    Links links;  // Link.version is the linked log's; `since` holds ours
    u32* since;
    u32 since_count, since_capacity;
    u32* table;  // entity -> 1 + index of its last entry
    u32 table_size;
    u32 seen_query, seen_version;
};

static void link_to(Links& links, Log* log, u32 version) {
    for (u32 i = 0; i < links.count; ++i)
        if (links.items[i].log == log) {
            if (links.items[i].version < version)
                links.items[i].version = version;
            return;
        }
    append(links.items, links.count, links.capacity, Link{log, version});
}

static void link_all(Links& to, const Links& from) {
    for (u32 i = 0; i < from.count; ++i)
        link_to(to, from.items[i].log, from.items[i].version);
}

static bool same_links(const Links& a, const Links& b) {
    if (a.count != b.count)
        return false;
    for (u32 i = 0; i < a.count; ++i) {
        bool found = false;
        for (u32 j = 0; j < b.count; ++j)
            found |= a.items[i].log == b.items[j].log && a.items[i].version == b.items[j].version;
        if (!found)
            return false;
    }
    return true;
}

static void fence_entry(Fence& fence, u64 entity, u32 stamp, u32 scope) {
    if (!stamp)
        return;
    for (u32 i = 0; i < fence.count; ++i)
        if (fence.entries[i].entity == entity && fence.entries[i].scope == scope) {
            if (fence.entries[i].stamp < stamp)
                fence.entries[i].stamp = stamp;
            return;
        }
    append(fence.entries, fence.count, fence.capacity, Entry{entity, stamp, scope, 0, 0});
}

static void fence_merge(Fence*& to, Fence* from) {
    if (!from || to == from)
        return;
    from->shared = true;
    if (!to) {
        to = from;
        return;
    }
    Fence* merged = (Fence*)arena_take(sizeof(Fence));
    const Fence* parts[2] = {to, from};
    for (const Fence* part : parts) {
        for (u32 i = 0; i < part->count; ++i)
            fence_entry(*merged, part->entries[i].entity, part->entries[i].stamp, part->entries[i].scope);
        link_all(merged->links, part->links);
    }
    to = merged;
}

static u64 warp_entity(const Warp* warp) {
    return WARP | (warp->slot->number * warp->slot->warp_count + warp->number);
}

static void take_fence(Fiber* f, bool device_scope) {
    Slot* slot = f->slot;
    Warp* warp = f->warp;
    u32 scope = device_scope ? 0 : 1 + (u32)slot->number;
    Fence* fence = f->fence;
    if (device_scope && fence && !fence->shared) {
        fence->count = fence->links.count = 0;  // covered by what follows
    } else {
        fence = (Fence*)arena_take(sizeof(Fence));
        if (!device_scope && f->fence)  // what an earlier fence covered for everyone stays covered
            for (u32 i = 0; i < f->fence->count; ++i)
                if (!f->fence->entries[i].scope)
                    fence_entry(*fence, f->fence->entries[i].entity, f->fence->entries[i].stamp, 0);
    }
    fence_entry(*fence, THREAD | f->gid, f->stamp, scope);
    fence_entry(*fence, warp_entity(warp), warp->stamp, scope);
    fence_entry(*fence, BLOCK | slot->number, slot->barrier_stamp, scope);
    for (u32 i = 0; i < slot->cluster->size && slot->cluster->size > 1; ++i)
        fence_entry(*fence, BLOCK | slot->cluster->slots[i]->number, slot->cluster->barrier_stamp, scope);
    if (warp->matrix)
        for (u32 lane = 0; lane < state.launch->warp_size; ++lane)
            if (bit(lane) & warp->exists)
                fence_entry(*fence, THREAD | (warp->fibers[0].gid + lane),
                            warp->matrix[f->lane * state.launch->warp_size + lane], scope);
    link_all(fence->links, f->acquired);
    link_all(fence->links, slot->acquired);
    f->fence = fence;
    f->stamp = next_stamp();  // what comes after the fence is not covered by it
    state.fenced = true;
}

static Log** log_place(Place place) {
    if (2 * (state.log_count + 1) > state.log_capacity) {
        u32 larger = state.log_capacity ? 2 * state.log_capacity : 64;
        Log** old = state.logs;
        u32 old_capacity = state.log_capacity;
        state.logs = (Log**)arena_take(larger * sizeof(Log*));
        state.log_capacity = larger;
        for (u32 i = 0; i < old_capacity; ++i)
            if (old[i])
                *log_place(old[i]->place) = old[i];
    }
    u32 i = (u32)((place.address * 0x9e3779b97f4a7c15u + place.owner * 0x85ebca6bu) >> 32) & (state.log_capacity - 1);
    while (state.logs[i] &&
           (state.logs[i]->place.address != place.address || state.logs[i]->place.owner != place.owner))
        i = (i + 1) & (state.log_capacity - 1);
    return &state.logs[i];
}

static u32* log_entity(Log* log, u64 entity) {
    u32 i = (u32)(entity * 0x9e3779b97f4a7c15u >> 32) & (log->table_size - 1);
    while (log->table[i] && log->entries[log->table[i] - 1].entity != entity)
        i = (i + 1) & (log->table_size - 1);
    return &log->table[i];
}

static void log_append(Log* log, const Entry& entry) {
    if (2 * (log->count + 1) > log->table_size) {
        u32 old_count = log->count;
        log->table_size = log->table_size ? 2 * log->table_size : 16;
        log->table = (u32*)arena_take(log->table_size * sizeof(u32));
        for (u32 i = 0; i < old_count; ++i)
            *log_entity(log, log->entries[i].entity) = i + 1;
    }
    u32* place = log_entity(log, entry.entity);
    for (u32 i = *place; i; i = log->entries[i - 1].previous) {
        if (log->entries[i - 1].scope != entry.scope)
            continue;
        if (log->entries[i - 1].stamp >= entry.stamp)
            return;
        break;  // an entity's stamps rise, so its last entry is the largest
    }
    Entry added = entry;
    added.version = log->version;
    added.previous = *place;
    append(log->entries, log->count, log->capacity, added);
    *log_entity(log, entry.entity) = log->count;
}

static void publish(Fiber* f, Place at, bool read_modify_write) {
    Fence* fences[2] = {f->fence, f->slot->fence};
    if (!state.fenced)
        return;
    Log** place = log_place(at);
    if (!fences[0] && !fences[1] && !*place)
        return;
    if (!*place) {
        *place = (Log*)arena_take(sizeof(Log));
        ++state.log_count;
        (*place)->place = at;
    } else if (!read_modify_write) {
        // A plain store ends the release sequence: later readers learn only from this one on.
        Log* fresh = (Log*)arena_take(sizeof(Log));
        fresh->place = at;
        *place = fresh;
    }
    Log* log = *place;
    ++log->version;
    log->last = f->gid;
    for (Fence* fence : fences) {
        if (!fence)
            continue;
        for (u32 i = 0; i < fence->count; ++i)
            log_append(log, fence->entries[i]);
        for (u32 i = 0; i < fence->links.count; ++i) {
            if (fence->links.items[i].log == log)
                continue;
            append(log->links.items, log->links.count, log->links.capacity, fence->links.items[i]);
            append(log->since, log->since_count, log->since_capacity, log->version);
        }
    }
}

// Leaving out the fence that the reading side needs too is not reported: hardware forgives it, and CUDA's own samples
// rely on that.
static void acquire(Fiber* f, Place at) {
    if (!state.log_count)
        return;
    Log* log = *log_place(at);
    if (log && log->version)
        link_to(f->acquired, log, log->version);
}

// Whether a chain of logs from `links` covers the access (gid, stamp), for a reader in block `reader`.
static bool acquired_covers(const Links& links, u32 gid, u32 stamp, u32 reader, u32 query) {
    if (!links.count)
        return false;
    u32 block = gid / state.threads, number = gid - block * state.threads;
    u64 warps = (state.threads + state.launch->warp_size - 1) >> state.warp_shift;
    u64 entities[3] = {THREAD | gid, WARP | (block * warps + (number >> state.warp_shift)), BLOCK | block};
    Links& work = state.scratch;
    work.count = 0;
    for (u32 i = 0; i < links.count; ++i)
        append(work.items, work.count, work.capacity, links.items[i]);
    while (work.count) {
        Link link = work.items[--work.count];
        Log* log = link.log;
        if (log->seen_query == query && log->seen_version >= link.version)
            continue;
        log->seen_query = query;
        log->seen_version = link.version;
        for (u64 entity : entities)
            for (u32 i = log->table_size ? *log_entity(log, entity) : 0; i; i = log->entries[i - 1].previous) {
                const Entry& entry = log->entries[i - 1];
                if (entry.version > link.version || (entry.scope && entry.scope != 1 + reader))
                    continue;
                if (entry.stamp >= stamp)
                    return true;
                break;
            }
        for (u32 i = 0; i < log->links.count; ++i)
            if (log->since[i] <= link.version)
                append(work.items, work.count, work.capacity, log->links.items[i]);
    }
    return false;
}
