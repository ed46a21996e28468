// The entry points of C++ atomics under -fsanitize=thread: HIP code spells flags as __atomic_* with a memory order.
#pragma once

// How an access reads and writes: FLAGS of check(). Without a region (a thread's own variable) nothing is published.
template <u32 FLAGS>
static Region* atomic_enter(Fiber* f, void* p, u64 size, int order, void* pc) {
    f->pc = pc;
    if (order >= 3)
        take_fence(f, true);  // release, acq_rel, seq_cst
    return check<ATOMIC | FLAGS>((uintptr_t)p, size, pc);
}

static void atomic_acquire(Fiber* f, Region* r, void* p) {
    if (r)
        acquire(f, place_of(r, (uintptr_t)p));
}

static void atomic_publish(Fiber* f, Region* r, void* p, bool read_modify_write) {
    if (r)
        publish(f, place_of(r, (uintptr_t)p), read_modify_write);
}

#define ATOMIC_RMW(bits, name, flags, expression)                                     \
    u##bits __tsan_atomic##bits##_##name(volatile u##bits* p, u##bits v, int order) { \
        Fiber* f = state.current;                                                     \
        Region* r = atomic_enter<flags>(f, (void*)p, sizeof *p, order, CALLER);       \
        u##bits old = *p;                                                             \
        *p = (u##bits)(expression);                                                   \
        atomic_acquire(f, r, (void*)p);                                               \
        atomic_publish(f, r, (void*)p, true);                                         \
        return old;                                                                   \
    }
#define ATOMIC_HOOKS(bits)                                                                                          \
    u##bits __tsan_atomic##bits##_load(const volatile u##bits* p, int order) {                                      \
        Fiber* f = state.current;                                                                                   \
        Region* r = atomic_enter<READ>(f, (void*)p, sizeof *p, order == 5 ? 5 : 0, CALLER);                         \
        polled(f);                                                                                                  \
        atomic_acquire(f, r, (void*)p);                                                                             \
        return *p;                                                                                                  \
    }                                                                                                               \
    void __tsan_atomic##bits##_store(volatile u##bits* p, u##bits v, int order) {                                   \
        Fiber* f = state.current;                                                                                   \
        Region* r = atomic_enter<WRITE | OVERWRITE>(f, (void*)p, sizeof *p, order, CALLER);                         \
        *p = v;                                                                                                     \
        atomic_publish(f, r, (void*)p, false);                                                                      \
    }                                                                                                               \
    ATOMIC_RMW(bits, exchange, WRITE | OVERWRITE, v)                                                                \
    ATOMIC_RMW(bits, fetch_add, WRITE, old + v)                                                                     \
    ATOMIC_RMW(bits, fetch_sub, WRITE, old - v)                                                                     \
    ATOMIC_RMW(bits, fetch_and, WRITE, old& v)                                                                      \
    ATOMIC_RMW(bits, fetch_or, WRITE, old | v)                                                                      \
    ATOMIC_RMW(bits, fetch_xor, WRITE, old ^ v)                                                                     \
    ATOMIC_RMW(bits, fetch_nand, WRITE, ~(old & v))                                                                 \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile u##bits* p, u##bits* expected, u##bits v, int order, \
                                                      int) {                                                        \
        Fiber* f = state.current;                                                                                   \
        u32 polls = f->spin_count;                                                                                  \
        Region* r = atomic_enter<WRITE>(f, (void*)p, sizeof *p, order, CALLER);                                     \
        u##bits old = *p;                                                                                           \
        bool equal = old == *expected;                                                                              \
        if (equal)                                                                                                  \
            *p = v;                                                                                                 \
        else                                                                                                        \
            *expected = old;                                                                                        \
        atomic_acquire(f, r, (void*)p);                                                                             \
        if (equal)                                                                                                  \
            atomic_publish(f, r, (void*)p, true);                                                                   \
        else {                                                                                                      \
            f->spin_count = polls;                                                                                  \
            --state.writes;                                                                                         \
            polled(f);                                                                                              \
        }                                                                                                           \
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
