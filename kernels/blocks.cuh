// blocks.cuh: the block of ids that a thread block reduces for a verification, if VPA_BLOCKS.
//
// Blocks begin at multiples of their size in the vocabulary, whatever the shards are: one across a shard's edge is
// reduced by each rank as far as it has it. A request's line has the blocks of each draft position, then of its last
// row.
//
// Needs what requests.cuh needs; VPA_DRAFT_BLOCK, ids of a block of a row that a draft is judged against;
// VPA_BONUS_BLOCK, of a request's last row.

#if VPA_BLOCKS

// Ids from .. from + size - 1 of a row; row -1 if the request has none in this place.
struct Block {
    i64 row;
    i64 from;
    i64 size;
};

// `draft_from`, `bonus_from`: where the first block of either size begins that the rank has ids of.
VPA_DEVICE Block block_of(const i32* cu_num_rows, i64 num_rows, i64 draft_from, i64 bonus_from) {
    const RequestRows rows = rows_of(cu_num_rows, blockIdx.x / LINE, num_rows);
    const i64 place = blockIdx.x % LINE;
    if (place < VPA_DRAFTS * VPA_WIDTH) {
        const i64 draft = place / VPA_WIDTH;
        return {draft + 1 < rows.count ? rows.begin + draft : -1, draft_from + place % VPA_WIDTH * VPA_DRAFT_BLOCK,
                VPA_DRAFT_BLOCK};
    }
    const i64 last = rows.begin + rows.count - 1;
    return {rows.count > 0 ? last : -1, bonus_from + (place - VPA_DRAFTS * VPA_WIDTH) * VPA_BONUS_BLOCK,
            VPA_BONUS_BLOCK};
}

#endif
