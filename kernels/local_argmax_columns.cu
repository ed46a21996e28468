// local_argmax_columns.cu: the scan where rows lie side by side, as in a column-major array. Each block takes one split
// of VPA_ROWS rows, so that neighbouring threads read neighbouring rows of one column.
//
// A thread walks every GROUPS-th column of its row. The block's threads of a row then agree through shared memory.
//
// Needs what split.cuh needs; VPA_DTYPE; VPA_THREADS, threads of a block; VPA_ROWS, rows of a block, a power of two up
// to 32; VPA_LOADS, columns that a thread has in flight.

#define WARPS (VPA_THREADS / VPA_WARP)
#define GROUPS (VPA_THREADS / VPA_ROWS)

extern "C" __global__ void __launch_bounds__(VPA_THREADS)
    local_argmax_columns(const Word* logits,  // row 0, column 0
                         i64 num_rows,
                         i64 row_stride,     // words
                         i64 column_stride,  // likewise
                         i64 chunk,          // valid columns of a split
                         const Ranges ranges,
                         u32* out) {
    __shared__ u64 found[GROUPS][VPA_ROWS];
    const i64 first_row = (i64)(blockIdx.x / VPA_SPLITS) * VPA_ROWS;
    const i64 from = blockIdx.x % VPA_SPLITS * chunk;
    const u32 group = threadIdx.x / VPA_ROWS;
    const i64 row = smaller(first_row + threadIdx.x % VPA_ROWS, num_rows - 1);  // past the end: the last one again
    overlap_with_neighbours();

    u64 best = NO_CANDIDATE;  // of this thread; its key is a logit's
    i64 before = 0;
#if VPA_RANGES > 2
#pragma unroll 1
#endif
    for (i32 r = 0; r < VPA_RANGES; r++) {
        const Run run = run_of(ranges, r, from, chunk, before);
        before += ranges.count[r];
        const Word* first = logits + (row * row_stride + run.start * column_stride);
        u32 top = 0;
        u32 place = 0;
        for (u64 column = group; column < run.count; column += VPA_LOADS * GROUPS) {
            u32 word[VPA_LOADS];
#pragma unroll
            for (u32 i = 0; i < VPA_LOADS; i++) {
                word[i] = first[smaller((i64)column + i * GROUPS, (i64)run.count - 1) * column_stride];
            }
#pragma unroll
            for (u32 i = 0; i < VPA_LOADS; i++) {
                const u32 key = logit_key(word[i]);
                if (key > top) {
                    top = key;
                    place = (u32)smaller((i64)column + i * GROUPS, (i64)run.count - 1);
                }
            }
        }
        const u64 candidate = top ? pack(top, ~(run.first_id + place)) : NO_CANDIDATE;
        best = candidate > best ? candidate : best;
    }

    found[group][threadIdx.x % VPA_ROWS] = best;
    __syncthreads();
    for (u32 r = threadIdx.x / VPA_WARP; r < VPA_ROWS; r += WARPS) {  // a warp for each row
        best = NO_CANDIDATE;
        for (u32 g = threadIdx.x % VPA_WARP; g < GROUPS; g += VPA_WARP) {
            best = found[g][r] > best ? found[g][r] : best;
        }
        best = warp_best_of(best);
        if (threadIdx.x % VPA_WARP == 0 && first_row + r < num_rows) {
            const u64 candidate = best == NO_CANDIDATE ? best : pack(candidate_key((u32)(best >> 32)), (u32)best);
            write_candidate(out, (first_row + r) * VPA_SPLITS + blockIdx.x % VPA_SPLITS, candidate);
        }
    }
}
