// CUDA's atomics: each is one call into the runtime, which is where a thread that spins on one gives way to the others.
#pragma once

enum simt_rmw : unsigned {
    SIMT_RMW_ADD = 0,
    SIMT_RMW_MIN_S,
    SIMT_RMW_MAX_S,
    SIMT_RMW_MIN_U,
    SIMT_RMW_MAX_U,
    SIMT_RMW_AND,
    SIMT_RMW_OR,
    SIMT_RMW_XOR,
    SIMT_RMW_EXCH,
    SIMT_RMW_CAS,
    SIMT_RMW_INC,
    SIMT_RMW_DEC,
    SIMT_RMW_FADD,
};

extern "C" {
unsigned simt_atomic32(unsigned op, void* address, unsigned value, unsigned compare) noexcept;
unsigned long long simt_atomic64(unsigned op,
                                 void* address,
                                 unsigned long long value,
                                 unsigned long long compare) noexcept;
unsigned short simt_atomic16(unsigned op, void* address, unsigned short value, unsigned short compare) noexcept;
}

// Atomics of the block are taken for atomics of the device: one that another block relies on is not found out.
#define SIMT_SCOPES(T, name)                           \
    SIMT_INLINE T name##_system(T* address, T value) { \
        return name(address, value);                   \
    }                                                  \
    SIMT_INLINE T name##_block(T* address, T value) {  \
        return name(address, value);                   \
    }
#define SIMT_ATOMIC(T, Bits, width, name, op)                                                  \
    SIMT_INLINE T name(T* address, T value) {                                                  \
        return simt_bits<T>((Bits)simt_atomic##width(op, address, simt_bits<Bits>(value), 0)); \
    }                                                                                          \
    SIMT_SCOPES(T, name)
#define SIMT_CAS(T, Bits, width)                                                                                \
    SIMT_INLINE T atomicCAS(T* address, T compare, T value) {                                                   \
        return simt_bits<T>(                                                                                    \
            (Bits)simt_atomic##width(SIMT_RMW_CAS, address, simt_bits<Bits>(value), simt_bits<Bits>(compare))); \
    }                                                                                                           \
    SIMT_INLINE T atomicCAS_system(T* address, T compare, T value) {                                            \
        return atomicCAS(address, compare, value);                                                              \
    }                                                                                                           \
    SIMT_INLINE T atomicCAS_block(T* address, T compare, T value) {                                             \
        return atomicCAS(address, compare, value);                                                              \
    }
#define SIMT_INTEGER_ATOMICS(T, Bits, width, sign)              \
    SIMT_ATOMIC(T, Bits, width, atomicAdd, SIMT_RMW_ADD)        \
    SIMT_ATOMIC(T, Bits, width, atomicMin, SIMT_RMW_MIN_##sign) \
    SIMT_ATOMIC(T, Bits, width, atomicMax, SIMT_RMW_MAX_##sign) \
    SIMT_ATOMIC(T, Bits, width, atomicAnd, SIMT_RMW_AND)        \
    SIMT_ATOMIC(T, Bits, width, atomicOr, SIMT_RMW_OR)          \
    SIMT_ATOMIC(T, Bits, width, atomicXor, SIMT_RMW_XOR)        \
    SIMT_ATOMIC(T, Bits, width, atomicExch, SIMT_RMW_EXCH)      \
    SIMT_CAS(T, Bits, width)
SIMT_INTEGER_ATOMICS(int, unsigned, 32, S)
SIMT_INTEGER_ATOMICS(unsigned, unsigned, 32, U)
SIMT_INTEGER_ATOMICS(long long, unsigned long long, 64, S)
SIMT_INTEGER_ATOMICS(unsigned long long, unsigned long long, 64, U)
SIMT_INTEGER_ATOMICS(unsigned long, unsigned long, 64, U)
SIMT_ATOMIC(unsigned, unsigned, 32, atomicInc, SIMT_RMW_INC)
SIMT_ATOMIC(unsigned, unsigned, 32, atomicDec, SIMT_RMW_DEC)
SIMT_ATOMIC(float, unsigned, 32, atomicAdd, SIMT_RMW_FADD)
SIMT_ATOMIC(float, unsigned, 32, atomicExch, SIMT_RMW_EXCH)
SIMT_ATOMIC(double, unsigned long long, 64, atomicAdd, SIMT_RMW_FADD)
SIMT_CAS(unsigned short, unsigned short, 16)
SIMT_INLINE int atomicSub(int* address, int value) {
    return atomicAdd(address, (int)(0u - (unsigned)value));
}
SIMT_INLINE unsigned atomicSub(unsigned* address, unsigned value) {
    return atomicAdd(address, 0u - value);
}
SIMT_SCOPES(int, atomicSub)
SIMT_SCOPES(unsigned, atomicSub)
#undef SIMT_SCOPES
#undef SIMT_ATOMIC
#undef SIMT_CAS
#undef SIMT_INTEGER_ATOMICS
