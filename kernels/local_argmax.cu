// local_argmax.cu: the scan. Each block takes one split of one row of the rank's logits and writes the best candidate.
//
// A block first agrees on its best key, then on the lowest id that has it: only threads that hold that key search for a
// column, in most blocks those of one warp. That costs a barrier more than a search by every warp, and is faster.
//
// If VPA_CLUSTER, the blocks of a row are a cluster, which agrees on one candidate: a row has VPA_SPLITS splits for the
// walk, and one for who reads the result.
//
// If VPA_BLOCKS, thread blocks take the blocks of ids of blocks.cuh in place of splits.
//
// Needs what split.cuh, transform.cuh, scan.cuh and, if VPA_BLOCKS, blocks.cuh need; VPA_CLUSTER, 0 or 1.

#define WARPS (VPA_THREADS / VPA_WARP)

// Blocks that all fit at once are what hides memory's latency; a loop, longer groups, or a transform, in which
// arithmetic is what takes time, need more registers than that.
#if VPA_RANGES == 1 && VPA_ONCE && VPA_LOADS <= 4 && !VPA_TRANSFORM
#define RESIDENT VPA_RESIDENT
#else
#define RESIDENT 1024
#endif

#if VPA_CLUSTER
#define CLUSTER VPA_CLUSTER_DIMS(VPA_SPLITS)
#else
#define CLUSTER
#endif

#if VPA_BLOCKS
#define BLOCK_PARAMETERS , const i32 *cu_num_rows, i64 num_rows, i64 draft_from, i64 bonus_from
#else
#define BLOCK_PARAMETERS
#endif

extern "C" __global__ void CLUSTER VPA_LAUNCH_BOUNDS(VPA_THREADS, RESIDENT)
    local_argmax_candidates(const Word* logits,  // row 0, column 0
                            i64 row_stride,      // words; any sign, 0 too
                            i64 column_stride,   // likewise
                            i64 chunk,           // valid columns of a split
                            VPA_GRID_CONSTANT Ranges ranges,
                            u32* out BLOCK_PARAMETERS) {
    __shared__ u32 warp_key[WARPS];
    __shared__ u32 warp_id[WARPS];
#if VPA_BLOCKS
    overlap_with_neighbours();
    const Block block = block_of(cu_num_rows, num_rows, draft_from, bonus_from);
    const i64 row = block.row;
    const i64 from = block.from;
    chunk = block.size;
    if (row < 0) {
        if (threadIdx.x == 0) {
            write_candidate(out, blockIdx.x, NO_CANDIDATE);
        }
        return;
    }
#else
    const u32 row = blockIdx.x / VPA_SPLITS;
    const i64 from = blockIdx.x % VPA_SPLITS * chunk;
#endif
    const u32 warp = threadIdx.x / VPA_WARP;
    const u32 lane = threadIdx.x % VPA_WARP;
#if !VPA_BLOCKS
    overlap_with_neighbours();
#endif

    u64 best = NO_CANDIDATE;  // in the lanes of warp 0
    i64 before = 0;
#if VPA_RANGES > 2  // rare; unrolled, 32 ranges take seconds to compile
#pragma unroll 1
#endif
    for (i32 r = 0; r < VPA_RANGES; r++) {
#if VPA_BLOCKS
        before = ranges.first_id[r];  // a column's number is its id
#endif
        const Run run = run_of(ranges, r, from, chunk, before);
        before += ranges.count[r];
        if (run.count == 0) {
            continue;
        }
        const Word* first = logits + (row * row_stride + run.start * column_stride);
        Spot spot;
        const u32 mine = walk(first, column_stride, run.count, &spot);
        const u32 of_warp = warp_max(mine);
        if (lane == 0) {
            warp_key[warp] = of_warp;
        }
        __syncthreads();
        const u32 key = warp_max(lane < WARPS ? warp_key[lane] : 0);
        u32 id_complement = 0;
        if (of_warp == key) {
            if (mine == key) {
                id_complement = ~(run.first_id + column_in(first, column_stride, run.count, key, &spot));
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
#if VPA_CLUSTER
    __shared__ u64 block_best[VPA_SPLITS];  // of the cluster's first block
    cluster_barrier();                      // all have begun: their shared memory is theirs
    if (threadIdx.x == 0) {
        in_block(block_best, 0)[blockIdx.x % VPA_SPLITS] = best;
    }
    cluster_barrier();
    if (blockIdx.x % VPA_SPLITS != 0) {
        return;
    }
    if (warp == 0) {
        best = warp_best_of(lane < VPA_SPLITS ? block_best[lane] : NO_CANDIDATE);
    }
    if (threadIdx.x == 0) {
        write_candidate(out, row, best);
    }
#else
    if (threadIdx.x == 0) {
        write_candidate(out, blockIdx.x, best);
    }
#endif
}
