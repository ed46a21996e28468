"""HIP's spelling: no masks, the lanes that are active take part; waves of 64 lanes and of 32."""

from __future__ import annotations

import numpy as np
import pytest

from vpa.backends.simt import DivergenceError, RaceError, RawModule

TEXT = r"""
#define KERNEL extern "C" __global__ void
KERNEL wave_sum(const long long* x, long long* out) {
    long long v = x[threadIdx.x];
    for (int d = warpSize / 2; d; d >>= 1) v += __shfl_xor(v, d);
    out[threadIdx.x] = v;
}
KERNEL ballots(const int* x, unsigned long long* out, int* votes) {
    out[threadIdx.x] = __ballot(x[threadIdx.x] > 0);
    votes[threadIdx.x] = __any(x[threadIdx.x] == 3) * 2 + __all(x[threadIdx.x] < 100);
}
KERNEL rows_of_width(const float* x, float* out, int width) {
    float v = x[threadIdx.x];
    out[threadIdx.x] = __shfl(v, 1, width);
    out[128 + threadIdx.x] = __shfl_up(v, 1, width);
    out[256 + threadIdx.x] = __shfl_down(v, 1, width);
}
KERNEL branch(int* out) {  // only the lanes in the branch take part
    int v = threadIdx.x;
    if (threadIdx.x % 4 < 2) {
        v = __shfl_xor(v, 1);
        v += 1000 * __popcll(__ballot(1));
    }
    v += __shfl(v, 0);
    out[threadIdx.x] = v;
}
KERNEL both_branches(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x & 2) v = __shfl_xor(v, 1); else v = 100 + __shfl_xor(v, 1);
    out[threadIdx.x] = v;
}
KERNEL loop_of_different_length(int* out) {  // pairs leave the loop one after another and meet behind it
    int v = threadIdx.x;
    for (int i = 0; i < (int)threadIdx.x / 2 % 4; ++i) v = __shfl_xor(v, 1) + 1;
    out[threadIdx.x] = __shfl_xor(v, 2);
}
KERNEL inner_branch_of_a_loop(int* out) {  // the lanes of the branch rejoin the others before the next round
    int v = threadIdx.x, total = 0;
    for (int i = 0; i < 3; ++i) {
        v = __shfl_xor(v, 2);
        if (threadIdx.x % 2 == 0 || i == 1) total += __shfl(v, threadIdx.x ^ 4) & 1;
    }
    out[threadIdx.x] = v + 1000 * total;
}
KERNEL returned_lanes(int* out) {
    if (threadIdx.x % 8 == 7) return;
    out[threadIdx.x] = __popcll(__ballot(1));
}
KERNEL active(unsigned long long* out) {
    if (threadIdx.x % 2) out[threadIdx.x] = __activemask();
}
KERNEL inactive_lane(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x < 8) v = __shfl(v, 9);  // @inactive_lane
    out[threadIdx.x] = v;
}
KERNEL assumes_32_lanes(const int* x, int* out) {  // one row a "warp" of 32: two rows meet in a wave of 64
    int v = x[threadIdx.x];
    for (int d = 16; d; d >>= 1) v += __shfl_xor(v, d);
    out[threadIdx.x] = __shfl(v, 0);
}
KERNEL lockstep_is_no_barrier(int* out) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = s[threadIdx.x ^ 1];
}
KERNEL lockstep_shuffle_orders(int* out) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    int v = __shfl_xor((int)threadIdx.x, 1);
    out[threadIdx.x] = s[threadIdx.x ^ 1] + v;
}
KERNEL mask_of_32(int* out) { out[threadIdx.x] = __shfl_sync(0xffffffffu, (int)threadIdx.x, 0); }
#ifdef __HIP_PLATFORM_AMD__
#define PLATFORM 64
#else
#define PLATFORM 32
#endif
KERNEL platform(int* out) { out[0] = PLATFORM + VPA_SIMT; }
"""


@pytest.fixture(scope="module", params=[32, 64], ids=["wave32", "wave64"])
def module(request, compiler) -> RawModule:
    return RawModule(TEXT, name="hip.cu", warp_size=request.param, compiler=compiler)


def run(module, name, block, *args, grid=1):
    module.get_function(name)((grid,), (block,), args)


lanes = np.arange(128)


def test_wave_sum(module):
    x, out = np.arange(128, dtype=np.int64) ** 3, np.zeros(128, np.int64)
    run(module, "wave_sum", 128, x, out)
    waves = x.reshape(-1, module.warp_size)
    np.testing.assert_array_equal(out.reshape(waves.shape), waves.sum(1, keepdims=True).repeat(module.warp_size, 1))


