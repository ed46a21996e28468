// The executor as one translation unit, linked into every compiled kernel text. SIMT_CHECKED adds the checker.
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

// A namespace, so that no variable of a kernel text can be taken for one of these.
namespace simt_runtime {
#include "state.h"
#include "fiber.h"
#include "threads.h"
#include "faults.h"
#ifdef SIMT_CHECKED
#include "arena.h"
#include "places.h"
#include "fences.h"
#include "clocks.h"
#include "cells.h"
#include "windows.h"
#include "races.h"
#include "shadow.h"
#include "hang.h"
#endif
#include "divergence.h"
#include "warp.h"
#include "barrier.h"
#include "blocks.h"
#include "scheduler.h"
#include "atomics.h"
#include "cluster.h"
#include "signals.h"
#ifdef SIMT_CHECKED
#include "hooks.h"
#include "hooks_atomic.h"
#include "undefined.h"
#endif

enum : u64 { KEPT_SHADOW = (u64)256 << 20, KEPT_SLOTS = 4 };  // between launches: fresh pages cost more than the checks

static void prepare(Launch* launch) {
    if (!*launch->pool)
        *launch->pool = calloc(1, sizeof(Pool));
    Pool* pool = (Pool*)*launch->pool;
    void* arena = state.arena;
    memset((void*)&state, 0, sizeof state);
    state.launch = launch;
    state.pool = pool;
    memcpy(&gridDim, launch->grid, sizeof gridDim);
    memcpy(&blockDim, launch->block, sizeof blockDim);
    state.threads = launch->block[0] * launch->block[1] * launch->block[2];
    state.block_count = (u64)launch->grid[0] * launch->grid[1] * launch->grid[2];
    state.cluster_size = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
    state.warp_shift = launch->warp_size == 64 ? 6 : 5;
    u32 limit = RESIDENT_THREADS / state.threads;
    limit = limit < 2 ? 2 : limit > MAX_SLOTS ? (u32)MAX_SLOTS : limit;
    if (launch->resident_blocks && launch->resident_blocks < MAX_SLOTS)
        limit = launch->resident_blocks;
    else if (limit < 2 * state.cluster_size)
        limit = 2 * state.cluster_size;
    state.resident_limit = limit / state.cluster_size * state.cluster_size;
    uintptr_t anchor = (uintptr_t)&simt_tls_anchor;
    Region* regions = launch->regions;
    state.static_shared = &regions[launch->region_count - 2];
    state.dynamic_shared = &regions[launch->region_count - 1];
    state.static_shared->low = anchor + (uintptr_t)launch->shared_low;
    state.dynamic_shared->low = anchor + (uintptr_t)launch->dynamic_low;
    state.tls_low = anchor + (uintptr_t)launch->image_low;
    state.tls_size = launch->image_size;
    state.last = &regions[0];
    memset(&launch->report, 0, sizeof launch->report);
#ifdef SIMT_CHECKED
    state.arena = arena;
    arena_clear();
    if (pool->stamp > 0x80000000u) {  // stamps rise from launch to launch, so that shadow memory need not be cleared
        for (int i = 0; i < MAX_REGIONS; ++i)
            release_cells(pool->cells[i], pool->cell_bytes[i]);
        for (u32 i = 0; i < pool->slot_count; ++i)
            for (int k = 0; k < 2; ++k)
                release_cells(pool->slots[i]->cells[k], pool->slots[i]->cell_bytes[k]);
        pool->stamp = 0;
    }
    state.stamp = ++pool->stamp;
    for (u32 i = 0; i < launch->region_count; ++i) {
        Region* r = &regions[i];
        r->index = i;
        r->cells = nullptr;
        r->base = state.stamp;
        if (i + 2 >= launch->region_count || !(r->permit & PERMIT_WRITE) || !r->size)
            continue;
        // The cells' size that the last launch ended with is the best guess for one like it.
        r->shift = pool->region_size[i] == r->size ? pool->region_shift[i] : r->shift;
        cells_reserve(pool->cells[i], pool->cell_bytes[i], cells_size(r, r->shift));
        r->cells = pool->cells[i];
    }
#else
    (void)arena;
#endif
}

static void finish() {
    for (u32 i = 0; i < state.resident; ++i)
        state.pool->slots[i]->open = false;
#ifdef SIMT_CHECKED
    Pool* pool = state.pool;
    for (u32 i = 0; i + 2 < state.launch->region_count; ++i) {
        pool->region_size[i] = state.launch->regions[i].size;
        pool->region_shift[i] = (u8)state.launch->regions[i].shift;
    }
    u64 kept = 0;
    for (u32 i = 0; i < MAX_REGIONS; ++i) {
        kept += pool->cell_bytes[i];
        if (kept > KEPT_SHADOW) {
            kept -= pool->cell_bytes[i];
            release_cells(pool->cells[i], pool->cell_bytes[i]);
        }
    }
#endif
    for (u32 i = KEPT_SLOTS; i < state.pool->slot_count; ++i)
        release_stacks(state.pool->slots[i]);
}

static u32 slice() {
    state.slice_start = clock_ns(CLOCK_MONOTONIC);
    signals_on();
    u32 status = run();
    signals_off();
    if (status != STATUS_PAUSED)
        finish();
    return status;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Runs a launch for up to its time slice; Status says whether it is done, wants to be resumed, or has left a report.
EXPORT u32 simt_launch(Launch* launch) {
    prepare(launch);
    start_blocks(0);
    return slice();
}

EXPORT u32 simt_resume() {
    return slice();
}

// Ends a paused launch; the report names a thread that had not returned.
EXPORT void simt_abandon() {
    Slot* slot = state.slot;
    const Fiber* found = nullptr;
    for (u32 i = 0; i < slot->threads; ++i) {
        const Fiber* f = &slot->fibers[i];
        if (f->state != EXITED && (!found || (f->state == RUNNING && f->pc && !(found->state == RUNNING && found->pc))))
            found = f;
    }
    if (found)
        describe(state.launch->report.actor, found, found->pc, 0, doing(found));
    stop(FAULT_HANG);
    finish();
}

// The loader's address of the module: what symbol values in its file are relative to.
EXPORT const char* simt_image() {
    return __ehdr_start;
}

EXPORT u64 simt_launch_bytes() {
    return sizeof(Launch);
}
EXPORT u64 simt_region_bytes() {
    return sizeof(Region);
}
}  // namespace simt_runtime
