// Shuffles, votes and warp reductions: CUDA's `_sync` spelling and HIP's spelling without a mask.
#pragma once

// Operation codes, in the order of divergence.h. LOCKSTEP marks the forms of HIP: the lanes that are active take part.
enum simt_op : unsigned {
    SIMT_SHFL = 0,
    SIMT_SHFL_UP,
    SIMT_SHFL_DOWN,
    SIMT_SHFL_XOR,
    SIMT_SYNCWARP,
    SIMT_BALLOT,
    SIMT_ANY,
    SIMT_ALL,
    SIMT_MATCH_ANY,
    SIMT_MATCH_ALL,
    SIMT_ADD_I,
    SIMT_MIN_I,
    SIMT_MAX_I,
    SIMT_ADD_U,
    SIMT_MIN_U,
    SIMT_MAX_U,
    SIMT_AND_U,
    SIMT_OR_U,
    SIMT_XOR_U,
    SIMT_ACTIVEMASK,
    SIMT_LOCKSTEP = 64,
};

SIMT_INLINE void __syncwarp(simt_mask mask = ~(simt_mask)0) {
    simt_warp(SIMT_SYNCWARP, mask, 0, 0, warpSize);
}
SIMT_INLINE simt_mask __activemask() {
    return (simt_mask)simt_warp(SIMT_ACTIVEMASK | SIMT_LOCKSTEP, 0, 0, 0, warpSize);
}

template <class To, class From>
SIMT_INLINE To simt_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    return __builtin_bit_cast(To, value);
}

// One set of overloads for each type that CUDA shuffles; smaller integers promote to int as they do there.
#define SIMT_SHUFFLES(T, Bits)                                                                             \
    SIMT_INLINE T simt_exchange(unsigned op, simt_mask mask, T value, int argument, int width) {           \
        return simt_bits<T>((Bits)simt_warp(op, mask, simt_bits<Bits>(value), argument, width));           \
    }                                                                                                      \
    SIMT_INLINE T __shfl_sync(simt_mask mask, T value, int lane, int width = warpSize) {                   \
        return simt_exchange(SIMT_SHFL, mask, value, lane, width);                                         \
    }                                                                                                      \
    SIMT_INLINE T __shfl_up_sync(simt_mask mask, T value, unsigned delta, int width = warpSize) {          \
        return simt_exchange(SIMT_SHFL_UP, mask, value, (int)delta, width);                                \
    }                                                                                                      \
    SIMT_INLINE T __shfl_down_sync(simt_mask mask, T value, unsigned delta, int width = warpSize) {        \
        return simt_exchange(SIMT_SHFL_DOWN, mask, value, (int)delta, width);                              \
    }                                                                                                      \
    SIMT_INLINE T __shfl_xor_sync(simt_mask mask, T value, int lane_mask, int width = warpSize) {          \
        return simt_exchange(SIMT_SHFL_XOR, mask, value, lane_mask, width);                                \
    }                                                                                                      \
    SIMT_INLINE T __shfl(T value, int lane, int width = warpSize) {                                        \
        return simt_exchange(SIMT_SHFL | SIMT_LOCKSTEP, 0, value, lane, width);                            \
    }                                                                                                      \
    SIMT_INLINE T __shfl_up(T value, unsigned delta, int width = warpSize) {                               \
        return simt_exchange(SIMT_SHFL_UP | SIMT_LOCKSTEP, 0, value, (int)delta, width);                   \
    }                                                                                                      \
    SIMT_INLINE T __shfl_down(T value, unsigned delta, int width = warpSize) {                             \
        return simt_exchange(SIMT_SHFL_DOWN | SIMT_LOCKSTEP, 0, value, (int)delta, width);                 \
    }                                                                                                      \
    SIMT_INLINE T __shfl_xor(T value, int lane_mask, int width = warpSize) {                               \
        return simt_exchange(SIMT_SHFL_XOR | SIMT_LOCKSTEP, 0, value, lane_mask, width);                   \
    }                                                                                                      \
    SIMT_INLINE simt_mask __match_any_sync(simt_mask mask, T value) {                                      \
        return (simt_mask)simt_warp(SIMT_MATCH_ANY, mask, simt_bits<Bits>(value), 0, warpSize);            \
    }                                                                                                      \
    SIMT_INLINE simt_mask __match_all_sync(simt_mask mask, T value, int* equal) {                          \
        simt_mask lanes = (simt_mask)simt_warp(SIMT_MATCH_ALL, mask, simt_bits<Bits>(value), 0, warpSize); \
        *equal = lanes != 0;                                                                               \
        return lanes;                                                                                      \
    }
SIMT_SHUFFLES(int, unsigned)
SIMT_SHUFFLES(unsigned, unsigned)
SIMT_SHUFFLES(long, unsigned long)
SIMT_SHUFFLES(unsigned long, unsigned long)
SIMT_SHUFFLES(long long, unsigned long long)
SIMT_SHUFFLES(unsigned long long, unsigned long long)
SIMT_SHUFFLES(float, unsigned)
SIMT_SHUFFLES(double, unsigned long long)
#undef SIMT_SHUFFLES

SIMT_INLINE simt_mask __ballot_sync(simt_mask mask, int predicate) {
    return (simt_mask)simt_warp(SIMT_BALLOT, mask, predicate != 0, 0, warpSize);
}
SIMT_INLINE int __any_sync(simt_mask mask, int predicate) {
    return (int)simt_warp(SIMT_ANY, mask, predicate != 0, 0, warpSize);
}
SIMT_INLINE int __all_sync(simt_mask mask, int predicate) {
    return (int)simt_warp(SIMT_ALL, mask, predicate != 0, 0, warpSize);
}
// HIP's ballot is 64 bits wide whatever the wave size.
SIMT_INLINE unsigned long long __ballot(int predicate) {
    return simt_warp(SIMT_BALLOT | SIMT_LOCKSTEP, 0, predicate != 0, 0, warpSize);
}
SIMT_INLINE int __any(int predicate) {
    return (int)simt_warp(SIMT_ANY | SIMT_LOCKSTEP, 0, predicate != 0, 0, warpSize);
}
SIMT_INLINE int __all(int predicate) {
    return (int)simt_warp(SIMT_ALL | SIMT_LOCKSTEP, 0, predicate != 0, 0, warpSize);
}

#define SIMT_REDUCE(T, name, op)                                     \
    SIMT_INLINE T name(simt_mask mask, T value) {                    \
        return (T)simt_warp(op, mask, (unsigned)value, 0, warpSize); \
    }
SIMT_REDUCE(int, __reduce_add_sync, SIMT_ADD_I)
SIMT_REDUCE(int, __reduce_min_sync, SIMT_MIN_I)
SIMT_REDUCE(int, __reduce_max_sync, SIMT_MAX_I)
SIMT_REDUCE(unsigned, __reduce_add_sync, SIMT_ADD_U)
SIMT_REDUCE(unsigned, __reduce_min_sync, SIMT_MIN_U)
SIMT_REDUCE(unsigned, __reduce_max_sync, SIMT_MAX_U)
SIMT_REDUCE(unsigned, __reduce_and_sync, SIMT_AND_U)
SIMT_REDUCE(unsigned, __reduce_or_sync, SIMT_OR_U)
SIMT_REDUCE(unsigned, __reduce_xor_sync, SIMT_XOR_U)
#undef SIMT_REDUCE
