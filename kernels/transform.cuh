// transform.cuh: what is done to a logit before it is ranked: soft-cap, then scale, each step rounded to the logit's
// type.
//
// vpa/transform.py says what the steps are, and these give the same bits. All arithmetic is fp64's, and all conversions
// are integers': CuPy compiles with -ftz=true, under which fp32 arithmetic loses subnormals. A product of two fp32
// numbers is exact in fp64, and a quotient rounded to fp64 rounds on to fp32 as if at once.
//
// Needs VPA_DTYPE and rounding.cuh. VPA_TRANSFORM, 1 if there is anything to do; then VPA_SOFT_CAP and VPA_SCALE, the
// bits of fp32 numbers, of which a soft-cap of 0 means none.

#if VPA_TRANSFORM

#define FLOAT_ONE 0x3F800000u
#define DOUBLE_SIGN 0x8000000000000000ull
#define DOUBLE_INFINITY 0x7FF0000000000000ull

// Never contracted to a fused multiply-add, which would round once where two roundings are meant.
#if VPA_HIP
#pragma clang fp contract(off)
VPA_DEVICE double sum_of(double a, double b) {
    return a + b;
}
VPA_DEVICE double product_of(double a, double b) {
    return a * b;
}
VPA_DEVICE double quotient_of(double a, double b) {
    return a / b;
}
#else
#define sum_of __dadd_rn
#define product_of __dmul_rn
#define quotient_of __ddiv_rn
#endif

// The number that fp32 bits are; not for NaN.
VPA_DEVICE double double_of(u32 bits) {
    const u32 magnitude = bits & ~FLOAT_SIGN;
    u64 wide = ((u64)magnitude << 29) + ((u64)(1023 - 127) << 52);
    if (magnitude < 0x00800000u) {
        wide = (u64)__double_as_longlong(product_of((double)magnitude, 0x1p-149));
    } else if (magnitude >= FLOAT_INFINITY) {
        wide = DOUBLE_INFINITY;
    }
    return __longlong_as_double((i64)(wide | (u64)(bits & FLOAT_SIGN) << 32));
}

// The bits of the fp32 number nearest to a number.
VPA_DEVICE u32 single_of(double number) {
    const u64 bits = (u64)__double_as_longlong(number);
    const u32 sign = (u32)(bits >> 32) & FLOAT_SIGN;
    const u64 magnitude = bits & ~DOUBLE_SIGN;
    const u32 exponent = (u32)(magnitude >> 52);
    if (magnitude > DOUBLE_INFINITY) {
        return FLOAT_NAN;
    }
    if (exponent >= 1023 + 128) {
        return sign | FLOAT_INFINITY;
    }
    if (exponent > 1023 - 127) {
        return sign | (u32)shifted(magnitude - ((u64)(1023 - 127) << 52), 29);
    }
    const u32 shift = 29 + (1023 - 126) - exponent;
    return shift > 53 ? sign : sign | (u32)shifted((magnitude & ((1ull << 52) - 1)) | 1ull << 52, shift);
}

// tanh of a number as fp64, before it is rounded to fp32: E / (E + 2) with E = exp(2|x|) - 1.
VPA_DEVICE double tanh_of(double x) {
    const u64 bits = (u64)__double_as_longlong(x);
    const double positive = __longlong_as_double((i64)(bits & ~DOUBLE_SIGN));
    const double twice = positive < 20.0 ? product_of(2.0, positive) : 40.0;
    const double to_integer = 0x1.8p52;  // a number of this size has no fraction
    const double power = sum_of(sum_of(product_of(twice, 1.4426950408889634), to_integer), -to_integer);
    double rest = sum_of(twice, -product_of(power, 0x1.62e42feep-1));
    rest = sum_of(rest, -product_of(power, 1.9082149292705877e-10));
    double series = 1.0 / 6227020800.0;  // 1 / 13!
    series = sum_of(product_of(series, rest), 1.0 / 479001600.0);
    series = sum_of(product_of(series, rest), 1.0 / 39916800.0);
    series = sum_of(product_of(series, rest), 1.0 / 3628800.0);
    series = sum_of(product_of(series, rest), 1.0 / 362880.0);
    series = sum_of(product_of(series, rest), 1.0 / 40320.0);
    series = sum_of(product_of(series, rest), 1.0 / 5040.0);
    series = sum_of(product_of(series, rest), 1.0 / 720.0);
    series = sum_of(product_of(series, rest), 1.0 / 120.0);
    series = sum_of(product_of(series, rest), 1.0 / 24.0);
    series = sum_of(product_of(series, rest), 1.0 / 6.0);
    series = sum_of(product_of(series, rest), 1.0 / 2.0);
    series = sum_of(product_of(series, product_of(rest, rest)), rest);  // exp(rest) - 1
    const double whole = __longlong_as_double((i64)((u64)(1023 + (i32)power) << 52));
    const double grown = sum_of(product_of(series, whole), sum_of(whole, -1.0));
    const u64 result = (u64)__double_as_longlong(quotient_of(grown, sum_of(grown, 2.0)));
    return __longlong_as_double((i64)(result | (bits & DOUBLE_SIGN)));
}

VPA_DEVICE Word transformed(Word word) {
    if ((widen(word) & ~FLOAT_SIGN) > FLOAT_INFINITY) {
        return word;
    }
#if VPA_SOFT_CAP
    const double cap = double_of((u32)VPA_SOFT_CAP);
    word = word_of_single(single_of(quotient_of(double_of(widen(word)), cap)));
    word = word_of_single(single_of(tanh_of(double_of(widen(word)))));
    word = word_of_single(single_of(product_of(double_of(widen(word)), cap)));
#endif
#if VPA_SCALE != FLOAT_ONE
    word = word_of_single(single_of(product_of(double_of(widen(word)), double_of((u32)VPA_SCALE))));
#endif
    return word;
}

// The logits of a 32-bit word of memory.
VPA_DEVICE u32 transformed_words(u32 words) {
    u32 results = 0;
#pragma unroll
    for (u32 bit = 0; bit < 32; bit += 8 * (u32)sizeof(Word)) {
        results |= (u32)transformed((Word)(words >> bit)) << bit;
    }
    return results;
}

#else

VPA_DEVICE Word transformed(Word word) {
    return word;
}

#endif

VPA_DEVICE Words4 transformed_load(Words4 words) {
#if VPA_TRANSFORM
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        words.word[i] = transformed_words(words.word[i]);
    }
#endif
    return words;
}

// 16 bytes of logits, 16-byte aligned, as they are ranked.
VPA_DEVICE Words4 load_logits(const Words4* address) {
    return transformed_load(load_once(address));
}
