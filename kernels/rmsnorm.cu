// rmsnorm.cu: a layer's end. Each block takes one row: partial sums are added over ranks, then the residual, then the
// row is normed; a block holds its row in registers, so that all memory is read once and written once. Where rows are
// few, the blocks of a cluster share a row, since one multiprocessor takes longer to add it up than to read it.
//
// vpa/rmsnorm.py says what is rounded where, and in which order squares are added: by groups of 16 bytes of a row, one
// a thread and step; by chunks, the 32 groups of a warp; then all chunks. A row's bits so depend on its length alone,
// neither on alignment nor on how many threads or rows there are.
//
// `partials` is a dim-0 all-gather: rank r's row b begins at r * rank_stride + b * row_stride. With one rank the kernel
// is the norm behind a collective that has added already. VPA_KEEP 0 leaves out the new residual, VPA_NORM 0 all that
// comes after it: then the kernel is a sum.
//
// Needs VPA_DTYPE; VPA_RANKS; VPA_RESIDUAL, 1 if there is one; VPA_ROUNDING, one of the three below; VPA_WEIGHT32, 1 if
// the weight is fp32 and the data is not; VPA_THREADS; VPA_GROUPS, groups of a thread; VPA_WIDE, 1 if every group of
// every array is whole and aligned to 16 bytes; VPA_FULL, 1 if threads have all their groups; VPA_PARTS, blocks of a
// row, at most 8; VPA_CLUSTER, 1 if those are a cluster, which a sum alone does without; VPA_NORM; VPA_KEEP.

#define ROUND_ONCE 0
#define ROUND_UNROUNDED 1
#define ROUND_GEMMA 2

#define PER_GROUP (4 * PER_WORD)
#define WARPS (VPA_THREADS / VPA_WARP)
#define CHUNKS (WARPS * VPA_GROUPS * VPA_PARTS)
#define SLOTS (CHUNKS <= VPA_WARP ? 1 : CHUNKS <= 2 * VPA_WARP ? 2 : 4)  // chunks of a lane, in the sum over all

// Ranks whose partial sums a thread has in flight: 8 loads in all, in registers until they are added. Fewer, and a loop
// that stays one, where there are many ranks, or so many threads that each has few registers.
#define UNROLLED (VPA_RANKS <= 16 && VPA_THREADS <= 512)
#define IN_FLIGHT ((UNROLLED ? 8 : 4) / VPA_GROUPS)
#define BATCH (VPA_RANKS < IN_FLIGHT ? VPA_RANKS : IN_FLIGHT)

#if VPA_CLUSTER
#define CLUSTER VPA_CLUSTER_DIMS(VPA_PARTS)
#else
#define CLUSTER
#endif

#if VPA_WEIGHT32
#define WEIGHT_LOADS 2
#else
#define WEIGHT_LOADS 1
#endif

// The group of a row that begins at `run`; zeros where it has no such group, or ends inside it.
VPA_DEVICE Words4 load_group(const Word* run, u32 group, u32 hidden) {
    Words4 words = {{0, 0, 0, 0}};
#if VPA_WIDE
    if (VPA_FULL || group * PER_GROUP < hidden) {
        words = load_once((const Words4*)run + group);
    }
#else
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
        const u32 column = group * PER_GROUP + i;
        if (column < hidden) {
            words.word[i / PER_WORD] |= (u32)run[column] << i % PER_WORD * 16;
        }
    }
#endif
    return words;
}

VPA_DEVICE void store_group(Word* run, u32 group, u32 hidden, const float* numbers) {
    Words4 words;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        words.word[i] = word_of(numbers + i * PER_WORD);
    }
#if VPA_WIDE
    if (VPA_FULL || group * PER_GROUP < hidden) {
        ((Words4*)run)[group] = words;
    }
#else
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
        const u32 column = group * PER_GROUP + i;
        if (column < hidden) {
            run[column] = (Word)(words.word[i / PER_WORD] >> i % PER_WORD * 16);
        }
    }
#endif
}

VPA_DEVICE void numbers_of_group(Words4 words, float* numbers) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        numbers_of(words.word[i], numbers + i * PER_WORD);
    }
}

