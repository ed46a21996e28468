// transform.cu: transformed logits as an array of their own, for those that are gathered or ranked by others.
//
// Needs what transform.cuh needs; VPA_THREADS.

extern "C" __global__ void __launch_bounds__(VPA_THREADS) transform_logits(const Word* logits, i64 count, Word* out) {
    const i64 i = (i64)blockIdx.x * VPA_THREADS + threadIdx.x;
    overlap_with_neighbours();
    if (i < count) {
        out[i] = transformed(logits[i]);
    }
}
