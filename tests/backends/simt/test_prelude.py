"""CUDA's intrinsics and types on the CPU against NumPy: exact, but for the functions that promise an ulp or two."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from vpa.backends.simt import RawModule, SimtError

TEXT = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void
#define AT (blockIdx.x * blockDim.x + threadIdx.x)
static_assert(sizeof(uint2) == 8 && alignof(uint2) == 8 && sizeof(uint3) == 12 && alignof(uint3) == 4, "");
static_assert(sizeof(uint4) == 16 && alignof(uint4) == 16 && alignof(float4) == 16 && alignof(ushort4) == 8, "");
static_assert(alignof(ulonglong2) == 16 && alignof(double2) == 16 && alignof(char4) == 4 && sizeof(char3) == 3, "");
KERNEL bits32(const u32* x, const u32* y, u32* out) {
    u32 a = x[AT], b = y[AT], n = gridDim.x * blockDim.x;
    int i = (int)a, j = (int)b;
    u32 results[] = {(u32)__clz(i), (u32)__popc(a), (u32)__ffs(i), __brev(a), __umulhi(a, b),
                     __byte_perm(a, b, b & 0x7777), __funnelshift_l(a, b, b & 63), __funnelshift_r(a, b, b & 63),
                     min(a, b), max(a, b), (u32)min(i, j), (u32)max(i, j), (u32)__mulhi(i, j),
                     __float_as_uint(__uint_as_float(a))};
    for (u32 i = 0; i < sizeof results / sizeof results[0]; ++i) out[i * n + AT] = results[i];
}
KERNEL bits64(const u64* x, const u64* y, u64* out) {
    u64 a = x[AT], b = y[AT], n = gridDim.x * blockDim.x;
    long long i64 = (long long)a;
    u64 results[] = {(u64)__clzll(i64), (u64)__popcll(a), (u64)__ffsll(i64), __brevll(a), __umul64hi(a, b), max(a, b)};
    for (u32 i = 0; i < sizeof results / sizeof results[0]; ++i) out[i * n + AT] = results[i];
}
KERNEL floats(const float* x, const float* y, const float* z, float* out) {
    float a = x[AT], b = y[AT], c = z[AT];
    u32 n = gridDim.x * blockDim.x;
    float results[] = {a + b, a * b, a * b + c, fmaf(a, b, c), __fmaf_rn(a, b, c), __fadd_rn(a, b), sqrtf(fabsf(a)),
                       fmaxf(a, b), fminf(a, b), a / b, floorf(a), rintf(a), (float)__float2int_rz(a), copysignf(a, b),
                       rsqrtf(fabsf(a)), tanhf(a), expf(b)};
    for (u32 i = 0; i < sizeof results / sizeof results[0]; ++i) out[i * n + AT] = results[i];
}
KERNEL reductions(const int* x, const u32* y, int* out, u32* unsigned_out) {
    int v = x[threadIdx.x];
    u32 u = y[threadIdx.x], full = 0xffffffff;
    int results[] = {__reduce_add_sync(full, v), __reduce_min_sync(full, v), __reduce_max_sync(full, v)};
    u32 others[] = {__reduce_add_sync(full, u), __reduce_min_sync(full, u), __reduce_max_sync(full, u),
                    __reduce_and_sync(full, u), __reduce_or_sync(full, u), __reduce_xor_sync(full, u),
                    __match_any_sync(full, (int)(u & 3))};
    for (int i = 0; i < 3; ++i) out[i * 32 + threadIdx.x] = results[i];
    for (int i = 0; i < 7; ++i) unsigned_out[i * 32 + threadIdx.x] = others[i];
}
KERNEL more_names(int* out, u32* bins) {
    u32 full = 0xffffffff;
    int t = threadIdx.x, equal, different;
    __shared__ alignas(16) int vector[4];
    __shared__ alignas(double) char bytes[8];
    static __shared__ alignas(float4) int structure[4];
    out[t] = __match_all_sync(full, 7, &equal) == full, out[32 + t] = equal;
    out[64 + t] = __match_all_sync(full, t / 31, &different) == 0, out[96 + t] = different;
    out[128 + t] = __mul24(t - 16, 0x01000003), out[160 + t] = (int)__umul24(t, 0x01000003u);
    out[192 + t] = __ffsll((u32)t) + 100 * __ffsll(1u << 31) + 10000 * __ffsll(-1);
    if (t < 4) vector[t] = structure[t] = t, bytes[t] = (char)t;
    __syncthreads();
    int4 v = *(int4*)vector, w = *(int4*)structure;
    out[224 + t] = v.x + v.w + w.w + bytes[3];
    atomicAdd_block(&bins[0], 1u), atomicMax_block(&bins[1], (u32)t), atomicCAS_block(&bins[2], 0u, 5u);
    atomicSub_system(&bins[3], 1u), atomicInc_block(&bins[4], 40u);
}
KERNEL atomics(int* i, u32* u, u64* w, float* f, double* d) {
    int t = threadIdx.x;
    atomicAdd(&i[0], t), atomicMax(&i[1], t - 40), atomicMin(&i[2], t - 40), atomicSub(&i[3], t), atomicExch(&i[4], 9);
    atomicAnd(&i[5], ~(1 << t % 8)), atomicOr(&i[6], 1 << t % 8), atomicXor(&i[7], t), atomicCAS(&i[8], t, t + 1);
    atomicMax(&u[0], (u32)t - 40u), atomicMin(&u[1], (u32)t + 5u), atomicInc(&u[2], 6u), atomicDec(&u[3], 6u);
    atomicAdd(&w[0], (u64)t << 32), atomicMax(&w[1], (u64)t << 40), atomicCAS(&w[2], 0ull, 77ull);
    atomicOr(&w[3], 1ull << t);
    atomicAdd(&f[0], 0.5f), atomicAdd(&d[0], 0.25);
}
__device__ uint4 philox(uint4 counter, uint2 key) {
    for (int round = 0; round < 10; ++round) {
        u32 high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        u32 high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
    }
    return counter;
}
KERNEL random_word(u64 seed, u64 position, u32* out) {
    out[0] = philox(make_uint4((u32)position, (u32)(position >> 32), 0, 0), make_uint2((u32)seed, (u32)(seed >> 32))).x;
}
KERNEL language(int* out, const float4* wide) {
    union { uint4 v; unsigned short halves[8]; } u;
    u.v = make_uint4(1, 2, 3, 4 << 16);
    auto twice = [&](int x) { return 2 * x + u.halves[7]; };
    dim3 block = blockDim;
    float4 f = wide[0];
    out[0] = twice(5), out[1] = (int)(block.x * gridDim.y), out[2] = warpSize, out[3] = (int)(f.x + f.w);
    out[4] = __ldg(&out[9]);
    out[5] = isnan(__int_as_float(0x7fc00000)) + isinf(__int_as_float(0x7f800000)), out[6] = clock64() > 0;
    if (threadIdx.x == 0) printf("thread %d of %u\n", threadIdx.x, block.x);
}
"""


