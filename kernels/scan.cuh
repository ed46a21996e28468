// scan.cuh: one thread block finds the best key of a run of columns, then the lowest column that has it.
//
// While scanning, a lane keeps only its largest key and which loads raised it. The column is searched once, at the end,
// by the few lanes that hold the block's largest key: searching inside the loop costs 20 to 45 % more on an H200, since
// some lane of a warp rises in nearly every step.
//
// Needs VPA_DTYPE; VPA_THREADS, threads of a block, a multiple of 32; VPA_CONTIGUOUS, 1 if columns lie side by side,
// and then VPA_LOADS, how many 16-byte loads a lane has in flight.

#define WARPS (VPA_THREADS / VPA_WARP)

// The largest value over the block, in every thread. `warps` is shared, and this call's alone until the next barrier.
VPA_DEVICE u32 block_max(u32 value, u32* warps) {
    value = warp_max(value);
    if (WARPS == 1) {
        return value;
    }
    const i32 lane = threadIdx.x % VPA_WARP;
    if (lane == 0) {
        warps[threadIdx.x / VPA_WARP] = value;
    }
    __syncthreads();
    return warp_max(lane < WARPS ? warps[lane] : 0);
}

// Both walks below have the same two functions over columns [0, count) of one row, `stride` words apart:
//   scan_run   the largest key among this thread's columns (0 if it has none), and `where` it was met;
//   column_in  the lowest of this thread's columns that has the key, for a thread whose scan_run returned that key.

#if VPA_CONTIGUOUS

#define WORDS_PER_LOAD (16 / (u32)sizeof(Word))
#define IN_HEAD 0xFFFFFFFFu
#define IN_TAIL 0xFFFFFFFEu

// How many columns come before the first 16-byte boundary: they, and those after the last whole load, are read singly.
VPA_DEVICE u32 head_of(const Word* run, u32 count) {
    const u32 misaligned = (u32)((u64)run % 16) / (u32)sizeof(Word);
    const u32 head = (WORDS_PER_LOAD - misaligned) % WORDS_PER_LOAD;
    return head < count ? head : count;
}

// Thread t reads loads t, t + VPA_THREADS, ..., VPA_LOADS of them at once. Past the end it reads the last one again:
// that changes no maximum, keeps all reads inside the run, and needs no second loop.
VPA_DEVICE Words4 load_of(const Words4* middle, u32 loads, u32 first, u32 i) {
    const u32 index = first + i * VPA_THREADS;
    return load_once(middle + (index < loads ? index : loads - 1));
}

// The largest key in one group of loads.
VPA_DEVICE u32 group_key(const Words4* group) {
#if VPA_NVIDIA && VPA_DTYPE == VPA_FP32
    // max.NaN keeps subnormals and NaN. It orders -0 below +0, which logit_key then undoes; so do the two below.
    float top = __uint_as_float(group[0].word[0]);
#pragma unroll
    for (i32 i = 1; i < 4 * VPA_LOADS; i++) {
        asm("max.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(__uint_as_float(group[i / 4].word[i % 4])));
    }
    return logit_key(__float_as_uint(top));
#elif VPA_NVIDIA
    u32 top = group[0].word[0];
#pragma unroll
    for (i32 i = 1; i < 4 * VPA_LOADS; i++) {
#if VPA_DTYPE == VPA_BF16
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(top) : "r"(group[i / 4].word[i % 4]));
#else
        asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(top) : "r"(group[i / 4].word[i % 4]));
#endif
    }
    const u32 low = logit_key(top & 0xFFFFu);
    const u32 high = logit_key(top >> 16);
    return high > low ? high : low;
#else
    u32 top = 0;
    for (i32 i = 0; i < 4 * VPA_LOADS; i++) {
        for (u32 bit = 0; bit < 32; bit += 8 * (u32)sizeof(Word)) {
            const u32 key = logit_key((Word)(group[i / 4].word[i % 4] >> bit));
            top = key > top ? key : top;
        }
    }
    return top;
#endif
}

VPA_DEVICE u32 scan_run(const Word* run, i64, u32 count, u32* where) {
    const u32 head = head_of(run, count);
    const u32 loads = (count - head) / WORDS_PER_LOAD;
    const u32 tail = head + loads * WORDS_PER_LOAD;
    const Words4* middle = (const Words4*)(run + head);
    u32 best = 0;
    *where = IN_HEAD;
    if (threadIdx.x < head) {
        best = logit_key(run[threadIdx.x]);
    }
    for (u32 first = threadIdx.x; first < loads; first += VPA_LOADS * VPA_THREADS) {
        Words4 group[VPA_LOADS];
#pragma unroll
        for (u32 i = 0; i < VPA_LOADS; i++) {
            group[i] = load_of(middle, loads, first, i);
        }
        const u32 key = group_key(group);
        if (key > best) {
            best = key;
            *where = first;
        }
    }
    if (threadIdx.x < count - tail) {
        const u32 key = logit_key(run[tail + threadIdx.x]);
        if (key > best) {
            best = key;
            *where = IN_TAIL;
        }
    }
    return best;
}

VPA_DEVICE u32 column_in(const Word* run, i64, u32 count, u32 key, u32 where) {
    const u32 head = head_of(run, count);
    const u32 loads = (count - head) / WORDS_PER_LOAD;
    if (where == IN_HEAD) {
        return threadIdx.x;
    }
    if (where == IN_TAIL) {
        return head + loads * WORDS_PER_LOAD + threadIdx.x;
    }
    for (u32 i = 0;; i++) {  // ends: some logit of the group has the key
        const u32 index = where + i * VPA_THREADS;
        const u32 column = head + (index < loads ? index : loads - 1) * WORDS_PER_LOAD;
        for (u32 j = 0; j < WORDS_PER_LOAD; j++) {
            if (logit_key(run[column + j]) == key) {
                return column + j;
            }
        }
    }
}

#else

VPA_DEVICE u32 scan_run(const Word* run, i64 stride, u32 count, u32* where) {
    u32 best = 0;
    *where = 0;
    for (u64 column = threadIdx.x; column < count; column += VPA_THREADS) {
        const u32 key = logit_key(run[(i64)column * stride]);
        if (key > best) {
            best = key;
            *where = (u32)column;
        }
    }
    return best;
}

VPA_DEVICE u32 column_in(const Word*, i64, u32, u32, u32 where) {
    return where;
}

#endif
