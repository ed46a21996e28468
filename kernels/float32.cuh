// float32.cuh: fp32 arithmetic that keeps subnormals, and conversions between fp32 and the type of the data.
//
// CuPy compiles with -ftz=true, under which additions, multiplications and conversions flush subnormals to zero. On
// NVIDIA instructions are named here that do not; elsewhere operators are used. On HIP a like option may flush fp32
// subnormals all the same: an exception that docs/semantics.md states. Nothing is contracted to a fused multiply-add,
// so that the bits are those of IEEE's single operations.
//
// Needs VPA_DTYPE and rounding.cuh.

#if VPA_HIP
#pragma clang fp contract(off)
#endif

#if defined(__CUDA_ARCH__)
VPA_DEVICE float add(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

VPA_DEVICE float multiply(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

// 1 / sqrt(x), each of the two rounded.
VPA_DEVICE float reciprocal_root(float x) {
    float result;
    asm("sqrt.rn.f32 %0, %1;\n\trcp.rn.f32 %0, %0;" : "=f"(result) : "f"(x));
    return result;
}
#else
VPA_DEVICE float add(float a, float b) {
    return a + b;
}

VPA_DEVICE float multiply(float a, float b) {
    return a * b;
}

VPA_DEVICE float reciprocal_root(float x) {
    return 1.0f / __builtin_sqrtf(x);
}
#endif

// The numbers of a 32-bit word of memory, two of 16 bits or one of 32, and the word nearest to them.
#define PER_WORD (4 / (u32)sizeof(Word))

VPA_DEVICE void numbers_of(u32 word, float* numbers) {
#if VPA_DTYPE == VPA_FP32
    numbers[0] = __uint_as_float(word);
#elif VPA_DTYPE == VPA_FP16 && defined(__CUDA_ARCH__)
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(numbers[0]), "=f"(numbers[1])
        : "r"(word));
#else
    numbers[0] = __uint_as_float(widen(word & 0xFFFFu));
    numbers[1] = __uint_as_float(widen(word >> 16));
#endif
}

VPA_DEVICE u32 word_of(const float* numbers) {
#if VPA_DTYPE == VPA_FP32
    return __float_as_uint(numbers[0]);
#elif VPA_NVIDIA
    u32 word;
#if VPA_DTYPE == VPA_BF16
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(numbers[0]), "f"(numbers[1]));
#else
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(numbers[0]), "f"(numbers[1]));
#endif
    return word;
#else
    return (u32)word_of_single(__float_as_uint(numbers[0])) | (u32)word_of_single(__float_as_uint(numbers[1])) << 16;
#endif
}
