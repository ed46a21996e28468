// local_argmax.cu: the scan. Each block takes one split of one row of the rank's logits and writes the best candidate.
//
// A rank's columns are ranges of the vocabulary with padding between them. Valid columns are numbered through all
// ranges 0, 1, 2, ...; split s of a row takes numbers [s * chunk, (s + 1) * chunk). Padding is never read. An empty
// split writes "no candidate", which loses to everything real.
//
// A block first agrees on its best key, then on the lowest id that has it: only threads that hold that key search for a
// column, in most blocks those of one warp. That costs a barrier more than a search by every warp, and is faster.
//
// Needs VPA_DTYPE, VPA_THREADS, VPA_CONTIGUOUS, VPA_LOADS, VPA_ONCE; VPA_SPLITS, blocks a row; VPA_RANGES, ranges of
// the shard; VPA_PAIRS, 1 to write [rows, 2 * splits] fp32 (value, id) pairs, 0 for [rows, splits] packed u64.

#define WARPS (VPA_THREADS / VPA_WARP)

// By value: a table in global memory would put one more dependent read in front of the scan.
struct Ranges {
    i64 start[VPA_RANGES];     // first local column
    i64 count[VPA_RANGES];     // columns
    i64 first_id[VPA_RANGES];  // global id of the first column
};

// Blocks that all fit at once are what hides memory's latency; only long groups of loads need more registers than that.
#define RESIDENT (VPA_RANGES == 1 && VPA_ONCE && VPA_LOADS <= 4 ? VPA_RESIDENT : 1024)

extern "C" __global__ void VPA_LAUNCH_BOUNDS(VPA_THREADS, RESIDENT)
    local_argmax_candidates(const Word* __restrict__ logits,  // row 0, column 0
                            i64 row_stride,                   // words; any sign, 0 too
                            i64 column_stride,                // likewise
                            i64 chunk,                        // valid columns of a split
                            const Ranges ranges,
                            u32* __restrict__ out) {
    __shared__ u32 warp_key[WARPS];
    __shared__ u32 warp_id[WARPS];
    const u32 row = blockIdx.x / VPA_SPLITS;
    const u32 split = blockIdx.x % VPA_SPLITS;
    const u32 warp = threadIdx.x / VPA_WARP;
    const u32 lane = threadIdx.x % VPA_WARP;
    const i64 from = split * chunk;

    u64 best = NO_CANDIDATE;  // in the lanes of warp 0
    i64 before = 0;           // valid columns in earlier ranges
#if VPA_RANGES > 2            // rare; unrolled, 32 ranges take seconds to compile
#pragma unroll 1
#endif
    for (i32 r = 0; r < VPA_RANGES; r++) {
        const i64 skip = larger(from - before, 0);
        const i64 count = smaller(from + chunk - before, ranges.count[r]) - skip;
        before += ranges.count[r];
        if (count <= 0) {
            continue;
        }
        const Word* run = logits + (row * row_stride + (ranges.start[r] + skip) * column_stride);
        Spot spot;
        const u32 mine = walk(run, column_stride, (u32)count, &spot);
        const u32 of_warp = warp_max(mine);
        if (lane == 0) {
            warp_key[warp] = of_warp;
        }
        __syncthreads();
        const u32 key = warp_max(lane < WARPS ? warp_key[lane] : 0);
        u32 id_complement = 0;
        if (of_warp == key) {
            if (mine == key) {
                const u32 column = column_in(run, column_stride, (u32)count, key, &spot);
                id_complement = 0xFFFFFFFFu - (u32)(ranges.first_id[r] + skip + column);
            }
            id_complement = warp_max(id_complement);
        }
        if (lane == 0) {
            warp_id[warp] = id_complement;
        }
        __syncthreads();
        if (warp == 0) {
            const u64 candidate = pack(candidate_key(key), warp_max(lane < WARPS ? warp_id[lane] : 0));
            best = candidate > best ? candidate : best;
        }
    }

    if (threadIdx.x == 0) {
#if VPA_PAIRS
        u32 value, id;
        pair_of_packed(best, &value, &id);
        out[2 * (i64)blockIdx.x] = value;
        out[2 * (i64)blockIdx.x + 1] = id;
#else
        ((u64*)out)[blockIdx.x] = best;
#endif
    }
}
