// requests.cuh: which rows of logits a request owns, and where its candidates lie.
//
// Kernels that know of requests define VPA_DRAFTS, the most drafts of one; VPA_BLOCKS, 1 if a rank gives statistics of
// blocks of ids, a line for each request, 0 if candidates, a line for each row; VPA_WIDTH, candidates of a row that a
// draft is judged against; VPA_BONUS_WIDTH, of a request's last row.

#if defined(VPA_DRAFTS)

#define REQUEST_ROWS (VPA_DRAFTS + 1)
#define LINE (VPA_BLOCKS ? VPA_DRAFTS * VPA_WIDTH + VPA_BONUS_WIDTH : VPA_WIDTH)

struct RequestRows {
    i64 begin;
    u32 count;
};

// Bounded by what there is: whatever `cu_num_rows` holds, no row outside the logits is named.
VPA_DEVICE RequestRows rows_of(const i32* cu_num_rows, u32 request, i64 num_rows) {
    const i64 begin = larger(cu_num_rows[request], 0);
    const i64 end = smaller(cu_num_rows[request + 1], num_rows);
    return {begin, (u32)smaller(larger(end - begin, 0), REQUEST_ROWS)};
}

#endif
