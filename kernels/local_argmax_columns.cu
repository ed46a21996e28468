// local_argmax_columns.cu: the scan where rows lie side by side, as in a column-major array. Each block takes one split
// of ROWS rows, so that neighbouring threads read neighbouring rows of one column.
//
// A thread walks every GROUPS-th column of its rows, 16 bytes of rows at once where they are aligned. As in scan.cuh it
// keeps the largest key, here of each row, and which columns raised it. A warp then finds a row's best key among
// the threads' and searches the columns of those that hold it.
//
// Needs what split.cuh needs; VPA_DTYPE; VPA_THREADS, threads of a block; VPA_WIDE, 1 if every column starts at a 16-byte
// boundary and has whole 16 bytes of rows; VPA_LANES, threads side by side, a power of two up to 32; VPA_LOADS, columns
// that a thread has in flight.

#define WARPS (VPA_THREADS / VPA_WARP)
#define GROUPS (VPA_THREADS / VPA_LANES)
#define MINE (VPA_WIDE ? 16 / (i32)sizeof(Word) : 1)  // rows of a thread
#define ROWS (VPA_LANES * MINE)

// Past the end of the run: its last column again.
VPA_DEVICE u32 column_number(u32 first, u32 i, u32 count) {
    const u32 column = first + i * GROUPS;
    return column < count ? column : count - 1;
}

// The largest key of each of this thread's rows among VPA_LOADS columns of a run, from column `first` on.
VPA_DEVICE void keys_of_group(const Word* run, i64 stride, u32 count, u32 first, u32* key) {
#if VPA_WIDE
    Words4 top;
    Words4 column[VPA_LOADS];
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        column[i] = load_once((const Words4*)(run + column_number(first, i, count) * stride));
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
        word[i] = run[column_number(first, i, count) * stride];
    }
    key[0] = 0;
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        const u32 other = logit_key(word[i]);
        key[0] = other > key[0] ? other : key[0];
    }
#endif
}

// The lowest column of a group that has the key; one of them has it.
VPA_DEVICE u32 column_in(const Word* run, i64 stride, u32 count, u32 first, u32 key) {
    const Patterns patterns = patterns_of(key);
    u32 found = 0;
    for (i32 i = VPA_LOADS - 1; i >= 0; i--) {
        const u32 column = column_number(first, (u32)i, count);
        if (is_among(run[column * stride], 0, patterns)) {
            found = column;
        }
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(VPA_THREADS)
    local_argmax_columns(const Word* logits,  // row 0, column 0
                         i64 num_rows,
                         i64 row_stride,     // words; 1 if VPA_WIDE
                         i64 column_stride,  // words
                         i64 chunk,          // valid columns of a split
                         VPA_GRID_CONSTANT Ranges ranges,
                         u32* out) {
    __shared__ u32 group_key[ROWS][GROUPS + 1];    // one more: neighbouring rows lie in different banks
    __shared__ u32 group_first[ROWS][GROUPS + 1];  // the first column of the group that has the key
    __shared__ u64 row_best[ROWS];                 // kept by lane 0 of the warp that takes the row
    const i64 first_row = (i64)(blockIdx.x / VPA_SPLITS) * ROWS;
    const i64 from = blockIdx.x % VPA_SPLITS * chunk;
    const u32 warp = threadIdx.x / VPA_WARP;
    const u32 lane = threadIdx.x % VPA_WARP;
    const u32 group = threadIdx.x / VPA_LANES;
    const u32 mine = threadIdx.x % VPA_LANES * MINE;                     // my first row in the block
    const i64 my_row = smaller(first_row + mine, num_rows - MINE);       // past the end: the last ones again
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
        u32 top[MINE] = {};
        u32 where[MINE] = {};
        for (u64 first = group; first < run.count; first += VPA_LOADS * GROUPS) {
            u32 key[MINE];
            keys_of_group(row_zero + my_row * row_stride, column_stride, run.count, (u32)first, key);
#pragma unroll
            for (i32 i = 0; i < MINE; i++) {
                if (key[i] > top[i]) {
                    top[i] = key[i];
                    where[i] = (u32)first;
                }
            }
        }
        __syncthreads();  // the last range's readers are done
#pragma unroll
        for (i32 i = 0; i < MINE; i++) {
            group_key[mine + i][group] = top[i];
            group_first[mine + i][group] = where[i];
        }
        __syncthreads();
        for (u32 row = warp; row < ROWS && first_row + row < num_rows; row += WARPS) {
            u32 key = 0;
            for (u32 g = lane; g < GROUPS; g += VPA_WARP) {
                key = group_key[row][g] > key ? group_key[row][g] : key;
            }
            key = warp_max(key);
            u32 id_complement = 0;
            for (u32 g = lane; g < GROUPS; g += VPA_WARP) {
                if (group_key[row][g] == key) {
                    const Word* start = row_zero + (first_row + row) * row_stride;
                    const u32 id = run.first_id + column_in(start, column_stride, run.count, group_first[row][g], key);
                    id_complement = ~id > id_complement ? ~id : id_complement;
                }
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
