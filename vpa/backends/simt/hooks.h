// The entry points that -fsanitize=thread puts before every memory access: the sanitizer's names, our checks.
#pragma once

#define CALLER __builtin_return_address(0)

template <u32 FLAGS> static inline void hook(void* pointer, u64 size, u64 alignment, void* pc) {
    uintptr_t address = (uintptr_t)pointer;
    if (alignment > 1 && __builtin_expect(address & (alignment - 1), 0))
        fault_at(FAULT_MISALIGNED, nullptr, address, size, FLAGS, pc);
    check<FLAGS>(address, size, pc);
}

// Volatile accesses are how polls and flags are written: strong, and published or acquired as atomics are.
template <u32 FLAGS> static inline void volatile_hook(void* pointer, u64 size, u64 alignment, void* pc) {
    Fiber* f = state.current;
    uintptr_t address = (uintptr_t)pointer;
    f->pc = pc;
    if (alignment > 1 && (address & (alignment - 1))) fault_at(FAULT_MISALIGNED, nullptr, address, size, FLAGS, pc);
    Region* region = check<FLAGS | VOLATILE>(address, size, pc);
    if (!region) return;
    bool shared = region->space == SPACE_STATIC_SHARED || region->space == SPACE_DYNAMIC_SHARED;
    if (FLAGS & WRITE) return publish(f, address, shared, false);
    acquire(f, address, shared);
    polled(f);
    acquire(f, address, shared);  // what was written while it slept is what it reads now
}

#define ACCESS_HOOKS(n)                                                                                                \
    void __tsan_read##n(void* p) { hook<READ>(p, n, n, CALLER); }                                                      \
    void __tsan_write##n(void* p) { hook<WRITE>(p, n, n, CALLER); }                                                    \
    void __tsan_unaligned_read##n(void* p) { hook<READ>(p, n, 1, CALLER); }                                            \
    void __tsan_unaligned_write##n(void* p) { hook<WRITE>(p, n, 1, CALLER); }                                          \
    void __tsan_volatile_read##n(void* p) { volatile_hook<READ>(p, n, n, CALLER); }                                    \
    void __tsan_volatile_write##n(void* p) { volatile_hook<WRITE>(p, n, n, CALLER); }                                  \
    void __tsan_unaligned_volatile_read##n(void* p) { volatile_hook<READ>(p, n, 1, CALLER); }                          \
    void __tsan_unaligned_volatile_write##n(void* p) { volatile_hook<WRITE>(p, n, 1, CALLER); }                        \
    void __tsan_read_write##n(void* p) { hook<READ>(p, n, n, CALLER), hook<WRITE>(p, n, n, CALLER); }                  \
    void __tsan_unaligned_read_write##n(void* p) { hook<READ>(p, n, 1, CALLER), hook<WRITE>(p, n, 1, CALLER); }

extern "C" {
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

void __tsan_read_range(void* p, size_t size) {
    if (size) hook<READ>(p, size, 1, CALLER);
}
void __tsan_write_range(void* p, size_t size) {
    if (size) hook<WRITE>(p, size, 1, CALLER);
}
void __tsan_vptr_read(void** p) { hook<READ>(p, 8, 8, CALLER); }
void __tsan_vptr_update(void** p, void*) { hook<WRITE>(p, 8, 8, CALLER); }
void* __tsan_memcpy(void* to, const void* from, size_t size) {
    if (size) hook<READ>((void*)from, size, 1, CALLER), hook<WRITE>(to, size, 1, CALLER);
    return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
    if (size) hook<READ>((void*)from, size, 1, CALLER), hook<WRITE>(to, size, 1, CALLER);
    return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
    if (size) hook<WRITE>(to, size, 1, CALLER);
    return memset(to, value, size);
}

void __tsan_init() {}
void __tsan_func_entry(void* pc) {
    Fiber* f = state.current;
    if (!f) return;  // Python reads the table of kernels
    if (f->depth < MAX_CALLS) f->calls[f->depth] = pc;
    ++f->depth;
    if (__builtin_expect((uintptr_t)__builtin_frame_address(0) - f->stack_low < GUARD_BYTES + 8192, 0))
        fault_in_thread(FAULT_STACK, CALLER, nullptr);
}
void __tsan_func_exit() {
    if (state.current) --state.current->depth;
}
}

