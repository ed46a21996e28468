// split.cuh: which columns a split of a row consists of, and where its candidate goes.
//
// A rank's columns are ranges of the vocabulary with padding between them. Valid columns are numbered through all
// ranges 0, 1, 2, ...; split s of a row takes numbers [s * chunk, (s + 1) * chunk). Padding is never read. An empty
// split writes "no candidate", which loses to everything real.
//
// Needs VPA_SPLITS, splits of a row; VPA_RANGES, ranges of the shard; VPA_WRITE, what becomes of a row's candidates,
// one of the three below.

#define WRITE_PACKED 0  // [rows, splits] u64
#define WRITE_PAIRS 1   // [rows, 2 * splits] fp32 (value, id)
#define WRITE_IDS 2     // one split, one rank: its id is the token, [rows] i64

// By value: a table in global memory would put one more dependent read in front of the scan.
struct Ranges {
    i64 start[VPA_RANGES];     // first local column
    i64 count[VPA_RANGES];     // columns
    i64 first_id[VPA_RANGES];  // global id of the first column
};

// Columns start .. start + count - 1 of a row, with ids first_id and up.
struct Run {
    i64 start;
    u32 count;
    u32 first_id;
};

// The part of range r in the split that begins at valid column `from`; `before`: valid columns in earlier ranges.
VPA_DEVICE Run run_of(const Ranges& ranges, i32 r, i64 from, i64 chunk, i64 before) {
    const i64 skip = larger(from - before, 0);
    const i64 count = smaller(from + chunk - before, ranges.count[r]) - skip;
    return {ranges.start[r] + skip, count > 0 ? (u32)count : 0, (u32)(ranges.first_id[r] + skip)};
}

// Write the best of split number `index`, counted through all rows. Its key is a candidate's, not a logit's.
VPA_DEVICE void write_candidate(u32* out, i64 index, u64 best) {
#if VPA_WRITE == WRITE_IDS
    ((i64*)out)[index] = id_of_packed(best);
#elif VPA_WRITE == WRITE_PAIRS
    u32 value, id;
    pair_of_packed(best, &value, &id);
    out[2 * index] = value;
    out[2 * index + 1] = id;
#else
    ((u64*)out)[index] = best;
#endif
}
