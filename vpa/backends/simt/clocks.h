// What happened before what among the threads of a block: stamps for barriers and warp synchronisation.
//
// One counter stamps every synchronisation of the launch; an access is known by its thread and that thread's stamp at
// the time. A barrier orders everything its block did up to a stamp with one store; a full warp synchronisation does
// the same for a warp; partial masks keep a lane-by-lane matrix.
#pragma once

static u32 own_fence_stamp(const Fiber* f) {
    if (f->fence)
        for (u32 i = 0; i < f->fence->count; ++i)
            if (f->fence->entries[i].entity == (THREAD | f->gid) && !f->fence->entries[i].scope)
                return f->fence->entries[i].stamp;
    return 0;
}

// What every thread has fenced becomes one entry for the block: else 1,024 threads would merge 1,024 fences.
static void merge_fences(Slot* slot) {
    u32 common = 0xffffffffu;
    for (u32 i = 0; i < slot->threads; ++i) {
        u32 stamp = own_fence_stamp(&slot->fibers[i]);
        if (stamp < common)
            common = stamp;
    }
    Fence* merged = (Fence*)arena_take(sizeof(Fence));
    if (slot->fence) {
        for (u32 i = 0; i < slot->fence->count; ++i)
            append(merged->entries, merged->count, merged->capacity, slot->fence->entries[i]);
        link_all(merged->links, slot->fence->links);
    }
    fence_entry(*merged, BLOCK | slot->number, common, 0);
    for (u32 i = 0; i < slot->threads; ++i) {
        Fence* fence = slot->fibers[i].fence;
        slot->fibers[i].fence = nullptr;
        if (!fence)
            continue;
        for (u32 k = 0; k < fence->count; ++k)
            if (fence->entries[k].stamp > common || fence->entries[k].scope)
                fence_entry(*merged, fence->entries[k].entity, fence->entries[k].stamp, fence->entries[k].scope);
        link_all(merged->links, fence->links);
    }
    slot->fence = merged;
}

static void clock_barrier(Slot* slot) {
    slot->barrier_stamp = state.stamp;
    u32 stamp = next_stamp();
    bool fences = false;
    for (u32 i = 0; i < slot->threads; ++i) {
        Fiber* f = &slot->fibers[i];
        f->stamp = stamp;
        if (f->acquired.count) {
            link_all(slot->acquired, f->acquired);
            f->acquired.count = 0;
        }
        fences |= f->fence != nullptr;
    }
    if (fences)
        merge_fences(slot);
}

// All blocks of the cluster that are still there have come: what any of them did before is known to all.
static void clock_cluster(Cluster* cluster) {
    cluster->barrier_stamp = state.stamp;
    Links acquired = {};
    Fence* fence = nullptr;
    for (u32 i = 0; i < cluster->size; ++i) {
        Slot* slot = cluster->slots[i];
        clock_barrier(slot);
        link_all(acquired, slot->acquired);
        fence_merge(fence, slot->fence);
    }
    for (u32 i = 0; i < cluster->size && cluster->size > 1; ++i) {
        link_all(cluster->slots[i]->acquired, acquired);
        cluster->slots[i]->fence = fence;
    }
}

static u32 lane_known(const Warp* warp, u32 lane, u32 other) {
    u32 known = warp->stamp > warp->slot->barrier_stamp ? warp->stamp : warp->slot->barrier_stamp;
    u32 pair = warp->matrix ? warp->matrix[lane * state.launch->warp_size + other] : 0;
    return pair > known ? pair : known;
}

static void clock_warp(Warp* warp, u64 group) {
    u32 size = state.launch->warp_size, now = state.stamp;
    if ((group & warp->live) == warp->live) {
        warp->stamp = now;
    } else {
        if (!warp->matrix)
            warp->matrix = (u32*)arena_take(size * size * sizeof(u32));
        u32 joint[64] = {};
        for (u64 rest = group; rest; rest &= rest - 1)
            for (u32 other = 0; other < size; ++other) {
                u32 known = lane_known(warp, lowest(rest), other);
                if (known > joint[other])
                    joint[other] = known;
            }
        for (u64 rest = group; rest; rest &= rest - 1)
            joint[lowest(rest)] = now;
        for (u64 rest = group; rest; rest &= rest - 1)
            memcpy(&warp->matrix[lowest(rest) * size], joint, size * sizeof(u32));
    }
    u32 stamp = next_stamp();
    Fiber* first = &warp->fibers[lowest(group)];
    bool sharing = false;
    for (u64 rest = group; rest; rest &= rest - 1) {
        Fiber* f = &warp->fibers[lowest(rest)];
        f->stamp = stamp;
        sharing |= f->fence != first->fence || !same_links(f->acquired, first->acquired);
    }
    if (!sharing)
        return;
    Links acquired = {};
    Fence* fence = nullptr;
    for (u64 rest = group; rest; rest &= rest - 1) {
        Fiber* f = &warp->fibers[lowest(rest)];
        link_all(acquired, f->acquired);
        fence_merge(fence, f->fence);
    }
    for (u64 rest = group; rest; rest &= rest - 1) {
        Fiber* f = &warp->fibers[lowest(rest)];
        link_all(f->acquired, acquired);
        f->fence = fence;
    }
}