// Numbers rounded to the type of the data.
VPA_DEVICE void round_group(float* numbers) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        numbers_of(word_of(numbers + i * PER_WORD), numbers + i * PER_WORD);
    }
}

VPA_DEVICE void add_group(float* numbers, Words4 words) {
    float more[PER_GROUP];
    numbers_of_group(words, more);
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
        numbers[i] = add(numbers[i], more[i]);
    }
}

#if VPA_NORM

#if VPA_WEIGHT32
typedef u32 WeightWord;
#else
typedef Word WeightWord;
#endif

// The weights of a group, read by every block: they stay in L1.
struct Weights {
    Words4 loads[WEIGHT_LOADS];
};

VPA_DEVICE Weights load_weights(const WeightWord* weight, u32 group, u32 hidden) {
    Weights weights = {};
#if VPA_WIDE
    if (VPA_FULL || group * PER_GROUP < hidden) {
#pragma unroll
        for (u32 i = 0; i < WEIGHT_LOADS; i++) {
            weights.loads[i] = ((const Words4*)weight)[group * WEIGHT_LOADS + i];
        }
    }
#else
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
        const u32 column = group * PER_GROUP + i;
        if (column < hidden) {
#if VPA_WEIGHT32
            weights.loads[i / 4].word[i % 4] = weight[column];
#else
            weights.loads[0].word[i / PER_WORD] |= (u32)weight[column] << i % PER_WORD * 16;
#endif
        }
    }
#endif
    return weights;
}

VPA_DEVICE void numbers_of_weights(const Weights& weights, float* numbers) {
#if VPA_WEIGHT32
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
        numbers[i] = __uint_as_float(weights.loads[i / 4].word[i % 4]);
    }
#else
    numbers_of_group(weights.loads[0], numbers);
#endif
}

// The sum over the 32 lanes of a warp, in every lane: the upper half of them is added to the lower.
VPA_DEVICE float warp_sum(float number) {
#pragma unroll
    for (i32 mask = VPA_WARP / 2; mask > 0; mask >>= 1) {
        number = add(number, VPA_SHUFFLE_XOR(number, mask));
    }
    return number;
}

VPA_DEVICE float squares_of(const float* numbers) {
    float squares[PER_GROUP];
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
        squares[i] = multiply(numbers[i], numbers[i]);
    }
#pragma unroll
    for (u32 half = PER_GROUP / 2; half > 0; half /= 2) {
#pragma unroll
        for (u32 i = 0; i < half; i++) {
            squares[i] = add(squares[i], squares[i + half]);
        }
    }
    return squares[0];
}

// The sum over all chunks, in every thread.
VPA_DEVICE float sum_of_chunks(const float* chunk) {
    float parts[SLOTS];
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        const u32 number = threadIdx.x % VPA_WARP + i * VPA_WARP;
        parts[i] = number < CHUNKS ? chunk[number] : 0.0f;
    }
#pragma unroll
    for (u32 half = SLOTS / 2; half > 0; half /= 2) {
#pragma unroll
        for (u32 i = 0; i < half; i++) {
            parts[i] = add(parts[i], parts[i + half]);
        }
    }
    return warp_sum(parts[0]);
}

// The row's numbers as they are written: times `scale`, times the weight.
VPA_DEVICE void norm_group(float* numbers, float scale, const Weights& weights) {
    float gain[PER_GROUP];
    numbers_of_weights(weights, gain);
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
        numbers[i] = multiply(numbers[i], scale);
    }
#if VPA_ROUNDING == ROUND_UNROUNDED && !VPA_WEIGHT32
    round_group(numbers);
#endif
#pragma unroll
    for (u32 i = 0; i < PER_GROUP; i++) {
#if VPA_ROUNDING == ROUND_GEMMA
        gain[i] = add(1.0f, gain[i]);
#endif
        numbers[i] = multiply(numbers[i], gain[i]);
    }
}

#else
typedef Word WeightWord;
#endif

