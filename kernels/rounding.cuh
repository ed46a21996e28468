// rounding.cuh: fp32 numbers as logits, to nearest, ties to even, in integer arithmetic: CuPy compiles with -ftz=true,
// under which fp32 arithmetic loses subnormals.
//
// Needs VPA_DTYPE. Both functions are there if VPA_TRANSFORM, VPA_PRODUCT or VPA_ROUNDING, which say that a kernel
// rounds.

#if VPA_TRANSFORM || VPA_PRODUCT || defined(VPA_ROUNDING)

#if VPA_TRANSFORM || VPA_DTYPE != VPA_FP32
// value / 2^shift to the nearest integer, ties to even; 0 < shift < 64.
VPA_DEVICE u64 shifted(u64 value, u32 shift) {
    return (value + ((1ull << (shift - 1)) - 1) + (value >> shift & 1)) >> shift;
}
#endif

// The logit nearest to the fp32 number with these bits.
VPA_DEVICE Word word_of_single(u32 bits) {
#if VPA_DTYPE == VPA_FP32
    return bits;
#else
    const u32 sign = bits >> 16 & WORD_SIGN;
    const u32 magnitude = bits & ~FLOAT_SIGN;
    if (magnitude > FLOAT_INFINITY) {
        return (Word)(WORD_INFINITY + 1);
    }
#if VPA_DTYPE == VPA_BF16
    return (Word)(sign | (u32)shifted(magnitude, 16));
#else
    if (magnitude >= (u32)(127 + 16) << 23) {
        return (Word)(sign | WORD_INFINITY);
    }
    if (magnitude >= (u32)(127 - 14) << 23) {
        return (Word)(sign | (u32)shifted(magnitude - ((u32)(127 - 15) << 23), 13));
    }
    const u32 shift = 13 + (127 - 14) - (magnitude >> 23);
    return (Word)(shift > 24 ? sign : sign | (u32)shifted((magnitude & 0x7FFFFFu) | 0x800000u, shift));
#endif
#endif
}

#endif