// --- C++ atomics in a kernel text (HIP code has them): __atomic_* with a memory order --------------------------------------

static Region* atomic_enter(Fiber* f, void* p, u64 size, int order, bool write, void* pc) {
    f->pc = pc;
    if (order >= 3) take_fence(f, true);  // release, acq_rel, seq_cst
    return write ? check<WRITE | ATOMIC>((uintptr_t)p, size, pc) : check<READ | ATOMIC>((uintptr_t)p, size, pc);
}

static bool in_shared(const Region* r) { return r && (r->space == SPACE_STATIC_SHARED || r->space == SPACE_DYNAMIC_SHARED); }

#define ATOMIC_RMW(bits, name, expression)                                                                             \
    u##bits __tsan_atomic##bits##_##name(volatile u##bits* p, u##bits v, int order) {                                  \
        Fiber* f = state.current;                                                                                      \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order, true, CALLER);                                         \
        u##bits old = *p;                                                                                              \
        *p = (u##bits)(expression);                                                                                    \
        acquire(f, (uintptr_t)p, in_shared(r));                                                                        \
        publish(f, (uintptr_t)p, in_shared(r), true);                                                                  \
        return old;                                                                                                    \
    }
#define ATOMIC_HOOKS(bits)                                                                                             \
    u##bits __tsan_atomic##bits##_load(const volatile u##bits* p, int order) {                                         \
        Fiber* f = state.current;                                                                                      \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order == 5 ? 5 : 0, false, CALLER);                           \
        polled(f);                                                                                                     \
        acquire(f, (uintptr_t)p, in_shared(r));                                                                        \
        return *p;                                                                                                     \
    }                                                                                                                  \
    void __tsan_atomic##bits##_store(volatile u##bits* p, u##bits v, int order) {                                      \
        Fiber* f = state.current;                                                                                      \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order, true, CALLER);                                         \
        *p = v;                                                                                                        \
        publish(f, (uintptr_t)p, in_shared(r), false);                                                                 \
    }                                                                                                                  \
    ATOMIC_RMW(bits, exchange, v)                                                                                      \
    ATOMIC_RMW(bits, fetch_add, old + v)                                                                               \
    ATOMIC_RMW(bits, fetch_sub, old - v)                                                                               \
    ATOMIC_RMW(bits, fetch_and, old & v)                                                                               \
    ATOMIC_RMW(bits, fetch_or, old | v)                                                                                \
    ATOMIC_RMW(bits, fetch_xor, old ^ v)                                                                               \
    ATOMIC_RMW(bits, fetch_nand, ~(old & v))                                                                           \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile u##bits* p, u##bits* expected, u##bits v, int order, int) { \
        Fiber* f = state.current;                                                                                      \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order, true, CALLER);                                         \
        u##bits old = *p;                                                                                              \
        bool equal = old == *expected;                                                                                 \
        if (equal) *p = v;                                                                                             \
        else *expected = old;                                                                                          \
        acquire(f, (uintptr_t)p, in_shared(r));                                                                        \
        if (equal) publish(f, (uintptr_t)p, in_shared(r), true);                                                       \
        else polled(f);                                                                                                \
        return equal;                                                                                                  \
    }                                                                                                                  \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile u##bits* p, u##bits* expected, u##bits v, int order, int failure) { \
        return __tsan_atomic##bits##_compare_exchange_strong(p, expected, v, order, failure);                          \
    }                                                                                                                  \
    u##bits __tsan_atomic##bits##_compare_exchange_val(volatile u##bits* p, u##bits expected, u##bits v, int order, int failure) { \
        __tsan_atomic##bits##_compare_exchange_strong(p, &expected, v, order, failure);                                \
        return expected;                                                                                               \
    }

extern "C" {
ATOMIC_HOOKS(8)
ATOMIC_HOOKS(16)
ATOMIC_HOOKS(32)
ATOMIC_HOOKS(64)
void __tsan_atomic_thread_fence(int order) {
    if (order >= 3) take_fence(state.current, true);
}
void __tsan_atomic_signal_fence(int) {}
}
