// plain_read.cu: read contiguous bytes once and keep a word of each warp's, so that no load can be dropped: what a scan
// of the same bytes is held against.
//
// Needs VPA_THREADS; VPA_LOADS, 16-byte loads in flight per thread.

extern "C" __global__ void __launch_bounds__(VPA_THREADS) plain_read(const Words4* data, i64 loads, u32* sink) {
    u32 mix = 0;
    const i64 first = (i64)blockIdx.x * VPA_THREADS * VPA_LOADS + threadIdx.x;
    overlap_with_neighbours();
    Words4 group[VPA_LOADS];
#pragma unroll
    for (i32 i = 0; i < VPA_LOADS; i++) {
        group[i] = load_once(data + smaller(first + i * VPA_THREADS, loads - 1));
    }
#pragma unroll
    for (i32 i = 0; i < VPA_LOADS; i++) {
        mix |= group[i].word[0] ^ group[i].word[1] ^ group[i].word[2] ^ group[i].word[3];
    }
    mix = warp_max(mix);
    if (threadIdx.x % VPA_WARP == 0) {
        sink[((i64)blockIdx.x * VPA_THREADS + threadIdx.x) / VPA_WARP] = mix;
    }
}
