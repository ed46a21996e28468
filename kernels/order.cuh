// order.cuh: the order of comparison, and the only place in CUDA/HIP with rules for NaN, zeros and ties.
//
//   1. NaN precedes every number, whatever its sign and payload; among NaNs the lower id precedes.
//   2. Otherwise the larger value precedes; -0 equals +0; infinities and subnormals are ordinary numbers.
//   3. Equal values: the lower id precedes.
//
// Values are compared as unsigned keys, never as floats: CuPy compiles with -ftz=true, under which 1e-40 equals 0.
// A candidate is 64 bits, key << 32 | (0xFFFFFFFF - id), and the better of two candidates is the larger integer.
// 0 is no candidate: the smallest key of a real value is that of -inf, which is above 0.
//
// Kernels that read logits define VPA_DTYPE, the logits' type, one of the three below. VPA_NAN_IGNORED, if it is 1: a
// NaN is -inf instead, with its key, in all three rules.

#define VPA_BF16 0
#define VPA_FP16 1
#define VPA_FP32 2

#define FLOAT_SIGN 0x80000000u
#define FLOAT_INFINITY 0x7F800000u
#define FLOAT_NAN 0x7FC00000u
#define NO_CANDIDATE 0ull

// The key of a floating-point number of any width, given its bits, its sign bit and the bits of its infinity.
VPA_DEVICE u32 key_of_bits(u32 bits, u32 sign, u32 infinity) {
    const u32 all = sign | (sign - 1);
    const u32 magnitude = bits & (sign - 1);
    if (magnitude > infinity) {
#if VPA_NAN_IGNORED
        return all ^ (sign | infinity);
#else
        return all;
#endif
    }
    if (magnitude == 0) {
        return sign;
    }
    return bits ^ (bits & sign ? all : sign);
}

// Bits that have this key. NaN and zero lost their sign: all ones less the sign, and +0, stand for them.
VPA_DEVICE u32 bits_of_key(u32 key, u32 sign) {
    return key ^ (key & sign ? sign : sign | (sign - 1));
}

VPA_DEVICE u64 pack(u32 key, u32 id_complement) {
    return (u64)key << 32 | id_complement;
}

// The id of a candidate; -1 where there is none, as only shards without a single column leave a row.
VPA_DEVICE i64 id_of_packed(u64 packed) {
    return packed == NO_CANDIDATE ? -1 : (i64)(0xFFFFFFFFu - (u32)packed);
}

// The best of the 32 candidates that a warp's lanes hold, in every lane.
VPA_DEVICE u64 warp_best_of(u64 candidate) {
    const u32 key = warp_max((u32)(candidate >> 32));
    return pack(key, warp_max((u32)(candidate >> 32) == key ? (u32)candidate : 0));
}

// Candidate <-> (value, id) as two fp32 numbers, given and taken as bits. Ids are exact below 2^24. "No candidate" is
// (-inf, +inf): no real candidate has an infinite id.
VPA_DEVICE void pair_of_packed(u64 packed, u32* value, u32* id) {
    if (packed == NO_CANDIDATE) {
        *value = FLOAT_SIGN | FLOAT_INFINITY;
        *id = FLOAT_INFINITY;
        return;
    }
    const u32 key = (u32)(packed >> 32);
    *value = key == 0xFFFFFFFFu ? FLOAT_NAN : bits_of_key(key, FLOAT_SIGN);
    *id = __float_as_uint((float)(0xFFFFFFFFu - (u32)packed));
}

VPA_DEVICE u64 packed_of_pair(u32 value, u32 id) {
    if (id == FLOAT_INFINITY) {
        return NO_CANDIDATE;
    }
    return pack(key_of_bits(value, FLOAT_SIGN, FLOAT_INFINITY), 0xFFFFFFFFu - (u32)__uint_as_float(id));
}

#if defined(VPA_DTYPE)

// Word: one logit as it lies in memory. Its sign bit and the bits of +inf are all that the order needs to know of it.
#if VPA_DTYPE == VPA_BF16
typedef u16 Word;
#define WORD_SIGN 0x8000u
#define WORD_INFINITY 0x7F80u
#elif VPA_DTYPE == VPA_FP16
typedef u16 Word;
#define WORD_SIGN 0x8000u
#define WORD_INFINITY 0x7C00u
#elif VPA_DTYPE == VPA_FP32
typedef u32 Word;
#define WORD_SIGN 0x80000000u
#define WORD_INFINITY 0x7F800000u
#endif

// The key of one logit, as wide as the logit: 16-bit logits compare by 16-bit keys.
VPA_DEVICE u32 logit_key(u32 word) {
    return key_of_bits(word, WORD_SIGN, WORD_INFINITY);
}

// The bit patterns of logits that have one key: those for which (bits & mask) - low <= span. A number has one pattern,
// zero has two, and NaN has all that lie beyond infinity.
struct Patterns {
    u32 mask;
    u32 low;
    u32 span;
};

