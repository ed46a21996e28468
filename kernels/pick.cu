// pick.cu: the pick. One warp per row takes the best of the candidates that all ranks gathered.
//
// `gathered` is a dim-0 all-gather: rank r's candidates of row b are line r * num_rows + b, VPA_WIDTH candidates long.
// No copy that moves the rank axis is needed, since the pick can stride over it.
//
// Needs VPA_WIDTH; VPA_PAIRS, 1 if candidates are fp32 pairs, 0 if packed; VPA_THREADS, threads of a block: one row for
// each 32 of them.

extern "C" __global__ void __launch_bounds__(VPA_THREADS)
    pick_from_candidates(const void* gathered, i64 num_rows, i64 ranks, i64* ids) {
    const i64 row = (i64)blockIdx.x * (VPA_THREADS / VPA_WARP) + threadIdx.x / VPA_WARP;
    if (row >= num_rows) {
        return;  // a whole warp at a time
    }
    overlap_with_neighbours();
    u64 best = NO_CANDIDATE;
    for (i64 i = threadIdx.x % VPA_WARP; i < ranks * VPA_WIDTH; i += VPA_WARP) {
        const i64 index = (i / VPA_WIDTH * num_rows + row) * VPA_WIDTH + i % VPA_WIDTH;
#if VPA_PAIRS
        const u32* pair = (const u32*)gathered + 2 * index;
        const u64 candidate = packed_of_pair(pair[0], pair[1]);
#else
        const u64 candidate = ((const u64*)gathered)[index];
#endif
        best = candidate > best ? candidate : best;
    }
    best = warp_best_of(best);
    if (threadIdx.x % VPA_WARP == 0) {
        ids[row] = id_of_packed(best);
    }
}
