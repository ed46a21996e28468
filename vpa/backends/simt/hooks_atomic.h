// The entry points of C++ atomics under -fsanitize=thread: HIP code spells flags as __atomic_* with a memory order.
#pragma once

static Region* atomic_enter(Fiber* f, void* p, u64 size, int order, bool write, void* pc) {
    f->pc = pc;
    if (order >= 3)
        take_fence(f, true);  // release, acq_rel, seq_cst
    return write ? check<WRITE | ATOMIC>((uintptr_t)p, size, pc) : check<READ | ATOMIC>((uintptr_t)p, size, pc);
}

static bool in_shared(const Region* r) {
    return r && (r->space == SPACE_STATIC_SHARED || r->space == SPACE_DYNAMIC_SHARED);
}

#define ATOMIC_RMW(bits, name, expression)                                            \
    u##bits __tsan_atomic##bits##_##name(volatile u##bits* p, u##bits v, int order) { \
        Fiber* f = state.current;                                                     \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order, true, CALLER);        \
        u##bits old = *p;                                                             \
        *p = (u##bits)(expression);                                                   \
        acquire(f, (uintptr_t)p, in_shared(r));                                       \
        publish(f, (uintptr_t)p, in_shared(r), true);                                 \
        return old;                                                                   \
    }
#define ATOMIC_HOOKS(bits)                                                                                          \
    u##bits __tsan_atomic##bits##_load(const volatile u##bits* p, int order) {                                      \
        Fiber* f = state.current;                                                                                   \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order == 5 ? 5 : 0, false, CALLER);                        \
        polled(f);                                                                                                  \
        acquire(f, (uintptr_t)p, in_shared(r));                                                                     \
        return *p;                                                                                                  \
    }                                                                                                               \
    void __tsan_atomic##bits##_store(volatile u##bits* p, u##bits v, int order) {                                   \
        Fiber* f = state.current;                                                                                   \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order, true, CALLER);                                      \
        *p = v;                                                                                                     \
        publish(f, (uintptr_t)p, in_shared(r), false);                                                              \
    }                                                                                                               \
    ATOMIC_RMW(bits, exchange, v)                                                                                   \
    ATOMIC_RMW(bits, fetch_add, old + v)                                                                            \
    ATOMIC_RMW(bits, fetch_sub, old - v)                                                                            \
    ATOMIC_RMW(bits, fetch_and, old& v)                                                                             \
    ATOMIC_RMW(bits, fetch_or, old | v)                                                                             \
    ATOMIC_RMW(bits, fetch_xor, old ^ v)                                                                            \
    ATOMIC_RMW(bits, fetch_nand, ~(old & v))                                                                        \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile u##bits* p, u##bits* expected, u##bits v, int order, \
                                                      int) {                                                        \
        Fiber* f = state.current;                                                                                   \
        Region* r = atomic_enter(f, (void*)p, sizeof *p, order, true, CALLER);                                      \
        u##bits old = *p;                                                                                           \
        bool equal = old == *expected;                                                                              \
        if (equal)                                                                                                  \
            *p = v;                                                                                                 \
        else                                                                                                        \
            *expected = old;                                                                                        \
        acquire(f, (uintptr_t)p, in_shared(r));                                                                     \
        if (equal)                                                                                                  \
            publish(f, (uintptr_t)p, in_shared(r), true);                                                           \
        else                                                                                                        \
            polled(f);                                                                                              \
        return equal;                                                                                               \
    }                                                                                                               \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile u##bits* p, u##bits* expected, u##bits v, int order,   \
                                                    int failure) {                                                  \
        return __tsan_atomic##bits##_compare_exchange_strong(p, expected, v, order, failure);                       \
    }                                                                                                               \
    u##bits __tsan_atomic##bits##_compare_exchange_val(volatile u##bits* p, u##bits expected, u##bits v, int order, \
                                                       int failure) {                                               \
        __tsan_atomic##bits##_compare_exchange_strong(p, &expected, v, order, failure);                             \
        return expected;                                                                                            \
    }

extern "C" {
ATOMIC_HOOKS(8)
ATOMIC_HOOKS(16)
ATOMIC_HOOKS(32)
ATOMIC_HOOKS(64)
void __tsan_atomic_thread_fence(int order) {
    if (order >= 3)
        take_fence(state.current, true);
}
void __tsan_atomic_signal_fence(int) {
}
}
