"""The norm's kernel run and checked on the CPU: three orders of blocks, warps of 32 and 64, every way to read a row."""

from __future__ import annotations

import numpy as np
import pytest
from norm_oracle import inputs, same
from oracle import DTYPES

from kernels.test_nvrtc import nvrtc
from kernels.test_simt import ORDERS, WARPS, run
from vpa import kernels, rmsnorm
from vpa.backends import launches, norm_launches
from vpa.backends.norm_launches import NormShape
from vpa.rmsnorm import ROUNDINGS


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_the_rules_bits(dtype, rounding, warp_size):
    for number, (ranks, hidden, kind) in enumerate(((3, 264, "random"), (1, 769, "nan"), (18, 4104, "subnormal"))):
        parts, residual, weight = inputs(dtype, ranks, 3, hidden, number, kind)
        held, weight = (None, weight.astype(np.float32)) if number == 1 else (residual, weight)
        for array in (parts, residual, weight):
            array.flags.writeable = False
        expected = np.empty_like(residual), np.empty_like(residual)
        rmsnorm.residual_rmsnorm(parts, held, weight, 1e-6, rounding, *expected)
        for order in ORDERS:
            normed, kept = np.zeros_like(residual), np.zeros_like(residual)
            run(norm_launches.norm(parts, held, weight, 1e-6, rounding, normed, kept), warp_size, order)
            assert same(kept, expected[1]) and same(normed, expected[0]), (hidden, order, kind)


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_shared_by_the_blocks_of_a_cluster_have_the_same_bits(dtype, warp_size):
    wide = 16 // DTYPES[dtype].itemsize
    for number, (rows, groups, parts) in enumerate(((1, 768, 8), (2, 1000, 8), (9, 384, 4), (2, 385, 4))):
        hidden = groups * wide - number % 2  # even rows whole groups, odd ones not
        partials, residual, weight = inputs(dtype, 2, rows, hidden, number)
        alone, shared = ([np.zeros_like(residual) for _ in range(2)] for _ in range(2))
        run(norm_launches.norm(partials, residual, weight, 1e-6, "once", *alone), warp_size)
        launch = norm_launches.norm(partials, residual, weight, 1e-6, "once", *shared, clusters=True)
        assert (launch.defines["parts"], launch.defines["cluster"], launch.grid) == (parts, 1, rows * parts)
        run(launch, warp_size, ORDERS[number % len(ORDERS)])
        assert all(same(a, b) for a, b in zip(alone, shared, strict=True)), (rows, hidden)
        total, summed = np.zeros_like(residual), norm_launches.norm(partials, None, None, 0, "once", None, alone[1])
        run(summed, warp_size)
        launch = norm_launches.norm(partials, None, None, 0, "once", None, total, clusters=True)
        assert (launch.defines["parts"], launch.defines["cluster"]) == (parts, 0)
        run(launch, warp_size)
        assert same(total, alone[1])


def test_what_is_not_asked_for_is_neither_read_nor_written():
    parts, residual, weight = inputs("bfloat16", 3, 2, 264)
    normed, kept = np.empty_like(residual), np.empty_like(residual)
    rmsnorm.residual_rmsnorm(parts, None, weight, 0, "once", normed, kept)
    alone = np.zeros_like(kept)
    launch = norm_launches.norm(parts, None, None, 0, "once", None, alone)
    assert not launch.defines["norm"]
    run(launch)
    assert same(alone, kept)
    parts.flags.writeable = False  # which stands where the new residual would
    launch = norm_launches.norm(parts, None, weight, 0, "once", alone, None)
    assert not launch.defines["keep"]
    run(launch)
    assert same(alone, normed)


