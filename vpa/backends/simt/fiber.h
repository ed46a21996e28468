// A context switch between threads of a kernel: their own few instructions on x86-64 and AArch64, ucontext elsewhere.
#pragma once

// CUDA allows 512 KiB of local memory; kernels use a few hundred bytes. Below each stack lies a page that nobody may
// touch.
#if defined(__x86_64__)
enum { GUARD_BYTES = 4096 };
#else
enum { GUARD_BYTES = 65536 };  // the largest page of AArch64
#endif
enum { STACK_BYTES = 128 * 1024 + GUARD_BYTES };

// Tops at one page offset would compete for the same cache sets.
static char* stack_top(char* bottom, u32 number) {
    return bottom + STACK_BYTES - number * 5 % 64 * 64;
}

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(SIMT_UCONTEXT)
enum : bool { STATE_ON_STACK = true };  // a switch leaves the registers on the stack
#else
enum : bool { STATE_ON_STACK = false };
#endif

static void fiber_main();

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
// Callee-saved registers only: a switch is a call. The floating-point control words are the same for every thread.
asm(R"(
    .text
    .p2align 4
    .local simt_switch
    .type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size simt_switch, . - simt_switch
)");
extern "C" void simt_switch(void** from, void* to);

static void* fiber_prepare(char*, char* top) {
    void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15);
    *--sp = nullptr;  // where a return address would lie: the stack is aligned as after a call
    *--sp = (void*)fiber_main;
    for (int i = 0; i < 6; ++i)
        *--sp = nullptr;
    return sp;
}

#elif defined(__aarch64__) && !defined(SIMT_UCONTEXT)
asm(R"(
    .text
    .p2align 4
    .local simt_switch
    .type simt_switch, %function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size simt_switch, . - simt_switch
)");
extern "C" void simt_switch(void** from, void* to);

static void* fiber_prepare(char*, char* top) {
    u64* sp = (u64*)((uintptr_t)top & ~(uintptr_t)15) - 20;
    memset(sp, 0, 160);
    sp[11] = (u64)(uintptr_t)fiber_main;  // x30
    return sp;
}

#else
static ucontext_t main_ucontext;
static void simt_switch(void** from, void* to) {
    // A fiber's context lies at the bottom of its own stack; the scheduler's is the static one.
    ucontext_t* self = from == &state.main_context ? &main_ucontext : (ucontext_t*)*from;
    *from = self;
    swapcontext(self, (ucontext_t*)to);
}
static void* fiber_prepare(char* bottom, char* top) {
    ucontext_t* context = (ucontext_t*)(((uintptr_t)bottom + 63) & ~(uintptr_t)63);
    getcontext(context);
    context->uc_stack.ss_sp = (char*)(context + 1);
    context->uc_stack.ss_size = (size_t)(top - (char*)(context + 1)) & ~(size_t)15;
    context->uc_link = nullptr;
    makecontext(context, fiber_main, 0);
    return context;
}
#endif
