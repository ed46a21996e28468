// scan.cuh: a thread walks its columns of one row, and later names the lowest of them that has the block's best key.
//
// While walking, a thread keeps only its largest key and which loads raised it. The column is searched once, at the
// end, by the threads that hold the block's largest key: searching inside the loop costs more, since some lane of a
// warp rises in nearly every step.
//
// Logits are transformed as they are loaded, see transform.cuh: what is kept and searched is what is ranked.
//
// Needs VPA_DTYPE; VPA_THREADS, threads of a block, a multiple of 32; VPA_CONTIGUOUS, 1 if columns lie side by side,
// and then VPA_LOADS, how many 16-byte loads a thread has in flight, and VPA_ONCE, 1 if no thread walks more than
// those.

// Both walks below have the same two functions over columns [0, count) of one row, `stride` words apart:
//   walk       the largest key among this thread's columns (0 if it has none); `spot` says where it was met;
//   column_in  the lowest of this thread's columns that has the key, for a thread whose walk returned that key.

#if VPA_CONTIGUOUS

#define WORDS_PER_LOAD (16 / (u32)sizeof(Word))

struct Spot {
    u32 edge_key;             // of the one column that this thread read singly; 0 if it read none
    u32 group_key;            // the largest of this thread's loads; 0 if it has none
    u32 first;                // the first load of the group with that key
    Words4 group[VPA_LOADS];  // the group that was loaded last
};

// How many columns come before the first 16-byte boundary. They and those after the last whole load, the edge, are
// fewer than a warp has lanes: each is read singly by one thread.
VPA_DEVICE u32 head_of(const Word* run, u32 count) {
    const u32 misaligned = (u32)((u64)run % 16) / (u32)sizeof(Word);
    const u32 head = (WORDS_PER_LOAD - misaligned) % WORDS_PER_LOAD;
    return head < count ? head : count;
}

// Thread t reads loads t, t + VPA_THREADS, ..., VPA_LOADS of them at once. Past the end it reads the last one again:
// that changes no maximum, keeps all reads inside the run, and needs no second loop.
VPA_DEVICE u32 load_number(u32 first, u32 i, u32 loads) {
    const u32 index = first + i * VPA_THREADS;
    return index < loads ? index : loads - 1;
}

// The largest key in one group of loads.
VPA_DEVICE u32 key_of_group(const Words4* group) {
    Top top = top_of(group[0].word[0]);
#pragma unroll
    for (i32 i = 1; i < 4 * VPA_LOADS; i++) {
        top = larger_top(top, top_of(group[i / 4].word[i % 4]));
    }
    return key_of_top(top);
}

VPA_DEVICE u32 edge_column(u32 head, u32 loads) {
    return threadIdx.x < head ? threadIdx.x : threadIdx.x + loads * WORDS_PER_LOAD;
}

VPA_DEVICE u32 walk(const Word* run, i64, u32 count, Spot* spot) {
    const u32 head = head_of(run, count);
    const u32 loads = (count - head) / WORDS_PER_LOAD;
    const Words4* middle = (const Words4*)(run + head);
    spot->edge_key = 0;
    spot->group_key = 0;
    if (threadIdx.x < count - loads * WORDS_PER_LOAD) {
        spot->edge_key = logit_key(transformed(run[edge_column(head, loads)]));
    }
    for (u32 first = threadIdx.x; first < loads; first += VPA_LOADS * VPA_THREADS) {
#pragma unroll
        for (u32 i = 0; i < VPA_LOADS; i++) {
            spot->group[i] = load_logits(middle + load_number(first, i, loads));
        }
        const u32 key = key_of_group(spot->group);
        if (key > spot->group_key) {
            spot->group_key = key;
            spot->first = first;
        }
#if VPA_ONCE
        break;
#endif
    }
    return spot->edge_key > spot->group_key ? spot->edge_key : spot->group_key;
}

VPA_DEVICE u32 column_in(const Word* run, i64, u32 count, u32 key, Spot* spot) {
    const u32 head = head_of(run, count);
    const u32 loads = (count - head) / WORDS_PER_LOAD;
    if (spot->edge_key == key && (threadIdx.x < head || spot->group_key != key)) {
        return edge_column(head, loads);
    }
#if !VPA_ONCE
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        spot->group[i] = transformed_load(((const Words4*)(run + head))[load_number(spot->first, i, loads)]);
    }
#endif
    const Patterns patterns = patterns_of(key);
    u32 load = 0;
    u32 place = 0;
#pragma unroll
    for (i32 i = VPA_LOADS - 1; i >= 0; i--) {  // from the last logit to the first, so that the first one stays
        u32 found = WORDS_PER_LOAD;
#pragma unroll
        for (i32 j = (i32)WORDS_PER_LOAD - 1; j >= 0; j--) {
            const u32 bit = (u32)j * 8 * (u32)sizeof(Word);
            if (is_among(spot->group[i].word[bit / 32], bit % 32, patterns)) {
                found = (u32)j;
            }
        }
        if (found != WORDS_PER_LOAD) {
            load = (u32)i;
            place = found;
        }
    }
    return head + load_number(spot->first, load, loads) * WORDS_PER_LOAD + place;
}

#else

struct Spot {
    u32 column;
};

VPA_DEVICE u32 walk(const Word* run, i64 stride, u32 count, Spot* spot) {
    u32 best = 0;
    spot->column = 0;
    for (u64 column = threadIdx.x; column < count; column += VPA_THREADS) {
        const u32 key = logit_key(transformed(run[(i64)column * stride]));
        if (key > best) {
            best = key;
            spot->column = (u32)column;
        }
    }
    return best;
}

VPA_DEVICE u32 column_in(const Word*, i64, u32, u32, Spot* spot) {
    return spot->column;
}

#endif
