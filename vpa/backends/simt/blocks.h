// Blocks under way: their threads' stacks, and whose shared memory lies at the addresses that the kernel uses.
#pragma once

enum { RESIDENT_THREADS = 8192 };  // stacks touch two pages a thread

static void fiber_main() {
    Fiber* f = state.current;
    state.launch->call(state.launch->arguments);
    f->state = EXITED;
    f->warp->ready &= ~bit(f->lane);
    f->warp->live &= ~bit(f->lane);
    --f->slot->live;
    progress(f->slot);
#ifdef SIMT_CHECKED
    leave_windows(f);
#endif
    if (f->warp->waiting)
        warp_lane_exits(f);
    suspend(f, f->warp);
    __builtin_trap();
}

static void release_stacks(Slot* slot) {
    if (slot->stacks)
        munmap(slot->stacks, (size_t)slot->capacity * STACK_BYTES);
    free(slot->fibers);
    free(slot->warps);
    slot->stacks = nullptr;
    slot->fibers = nullptr;
    slot->warps = nullptr;
    slot->capacity = 0;
}

static Slot* slot_take(u32 number) {
    Pool* pool = state.pool;
    if (number == pool->slot_count)
        pool->slots[pool->slot_count++] = (Slot*)calloc(1, sizeof(Slot));
    Slot* slot = pool->slots[number];
    if (slot->capacity >= state.threads)
        return slot;
    release_stacks(slot);
    u32 capacity = (state.threads + 31) & ~31u;
    slot->fibers = (Fiber*)aligned_alloc(alignof(Fiber), capacity * sizeof(Fiber));
    memset((void*)slot->fibers, 0, capacity * sizeof(Fiber));
    slot->warps = (Warp*)calloc(capacity / 32 + 1, sizeof(Warp));
    slot->stacks = (char*)mmap(nullptr, (size_t)capacity * STACK_BYTES, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (slot->stacks == MAP_FAILED)
        abort();
    for (u32 i = 0; i < capacity; ++i)
        mprotect(slot->stacks + (size_t)i * STACK_BYTES, GUARD_BYTES, PROT_NONE);
    slot->capacity = capacity;
    return slot;
}

static void reserve_image(Slot* slot) {
    if (slot->image_size >= state.tls_size)
        return;
    if (slot->image)
        free(slot->image - IMAGE_MARGIN);
    slot->image = (u8*)malloc(state.tls_size + 2 * IMAGE_MARGIN) + IMAGE_MARGIN;
    slot->image_size = state.tls_size;
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
    slot->saved = slot->at_cluster_barrier = false;
    slot->fence = nullptr;
    slot->acquired = {};
#ifdef SIMT_CHECKED
    slot->start = next_stamp();
#endif
    if (state.cluster_size > 1) {
        reserve_image(slot);
        slot->saved = true;  // others may write there before it runs
#ifdef SIMT_CHECKED
        open_windows(slot);
#endif
    }
    for (u32 w = 0; w < slot->warp_count; ++w) {
        u32 first = w << state.warp_shift, lanes = state.threads - first;
        u64 exists = lanes >= launch->warp_size ? ~(u64)0 >> (64 - launch->warp_size) : bit(lanes) - 1;
        slot->warps[w] = {exists, exists, exists, 0, 0, slot->fibers + first, slot, nullptr, w, false, 0, nullptr};
    }
    Dim index = {0, 0, 0};
    for (u32 i = 0; i < state.threads; ++i) {
        Fiber* f = &slot->fibers[i];
        char* bottom = slot->stacks + (size_t)i * STACK_BYTES;
        f->index = index;
        f->gid = slot->first_gid + i;
        f->number = i;
        f->lane = i & (launch->warp_size - 1);
        f->state = RUNNING;
        f->warp = &slot->warps[i >> state.warp_shift];
        f->slot = slot;
        f->stamp = slot->start;
        f->depth = f->spin_count = f->seen_epoch = f->stuck_epoch = 0;
        f->slept = false;
        f->fence = nullptr;
        f->acquired = {};
        f->pc = nullptr;
        f->stack_low = (uintptr_t)bottom;
        f->stack_high = (uintptr_t)bottom + STACK_BYTES;
        f->context = fiber_prepare(bottom + GUARD_BYTES, stack_top(bottom, i));
        if (++index.x == launch->block[0]) {
            index.x = 0;
            if (++index.y == launch->block[1])
                index.y = 0, ++index.z;
        }
    }
    progress(slot);
}

// Makes a resident block the one whose shared memory lies at the addresses that the kernel uses.
static void slot_activate(Slot* slot) {
    if (state.slot && state.slot != slot && state.slot->open && state.tls_size) {
        reserve_image(state.slot);
        memcpy(state.slot->image, (void*)state.tls_low, state.tls_size);
        state.slot->saved = true;
    }
    if (state.slot != slot && slot->saved)
        memcpy((void*)state.tls_low, slot->image, state.tls_size);
    slot->saved = false;
    state.slot = slot;
    blockIdx = slot->index;
#ifdef SIMT_CHECKED
    Region* regions[2] = {state.static_shared, state.dynamic_shared};
    for (u32 i = 0; i < 2; ++i)
        if (regions[i]->size)
            attach_cells(regions[i], slot, i);
#endif
}

// Starts the next block, or cluster of blocks, in the slots from `first` on, which are free.
static bool start_blocks(u32 first) {
    if (state.next_block == state.block_count)
        return false;
    Cluster* cluster = &slot_take(first)->own_cluster;
    cluster->size = state.cluster_size;
    cluster->barrier_stamp = 0;
    for (u32 i = 0; i < state.cluster_size; ++i) {
        u64 number = state.launch->order ? state.launch->order[state.next_block] : state.next_block;
        ++state.next_block;
        Slot* slot = slot_take(first + i);
        slot->cluster = cluster;
        slot_open(slot, number);
        const u32* dims = state.launch->cluster;
        slot->rank =
            slot->index.x % dims[0] + dims[0] * (slot->index.y % dims[1] + dims[1] * (slot->index.z % dims[2]));
        cluster->slots[slot->rank] = slot;
    }
    if (first == state.resident)
        state.resident += state.cluster_size;
    slot_activate(state.pool->slots[first]);
    return true;
}

static void wake_all(Slot* slot) {
    for (u32 w = 0; w < slot->warp_count; ++w) {
        slot->warps[w].ready |= slot->warps[w].asleep;
        slot->warps[w].asleep = 0;
    }
}
