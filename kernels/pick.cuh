// pick.cuh: a warp takes the best of the candidates that all ranks gave for one row.
//
// Needs VPA_RANKS, ranks that contributed; VPA_PAIRS, 1 if candidates are fp32 pairs, 0 if packed.

// The best of the row's candidates, in every lane: `width` of each rank, the first rank's from number `first` on, each
// later rank's `apart` further on.
template <u32 width>
VPA_DEVICE u64 warp_pick(const void* gathered, i64 first, i64 apart) {
    const u32 candidates = VPA_RANKS * width;
    const u32 steps = (candidates + VPA_WARP - 1) / VPA_WARP;
    const u32 in_flight = steps < 8 ? steps : 8;  // that a lane loads before it compares any: a latency less for each
    u64 best = NO_CANDIDATE;
    for (u32 start = threadIdx.x % VPA_WARP; start < candidates; start += in_flight * VPA_WARP) {
        u64 candidate[in_flight];
#pragma unroll
        for (u32 step = 0; step < in_flight; step++) {
            const u32 i = start + step * VPA_WARP < candidates ? start + step * VPA_WARP : start;
            const i64 index = i / width * apart + first + i % width;
#if VPA_PAIRS
            const u32* pair = (const u32*)gathered + 2 * index;
            candidate[step] = packed_of_pair(pair[0], pair[1]);
#else
            candidate[step] = ((const u64*)gathered)[index];
#endif
        }
#pragma unroll
        for (u32 step = 0; step < in_flight; step++) {
            best = candidate[step] > best ? candidate[step] : best;
        }
    }
    return warp_best_of(best);
}
