// The entry points that -fsanitize=thread puts before every memory access: the sanitizer's names, our checks.
#pragma once

#define CALLER __builtin_return_address(0)

template <u32 FLAGS>
static inline void hook(void* pointer, u64 size, u64 alignment, void* pc) {
    uintptr_t address = (uintptr_t)pointer;
    if (alignment > 1 && __builtin_expect(address & (alignment - 1), 0))
        fault_at(FAULT_MISALIGNED, nullptr, address, size, FLAGS, pc);
    check<FLAGS>(address, size, pc);
}

// Volatile accesses are how polls and flags are written: strong, and published or acquired as atomics are.
template <u32 FLAGS>
static inline void volatile_hook(void* pointer, u64 size, u64 alignment, void* pc) {
    Fiber* f = state.current;
    uintptr_t address = (uintptr_t)pointer;
    f->pc = pc;
    if (alignment > 1 && (address & (alignment - 1)))
        fault_at(FAULT_MISALIGNED, nullptr, address, size, FLAGS, pc);
    Region* region = check<FLAGS | VOLATILE>(address, size, pc);
    if (!region)
        return;
    Place place = place_of(region, address);
    if (FLAGS & WRITE)
        return publish(f, place, false);
    acquire(f, place);
    polled(f);
    acquire(f, place);  // what was written while it slept is what it reads now
}

#define ACCESS_HOOKS(n)                                            \
    void __tsan_read##n(void* p) {                                 \
        hook<READ>(p, n, n, CALLER);                               \
    }                                                              \
    void __tsan_write##n(void* p) {                                \
        hook<WRITE>(p, n, n, CALLER);                              \
    }                                                              \
    void __tsan_unaligned_read##n(void* p) {                       \
        hook<READ>(p, n, 1, CALLER);                               \
    }                                                              \
    void __tsan_unaligned_write##n(void* p) {                      \
        hook<WRITE>(p, n, 1, CALLER);                              \
    }                                                              \
    void __tsan_volatile_read##n(void* p) {                        \
        volatile_hook<READ>(p, n, n, CALLER);                      \
    }                                                              \
    void __tsan_volatile_write##n(void* p) {                       \
        volatile_hook<WRITE>(p, n, n, CALLER);                     \
    }                                                              \
    void __tsan_unaligned_volatile_read##n(void* p) {              \
        volatile_hook<READ>(p, n, 1, CALLER);                      \
    }                                                              \
    void __tsan_unaligned_volatile_write##n(void* p) {             \
        volatile_hook<WRITE>(p, n, 1, CALLER);                     \
    }                                                              \
    void __tsan_read_write##n(void* p) {                           \
        hook<READ>(p, n, n, CALLER), hook<WRITE>(p, n, n, CALLER); \
    }                                                              \
    void __tsan_unaligned_read_write##n(void* p) {                 \
        hook<READ>(p, n, 1, CALLER), hook<WRITE>(p, n, 1, CALLER); \
    }

extern "C" {
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

void __tsan_read_range(void* p, size_t size) {
    if (size)
        hook<READ>(p, size, 1, CALLER);
}
void __tsan_write_range(void* p, size_t size) {
    if (size)
        hook<WRITE>(p, size, 1, CALLER);
}
void __tsan_vptr_read(void** p) {
    hook<READ>(p, 8, 8, CALLER);
}
void __tsan_vptr_update(void** p, void*) {
    hook<WRITE>(p, 8, 8, CALLER);
}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
    if (size)
        hook<READ>((void*)from, size, 1, CALLER), hook<WRITE>(to, size, 1, CALLER);
    return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
    if (size)
        hook<READ>((void*)from, size, 1, CALLER), hook<WRITE>(to, size, 1, CALLER);
    return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
    if (size)
        hook<WRITE>(to, size, 1, CALLER);
    return memset(to, value, size);
}

void __tsan_init() {
}
void __tsan_func_entry(void* pc) {
    Fiber* f = state.current;
    if (!f)
        return;  // Python reads the table of kernels
    if (f->depth < MAX_CALLS)
        f->calls[f->depth] = pc;
    ++f->depth;
    if (__builtin_expect((uintptr_t)__builtin_frame_address(0) - f->stack_low < GUARD_BYTES + 8192, 0))
        fault_in_thread(FAULT_STACK, CALLER, nullptr);
}
void __tsan_func_exit() {
    if (state.current)
        --state.current->depth;
}
}
