// head.cu: the head's product and the scan in one. Each warp takes rows of the head's weight, multiplies them with the
// hidden states of up to VPA_BATCH rows, and keeps the best candidate of each: logits are never written.
//
// A logit is the fp32 sum over the hidden size, plus the bias, rounded once to the logits' type, then transformed and
// ranked as those of a product of its own would be. The order of the sum is this kernel's.
//
// If VPA_TENSOR, tensor cores multiply 16 rows of hidden states with a tile, 8 rows of the weight, 16 columns at a
// time. Which of the 16 columns a thread holds does not matter as long as both sides agree: so a thread takes 8
// neighbours of a row, one 16-byte load, for two steps. The weight is read once; hidden states, which all warps read,
// stay in L1. VPA_SHARERS warps share a tile, each of them its own columns, so that fewer rows are read at once.
//
// Needs what split.cuh and transform.cuh need; VPA_PRODUCT, 1; VPA_DTYPE, also of weight and hidden states;
// VPA_THREADS; VPA_BATCH, 8 or 16, at most 32 without tensor cores; VPA_BIAS, 0 or 1; VPA_TENSOR, 1 for 16-bit types
// whose rows are whole 16-byte loads, aligned to them; then VPA_LOADS, loads of the weight that a thread has in flight,
// and VPA_SHARERS.

#define WARPS (VPA_THREADS / VPA_WARP)

// Batch rows of which a lane keeps the best candidate: on tensor cores two of a tile, 8 apart; else one.
#if VPA_TENSOR
#define MINE (VPA_BATCH / 8)
#define TILES (WARPS / VPA_SHARERS)  // of a block, at a time
#define COLUMNS (32 * VPA_LOADS)
#else
#define MINE 1
#endif

// Where valid column `number` lies: `start`, its row of the weight, and `first_id`, its id.
VPA_DEVICE Run column_number(const Ranges& ranges, i64 number) {
    Run found = {0, 0, 0};
    i64 before = 0;
#if VPA_RANGES > 2
#pragma unroll 1
#else
#pragma unroll
#endif
    for (i32 r = 0; r < VPA_RANGES; r++) {
        const Run run = run_of(ranges, r, number, 1, before);
        before += ranges.count[r];
        if (run.count != 0) {
            found.start = run.start;
            found.first_id = run.first_id;
        }
    }
    return found;
}

VPA_DEVICE float number_of(Word word) {
#if VPA_NVIDIA && VPA_DTYPE == VPA_FP16
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(word));
    return number;
#else
    return __uint_as_float(widen(word));
#endif
}

// sum + a * b, subnormals kept: -ftz=true, with which CuPy compiles, concerns operators alone.
VPA_DEVICE float add_product(float sum, float a, float b) {
#if defined(__CUDA_ARCH__)
    asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sum) : "f"(a), "f"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

// The candidate of a logit, given its sum.
VPA_DEVICE u64 candidate_of(float sum, [[maybe_unused]] const float* bias, Run column) {
#if VPA_BIAS
    sum = add_product(sum, 1.0f, bias[column.start]);
#endif
    const u32 key = logit_key(transformed(word_of_single(__float_as_uint(sum))));
    return pack(candidate_key(key), ~column.first_id);
}

#if VPA_TENSOR
// sum += x * w for 16 columns; a thread's words hold columns of batch rows `lane / 4` (low) and 8 above (high), and of
// the tile's weight row `lane / 4`. Sums: batch row low, then high; weight rows `lane % 4 * 2` and the next.
VPA_DEVICE void multiply(float* sum, const u32* low, const u32* high, const u32* w) {
#if VPA_DTYPE == VPA_BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
    asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(low[0]), "r"(high[0]), "r"(low[1]), "r"(high[1]), "r"(w[0]), "r"(w[1]));
}

// As load_once; of a line of 128 bytes, L2 fetches all, not only the half that the four threads of a row ask for. On
// one H200 that took the kernel from 117 to 110 us, hidden size 7168 and 32320 rows of bf16.
VPA_DEVICE Words4 load_weight(const Words4* address) {
    Words4 w;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
                 : "l"(address));
    return w;
}

VPA_DEVICE Words4 load_if(bool inside, const Word* address) {
    return inside ? *(const Words4*)address : Words4{{0, 0, 0, 0}};
}

// The sums of a tile over VPA_LOADS times 32 columns, of which this thread takes 8 of each 32, from `k` on. If not
// `whole`, columns from `size` on count as 0.
VPA_DEVICE void add_columns(float* sum, const Word* w, const Word* low, const Word* high, u32 k, i64 size, bool whole) {
    Words4 weight[VPA_LOADS];
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        weight[i] = whole ? load_weight((const Words4*)(w + k + 32 * i)) : load_if(k + 32 * i < size, w + k + 32 * i);
    }
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        const bool inside = whole || k + 32 * i < size;
        const Words4 x_low = load_if(inside, low + k + 32 * i);
        const Words4 x_high = load_if(inside && VPA_BATCH > 8, high + k + 32 * i);
        multiply(sum, x_low.word, x_high.word, weight[i].word);
        multiply(sum, x_low.word + 2, x_high.word + 2, weight[i].word + 2);
    }
}
#endif

