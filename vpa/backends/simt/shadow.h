// The check that every access of a kernel passes: which memory it is, whether it may be used so, and its race.
#pragma once

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
    if (Region* window = find_window(address, size, flags, pc))
        return window;
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
