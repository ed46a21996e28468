// The timer that keeps a launch from hanging, and crashes of the kernel turned into reports.
//
// The timer strikes every few milliseconds and asks the running thread to give way. In checked mode every memory access
// is an opportunity; a thread that lets 5 ms of processor time pass without one cannot be inside the runtime, so it is
// safe to switch away from it right in the handler (and to come back later: its registers lie on its own stack).
#pragma once

#ifndef sigev_notify_thread_id  // musl has the name, glibc only the field
#define sigev_notify_thread_id _sigev_un._tid
#endif

enum { TICK_NS = 20000000, SHORT_TICK_NS = 2000000, SIGNAL_STACK_BYTES = 65536 };
static const int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction old_actions[4], old_tick;
static stack_t old_stack;
static int timer_id = -1;
static i64 patience;

static bool ours() {
    return state.current && (u64)pthread_self() == state.owner;
}

static void set_timer(i64 ns) {
    itimerspec when = {{0, ns}, {0, ns}};
    syscall(SYS_timer_settime, timer_id, 0, &when, nullptr);
}

static uintptr_t program_counter(void* context) {
    ucontext_t* u = (ucontext_t*)context;
#if defined(__x86_64__)
    return (uintptr_t)u->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (uintptr_t)u->uc_mcontext.pc;
#else
    (void)u;
    return 0;
#endif
}

static void on_tick(int, siginfo_t*, void* context) {
    if ((u64)pthread_self() != state.owner)
        return;
    i64 now = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    if (!state.tick) {
        state.tick_time = now;
        state.tick = 1;
        return;
    }
    if (!state.current || state.busy || now - state.tick_time < patience)
        return;
#ifndef SIMT_CHECKED
    // Likely a poll, which this mode cannot see: the timer may have to switch between hundreds of threads.
    if (patience > SHORT_TICK_NS / 2) {
        patience = SHORT_TICK_NS / 2;
        set_timer(SHORT_TICK_NS);
    }
#endif
    state.current->pc = (void*)(program_counter(context) + 1);
    sleep(state.current);
}

static void on_crash(int signal, siginfo_t* info, void* context) {
    if (!ours()) {  // not the kernel's: as if we had not been here
        for (int i = 0; i < 4; ++i)
            if (crash_signals[i] == signal)
                sigaction(signal, &old_actions[i], nullptr);
        return;
    }
    Fiber* f = state.current;
    uintptr_t address = (uintptr_t)info->si_addr, pc = program_counter(context);
    Report& report = state.launch->report;
    Fault fault = FAULT_CRASH;
    if (signal == SIGFPE) {
        fault = FAULT_ARITHMETIC;
        set_text("integer division by zero, or of the smallest number by -1");
    } else if (signal == SIGILL) {
        fault = FAULT_TRAP;
        set_text("an illegal instruction: __builtin_trap(), or the end of a function that must return a value");
    } else if (address - f->stack_low < GUARD_BYTES) {
        fault = FAULT_STACK;
    } else if (signal == SIGSEGV && info->si_code > 0 && info->si_code < 0x80 && address < 0x400000) {
        fault = FAULT_NULL;
    }
    report.address = address;
    // The report takes return addresses, which lie behind the instruction.
    describe(report.actor, f, pc ? (void*)(pc + 1) : nullptr, 0, nullptr);
    stop(fault);
}

static void signals_on() {
    state.owner = (u64)pthread_self();
    patience = 5000000;
    Pool* pool = state.pool;
    if (!pool->signal_stack)
        pool->signal_stack = (char*)malloc(SIGNAL_STACK_BYTES);
    stack_t stack = {};
    stack.ss_sp = pool->signal_stack;
    stack.ss_size = SIGNAL_STACK_BYTES;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int i = 0; i < 4; ++i)
        sigaction(crash_signals[i], &action, &old_actions[i]);
    action.sa_sigaction = on_tick;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    sigaction(SIGURG, &action, &old_tick);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGURG;
    event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
    if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer_id) == 0)
        set_timer(TICK_NS);
    else
        timer_id = -1;
}

static void signals_off() {
    if (timer_id >= 0)
        syscall(SYS_timer_delete, timer_id);
    timer_id = -1;
    for (int i = 0; i < 4; ++i)
        sigaction(crash_signals[i], &old_actions[i], nullptr);
    sigaction(SIGURG, &old_tick, nullptr);
    sigaltstack(&old_stack, nullptr);
}
