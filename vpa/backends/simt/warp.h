// Warp operations: lanes that call one wait until the others have come, then the last to come computes every lane's
// result.
//
// With a mask (CUDA) an operation completes when all lanes that the mask names have called it with the same mask from
// the same place in the source. Without (HIP) the lanes that are active take part: those of the warp's live lanes that
// wait at the same place once no lane of the warp can run.
#pragma once

// The lane that a shuffle reads from; its own where CUDA and HIP say so.
static i32 source_lane(u32 op, i32 lane, i32 argument, i32 width) {
    i32 first = lane & ~(width - 1), last = first + width - 1;
    switch (op) {
        case SHFL:
            return first | (argument & (width - 1));
        case SHFL_UP:
            return argument > lane - first || argument < 0 ? lane : lane - argument;
        case SHFL_DOWN:
            return argument > last - lane || argument < 0 ? lane : lane + argument;
        case SHFL_XOR:
            return (lane ^ argument) > last || (lane ^ argument) < 0 ? lane : lane ^ argument;
        default:
            return lane;
    }
}

static u64 combine(u32 op, u64 a, u64 b) {
    i32 i = (i32)a, j = (i32)b;
    u32 u = (u32)a, v = (u32)b;
    switch (op) {
        case ADD_I:
        case ADD_U:
            return u + v;
        case MIN_I:
            return (u32)(i < j ? i : j);
        case MAX_I:
            return (u32)(i > j ? i : j);
        case MIN_U:
            return u < v ? u : v;
        case MAX_U:
            return u > v ? u : v;
        case AND_U:
            return u & v;
        case OR_U:
            return u | v;
        default:
            return u ^ v;
    }
}

static void complete_operation(Warp* w, u64 group) {
    Fiber* fibers = w->fibers;
    u32 op = fibers[lowest(group)].op & ~(u32)LOCKSTEP;
    u64 votes = 0, total = fibers[lowest(group)].value;
    if (op <= SHFL_XOR) {
        for (u64 rest = group; rest; rest &= rest - 1) {
            Fiber* f = &fibers[lowest(rest)];
            if (!(group >> f->source & 1)) {
                Fiber* other = w->exists >> f->source & 1 ? &fibers[f->source] : nullptr;
                return divergence(f, other, other ? "inactive" : "absent");
            }
            f->result = fibers[f->source].value;
            f->state = RUNNING;
        }
    } else if (op == MATCH_ANY || op == MATCH_ALL) {
        for (u64 rest = group; rest; rest &= rest - 1) {
            Fiber* f = &fibers[lowest(rest)];
            f->result = 0;
            for (u64 all = group; all; all &= all - 1)
                if (fibers[lowest(all)].value == f->value)
                    f->result |= bit(lowest(all));
            if (op == MATCH_ALL && f->result != group)
                f->result = 0;
        }
    } else {
        for (u64 rest = group; rest; rest &= rest - 1)
            if (fibers[lowest(rest)].value)
                votes |= bit(lowest(rest));
        if (op >= ADD_I && op <= XOR_U)
            for (u64 rest = group & (group - 1); rest; rest &= rest - 1)
                total = combine(op, total, fibers[lowest(rest)].value);
        u64 result = op == BALLOT       ? votes
                     : op == ANY        ? votes != 0
                     : op == ALL        ? votes == group
                     : op == ACTIVEMASK ? group
                                        : total;
        for (u64 rest = group; rest; rest &= rest - 1)
            fibers[lowest(rest)].result = result;
    }
    w->waiting &= ~group;
    w->ready |= group;
    for (u64 rest = group; rest; rest &= rest - 1)
        fibers[lowest(rest)].state = RUNNING;
#ifdef SIMT_CHECKED
    if (op == SYNCWARP || (state.launch->shuffles_order_memory && op != ACTIVEMASK))
        clock_warp(w, group);
#endif
    progress(w->slot);
}

// --- With a mask ---

enum Match { INCOMPLETE, COMPLETE, UNCERTAIN };

// The lanes that must take part.
static inline u64 mask_group(const Fiber* f) {
    return f->mask & f->warp->exists & (f->op == SYNCWARP ? f->warp->live : ~(u64)0);
}

static inline Match match_mask(const Fiber* f) {
    const Warp* w = f->warp;
    u64 need = mask_group(f);
    if ((w->waiting & need) != need)
        return INCOMPLETE;
    if (w->uniform)
        return COMPLETE;
    Match match = COMPLETE;
    for (u64 rest = need; rest; rest &= rest - 1) {
        const Fiber* other = &w->fibers[lowest(rest)];
        if (other->op != f->op || other->mask != f->mask)
            return INCOMPLETE;
        if (f->op != SYNCWARP && !same_calls(f, other))
            match = UNCERTAIN;
    }
    return match;
}