def test_ballot_has_64_bits(module):
    x, out, votes = np.arange(-70, 58, dtype=np.int32), np.zeros(128, np.uint64), np.zeros(128, np.int32)
    run(module, "ballots", 128, x, out, votes)
    for wave in range(128 // module.warp_size):
        part = slice(wave * module.warp_size, (wave + 1) * module.warp_size)
        expected = sum(1 << i for i, v in enumerate(x[part]) if v > 0)
        assert set(map(int, out[part])) == {expected}
        assert set(votes[part]) == {2 * (3 in x[part]) + 1}


@pytest.mark.parametrize("width", [4, 16, 32])
def test_width(module, width):
    x, out = np.random.default_rng(1).standard_normal(128).astype(np.float32), np.zeros((3, 128), np.float32)
    run(module, "rows_of_width", 128, x, out, np.int32(width))
    first, last = lanes // width * width, lanes // width * width + width - 1
    np.testing.assert_array_equal(out[0], x[first + 1])
    np.testing.assert_array_equal(out[1], x[np.maximum(lanes - 1, first)])
    np.testing.assert_array_equal(out[2], x[np.minimum(lanes + 1, last)])


def test_branch(module):
    out = np.zeros(128, np.int32)
    run(module, "branch", 128, out)
    v = np.where(lanes % 4 < 2, (lanes ^ 1) + 1000 * module.warp_size // 2, lanes)
    np.testing.assert_array_equal(out, v + v[lanes // module.warp_size * module.warp_size])


def test_both_branches(module):
    out = np.zeros(128, np.int32)
    run(module, "both_branches", 128, out)
    np.testing.assert_array_equal(out, np.where(lanes & 2, lanes ^ 1, 100 + (lanes ^ 1)))


def test_loop_of_different_length(module):
    out = np.zeros(128, np.int32)
    run(module, "loop_of_different_length", 128, out)
    rounds = lanes // 2 % 4
    v = np.where(rounds % 2, lanes ^ 1, lanes) + rounds
    np.testing.assert_array_equal(out, v[lanes ^ 2])


def test_inner_branch_of_a_loop(module):
    out = np.zeros(64, np.int32)
    run(module, "inner_branch_of_a_loop", 64, out)
    lane = np.arange(64)
    np.testing.assert_array_equal(out, (lane ^ 2) + 1000 * np.where(lane % 2, 1, 0))


def test_returned_lanes_are_inactive(module):
    out = np.zeros(64, np.int32)
    run(module, "returned_lanes", 64, out)
    np.testing.assert_array_equal(out, np.where(np.arange(64) % 8 == 7, 0, module.warp_size * 7 // 8))


def test_activemask(module):
    out = np.zeros(64, np.uint64)
    run(module, "active", 64, out)
    assert set(map(int, out)) == {0, 0xAAAAAAAAAAAAAAAA >> (64 - module.warp_size)}


def test_reading_an_inactive_lane_is_reported(module):
    with pytest.raises(DivergenceError, match="does not take part") as caught:
        run(module, "inactive_lane", 64, np.zeros(64, np.int32))
    assert caught.value.thread == (0, 0, 0) and caught.value.other.thread == (9, 0, 0)
    assert caught.value.line == 1 + TEXT[: TEXT.index("@inactive_lane")].count("\n")


def test_a_wave_of_64_finds_what_assumes_32(module):
    x, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    run(module, "assumes_32_lanes", 128, x, out)
    sums = x.reshape(4, 32).sum(1).repeat(32)
    assert (out == sums).all() == (module.warp_size == 32)


def test_lockstep_does_not_order_memory(module):
    with pytest.raises(RaceError):
        run(module, "lockstep_is_no_barrier", 64, np.zeros(64, np.int32))


def test_shuffles_order_memory_unless_asked_not_to(module, compiler):
    out = np.zeros(64, np.int32)
    run(module, "lockstep_shuffle_orders", 64, out)
    np.testing.assert_array_equal(out, 2 * (np.arange(64) ^ 1))
    strict = RawModule(TEXT, name="hip.cu", warp_size=module.warp_size, compiler=compiler, shuffles_order_memory=False)
    with pytest.raises(RaceError):
        run(strict, "lockstep_shuffle_orders", 64, out)


def test_a_mask_of_32_lanes_in_a_wave_of_64(module):
    out = np.zeros(64, np.int32)
    if module.warp_size == 32:
        run(module, "mask_of_32", 64, out)
        assert (out[:32] == 0).all() and (out[32:] == 32).all()
    else:
        with pytest.raises(DivergenceError, match="does not name its own lane") as caught:
            run(module, "mask_of_32", 64, out)
        assert caught.value.thread == (32, 0, 0)


def test_platform_macros(module):
    out = np.zeros(1, np.int32)
    run(module, "platform", 1, out)
    assert out[0] == module.warp_size + 1
