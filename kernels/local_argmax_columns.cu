// local_argmax_columns.cu: the scan where rows lie side by side, as in a column-major array. Each block takes one split
// of ROWS rows, so that neighbouring threads read neighbouring rows of one column.
//
// A thread takes VPA_LOADS neighbouring columns at a time, 16 bytes of rows each where they are aligned. As in scan.cuh
// it keeps the largest key, here of each row, and which group of columns raised it: among equal keys the lower group
// has the lower column, so that a row's threads agree by one maximum. A warp then finds the column in that group.
//
// Needs what split.cuh and transform.cuh need; VPA_DTYPE; VPA_THREADS, threads of a block; VPA_WIDE, 1 if every column
// starts at a 16-byte boundary and has whole 16 bytes of rows; VPA_LANES, threads side by side, a power of two up to
// 32; VPA_LOADS, columns that a thread has in flight; VPA_NARROW, 1 if logits have 16 bits and a split at most 2^16
// groups.

#define WARPS (VPA_THREADS / VPA_WARP)
#define GROUPS (VPA_THREADS / VPA_LANES)
#define MINE (VPA_WIDE ? 16 / (i32)sizeof(Word) : 1)  // rows of a thread
#define ROWS (VPA_LANES * MINE)

// Past the end of the run: its last column again.
VPA_DEVICE u32 column_number(u32 group, u32 i, u32 count) {
    const u64 column = (u64)group * VPA_LOADS + i;
    return column < count ? (u32)column : count - 1;
}

// The largest key of each of this thread's rows among the columns of a group.
VPA_DEVICE void keys_of_group(const Word* run, i64 stride, u32 count, u32 group, u32* key) {
#if VPA_WIDE
    Words4 top;
    Words4 column[VPA_LOADS];
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        column[i] = load_logits((const Words4*)(run + column_number(group, i, count) * stride));
    }
    top = column[0];
#pragma unroll
    for (u32 i = 4; i < 4 * VPA_LOADS; i++) {
        top.word[i % 4] = larger_words(top.word[i % 4], column[i / 4].word[i % 4]);
    }
#pragma unroll
    for (i32 r = 0; r < MINE; r++) {
        const i32 bit = r * 8 * (i32)sizeof(Word);
        key[r] = logit_key((Word)(top.word[bit / 32] >> (bit % 32)));
    }
#else
    u32 word[VPA_LOADS];
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        word[i] = transformed(run[column_number(group, i, count) * stride]);
    }
    key[0] = 0;
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        const u32 other = logit_key(word[i]);
        key[0] = other > key[0] ? other : key[0];
    }
#endif
}

// A key and the group that has it, ordered as a candidate is: the larger key, then the lower group. The key of a 16-bit
// logit shares 32 bits with a group below 2^16, and one instruction then compares what takes two otherwise.
#if VPA_NARROW
typedef u32 Mark;

VPA_DEVICE Mark mark_of(u32 key, u32 group) {
    return key << 16 | (0xFFFFu - group);
}

VPA_DEVICE u32 key_of_mark(Mark mark) {
    return mark >> 16;
}

VPA_DEVICE u32 group_of_mark(Mark mark) {
    return 0xFFFFu - (mark & 0xFFFFu);
}

VPA_DEVICE Mark warp_best_mark(Mark mark) {
    return warp_max(mark);
}
#else
typedef u64 Mark;

VPA_DEVICE Mark mark_of(u32 key, u32 group) {
    return pack(key, ~group);
}

VPA_DEVICE u32 key_of_mark(Mark mark) {
    return (u32)(mark >> 32);
}

VPA_DEVICE u32 group_of_mark(Mark mark) {
    return ~(u32)mark;
}

VPA_DEVICE Mark warp_best_mark(Mark mark) {
    return warp_best_of(mark);
}
#endif

