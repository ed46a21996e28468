// plain_read.cu: read contiguous bytes once and keep a word of them, so that no load can be dropped. The floor under a
// scan: no kernel that looks at every logit can take less.
//
// Needs VPA_THREADS; VPA_LOADS, 16-byte loads in flight per thread.

extern "C" __global__ void __launch_bounds__(VPA_THREADS)
    plain_read(const Words4* __restrict__ data, i64 loads, u32* __restrict__ sink) {
    u32 mix = 0;
    const i64 step = (i64)gridDim.x * VPA_THREADS;
    for (i64 first = (i64)blockIdx.x * VPA_THREADS + threadIdx.x; first < loads; first += VPA_LOADS * step) {
        Words4 group[VPA_LOADS];
#pragma unroll
        for (i32 i = 0; i < VPA_LOADS; i++) {
            group[i] = load_once(data + smaller(first + i * step, loads - 1));
        }
#pragma unroll
        for (i32 i = 0; i < VPA_LOADS; i++) {
            mix |= group[i].word[0] ^ group[i].word[1] ^ group[i].word[2] ^ group[i].word[3];
        }
    }
    sink[(i64)blockIdx.x * VPA_THREADS + threadIdx.x] = mix;
}
