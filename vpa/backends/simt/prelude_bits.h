// Bit and byte intrinsics, conversions of bits, and loads and stores with a cache hint.
#pragma once

SIMT_INLINE unsigned __float_as_uint(float x) {
    return simt_bits<unsigned>(x);
}
SIMT_INLINE int __float_as_int(float x) {
    return simt_bits<int>(x);
}
SIMT_INLINE float __uint_as_float(unsigned x) {
    return simt_bits<float>(x);
}
SIMT_INLINE float __int_as_float(int x) {
    return simt_bits<float>(x);
}
SIMT_INLINE long long __double_as_longlong(double x) {
    return simt_bits<long long>(x);
}
SIMT_INLINE double __longlong_as_double(long long x) {
    return simt_bits<double>(x);
}
SIMT_INLINE int __double2hiint(double x) {
    return (int)(simt_bits<unsigned long long>(x) >> 32);
}
SIMT_INLINE int __double2loint(double x) {
    return (int)simt_bits<unsigned long long>(x);
}
SIMT_INLINE double __hiloint2double(int hi, int lo) {
    return simt_bits<double>((unsigned long long)(unsigned)hi << 32 | (unsigned)lo);
}
SIMT_INLINE int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
SIMT_INLINE int __clzll(long long x) {
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
SIMT_INLINE int __ffs(int x) {
    return __builtin_ffs(x);
}
SIMT_INLINE int __ffs(unsigned x) {
    return __builtin_ffs((int)x);
}
// CUDA declares only the form for long long: other integers are converted.
#define SIMT_FFSLL(T)                         \
    SIMT_INLINE int __ffsll(T x) {            \
        return __builtin_ffsll((long long)x); \
    }
SIMT_FFSLL(int)
SIMT_FFSLL(unsigned)
SIMT_FFSLL(long)
SIMT_FFSLL(unsigned long)
SIMT_FFSLL(long long)
SIMT_FFSLL(unsigned long long)
#undef SIMT_FFSLL
SIMT_INLINE int __popc(unsigned x) {
    return __builtin_popcount(x);
}
SIMT_INLINE int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
SIMT_INLINE unsigned long long __brevll(unsigned long long x) {
    unsigned long long y = 0;
    for (int i = 0; i < 64; ++i)
        y |= (x >> i & 1) << (63 - i);
    return y;
}
SIMT_INLINE unsigned __brev(unsigned x) {
    return (unsigned)(__brevll(x) >> 32);
}
SIMT_INLINE unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
SIMT_INLINE int __mulhi(int a, int b) {
    return (int)((long long)a * b >> 32);
}
SIMT_INLINE int __mul24(int a, int b) {
    const int x = (int)((unsigned)a << 8) >> 8, y = (int)((unsigned)b << 8) >> 8;  // bits 0 to 23 with their sign
    return (int)((unsigned)x * (unsigned)y);
}
SIMT_INLINE unsigned __umul24(unsigned a, unsigned b) {
    return (a & 0xffffffu) * (b & 0xffffffu);
}
SIMT_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
SIMT_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned pick = selector >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (pick & 7)) & 255;
        result |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}
SIMT_INLINE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)((((unsigned long long)hi << 32 | lo) << (shift & 31)) >> 32);
}
SIMT_INLINE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((unsigned long long)hi << 32 | lo) >> (shift & 31));
}
template <class T>
SIMT_INLINE T __ldg(const T* address) {
    return *address;
}
template <class T>
SIMT_INLINE T __ldcg(const T* address) {
    return *address;
}
template <class T>
SIMT_INLINE T __ldcs(const T* address) {
    return *address;
}
template <class T>
SIMT_INLINE void __stcg(T* address, T value) {
    *address = value;
}
template <class T>
SIMT_INLINE void __stcs(T* address, T value) {
    *address = value;
}