// The best of the marks of all lanes that have this lane's rows, in each of them.
VPA_DEVICE Mark best_over_lanes(Mark mark) {
#if VPA_LANES == 1
    return warp_best_mark(mark);
#else
    for (i32 mask = VPA_WARP / 2; mask >= VPA_LANES; mask >>= 1) {
#if VPA_NARROW
        const Mark other = VPA_SHUFFLE_XOR(mark, mask);
#else
        const u32 high = VPA_SHUFFLE_XOR((u32)(mark >> 32), mask);
        const Mark other = pack(high, VPA_SHUFFLE_XOR((u32)mark, mask));
#endif
        mark = other > mark ? other : mark;
    }
    return mark;
#endif
}

// `logits` points to row 0, column 0; strides are in words, that of rows is 1 if VPA_WIDE; `chunk`: valid columns of a
// split.
extern "C" __global__ void VPA_LAUNCH_BOUNDS(VPA_THREADS, 1024) local_argmax_columns(const Word* logits,
                                                                                     i64 num_rows,
                                                                                     i64 row_stride,
                                                                                     i64 column_stride,
                                                                                     i64 chunk,
                                                                                     VPA_GRID_CONSTANT Ranges ranges,
                                                                                     u32* out) {
    __shared__ Mark found[ROWS][WARPS];
    __shared__ u64 row_best[ROWS];  // kept by lane 0 of the warp that takes the row
    const i64 first_row = (i64)(blockIdx.x / VPA_SPLITS) * ROWS;
    const i64 from = blockIdx.x % VPA_SPLITS * chunk;
    const u32 warp = threadIdx.x / VPA_WARP;
    const u32 lane = threadIdx.x % VPA_WARP;
    const u32 place = threadIdx.x / VPA_LANES;
    const u32 mine = threadIdx.x % VPA_LANES * MINE;                // my first row in the block
    const i64 my_row = smaller(first_row + mine, num_rows - MINE);  // past the end: the last ones again
    overlap_with_neighbours();

    if (lane == 0) {
        for (u32 row = warp; row < ROWS; row += WARPS) {
            row_best[row] = NO_CANDIDATE;
        }
    }
    i64 before = 0;
#if VPA_RANGES > 2
#pragma unroll 1
#endif
    for (i32 r = 0; r < VPA_RANGES; r++) {
        const Run run = run_of(ranges, r, from, chunk, before);
        before += ranges.count[r];
        if (run.count == 0) {
            continue;
        }
        const Word* row_zero = logits + run.start * column_stride;
        const u32 groups = (u32)(((u64)run.count + VPA_LOADS - 1) / VPA_LOADS);
        Mark top[MINE] = {};
        for (u64 group = place; group < groups; group += GROUPS) {
            u32 key[MINE];
            keys_of_group(row_zero + my_row * row_stride, column_stride, run.count, (u32)group, key);
#pragma unroll
            for (i32 i = 0; i < MINE; i++) {
                const Mark other = mark_of(key[i], (u32)group);
                top[i] = other > top[i] ? other : top[i];
            }
        }
        __syncthreads();  // the last range's readers are done
#pragma unroll
        for (i32 i = 0; i < MINE; i++) {
            const Mark of_warp = best_over_lanes(top[i]);
            if (lane < VPA_LANES) {
                found[mine + i][warp] = of_warp;
            }
        }
        __syncthreads();
        for (u32 row = warp; row < ROWS && first_row + row < num_rows; row += WARPS) {
            const Mark best = warp_best_mark(lane < WARPS ? found[row][lane] : 0);
            const u32 key = key_of_mark(best);
            u32 id_complement = 0;
            if (lane < VPA_LOADS) {
                const u32 column = column_number(group_of_mark(best), lane, run.count);
                const Word word = transformed(row_zero[(first_row + row) * row_stride + column * column_stride]);
                id_complement = logit_key(word) == key ? ~(run.first_id + column) : 0;
            }
            const u64 candidate = pack(candidate_key(key), warp_max(id_complement));
            if (lane == 0) {
                row_best[row] = candidate > row_best[row] ? candidate : row_best[row];
            }
        }
    }
    if (lane == 0) {
        for (u32 row = warp; row < ROWS && first_row + row < num_rows; row += WARPS) {
            write_candidate(out, (first_row + row) * VPA_SPLITS + blockIdx.x % VPA_SPLITS, row_best[row]);
        }
    }
}
