// pick.cu: the pick. One warp per row takes the best of the candidates that all ranks gathered.
//
// `gathered` is a dim-0 all-gather: rank r's candidates of row b are line r * num_rows + b, VPA_WIDTH candidates long.
// No copy that moves the rank axis is needed, since the pick can stride over it.
//
// Needs what pick.cuh needs; VPA_KEEP, 1 to write a row's best candidate, packed, in place of its id; VPA_WIDTH,
// candidates of a rank's line; VPA_THREADS, threads of a block: one row for each 32 of them.

extern "C" __global__ void __launch_bounds__(VPA_THREADS)
    pick_from_candidates(const void* gathered, i64 num_rows, i64* out) {
    const i64 row = (i64)blockIdx.x * (VPA_THREADS / VPA_WARP) + threadIdx.x / VPA_WARP;
    if (row >= num_rows) {
        return;  // a whole warp at a time
    }
    overlap_with_neighbours();
    const u64 best = warp_pick<VPA_WIDTH>(gathered, row * VPA_WIDTH, num_rows * VPA_WIDTH);
    if (threadIdx.x % VPA_WARP == 0) {
        out[row] = VPA_KEEP ? (i64)best : id_of_packed(best);
    }
}