// hidden: [num_rows, size], rows side by side; weight: rows of `size`, `stride` words apart; out: [num_rows, blocks]
// packed, where a launch has `blocks` blocks for each VPA_BATCH rows.
extern "C" __global__ void VPA_LAUNCH_BOUNDS(VPA_THREADS, 512) head_candidates(const Word* hidden,
                                                                               i64 num_rows,
                                                                               i64 size,
                                                                               const Word* weight,
                                                                               i64 stride,
                                                                               const float* bias,
                                                                               VPA_GRID_CONSTANT Ranges ranges,
                                                                               i64 valid,  // columns
                                                                               u32 blocks,
                                                                               u32* out) {
    __shared__ u64 found[WARPS][VPA_BATCH];
    const u32 batches = gridDim.x / blocks;
    const u32 block = blockIdx.x / batches;  // neighbouring blocks share rows of the weight
    const i64 first_row = (i64)(blockIdx.x % batches) * VPA_BATCH;
    const u32 warp = threadIdx.x / VPA_WARP;
    const u32 lane = threadIdx.x % VPA_WARP;
#if VPA_TENSOR
    const i64 tiles = (valid + 7) / 8;
#endif
    overlap_with_neighbours();

    u64 mine[MINE] = {};
#if VPA_TENSOR
#if VPA_SHARERS > 1
    __shared__ Words4 part_of_sum[2][WARPS][VPA_WARP];
    u32 buffer = 0;
#endif
    for (i64 first = (i64)block * TILES; first < tiles; first += (i64)blocks * TILES) {
        const i64 tile = first + warp / VPA_SHARERS;  // past the end: the last row of the weight again, for nothing
        const u32 group = lane / 4;
        const u32 part = lane % 4 * 8;
        const Word* low = hidden + smaller(first_row + group, num_rows - 1) * size + part;
        const Word* high = hidden + smaller(first_row + group + 8, num_rows - 1) * size + part;
        const Run row = column_number(ranges, smaller(tile * 8 + group, valid - 1));
        const Word* w = weight + row.start * stride + part;
        float sum[4] = {};
        u32 k = warp % VPA_SHARERS * COLUMNS;
        for (; k + COLUMNS <= size; k += VPA_SHARERS * COLUMNS) {
            add_columns(sum, w, low, high, k, 0, true);
        }
        if (k < size) {
            add_columns(sum, w, low, high, k, size - part, false);
        }
#if VPA_SHARERS > 1
        Words4* parts = part_of_sum[buffer][warp];
        parts[lane] = {
            {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])}};
        buffer ^= 1;  // who adds them up may lag behind by one tile
        __syncthreads();
        if (warp % VPA_SHARERS != 0) {
            continue;
        }
#pragma unroll
        for (u32 other = 1; other < VPA_SHARERS; other++) {
            const Words4 more = parts[other * VPA_WARP + lane];
            for (i32 i = 0; i < 4; i++) {
                sum[i] = add_product(sum[i], 1.0f, __uint_as_float(more.word[i]));
            }
        }
#endif
#pragma unroll 1  // a transform is long
        for (u32 i = 0; i < 2 * MINE; i++) {
            const i64 number = tile * 8 + lane % 4 * 2 + i % 2;
            if (number < valid) {
                const float of_batch = i % 2 ? (i < 2 ? sum[1] : sum[3]) : (i < 2 ? sum[0] : sum[2]);
                const u64 candidate = candidate_of(of_batch, bias, column_number(ranges, number));
                if (i < 2) {
                    mine[0] = candidate > mine[0] ? candidate : mine[0];
                } else {
                    mine[MINE - 1] = candidate > mine[MINE - 1] ? candidate : mine[MINE - 1];
                }
            }
        }
    }
#else
    for (i64 number = (i64)block * WARPS + warp; number < valid; number += (i64)blocks * WARPS) {
        const Run row = column_number(ranges, number);
        float sum[VPA_BATCH] = {};
#pragma unroll 1
        for (i64 k = lane; k < size; k += VPA_WARP) {
            const float w = number_of(weight[row.start * stride + k]);
#pragma unroll
            for (i32 b = 0; b < VPA_BATCH; b++) {
                sum[b] = add_product(sum[b], w, number_of(hidden[smaller(first_row + b, num_rows - 1) * size + k]));
            }
        }
        float of_lane = 0;
#pragma unroll
        for (i32 b = 0; b < VPA_BATCH; b++) {
            for (i32 mask = VPA_WARP / 2; mask > 0; mask >>= 1) {
                sum[b] = add_product(sum[b], 1.0f, __uint_as_float(VPA_SHUFFLE_XOR(__float_as_uint(sum[b]), mask)));
            }
            of_lane = (i32)lane == b ? sum[b] : of_lane;
        }
        const u64 candidate = candidate_of(of_lane, bias, row);
        mine[0] = candidate > mine[0] ? candidate : mine[0];
    }
#endif
#if VPA_TENSOR
#pragma unroll
    for (i32 i = 0; i < MINE; i++) {
        for (i32 mask = 2; mask > 0; mask >>= 1) {  // the four lanes that share a batch row
            const u32 high = VPA_SHUFFLE_XOR((u32)(mine[i] >> 32), mask);
            const u64 other = pack(high, VPA_SHUFFLE_XOR((u32)mine[i], mask));
            mine[i] = other > mine[i] ? other : mine[i];
        }
        if (lane % 4 == 0) {
            found[warp][lane / 4 + 8 * i] = mine[i];
        }
    }
#else
    if (lane < VPA_BATCH) {
        found[warp][lane] = mine[0];
    }
#endif
    __syncthreads();
    if (threadIdx.x < VPA_BATCH && first_row + threadIdx.x < num_rows) {
        u64 candidate = NO_CANDIDATE;
        for (u32 i = 0; i < WARPS; i++) {
            candidate = found[i][threadIdx.x] > candidate ? found[i][threadIdx.x] : candidate;
        }
        write_candidate(out, (first_row + threadIdx.x) * blocks + block, candidate);
    }
}