// The lanes called from several return addresses: one call that the compiler duplicated, or several calls?
static void settle_uncertain(Fiber* f) {
    for (u64 rest = mask_group(f); rest; rest &= rest - 1) {
        Fiber* other = &f->warp->fibers[lowest(rest)];
        if (compare_in_source(f, other))
            return divergence(f, other, "call");
    }
    complete_operation(f->warp, mask_group(f));
}

// --- Without a mask ---

static void settle_lockstep(Warp* w) {
    // The group that stands first in the source goes first: an inner branch or loop before the place where lanes meet
    // again. If it would read from a lane outside it, the next group gets the chance to catch up with it.
    u64 left = 0;
    for (u64 rest = w->waiting; rest; rest &= rest - 1)
        if (w->fibers[lowest(rest)].op & LOCKSTEP)
            left |= bit(lowest(rest));
    u64 first_group = 0;
    while (left) {
        Fiber* best = &w->fibers[lowest(left)];
        for (u64 rest = left; rest; rest &= rest - 1)
            if (compare_in_source(&w->fibers[lowest(rest)], best) < 0)
                best = &w->fibers[lowest(rest)];
        u64 group = 0;
        bool closed = true;
        for (u64 rest = left; rest; rest &= rest - 1) {
            Fiber* f = &w->fibers[lowest(rest)];
            if (f->op == best->op && !compare_in_source(f, best))
                group |= bit(lowest(rest));
        }
        for (u64 rest = group; rest; rest &= rest - 1)
            closed &= group >> w->fibers[lowest(rest)].source & 1;
        if (closed)
            return complete_operation(w, group);
        if (!first_group)
            first_group = group;
        left &= ~group;
    }
    complete_operation(w, first_group);  // reports the lane that reads from an inactive one
}

static bool warp_settle(Slot* slot) {
    for (u32 i = 0; i < slot->warp_count; ++i) {
        Warp* w = &slot->warps[i];
        if (w->ready || (w->asleep && slot->idle_rounds < 2))
            continue;
        for (u64 rest = w->waiting; rest; rest &= rest - 1)
            if (w->fibers[lowest(rest)].op & LOCKSTEP) {
                settle_lockstep(w);
                return true;
            }
    }
    return false;
}

// --- Calls ---

// A masked operation that exchanges data cannot complete without this lane. A __syncwarp() can: CUDA lets it name
// returned lanes.
static void warp_lane_exits(Fiber* leaving) {
    Warp* w = leaving->warp;
    for (u64 rest = w->waiting; rest; rest &= rest - 1) {
        Fiber* f = &w->fibers[lowest(rest)];
        if (f->op & LOCKSTEP || !(f->mask >> leaving->lane & 1))
            continue;
        if (f->op != SYNCWARP)
            return divergence(f, leaving, "mask");
        if (match_mask(f) == COMPLETE)
            return complete_operation(w, mask_group(f));
    }
}

extern "C" unsigned long long simt_warp(
    unsigned op, unsigned long long mask, unsigned long long value, int argument, int width) noexcept {
    Fiber* f = state.current;
    Warp* w = f->warp;
    f->pc = __builtin_return_address(0);
    f->op = op;
    f->mask = mask;
    f->value = value;
    f->state = IN_OPERATION;
    u32 code = op & ~(u32)LOCKSTEP;
    if (code <= SHFL_XOR) {
        if (width <= 0 || (u32)width > state.launch->warp_size || width & (width - 1))
            divergence(f, nullptr, "width");
        f->source = source_lane(code, (i32)f->lane, argument, width);
    } else {
        f->source = (i32)f->lane;
    }
    if (!w->waiting) {
        w->leader = f;
        w->uniform = true;
    } else if (w->leader->op != op || w->leader->mask != mask || !same_calls(f, w->leader)) {
        w->uniform = false;
    }
    w->waiting |= bit(f->lane);
    w->ready &= ~bit(f->lane);
    if (op & LOCKSTEP) {
        if (w->waiting == w->live && w->uniform)
            complete_operation(w, w->live);
        suspend(f, w);
        return f->result;
    }
    if (!(mask >> f->lane & 1))
        divergence(f, nullptr, "own");
    if (op != SYNCWARP && mask & w->exists & ~w->live)
        divergence(f, &w->fibers[lowest(mask & w->exists & ~w->live)], "mask");
    Match match = match_mask(f);
    if (match == COMPLETE)
        complete_operation(w, mask_group(f));
    if (match == UNCERTAIN)
        on_main(f, settle_uncertain);
    else
        suspend(f, w);
    return f->result;
}
