// Where threads wait, whether two of them wait at one place in the source, and the report if they should and do not.
#pragma once

// The operation codes of prelude_warp.h.
enum Operation : u32 {
    SHFL = 0,
    SHFL_UP,
    SHFL_DOWN,
    SHFL_XOR,
    SYNCWARP,
    BALLOT,
    ANY,
    ALL,
    MATCH_ANY,
    MATCH_ALL,
    ADD_I,
    MIN_I,
    MAX_I,
    ADD_U,
    MIN_U,
    MAX_U,
    AND_U,
    OR_U,
    XOR_U,
    ACTIVEMASK,
    OPERATION_COUNT,
    LOCKSTEP = 64,
};

static const char* operation_name(u32 op) {
    static const char* const masked[] = {
        "__shfl_sync()",       "__shfl_up_sync()",    "__shfl_down_sync()",  "__shfl_xor_sync()",
        "__syncwarp()",        "__ballot_sync()",     "__any_sync()",        "__all_sync()",
        "__match_any_sync()",  "__match_all_sync()",  "__reduce_add_sync()", "__reduce_min_sync()",
        "__reduce_max_sync()", "__reduce_add_sync()", "__reduce_min_sync()", "__reduce_max_sync()",
        "__reduce_and_sync()", "__reduce_or_sync()",  "__reduce_xor_sync()", "__activemask()"};
    static const char* const lockstep[] = {"__shfl()", "__shfl_up()", "__shfl_down()", "__shfl_xor()",
                                           "",         "__ballot()",  "__any()",       "__all()"};
    u32 code = op & ~(u32)LOCKSTEP;
    return op & LOCKSTEP && code <= ALL ? lockstep[code] : masked[code];
}

static inline bool same_calls(const Fiber* a, const Fiber* b) {
    return a->pc == b->pc && a->depth == b->depth &&
           (a->depth <= 1 ||
            !memcmp(a->calls + 1, b->calls + 1, (a->depth < MAX_CALLS ? a->depth - 1 : MAX_CALLS - 1) * sizeof(void*)));
}

static i32 compare_in_source(const Fiber* a, const Fiber* b) {
    if (same_calls(a, b))
        return 0;
    static Actor one, two;
    describe(one, a, a->pc, 0, nullptr);
    describe(two, b, b->pc, 0, nullptr);
    return state.launch->compare_sites(&one, &two);
}

static const char* doing(const Fiber* f) {
    static const char* const barriers[] = {"__syncthreads()", "__syncthreads_count()", "__syncthreads_and()",
                                           "__syncthreads_or()", "__simt_cluster_barrier()"};
    if (f->state == AT_BARRIER)
        return barriers[f->op];
    if (f->state == IN_OPERATION)
        return operation_name(f->op);
    return f->state == EXITED ? "returned" : "runs";
}

static void divergence(const Fiber* f, const Fiber* other, const char* text) {
    Report& report = state.launch->report;
    describe(report.actor, f, f->pc, 0, doing(f));
    if (other) {
        report.has_other = 1;
        describe(report.other, other, other->state == EXITED ? nullptr : other->pc, 0, doing(other));
    }
    set_text(text);
    stop(FAULT_DIVERGENCE);
}
