// verify.cu: the finish of a greedy verification. One block per request picks the argmax of each of its rows from what
// all ranks gathered, a warp for each, and then its first warp accepts drafts, up to the first that is refused.
//
// vpa/acceptance.py says what the rules are. A draft is judged by its own row alone, so that all are judged at once.
//
// Needs what pick.cuh and requests.cuh need; VPA_SYNTHETIC, 1 if drafts are accepted by a draw; VPA_THREADS, threads of
// a block.

#define WARPS (VPA_THREADS / VPA_WARP)
#define NO_TOKEN (-1)

// `lines`: how many a rank gave, a line for each request or for each row.
VPA_DEVICE i64 argmax_of_row(const u64* gathered, RequestRows rows, u32 i, i64 lines) {
#if VPA_BLOCKS
    const i64 first = (i64)blockIdx.x * LINE;
    if (i + 1 == rows.count) {
        return id_of_packed(warp_pick<VPA_BONUS_WIDTH>(gathered, first + VPA_DRAFTS * VPA_WIDTH, lines * LINE));
    }
    return id_of_packed(warp_pick<VPA_WIDTH>(gathered, first + i * VPA_WIDTH, lines * LINE));
#else
    return id_of_packed(warp_pick<VPA_WIDTH>(gathered, (rows.begin + i) * LINE, lines * LINE));
#endif
}

// draft_ids, positions: [num_rows]; cu_num_rows: [requests + 1]; seq_lens, prefill_lens, seeds, num_sampled and
// num_rejected: [requests]; acceptance: [VPA_DRAFTS]; tokens: [requests, VPA_DRAFTS + 1].
extern "C" __global__ void __launch_bounds__(VPA_THREADS) greedy_verify(const u64* gathered,
                                                                        i64 num_rows,
                                                                        i64 vocab_size,
                                                                        const i64* draft_ids,
                                                                        const i32* cu_num_rows,
                                                                        const i64* positions,
                                                                        const i32* seq_lens,
                                                                        const i32* prefill_lens,
#if VPA_SYNTHETIC
                                                                        const i64* seeds,
                                                                        const float* acceptance,
#endif
                                                                        i64* tokens,
                                                                        i32* num_sampled,
                                                                        i32* num_rejected) {
    __shared__ i64 argmax[REQUEST_ROWS];
    const u32 request = blockIdx.x;
    const u32 warp = threadIdx.x / VPA_WARP;
    const u32 lane = threadIdx.x % VPA_WARP;
    overlap_with_neighbours();

    RequestRows rows = rows_of(cu_num_rows, request, num_rows);
    const i32 prefill_len = prefill_lens[request];
    if (seq_lens[request] < prefill_len) {
        rows.count = 0;
    }
    for (u32 i = warp; i < rows.count; i += WARPS) {
        const i64 id = argmax_of_row(gathered, rows, i, VPA_BLOCKS ? gridDim.x : num_rows);
        if (lane == 0) {
            argmax[i] = id;
        }
    }
    __syncthreads();
    if (warp > 0) {
        return;
    }

    const u32 drafts = rows.count > 0 ? rows.count - 1 : 0;
    u32 refused = 0;  // the complement of the first draft that this lane refuses: the largest of all is the first one's
    for (u32 i = lane; i < drafts && refused == 0; i += VPA_WARP) {
        const i64 row = rows.begin + i;
        const i64 draft = draft_ids[row + 1];
        const bool is_prompt = positions[row + 1] - (i + 1) < prefill_len;
#if VPA_SYNTHETIC
        const bool agreed = draw(seeds[request], positions[row]) < acceptance[i];
#else
        const bool agreed = draft == argmax[i];
#endif
        if (draft < 0 || draft >= vocab_size || is_prompt || !agreed) {
            refused = ~i;
        }
    }
    refused = warp_max(refused);
    const u32 accepted = refused == 0 ? drafts : ~refused;
    const u32 sampled = rows.count > 0 ? accepted + 1 : 0;
    for (u32 i = lane; i < REQUEST_ROWS; i += VPA_WARP) {
        const i64 token = i < accepted ? draft_ids[rows.begin + i + 1] : i < sampled ? argmax[i] : NO_TOKEN;
        tokens[(i64)request * REQUEST_ROWS + i] = token;
    }
    if (lane == 0) {
        num_sampled[request] = (i32)sampled;
        num_rejected[request] = (i32)(rows.count - sampled);
    }
}