@pytest.fixture(scope="module", params=[True, False], ids=["checked", "plain"])
def module(request, compiler) -> RawModule:
    return RawModule(TEXT, name="prelude.cu", compiler=compiler, checked=request.param)


rng = np.random.default_rng(3)


def run(module, name, *args, grid=(1,), block=(64,)):
    module.get_function(name)(grid, block, args)


def words(bits: int, count: int = 256) -> np.ndarray:
    dtype = np.dtype(f"u{bits // 8}")
    special = [0, 1, 2, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1]
    return np.concatenate([np.array(special, dtype), rng.integers(0, 2**bits, count - 6, dtype=dtype)])


def test_32_bit_intrinsics(module):
    a, b, out = words(32), words(32)[::-1].copy(), np.zeros((14, 256), np.uint32)
    run(module, "bits32", a, b, out, grid=(4,))
    for i, (x, y) in enumerate(zip(map(int, a), map(int, b), strict=True)):
        signed = [v - 2**32 if v >= 2**31 else v for v in (x, y)]
        by, pair = y & 31, y << 32 | x
        selector = y & 0x7777
        expected = [
            32 - x.bit_length(),
            x.bit_count(),
            (x & -x).bit_length(),
            int(f"{x:032b}"[::-1], 2),
            x * y >> 32,
            sum((pair >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k for k in range(4)),
            pair << by >> 32,
            pair >> by,
            min(x, y),
            max(x, y),
            min(signed),
            max(signed),
            signed[0] * signed[1] >> 32,
            x,
        ]
        assert list(map(int, out[:, i])) == [v & (2**32 - 1) for v in expected], (x, y)


def test_64_bit_intrinsics(module):
    a, b, out = words(64), words(64)[::-1].copy(), np.zeros((6, 256), np.uint64)
    run(module, "bits64", a, b, out, grid=(4,))
    for i, (x, y) in enumerate(zip(map(int, a), map(int, b), strict=True)):
        expected = [
            64 - x.bit_length(),
            x.bit_count(),
            (x & -x).bit_length(),
            int(f"{x:064b}"[::-1], 2),
            x * y >> 64,
            max(x, y),
        ]
        assert list(map(int, out[:, i])) == expected, (x, y)


def test_floating_point_rounds_as_written(module):
    special = np.array([0, -0.0, 1e-40, -1e-45, 1.5, 3e38, 2**31, 2.5], np.float32)
    a, b, c = (np.concatenate([np.roll(special, k), rng.standard_normal(120).astype(np.float32)]) for k in (0, 3, 5))
    b[b == 0] = 1
    out = np.zeros((17, 128), np.float32)
    run(module, "floats", a, b, c, out, grid=(2,))
    with np.errstate(all="ignore"):
        fused = (a.astype(np.float64) * b + c).astype(np.float32)  # the product is exact in double
        exact = [
            a + b,
            a * b,
            a * b + c,
            None,
            None,
            a + b,
            np.sqrt(np.abs(a)),
            np.fmax(a, b),
            np.fmin(a, b),
            a / b,
            np.floor(a),
        ]
        exact += [
            np.rint(a),
            np.clip(np.trunc(a.astype(np.float64)), -(2.0**31), 2.0**31 - 1).astype(np.float32),
            np.copysign(a, b),
        ]
        close = [1 / np.sqrt(np.abs(a.astype(np.float64))), np.tanh(a.astype(np.float64)), np.exp(b.astype(np.float64))]
    for got, expected in zip(out, exact, strict=False):
        if expected is not None:
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(out[3], out[4])
    assert (np.abs(out[3] - fused) <= np.spacing(np.abs(fused))).all()  # double rounding of the reference
    with np.errstate(all="ignore"):
        for got, expected in zip(out[14:], close, strict=True):
            np.testing.assert_allclose(got, expected.astype(np.float32), rtol=3e-7)


def test_reductions(module):
    x, y = rng.integers(-1000, 1000, 32).astype(np.int32), rng.integers(0, 2**32, 32, dtype=np.uint32)
    out, unsigned_out = np.zeros((3, 32), np.int32), np.zeros((7, 32), np.uint32)
    run(module, "reductions", x, y, out, unsigned_out, block=(32,))
    np.testing.assert_array_equal(out, np.array([[x.sum()], [x.min()], [x.max()]]).repeat(32, 1))
    bitwise = [f.reduce(y) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
    expected = [np.add.reduce(y, dtype=np.uint32), y.min(), y.max(), *bitwise]
    np.testing.assert_array_equal(unsigned_out[:6], np.array(expected)[:, None].repeat(32, 1))
    np.testing.assert_array_equal(unsigned_out[6], [sum(1 << k for k in range(32) if (y[k] ^ v) & 3 == 0) for v in y])


def test_more_names(module):
    out, bins, t = np.zeros((8, 32), np.int32), np.zeros(5, np.uint32), np.arange(32)
    run(module, "more_names", out, bins, block=(32,))
    first = np.array([0] + [(v & -v).bit_length() for v in range(1, 32)])
    np.testing.assert_array_equal(
        out, [t * 0 + 1, t * 0 + 1, t * 0 + 1, t * 0, (t - 16) * 3, t * 3, first + 13200, t * 0 + 9]
    )
    np.testing.assert_array_equal(bins, [32, 31, 5, 2**32 - 32, 32])


def test_atomics(module):
    i, u, w = (
        np.array([0, -99, 99, 0, 0, 255, 0, 0, 0], np.int32),
        np.array([0, 2**32 - 1, 0, 0], np.uint32),
        np.zeros(4, np.uint64),
    )
    f, d = np.zeros(1, np.float32), np.zeros(1)
    run(module, "atomics", i, u, w, f, d)
    xor = np.bitwise_xor.reduce(np.arange(64))
    np.testing.assert_array_equal(i, [2016, 23, -40, -2016, 9, 0, 255, xor, 64])
    np.testing.assert_array_equal(u, [2**32 - 1, 5, 64 % 7, -64 % 7])
    np.testing.assert_array_equal(w, [2016 << 32, 63 << 40, 77, 2**64 - 1])
    assert (f[0], d[0]) == (32, 16)


@pytest.mark.parametrize(
    ("seed", "position", "word"),
    [(0, 0, 0x6627E8D5), (42, 0, 0x9CEAF053), (42, 2**32 + 7, 0x05B263F6), (1234567890123, 5, 0x4CDDAACF)],
)
def test_philox(module, seed, position, word):
    out = np.zeros(1, np.uint32)
    run(module, "random_word", np.uint64(seed), np.uint64(position), out, block=(1,))
    assert out[0] == word


def test_language(module, capfd):
    out, wide = np.zeros(10, np.int32), np.arange(4, dtype=np.float32)
    run(module, "language", out, wide, grid=(1, 3), block=(1,)) if not module.checked else run(
        module, "language", out, wide, block=(1,)
    )
    assert list(out[:7]) == [14, 1 if module.checked else 3, 32, 3, 0, 2, 1]
    assert "thread 0 of 1\n" in capfd.readouterr().out


def test_host_threads_take_turns(module):
    errors = []

    def work(seed):
        try:
            x = np.random.default_rng(seed).integers(0, 2**32, 32, dtype=np.uint32)
            for _ in range(20):
                out, unsigned_out = np.zeros((3, 32), np.int32), np.zeros((7, 32), np.uint32)
                run(module, "reductions", x.view(np.int32) // 64, x, out, unsigned_out, block=(32,))
                assert (unsigned_out[2] == x.max()).all()
        except (AssertionError, SimtError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
