// Floating-point and conversion intrinsics, and min and max. Everything rounds as IEEE says: no fast math, no
// contraction, no flush to zero.
#pragma once

// --- C's mathematical functions ---
#define SIMT_MATH1(name)                      \
    extern "C" float name##f(float) noexcept; \
    extern "C" double name(double) noexcept;  \
    SIMT_INLINE float name(float x) {         \
        return name##f(x);                    \
    }
#define SIMT_MATH2(name)                             \
    extern "C" float name##f(float, float) noexcept; \
    extern "C" double name(double, double) noexcept; \
    SIMT_INLINE float name(float x, float y) {       \
        return name##f(x, y);                        \
    }
SIMT_MATH1(sqrt)
SIMT_MATH1(cbrt)
SIMT_MATH1(exp)
SIMT_MATH1(exp2)
SIMT_MATH1(expm1)
SIMT_MATH1(log)
SIMT_MATH1(log2)
SIMT_MATH1(log10)
SIMT_MATH1(log1p)
SIMT_MATH1(sin)
SIMT_MATH1(cos)
SIMT_MATH1(tan)
SIMT_MATH1(atan)
SIMT_MATH1(tanh)
SIMT_MATH1(sinh)
SIMT_MATH1(cosh)
SIMT_MATH1(erf)
SIMT_MATH1(fabs)
SIMT_MATH1(floor)
SIMT_MATH1(ceil)
SIMT_MATH1(trunc)
SIMT_MATH1(round)
SIMT_MATH1(rint)
SIMT_MATH1(nearbyint)
SIMT_MATH2(fmax)
SIMT_MATH2(fmin)
SIMT_MATH2(pow)
SIMT_MATH2(fmod)
SIMT_MATH2(atan2)
SIMT_MATH2(copysign)
SIMT_MATH2(hypot)
#undef SIMT_MATH1
#undef SIMT_MATH2
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" int abs(int) noexcept;
SIMT_INLINE float fma(float x, float y, float z) {
    return fmaf(x, y, z);
}
SIMT_INLINE float abs(float x) {
    return __builtin_fabsf(x);
}
SIMT_INLINE double abs(double x) {
    return __builtin_fabs(x);
}
SIMT_INLINE long long abs(long long x) {
    return x < 0 ? -x : x;
}
// The double result rounded to float: within one ulp, where a GPU's own rsqrtf promises two.
SIMT_INLINE float rsqrtf(float x) {
    return (float)(1.0 / __builtin_sqrt((double)x));
}
SIMT_INLINE double rsqrt(double x) {
    return 1.0 / __builtin_sqrt(x);
}
#undef isnan
#undef isinf
#undef isfinite
#undef signbit
#define SIMT_CLASSIFY(T)              \
    SIMT_INLINE bool isnan(T x) {     \
        return __builtin_isnan(x);    \
    }                                 \
    SIMT_INLINE bool isinf(T x) {     \
        return __builtin_isinf(x);    \
    }                                 \
    SIMT_INLINE bool isfinite(T x) {  \
        return __builtin_isfinite(x); \
    }                                 \
    SIMT_INLINE bool signbit(T x) {   \
        return __builtin_signbit(x);  \
    }
SIMT_CLASSIFY(float)
SIMT_CLASSIFY(double)
#undef SIMT_CLASSIFY

// --- Correctly rounded arithmetic under CUDA's names ---
SIMT_INLINE float __fadd_rn(float x, float y) {
    return x + y;
}
SIMT_INLINE float __fsub_rn(float x, float y) {
    return x - y;
}
SIMT_INLINE float __fmul_rn(float x, float y) {
    return x * y;
}
SIMT_INLINE float __fdiv_rn(float x, float y) {
    return x / y;
}
SIMT_INLINE float __frcp_rn(float x) {
    return 1.0f / x;
}
SIMT_INLINE float __fsqrt_rn(float x) {
    return __builtin_sqrtf(x);
}
SIMT_INLINE float __fmaf_rn(float x, float y, float z) {
    return fmaf(x, y, z);
}
SIMT_INLINE double __dadd_rn(double x, double y) {
    return x + y;
}
SIMT_INLINE double __dmul_rn(double x, double y) {
    return x * y;
}
SIMT_INLINE double __ddiv_rn(double x, double y) {
    return x / y;
}
SIMT_INLINE double __fma_rn(double x, double y, double z) {
    return fma(x, y, z);
}
SIMT_INLINE float __expf(float x) {
    return expf(x);
}
SIMT_INLINE float __logf(float x) {
    return logf(x);
}
SIMT_INLINE float __fdividef(float x, float y) {
    return x / y;
}
SIMT_INLINE float __int2float_rn(int x) {
    return (float)x;
}
SIMT_INLINE float __uint2float_rn(unsigned x) {
    return (float)x;
}
SIMT_INLINE float __double2float_rn(double x) {
    return (float)x;
}
// The hardware conversion saturates and takes NaN to zero; a C++ cast of such a value is undefined.
SIMT_INLINE int simt_saturate(double x) {
    return x != x ? 0 : x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? (int)0x80000000u : (int)x;
}
SIMT_INLINE int __float2int_rn(float x) {
    return simt_saturate(__builtin_rint((double)x));
}
SIMT_INLINE int __float2int_rz(float x) {
    return simt_saturate(__builtin_trunc((double)x));
}
SIMT_INLINE int __float2int_rd(float x) {
    return simt_saturate(__builtin_floor((double)x));
}
SIMT_INLINE int __float2int_ru(float x) {
    return simt_saturate(__builtin_ceil((double)x));
}

// --- min and max, with CUDA's mixed forms ---
#define SIMT_MINMAX(A, B, R)              \
    SIMT_INLINE R min(A a, B b) {         \
        return (R)a < (R)b ? (R)a : (R)b; \
    }                                     \
    SIMT_INLINE R max(A a, B b) {         \
        return (R)a > (R)b ? (R)a : (R)b; \
    }
SIMT_MINMAX(int, int, int)
SIMT_MINMAX(unsigned, unsigned, unsigned)
SIMT_MINMAX(int, unsigned, unsigned)
SIMT_MINMAX(unsigned, int, unsigned)
SIMT_MINMAX(long, long, long)
SIMT_MINMAX(unsigned long, unsigned long, unsigned long)
SIMT_MINMAX(long long, long long, long long)
SIMT_MINMAX(unsigned long long, unsigned long long, unsigned long long)
SIMT_MINMAX(long long, unsigned long long, unsigned long long)
SIMT_MINMAX(unsigned long long, long long, unsigned long long)
#undef SIMT_MINMAX
SIMT_INLINE float min(float a, float b) {
    return fminf(a, b);
}
SIMT_INLINE float max(float a, float b) {
    return fmaxf(a, b);
}
SIMT_INLINE double min(double a, double b) {
    return fmin(a, b);
}
SIMT_INLINE double max(double a, double b) {
    return fmax(a, b);
}
SIMT_INLINE double min(float a, double b) {
    return fmin((double)a, b);
}
SIMT_INLINE double max(float a, double b) {
    return fmax((double)a, b);
}
SIMT_INLINE double min(double a, float b) {
    return fmin(a, (double)b);
}
SIMT_INLINE double max(double a, float b) {
    return fmax(a, (double)b);
}