class TestLaunches:
    """The choices, as a pure function of shapes."""

    @pytest.mark.parametrize(
        ("hidden", "itemsize", "threads", "groups"),
        [(1, 2, 32, 1), (768, 2, 96, 1), (4096, 2, 512, 1), (5120, 2, 640, 1), (6144, 2, 768, 1), (7168, 2, 896, 1),
         (8192, 2, 1024, 1), (16384, 2, 1024, 2), (2048, 4, 512, 1), (7168, 4, 896, 2), (16384, 4, 1024, 4)],
    )  # fmt: skip
    def test_shapes(self, hidden, itemsize, threads, groups):
        assert NormShape.of(hidden, itemsize, 17, True) == NormShape(threads, groups)
        assert NormShape.of(hidden, itemsize, 1, False) == NormShape(threads, groups)

    @pytest.mark.parametrize(
        ("hidden", "rows", "shape"),
        [(7168, 1, (128, 1, 8)), (7168, 8, (128, 1, 8)), (7168, 9, (224, 1, 4)), (7168, 16, (224, 1, 4)),
         (16384, 4, (256, 1, 8)), (6144, 1, (96, 1, 8)), (6143, 1, (96, 1, 8)), (6136, 1, (192, 1, 4)),
         (3072, 16, (96, 1, 4)), (3064, 16, (384, 1, 1)), (7168, 17, (896, 1, 1))],
    )  # fmt: skip
    def test_few_long_rows_are_shared_by_blocks(self, hidden, rows, shape):
        assert NormShape.of(hidden, 2, rows, True) == NormShape(*shape)

    def test_every_row_fits(self):
        for itemsize in (2, 4):
            for hidden in range(1, 16385):
                for rows in (1, 16, 17):
                    shape = NormShape.of(hidden, itemsize, rows, True)
                    assert shape.threads % 32 == 0 and shape.threads <= 1024
                    assert shape.groups * 16 // itemsize <= norm_launches.MAX_NUMBERS
                    assert shape.threads * shape.groups * shape.parts * 16 >= hidden * itemsize
            with pytest.raises(ValueError, match="a row has 16385 elements; a block holds at most 16384"):
                NormShape.of(16385, itemsize, 17, True)

    @pytest.mark.parametrize(
        ("change", "wide", "full"),
        [({}, 1, 1), ({"hidden": 240}, 1, 0), ({"hidden": 257}, 0, 0), ({"shift": "parts"}, 0, 1),
         ({"shift": "residual"}, 0, 1), ({"shift": "weight"}, 0, 1), ({"shift": "normed"}, 0, 1),
         ({"shift": "kept"}, 0, 1), ({"gap": 8}, 1, 1), ({"gap": 4}, 0, 1)],
    )  # fmt: skip
    def test_wide_loads_are_taken_where_every_row_of_every_array_is_aligned(self, change, wide, full):
        hidden, gap = change.get("hidden", 256), change.get("gap", 0)

        def array(name: str, *shape: int) -> np.ndarray:
            step = (shape[-1] + gap) if len(shape) > 1 else shape[-1]
            buffer = np.zeros(int(np.prod(shape[:-1])) * step + 16, np.uint16)
            start = -buffer.ctypes.data % 16 // 2 + (change.get("shift") == name)
            buffer = buffer[start : start + int(np.prod(shape[:-1])) * step]
            return buffer.reshape(*shape[:-1], step)[..., : shape[-1]].view(DTYPES["float16"])

        arrays = array("parts", 2, 3, hidden), array("residual", 3, hidden), array("weight", hidden)
        normed, kept = (np.ascontiguousarray(array(name, 3, hidden)) for name in ("normed", "kept"))
        if change.get("shift") in ("normed", "kept"):
            normed, kept = array("normed", 3, hidden), array("kept", 3, hidden)
        launch = norm_launches.norm(*arrays, 0, "once", normed, kept)
        assert (launch.defines["wide"], launch.defines["full"]) == (wide, full)

    def test_rows_beyond_a_grid_are_refused(self):
        rows = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, 2**31, 8), (0, 0, 4))
        with pytest.raises(ValueError, match=r"2147483648 rows; a launch takes at most 2147483647"):
            norm_launches.norm(rows, None, None, 0, "once", None, rows[0])


@pytest.mark.parametrize("architecture", ["compute_75", "compute_90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_instruction_flushes_or_contracts(dtype, architecture):
    """Compiled as CuPy does, with -ftz=true: all arithmetic on fp32 is by instructions that keep subnormals."""
    library = nvrtc()
    parts, residual, weight = inputs(dtype, 3, 2, 264)
    launch = norm_launches.norm(parts, residual, weight.astype(np.float32), 0, "gemma", residual, residual)
    text = kernels.source(launch.kernel, **launch.defines).text
    _, program = library.nvrtcCreateProgram(text.encode(), b"rmsnorm.cu", 0, [], [])
    options = [f"-arch={architecture}".encode(), b"-std=c++17", b"-ftz=true"]
    assert library.nvrtcCompileProgram(program, len(options), options)[0] == library.nvrtcResult.NVRTC_SUCCESS
    _, size = library.nvrtcGetPTXSize(program)
    ptx = b" " * size
    library.nvrtcGetPTX(program, ptx)
    library.nvrtcDestroyProgram(program)
    assert b"add.rn.f32" in ptx and b"sqrt.rn.f32" in ptx
    assert b".ftz" not in ptx and b"fma" not in ptx


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_floor_reads_and_writes_all(order, warp_size):
    data = np.random.default_rng(0).integers(0, 2**32, (5, 500, 4), dtype=np.uint32)
    data.flags.writeable = False
    out = np.zeros((2, 500, 4), np.uint32)
    defines = {"reads": 5, "writes": 2, "threads": 64, "loads": 4}
    run(launches.Launch("plain_move", defines, 2, 64, (data, np.int64(500), out)), warp_size, order)
    assert np.array_equal(out, np.broadcast_to(np.bitwise_xor.reduce(data), out.shape))
