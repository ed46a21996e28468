// How a fault leaves the kernel: who did it, where, and a switch to the scheduler that never comes back.
#pragma once

static u64 relative(const void* pc) {
    return (u64)((uintptr_t)pc - (uintptr_t)__ehdr_start);
}

static void describe(Actor& actor, const Fiber* fiber, const void* pc, u32 flags, const char* doing) {
    actor.block = fiber->gid / state.threads;
    actor.thread = fiber->number;
    actor.flags = flags;
    actor.doing = doing;
    actor.frame_count = 0;
    if (pc)
        actor.frames[actor.frame_count++] = relative(pc);
    u32 depth = fiber->depth < MAX_CALLS ? fiber->depth : (u32)MAX_CALLS;
    // calls[0] is the trampoline's.
    for (u32 i = depth; i > 1 && actor.frame_count < MAX_FRAMES; --i)
        actor.frames[actor.frame_count++] = relative(fiber->calls[i - 1]);
}

// From a kernel thread this does not return; from the scheduler it does.
static void stop(Fault fault) {
    if (state.deferred_slot && fault != FAULT_RACE) {  // what went wrong first: the rest may be its consequence
        state.launch->report = state.deferred;
        fault = FAULT_UNINITIALIZED;
    }
    state.fault = fault;
    state.launch->report.fault = fault;
    if (state.current)
        leave_to_main();
}

static void set_text(const char* text) {
    char* to = state.launch->report.text;
    size_t length = strlen(text), room = sizeof(state.launch->report.text) - 1;
    memcpy(to, text, length < room ? length : room);
    to[length < room ? length : room] = 0;
}

static void fault_in_thread(Fault fault, const void* pc, const char* text) {
    Report& report = state.launch->report;
    describe(report.actor, state.current, pc, 0, nullptr);
    if (text)
        set_text(text);
    stop(fault);
}
