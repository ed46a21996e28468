// The atomics, fences and other small services that a kernel text calls by CUDA's names.
#pragma once

// A thread that polls gives way now and then: whom it waits for may not have run yet.
static void polled(Fiber* f) {
#ifdef SIMT_CHECKED
    if (++f->spin_count % READS_PER_TURN == 0) {
        f->spin_count = READS_PER_TURN;  // a poll comes back to the same state: see hang.h
        sleep(f);
    }
#else
    if (--state.budget == 0)
        sleep(f);
#endif
}

template <class U, class S, class F>
static U modified(u32 op, U old, U value, U compare) {
    switch (op) {
        case 0:
            return old + value;
        case 1:
            return (S)old < (S)value ? old : value;
        case 2:
            return (S)old > (S)value ? old : value;
        case 3:
            return old < value ? old : value;
        case 4:
            return old > value ? old : value;
        case 5:
            return old & value;
        case 6:
            return old | value;
        case 7:
            return old ^ value;
        case 8:
            return value;
        case 9:
            return old == compare ? value : old;
        case 10:
            return old >= value ? 0 : old + 1;
        case 11:
            return old == 0 || old > value ? value : old - 1;
        default: {
            F a, b;
            memcpy(&a, &old, sizeof a);
            memcpy(&b, &value, sizeof b);
            a += b;
            memcpy(&old, &a, sizeof a);
            return old;
        }
    }
}

// Launches are serialised and the timer does not interrupt this, so plain loads and stores are atomic.
template <class U, class S, class F>
static U atomic(u32 op, void* address, U value, U compare, void* pc) {
    Fiber* f = state.current;
    f->pc = pc;
#ifdef SIMT_CHECKED
    if ((uintptr_t)address % sizeof(U))
        fault_at(FAULT_MISALIGNED, nullptr, (uintptr_t)address, sizeof(U), WRITE | ATOMIC, pc);
    u32 polls = f->spin_count;
    Region* region = op == 8 ? check<WRITE | ATOMIC | OVERWRITE>((uintptr_t)address, sizeof(U), pc)
                             : check<WRITE | ATOMIC>((uintptr_t)address, sizeof(U), pc);
#endif
    U old = *(U*)address, fresh = modified<U, S, F>(op, old, value, compare);
    *(U*)address = fresh;
#ifdef SIMT_CHECKED
    if (region) {
        Place place = place_of(region, (uintptr_t)address);
        acquire(f, place);
        if (op != 9 || old == compare)
            publish(f, place, true);
    }
    if (fresh != old)
        return old;
    f->spin_count = polls;  // nothing changed: it may be polling
    --state.writes;
#endif
    polled(f);
    return old;
}

struct NoFloat {
    char pad;
    void operator+=(NoFloat) {
    }
};

extern "C" {
unsigned simt_atomic32(unsigned op, void* address, unsigned value, unsigned compare) noexcept {
    return atomic<u32, i32, float>(op, address, value, compare, __builtin_return_address(0));
}
unsigned long long simt_atomic64(unsigned op,
                                 void* address,
                                 unsigned long long value,
                                 unsigned long long compare) noexcept {
    return atomic<u64, i64, double>(op, address, value, compare, __builtin_return_address(0));
}
unsigned short simt_atomic16(unsigned op, void* address, unsigned short value, unsigned short compare) noexcept {
    return atomic<u16, int16_t, NoFloat>(op, address, value, compare, __builtin_return_address(0));
}

void simt_fence(int scope) noexcept {
#ifdef SIMT_CHECKED
    take_fence(state.current, scope != 0);
#else
    (void)scope;
#endif
}

void simt_pause() noexcept {
    state.current->pc = __builtin_return_address(0);
    sleep(state.current);
}

void simt_trap(const char* what, const char* file, int line) noexcept {
    state.launch->report.file = file;
    state.launch->report.line = (u32)line;
    fault_in_thread(FAULT_TRAP, __builtin_return_address(0), what);
    __builtin_unreachable();
}

// What <cassert> calls.
void __assert_fail(const char* what, const char* file, unsigned line, const char*) noexcept {
    state.launch->report.file = file;
    state.launch->report.line = line;
    fault_in_thread(FAULT_TRAP, __builtin_return_address(0), what);
    __builtin_unreachable();
}

long long simt_clock() noexcept {
    ++state.writes;  // the time may end a poll, as a write may
    return clock_ns(CLOCK_MONOTONIC);
}

int simt_printf(const char* format, ...) noexcept {
    ++state.busy;
    va_list arguments;
    va_start(arguments, format);
    int count = vdprintf(1, format, arguments);
    va_end(arguments);
    --state.busy;
    return count;
}

// A copy outside a kernel's body is the trampoline unpacking a large argument.
void* simt_memcpy(void* to, const void* from, size_t size) noexcept {
#ifdef SIMT_CHECKED
    if (size && state.current && state.current->depth) {
        check<READ>((uintptr_t)from, size, __builtin_return_address(0));
        check<WRITE>((uintptr_t)to, size, __builtin_return_address(0));
    }
#endif
    return memcpy(to, from, size);
}

void* simt_memmove(void* to, const void* from, size_t size) noexcept {
#ifdef SIMT_CHECKED
    if (size && state.current && state.current->depth) {
        check<READ>((uintptr_t)from, size, __builtin_return_address(0));
        check<WRITE>((uintptr_t)to, size, __builtin_return_address(0));
    }
#endif
    return memmove(to, from, size);
}

void* simt_memset(void* to, int value, size_t size) noexcept {
#ifdef SIMT_CHECKED
    if (size && state.current && state.current->depth)
        check<WRITE>((uintptr_t)to, size, __builtin_return_address(0));
#endif
    return memset(to, value, size);
}
}
