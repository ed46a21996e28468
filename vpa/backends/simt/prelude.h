// The CUDA and HIP names that a kernel text sees on the CPU: qualifiers, built-in variables, vector types, barriers.
// No header is included: a kernel text that brings its own uint64_t and the like (as NVRTC makes it) must not collide.
#pragma once

#define VPA_SIMT 1
#if SIMT_WARP_SIZE == 64
#define __HIP_PLATFORM_AMD__ 1
typedef unsigned long long simt_mask;
#else
typedef unsigned int simt_mask;
#endif

// --- Qualifiers ---
// thread_local is the one keyword that is valid both in `__shared__ float s[32];` inside a function (where it implies
// static) and after the `extern` of dynamic shared memory; one block at a time owns the host thread's copy. It also
// marks the variables in the symbol table, which is how the checker learns their extents. `used`: a variable that the
// text never writes, or never reads, must not be folded into a constant: that is a fault to be found.
#define __shared__ __attribute__((used)) thread_local
#define __global__ __attribute__((noinline, used))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __cluster_dims__(...)  // read from the text: see source.py
// The keyword is not allowed after `__shared__` as it stands for here; an attribute is, but takes no type.
template <class T>
constexpr unsigned long simt_alignment() {
    return alignof(T);
}
template <unsigned long value>
constexpr unsigned long simt_alignment() {
    return value;
}
#define alignas(...) __attribute__((aligned(simt_alignment<__VA_ARGS__>())))
#define SIMT_TEXT_(x) #x
#define SIMT_TEXT(x) SIMT_TEXT_(x)
// A section of its own for each variable: const and non-const ones may not share one.
#define __constant__ __attribute__((section("simt_constant." SIMT_TEXT(__COUNTER__))))

// Calls that synchronise may not be moved into or out of branches, nor be merged with one another.
#ifdef __clang__
#define SIMT_SYNC __attribute__((convergent, noduplicate, nomerge))
#else
#define SIMT_SYNC
#endif
#define SIMT_INLINE inline __attribute__((always_inline))

typedef decltype(sizeof(0)) size_t;
#ifndef __clang__
#define __builtin_assume(condition) ((void)0)
#endif

// --- Vector types, with CUDA's alignments ---
#define SIMT_VECTORS(T, name, align2, align4)                \
    struct name##1 {                                         \
        T x;                                                 \
    };                                                       \
    struct __align__(align2) name##2 {                       \
        T x, y;                                              \
    };                                                       \
    struct name##3 {                                         \
        T x, y, z;                                           \
    };                                                       \
    struct __align__(align4) name##4 {                       \
        T x, y, z, w;                                        \
    };                                                       \
    SIMT_INLINE name##1 make_##name##1(T x) {                \
        return {x};                                          \
    }                                                        \
    SIMT_INLINE name##2 make_##name##2(T x, T y) {           \
        return {x, y};                                       \
    }                                                        \
    SIMT_INLINE name##3 make_##name##3(T x, T y, T z) {      \
        return {x, y, z};                                    \
    }                                                        \
    SIMT_INLINE name##4 make_##name##4(T x, T y, T z, T w) { \
        return {x, y, z, w};                                 \
    }
SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned int, uint, 8, 16)
SIMT_VECTORS(long, long, 16, 16)
SIMT_VECTORS(unsigned long, ulong, 16, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef SIMT_VECTORS

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {
    }
};

// --- Built-in variables ---
// The runtime rewrites them whenever another thread is resumed, so each thread sees constants. Plain structures: a
// const object with a constructor would be instrumented at every use.
struct simt_extent {
    unsigned int x, y, z;
    operator dim3() const {
        return dim3(x, y, z);
    }
};
extern "C" {
extern const uint3 threadIdx, blockIdx;
extern const simt_extent blockDim, gridDim;
}
static constexpr int warpSize = SIMT_WARP_SIZE;

// --- Barriers, fences, traps ---
extern "C" {
SIMT_SYNC int simt_barrier(int kind, int predicate) noexcept;
SIMT_SYNC unsigned long long simt_warp(
    unsigned op, unsigned long long mask, unsigned long long value, int argument, int width) noexcept;
void simt_fence(int scope) noexcept;
void simt_pause() noexcept;
[[noreturn]] void simt_trap(const char* what, const char* file, int line) noexcept;
long long simt_clock() noexcept;
unsigned simt_cluster_rank() noexcept;
unsigned simt_cluster_size() noexcept;
void* simt_cluster_map(const void* pointer, unsigned rank) noexcept;
int simt_printf(const char* format, ...) noexcept __attribute__((format(printf, 1, 2)));
}

SIMT_INLINE void __syncthreads() {
    simt_barrier(0, 0);
}
SIMT_INLINE int __syncthreads_count(int predicate) {
    return simt_barrier(1, predicate);
}
SIMT_INLINE int __syncthreads_and(int predicate) {
    return simt_barrier(2, predicate);
}
SIMT_INLINE int __syncthreads_or(int predicate) {
    return simt_barrier(3, predicate);
}
// Clusters, under names of our own: all threads of the cluster meet (release and acquire), the block's rank in it and
// their number, and the object of another block that lies where `pointer` does in the shared memory of this one.
SIMT_INLINE void __simt_cluster_barrier() {
    simt_barrier(4, 0);
}
SIMT_INLINE unsigned __simt_cluster_rank() {
    return simt_cluster_rank();
}
SIMT_INLINE unsigned __simt_cluster_size() {
    return simt_cluster_size();
}
template <class T>
SIMT_INLINE T* __simt_cluster_map(T* pointer, unsigned rank) {
    return (T*)simt_cluster_map((const void*)pointer, rank);
}
SIMT_INLINE void __threadfence_block() {
    simt_fence(0);
}
SIMT_INLINE void __threadfence() {
    simt_fence(1);
}
SIMT_INLINE void __threadfence_system() {
    simt_fence(1);
}
SIMT_INLINE void __nanosleep(unsigned) {
    simt_pause();
}
SIMT_INLINE long long clock64() {
    return simt_clock();
}
SIMT_INLINE long long wall_clock64() {
    return simt_clock();
}
[[noreturn]] SIMT_INLINE void __trap() {
    simt_trap("__trap()", 0, 0);
}
#define printf simt_printf
#ifndef assert
#define assert(condition) ((condition) ? (void)0 : simt_trap("assert(" #condition ")", __FILE__, __LINE__))
#endif

// Copies go through the checker too; the label also catches the copies that the compiler makes of large structs.
extern "C" {
void* memcpy(void* to, const void* from, size_t size) noexcept __asm__("simt_memcpy");
void* memmove(void* to, const void* from, size_t size) noexcept __asm__("simt_memmove");
void* memset(void* to, int value, size_t size) noexcept __asm__("simt_memset");
}
#define __builtin_memcpy memcpy
#define __builtin_memmove memmove
#define __builtin_memset memset

#include "prelude_warp.h"
#include "prelude_atomics.h"
#include "prelude_bits.h"
#include "prelude_math.h"
#include "prelude_launch.h"

// To the end of the kernel text: calls of one function in two branches stay two calls, each with its own line.
#ifdef __clang__
#pragma clang attribute push(__attribute__((nomerge)), apply_to = function)
#endif
