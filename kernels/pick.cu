// pick.cu: the pick. One warp per row takes the best of the candidates that all ranks gathered.
//
// `gathered` is a dim-0 all-gather: rank r's candidates of row b are line r * num_rows + b, VPA_WIDTH candidates long.
// No copy that moves the rank axis is needed, since the pick can stride over it.
//
// Needs VPA_KEEP, 1 to write a row's best candidate, packed, in place of its id; VPA_WIDTH; VPA_RANKS, ranks that
// contributed; VPA_PAIRS, 1 if candidates are fp32 pairs, 0 if packed; VPA_THREADS, threads of a block: one row for
// each 32 of them.

#define CANDIDATES (VPA_RANKS * VPA_WIDTH)
#define STEPS ((CANDIDATES + VPA_WARP - 1) / VPA_WARP)
#define IN_FLIGHT \
    (STEPS < 8 ? STEPS : 8)  // candidates that a lane loads before it compares any: a latency less for each

extern "C" __global__ void __launch_bounds__(VPA_THREADS)
    pick_from_candidates(const void* gathered, i64 num_rows, i64* out) {
    const i64 row = (i64)blockIdx.x * (VPA_THREADS / VPA_WARP) + threadIdx.x / VPA_WARP;
    if (row >= num_rows) {
        return;  // a whole warp at a time
    }
    overlap_with_neighbours();
    u64 best = NO_CANDIDATE;
    for (u32 first = threadIdx.x % VPA_WARP; first < CANDIDATES; first += IN_FLIGHT * VPA_WARP) {
        u64 candidate[IN_FLIGHT];
#pragma unroll
        for (u32 step = 0; step < IN_FLIGHT; step++) {
            const u32 i = first + step * VPA_WARP < CANDIDATES ? first + step * VPA_WARP : first;
            const i64 index = (i / VPA_WIDTH * num_rows + row) * VPA_WIDTH + i % VPA_WIDTH;
#if VPA_PAIRS
            const u32* pair = (const u32*)gathered + 2 * index;
            candidate[step] = packed_of_pair(pair[0], pair[1]);
#else
            candidate[step] = ((const u64*)gathered)[index];
#endif
        }
#pragma unroll
        for (u32 step = 0; step < IN_FLIGHT; step++) {
            best = candidate[step] > best ? candidate[step] : best;
        }
    }
    best = warp_best_of(best);
    if (threadIdx.x % VPA_WARP == 0) {
        out[row] = VPA_KEEP ? (i64)best : id_of_packed(best);
    }
}