extern "C" __global__ void CLUSTER VPA_LAUNCH_BOUNDS(VPA_THREADS, 1024)
    residual_rmsnorm(const Word* partials,  // rank 0, row 0
                     i64 rank_stride,       // words; any sign, 0 too
                     i64 row_stride,        // likewise
                     const Word* residual,  // row 0; not read without VPA_RESIDUAL
                     i64 residual_stride,
                     const WeightWord* weight,  // not read without VPA_NORM
                     Word* normed,              // [rows, hidden]; not written without VPA_NORM
                     Word* new_residual,        // likewise; not written without VPA_KEEP
                     u32 hidden,
                     float eps,
                     float per_column) {  // 1 / hidden
    const i64 row = blockIdx.x / VPA_PARTS;
    const u32 part = blockIdx.x % VPA_PARTS;  // of the row
    const u32 first_group = part * (VPA_THREADS * VPA_GROUPS) + threadIdx.x;
    const Word* run = partials + row * row_stride;
    (void)residual, (void)residual_stride, (void)weight, (void)normed, (void)new_residual, (void)eps, (void)per_column;
#if VPA_CLUSTER
    cluster_arrive();
#endif
    overlap_with_neighbours();

    float numbers[VPA_GROUPS][PER_GROUP];
#if VPA_RESIDUAL
    Words4 rest[VPA_GROUPS];
#pragma unroll
    for (u32 k = 0; k < VPA_GROUPS; k++) {
        rest[k] = load_group(residual + row * residual_stride, first_group + k * VPA_THREADS, hidden);
    }
#endif
#if UNROLLED
#pragma unroll
#else
#pragma unroll 1
#endif
    for (u32 first = 0; first < VPA_RANKS; first += BATCH) {
        Words4 words[BATCH][VPA_GROUPS];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
            for (u32 k = 0; k < VPA_GROUPS; k++) {
                if (VPA_RANKS % BATCH == 0 || first + i < VPA_RANKS) {
                    words[i][k] = load_group(run + (first + i) * rank_stride, first_group + k * VPA_THREADS, hidden);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
            for (u32 k = 0; k < VPA_GROUPS; k++) {
                if (i == 0 && first == 0) {
                    numbers_of_group(words[i][k], numbers[k]);
                } else if (VPA_RANKS % BATCH == 0 || first + i < VPA_RANKS) {
                    add_group(numbers[k], words[i][k]);
                }
            }
        }
    }
#if VPA_NORM
    Weights weights[VPA_GROUPS];
    __shared__ float chunk[CHUNKS];
#endif
#pragma unroll
    for (u32 k = 0; k < VPA_GROUPS; k++) {
        const u32 group = first_group + k * VPA_THREADS;
#if VPA_NORM
        weights[k] = load_weights(weight, group, hidden);  // before the barrier, whose wait hides it
#endif
#if VPA_RANKS > 1
        round_group(numbers[k]);
#endif
#if VPA_RESIDUAL
        add_group(numbers[k], rest[k]);
#if VPA_ROUNDING != ROUND_UNROUNDED
        round_group(numbers[k]);
#endif
#endif
#if VPA_KEEP && !VPA_CLUSTER
        store_group(new_residual + row * hidden, group, hidden, numbers[k]);
#endif
#if VPA_NORM
        const float sum = warp_sum(squares_of(numbers[k]));
        const u32 number = threadIdx.x / VPA_WARP + (part * VPA_GROUPS + k) * WARPS;
#if VPA_CLUSTER
        if (k == 0) {
            cluster_wait();  // all blocks have begun: their shared memory is theirs
        }
        if (threadIdx.x % VPA_WARP < VPA_PARTS) {  // a lane for each block
            *in_block(&chunk[number], threadIdx.x % VPA_WARP) = sum;
        }
#else
        if (threadIdx.x % VPA_WARP == 0) {
            chunk[number] = sum;
        }
#endif
#endif
    }
#if VPA_NORM
#if VPA_CLUSTER
    cluster_barrier();
#else
    __syncthreads();
#endif
    const float scale = reciprocal_root(add(multiply(sum_of_chunks(chunk), per_column), eps));
#pragma unroll
    for (u32 k = 0; k < VPA_GROUPS; k++) {
#if VPA_KEEP && VPA_CLUSTER  // not earlier: the cluster's barrier would wait for it
        store_group(new_residual + row * hidden, first_group + k * VPA_THREADS, hidden, numbers[k]);
#endif
        norm_group(numbers[k], scale, weights[k]);
        store_group(normed + row * hidden, first_group + k * VPA_THREADS, hidden, numbers[k]);
    }
#endif
}
