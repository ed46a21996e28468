// plain_move.cu: read some arrays of one length once, and write as many bytes to others as a norm of them would: what a
// norm is held against.
//
// Needs VPA_READS and VPA_WRITES, arrays of `loads` 16-byte words that follow one another; VPA_THREADS; VPA_LOADS,
// words of each array that a thread moves.

extern "C" __global__ void __launch_bounds__(VPA_THREADS) plain_move(const Words4* data, i64 loads, Words4* out) {
    const i64 first = (i64)blockIdx.x * VPA_THREADS * VPA_LOADS + threadIdx.x;
    overlap_with_neighbours();
    Words4 words[VPA_LOADS][VPA_READS];
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
#pragma unroll
        for (u32 array = 0; array < VPA_READS; array++) {
            words[i][array] = load_once(data + array * loads + smaller(first + i * VPA_THREADS, loads - 1));
        }
    }
#pragma unroll
    for (u32 i = 0; i < VPA_LOADS; i++) {
        Words4 mixed = words[i][0];
#pragma unroll
        for (u32 array = 1; array < VPA_READS; array++) {
#pragma unroll
            for (u32 part = 0; part < 4; part++) {
                mixed.word[part] ^= words[i][array].word[part];
            }
        }
        if (first + i * VPA_THREADS < loads) {
#pragma unroll
            for (u32 array = 0; array < VPA_WRITES; array++) {
                out[array * loads + first + i * VPA_THREADS] = mixed;
            }
        }
    }
}
