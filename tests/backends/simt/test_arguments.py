"""Arguments: what fits a parameter, what is refused and how, and which bytes an array of any strides gives."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vpa.backends.simt import (
    ArgumentError,
    LaunchError,
    OutOfBoundsError,
    RaceError,
    RawModule,
    ReadOnlyError,
    SimtError,
    executor,
)

TEXT = r"""
#define KERNEL extern "C" __global__ void
struct Pair { int a; float b; };
struct Peers { float* part[2]; int count; };
KERNEL every_kind(const float* x, void* raw, int i, unsigned u, long long l, unsigned long long ul, float f, double d,
                  bool b, unsigned short h, signed char c, Pair pair, double* out) {
    out[0] = x ? x[0] : -1, out[1] = raw != nullptr, out[2] = i, out[3] = u, out[4] = (double)l, out[5] = (double)ul;
    out[6] = f, out[7] = d, out[8] = b, out[9] = h, out[10] = c, out[11] = pair.a, out[12] = pair.b;
}
KERNEL strided(const float* x, float* out, long long row, long long column, int columns) {
    float total = 0;
    for (int c = 0; c < columns; ++c) total += x[blockIdx.x * row + c * column];
    out[blockIdx.x] = total;
}
KERNEL read_at(const float* x, float* out, long long i) { out[0] = x[i]; }
KERNEL write_at(float* x, long long i, float v) { x[i] = v; }
KERNEL bf16_sum(const unsigned short* x, float* out, int n) {
    float total = 0;
    for (int i = 0; i < n; ++i) total += __uint_as_float((unsigned)x[i] << 16);
    out[0] = total;
}
KERNEL copy(const int* from, int* to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}
KERNEL through_table(float* const* parts, int count, float* out) { out[0] = parts[threadIdx.x % count][0]; }
KERNEL through_struct(Peers peers) { peers.part[threadIdx.x][1] = 7; }
KERNEL none() {}
KERNEL static_shared(int* out) {
    __shared__ int s[10 * 1024];
    s[0] = 1;
    out[0] = s[0];
}
KERNEL two_rows(float* x, long long row) { x[threadIdx.x * row] = 1; }
KERNEL unaligned_base(const unsigned short* x, unsigned long long* out) {
    out[0] = (unsigned long long)(x) % 16;
}
extern "C" {
__global__ __launch_bounds__(64, 2) void in_a_block(int* out) { out[threadIdx.x] = 1; }
}
template <class T> __global__ void not_by_name(T* x) { *x = 0; }
"""


@pytest.fixture(scope="module")
def module(compiler) -> RawModule:
    return RawModule(TEXT, name="arguments.cu", compiler=compiler)


@pytest.fixture(scope="module", params=[True, False], ids=["checked", "plain"])
def either(request, compiler) -> RawModule:
    return RawModule(TEXT, name="arguments.cu", compiler=compiler, checked=request.param)


def run(module, name, *args, grid=(1,), block=(1,), **options):
    module.get_function(name)(grid, block, args, **options)


PAIR = np.array([(9, 2.5)], [("a", "i4"), ("b", "f4")])


def every_kind(**changes):
    values = {
        "x": np.ones(3, np.float32),
        "raw": np.zeros(2, np.int8),
        "i": np.int32(-3),
        "u": np.uint32(2**32 - 1),
        "l": np.int64(-(2**40)),
        "ul": np.uint64(2**50),
        "f": np.float32(1.5),
        "d": np.float64(2.25),
        "b": np.bool_(True),
        "h": np.uint16(65535),
        "c": np.int8(-5),
        "pair": PAIR,
        "out": np.zeros(13),
    }
    return list({**values, **changes}.values())


def test_every_kind_arrives(either):
    args = every_kind()
    run(either, "every_kind", *args)
    assert list(args[-1]) == [1, 1, -3, 2**32 - 1, -(2**40), 2**50, 1.5, 2.25, 1, 65535, -5, 9, 2.5]
    args = every_kind(x=None, raw=None, pair=PAIR[0], i=np.array([7], np.int32), u=np.int32(-1))
    run(either, "every_kind", *args)
    assert list(args[-1])[:4] == [-1, 0, 7, 2**32 - 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"i": 3}, r"argument 2 \(i\) is the Python int 3, but the parameter is int .*numpy.int32"),
        ({"f": 1.0}, "the Python float 1.0"),
        ({"b": True}, "the Python bool True"),
        ({"i": np.int64(3)}, r"int64 \(8 bytes\)"),
        ({"l": np.int32(3)}, r"int32 \(4 bytes\)"),
        ({"f": np.int32(3)}, r"int32 \(4 bytes\), but the parameter is float \(floating-point number, 4 bytes\)"),
        ({"i": np.float32(3)}, r"float32 \(4 bytes\)"),
        (
            {"pair": np.array([(9, 2.5)], [("a", "i8"), ("b", "f4")])},
            r"\(12 bytes\), but the parameter is Pair \(struct, 8 bytes\)",
        ),
        ({"pair": np.zeros(2, PAIR.dtype)}, "an array of shape"),
        ({"i": None}, "None is a null pointer"),
        ({"x": [1.0, 2.0]}, "a list"),
        ({"x": 4096}, "the Python int 4096"),
        ({"x": np.float32(1)}, "numpy.float32"),
        ({"x": np.ones(3)}, r"an array of float64 \(8 bytes an element\)"),
        ({"x": np.ones(3, ml_dtypes.bfloat16)}, "an array of bfloat16"),
        (
            {"out": np.ones(13, np.float32)},
            r"an array of float32 \(4 bytes an element\), but the parameter is double *",
        ),
        ({"x": np.ones(3, ">f4")}, "native-endian"),
        ({"raw": np.array([object()])}, "an array of object"),
    ],
    ids=lambda v: None if isinstance(v, str) else next(iter(v)),
)
def test_what_does_not_fit_is_refused(module, change, says):
    with pytest.raises(ArgumentError, match=says) as caught:
        run(module, "every_kind", *every_kind(**change))
    assert isinstance(caught.value, TypeError) and caught.value.kernel == "every_kind"


def test_wrong_number_of_arguments(module):
    with pytest.raises(ArgumentError, match=r"takes 3 arguments \(.*float.* x, .*float.* out, long long.* i\), got 2"):
        run(module, "read_at", np.ones(3, np.float32), np.ones(1, np.float32))
    with pytest.raises(ArgumentError, match="must be a tuple"):
        module.get_function("none")((1,), (1,), np.zeros(3))
    run(module, "none")


def test_views_name_their_dtype_where_the_pointer_does_not(module):
    x, out = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16), np.zeros(1, np.float32)
    for array in (x, x.view(np.uint16)):
        run(module, "bf16_sum", array, out, np.int32(6))
        assert out[0] == 15


def test_parameters_are_described(module):
    kernel = module.get_function("read_at")
    assert [(p.name, p.kind, p.size) for p in kernel.parameters] == [("x", "p", 8), ("out", "p", 8), ("i", "i", 8)]
    assert "in_a_block" in module.kernel_names and "not_by_name" not in module.kernel_names
    with pytest.raises(SimtError, match="has no kernel 'missing'; it has: every_kind"):
        module.get_function("missing")


# --- Strides ---------------------------------------------------------------------------------------------------------

BUFFER = np.arange(60, dtype=np.float32).reshape(6, 10)
VIEWS = {
    "columns of a wider buffer": BUFFER[:, 2:6],
    "every second column": BUFFER[:, ::2],
    "reversed rows": BUFFER[::-1],
    "reversed columns": BUFFER[:, ::-1],
    "both reversed, strided": BUFFER[::-2, ::-3],
    "transposed": BUFFER.T,
    "a broadcast row": np.broadcast_to(BUFFER[2], (6, 10)),
    "a broadcast column": np.broadcast_to(BUFFER[:, 3:4], (6, 10)),
    "a broadcast scalar": np.broadcast_to(np.float32(3), (4, 4)),
    "one element into a buffer": BUFFER.ravel()[1:41].reshape(4, 10),
    "overlapping windows": np.lib.stride_tricks.sliding_window_view(BUFFER.ravel(), 7)[:5],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_strides_are_in_bounds_and_nothing_else(module, view):
    steps = [np.int64(s // 4) for s in view.strides]
    out = np.zeros(view.shape[0], np.float32)
    run(module, "strided", view, out, *steps, np.int32(view.shape[1]), grid=(view.shape[0],))
    np.testing.assert_array_equal(out, [sum(map(float, row)) for row in view])
    first = view.__array_interface__["data"][0]
    inside = {(first + i * view.strides[0] + j * view.strides[1] - first) // 4 for i, j in np.ndindex(view.shape)}
    single = np.zeros(1, np.float32)
    for offset in range(min(inside) - 3, max(inside) + 4):
        if offset in inside:
            run(module, "read_at", view, single, np.int64(offset))
        else:
            with pytest.raises(OutOfBoundsError) as caught:
                run(module, "read_at", view, single, np.int64(offset))
            assert caught.value.line == TEXT[: TEXT.index("KERNEL read_at")].count("\n") + 1


def test_hidden_columns_are_between_the_elements(module):
    with pytest.raises(
        OutOfBoundsError, match=r"between the elements of x \(float32\[6, 4\]\): 16 bytes from its first element"
    ):
        run(module, "read_at", BUFFER[:, 2:6], np.zeros(1, np.float32), np.int64(4))


def test_an_extent_can_be_given(module):
    out = np.zeros(1, np.float32)
    run(module, "read_at", (BUFFER[1:3, 2:6], BUFFER), out, np.int64(4))
    assert out[0] == BUFFER[1, 6]
    run(module, "read_at", (BUFFER[1:3, 2:6], BUFFER), out, np.int64(-12))
    assert out[0] == BUFFER[0, 0]
    with pytest.raises(OutOfBoundsError):
        run(module, "read_at", (BUFFER[1:3, 2:6], BUFFER), out, np.int64(-13))
    with pytest.raises(ArgumentError, match="does not lie inside its extent"):
        run(module, "read_at", (BUFFER, BUFFER[1:]), out, np.int64(0))


def test_the_element_is_named(module):
    x = np.zeros((4, 6), np.float32)
    for view, index in ((x, r"x\[1, 2\]"), (x.T, r"x\[2, 1\]"), (x[::-1, ::-1], r"x\[1, 2\]")):
        view = view[:]
        view.flags.writeable = False
        offset = sum(i * s for i, s in zip(map(int, index[3:-2].split(", ")), view.strides, strict=True)) // 4
        with pytest.raises(ReadOnlyError, match=index):
            run(module, "write_at", view, np.int64(offset), np.float32(1))


def test_an_empty_array_has_no_bytes(module):
    with pytest.raises(OutOfBoundsError):
        run(module, "read_at", np.zeros((3, 0), np.float32), np.zeros(1, np.float32), np.int64(0))


def test_a_neighbour_is_not_hit_by_accident(module):
    block = np.zeros(64, np.float32)
    first, second = block[:32], block[32:]
    run(module, "read_at", first, second, np.int64(31))
    with pytest.raises(OutOfBoundsError, match="0 bytes past the end of x"):
        run(module, "read_at", first, second, np.int64(32))


def test_alignment_is_that_of_the_array(either):
    base, out = np.zeros(64, np.uint16), np.zeros(1, np.uint64)
    for shift in range(9):
        run(either, "unaligned_base", base[shift:], out)
        assert out[0] == (base.ctypes.data + 2 * shift) % 16


# --- Aliasing, permissions, addresses in memory ----------------------------------------------------------------------


def test_arrays_may_overlap(either):
    data = np.arange(10, dtype=np.int32)
    run(either, "copy", data[5:], data[:5], np.int32(5), block=(32,))
    np.testing.assert_array_equal(data, [5, 6, 7, 8, 9, 5, 6, 7, 8, 9])


def test_a_race_through_two_names_is_seen(module):
    data = np.arange(10, dtype=np.int32)
    with pytest.raises(RaceError):
        run(module, "copy", data[1:], data[:9], np.int32(9), block=(32,))
    run(module, "copy", data, data, np.int32(10), block=(32,))


def test_read_only_is_a_property_of_the_argument(module):
    data = np.zeros(8, np.float32)
    view = data[:4]
    view.flags.writeable = False
    with pytest.raises(ReadOnlyError, match=r"x\[2\].*read-only"):
        run(module, "write_at", view, np.int64(2), np.float32(1))
    run(module, "write_at", data, np.int64(2), np.float32(1))
    assert data[2] == 1 and view[2] == 1


def test_a_fault_does_not_keep_the_copies(module):
    big = np.zeros(80 << 20, np.int32)
    with pytest.raises(OutOfBoundsError):
        run(module, "write_at", big.view(np.float32), np.int64(1 << 40), np.float32(1))
    assert executor._arena._memory.size < 1 << 28


def test_only_elements_are_copied_back(module):
    buffer = np.zeros((2, 10), np.float32)
    view = buffer[:, :4]
    run(module, "two_rows", view, np.int64(10), block=(2,))
    np.testing.assert_array_equal(buffer[:, 0], 1)
    assert buffer.sum() == 2


def test_addresses_in_memory_need_their_arrays_named(either):
    parts = [np.full(4, 3, np.float32), np.full(4, 4, np.float32)]
    table, out = np.array([p.ctypes.data for p in parts], np.uint64), np.zeros(1, np.float32)
    run(either, "through_table", table, np.int32(1), out, memory=parts)
    assert out[0] == 3
    peers = np.array(
        [([p.ctypes.data for p in parts], 2)], np.dtype([("part", "u8", (2,)), ("count", "i4")], align=True)
    )
    run(either, "through_struct", peers, block=(2,), memory=parts)
    assert parts[0][1] == parts[1][1] == 7


def test_addresses_that_are_not_named_are_out_of_bounds(module):
    parts = [np.full(4, 3, np.float32)]
    table = np.array([p.ctypes.data for p in parts], np.uint64)
    with pytest.raises(OutOfBoundsError):
        run(module, "through_table", table, np.int32(1), np.zeros(1, np.float32))


# --- Grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "options", "says"),
    [
        ((0,), (1,), {}, "grid must be 1 to 3 positive ints"),
        ((1, 1, 1, 1), (1,), {}, "grid must be"),
        ((1,), (-1,), {}, "block must be"),
        ((1.0,), (1,), {}, "grid must be"),
        ((1,), (1025,), {}, "1024 threads"),
        ((1,), (32, 33), {}, "1024 threads"),
        ((1,), (1, 1, 65), {}, "64"),
        ((1, 65536), (1,), {}, "65535"),
        ((2**31 - 1,), (1024,), {}, "2\\^32 threads"),
        ((1,), (1,), {"shared_mem": 227 * 1024 + 1}, "0 bytes of static .* and 232449 of dynamic, the most is 227 KiB"),
        ((1,), (1,), {"shared_mem": -4}, "an int, got -4"),
        ((1,), (1,), {"shared_mem": 1.5}, "an int, got 1.5"),
        ((1,), (1,), {"shared_mem": "3"}, "an int, got '3'"),
        ((1,), (1,), {"shared_mem": None}, "an int, got None"),
        ((1,), (1,), {"shared_mem": True}, "an int, got True"),
        ((1,), (1,), {"resident_blocks": 0}, "at least 1"),
    ],
)
def test_grids_that_no_gpu_takes(module, grid, block, options, says):
    with pytest.raises(LaunchError, match=says) as caught:
        run(module, "none", grid=grid, block=block, **options)
    assert isinstance(caught.value, ValueError)


def test_static_shared_memory_has_a_limit_of_its_own(module, compiler):
    run(module, "none", shared_mem=np.int64(227 * 1024))
    run(module, "static_shared", np.zeros(1, np.int32), shared_mem=187 * 1024)
    with pytest.raises(LaunchError, match=r"40960 bytes of static .* and 191489 of dynamic"):
        run(module, "static_shared", np.zeros(1, np.int32), shared_mem=187 * 1024 + 1)
    text = """extern "C" __global__ void big(int* out) {
        __shared__ int s[12 * 1024 + 1];
        s[threadIdx.x] = 1;
        out[threadIdx.x] = s[threadIdx.x];
    }"""
    for warp_size in (32, 64):
        big = RawModule(text, compiler=compiler, warp_size=warp_size).get_function("big")
        if warp_size == 64:
            big((1,), (1,), (np.zeros(1, np.int32),))  # 64 KiB on AMD
            continue
        with pytest.raises(LaunchError, match="49156 bytes of static shared memory, the most is 48 KiB"):
            big((1,), (1,), (np.zeros(1, np.int32),))


def test_launch_bounds_are_a_promise(module):
    out = np.zeros(100, np.int32)
    run(module, "in_a_block", out, block=(64,))
    with pytest.raises(LaunchError, match="__launch_bounds__ promise at most 64 threads a block"):
        run(module, "in_a_block", out, block=(65,))


def test_unknown_order_and_warp_size(module):
    with pytest.raises(ValueError, match="block_order"):
        run(module, "none", block_order="sideways")
    with pytest.raises(ValueError, match="warp_size must be 32 or 64"):
        RawModule(TEXT, warp_size=16)
    with pytest.raises(TypeError, match="code must be a string"):
        RawModule(b"")