VPA_DEVICE Patterns patterns_of(u32 key) {
    const u32 all = WORD_SIGN | (WORD_SIGN - 1);
#if VPA_NAN_IGNORED
    if (key == logit_key(WORD_SIGN | WORD_INFINITY)) {  // +inf too: where this key is the largest, there is none
        return {WORD_SIGN - 1, WORD_INFINITY, WORD_SIGN - 1 - WORD_INFINITY};
    }
#else
    if (key == all) {
        return {WORD_SIGN - 1, WORD_INFINITY + 1, WORD_SIGN - 1 - (WORD_INFINITY + 1)};
    }
#endif
    if (key == WORD_SIGN) {
        return {WORD_SIGN - 1, 0, 0};
    }
    return {all, bits_of_key(key, WORD_SIGN), 0};
}

// Whether the logit that begins at bit `at` of a 32-bit word is one of them.
VPA_DEVICE bool is_among(u32 word, u32 at, Patterns patterns) {
    return (word & patterns.mask << at) - (patterns.low << at) <= patterns.span << at;
}

// The largest logit among 32-bit words of memory: two 16-bit logits each, or one of 32 bits.
//
// NVIDIA's max.NaN takes both halves of a word at once and keeps subnormals, infinities and NaN. It orders -0 below +0,
// which only the key undoes: a Top says which value is largest, never where. Plain max gives NaN only where both are.
#if VPA_NVIDIA
typedef u32 Top;

#if VPA_NAN_IGNORED
#define LARGER "max"
#else
#define LARGER "max.NaN"
#endif

VPA_DEVICE Top top_of(u32 word) {
    return word;
}

// The larger of two words' logits, half by half.
VPA_DEVICE u32 larger_words(u32 a, u32 b) {
#if VPA_DTYPE == VPA_BF16
    asm(LARGER ".bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
#elif VPA_DTYPE == VPA_FP16
    asm(LARGER ".f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
#else
    asm("{.reg .f32 a, b; mov.b32 a, %0; mov.b32 b, %1; " LARGER ".f32 a, a, b; mov.b32 %0, a;}" : "+r"(a) : "r"(b));
#endif
    return a;
}

VPA_DEVICE Top larger_top(Top a, Top b) {
    return larger_words(a, b);
}

VPA_DEVICE u32 key_of_top(Top top) {
#if VPA_DTYPE == VPA_FP32
    return logit_key(top);
#else
    return logit_key(larger_top(top, top >> 16) & 0xFFFFu);
#endif
}
#else
typedef u32 Top;  // a key: no other device compares the halves of a word in all three types

VPA_DEVICE Top top_of(u32 word) {
    u32 top = 0;
    for (u32 bit = 0; bit < 32; bit += 8 * (u32)sizeof(Word)) {
        const u32 key = logit_key((Word)(word >> bit));
        top = key > top ? key : top;
    }
    return top;
}

VPA_DEVICE Top larger_top(Top a, Top b) {
    return b > a ? b : a;
}

VPA_DEVICE u32 larger_words(u32 a, u32 b) {
    u32 larger = 0;
    for (u32 bit = 0; bit < 32; bit += 8 * (u32)sizeof(Word)) {
        const u32 from_b = logit_key((Word)(b >> bit)) > logit_key((Word)(a >> bit));
        larger |= ((from_b ? b : a) >> bit & (WORD_SIGN | (WORD_SIGN - 1))) << bit;
    }
    return larger;
}

VPA_DEVICE u32 key_of_top(Top top) {
    return top;
}
#endif

// The bits of the fp32 number equal to a logit. Integer arithmetic: a subnormal fp16 must not be flushed.
VPA_DEVICE u32 widen(u32 word) {
#if VPA_DTYPE == VPA_BF16
    return word << 16;
#elif VPA_DTYPE == VPA_FP32
    return word;
#else
    const u32 sign = (word & 0x8000u) << 16;
    u32 exponent = (word >> 10) & 0x1Fu;
    u32 fraction = word & 0x3FFu;
    if (exponent == 0x1F) {
        return sign | FLOAT_INFINITY | fraction << 13;
    }
    if (exponent == 0) {
        if (fraction == 0) {
            return sign;
        }
        exponent = 1;
        while (!(fraction & 0x400u)) {  // at most ten steps, in one thread of a block
            fraction <<= 1;
            exponent -= 1;  // wraps below 0 and comes back with the bias
        }
        fraction &= 0x3FFu;
    }
    return sign | (exponent + (127 - 15)) << 23 | fraction << 13;
#endif
}

// The 32-bit key of a candidate, from the key of a logit: what ranks exchange does not depend on the logits' type.
VPA_DEVICE u32 candidate_key(u32 key) {
    return key_of_bits(widen(bits_of_key(key, WORD_SIGN)), FLOAT_SIGN, FLOAT_INFINITY);
}

#endif
