"""All-reduce, residual and RMSNorm: the rules' bits on every backend, in every mode, and near an fp64 reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from norm_oracle import KINDS, SWALLOWED, distances, exact_norm, exact_sum, inputs, same, ulps
from oracle import DTYPES, laid_out, to_host

import vpa
from vpa import norm, rmsnorm
from vpa.rmsnorm import ROUNDINGS

TPS = (1, 2, 3, 4, 8)
HIDDEN = (8, 768, 769, 5120, 5125, 7168, 8192)
EPS = 1e-6


def rule(parts, residual, weight, eps: float = EPS, rounding: str = "once") -> tuple[np.ndarray, np.ndarray]:
    """What the numpy backend, the specification, gives for ``parts`` [tp, B, H]."""
    normed, kept = np.empty_like(parts[0]), np.empty_like(parts[0])
    rmsnorm.residual_rmsnorm(parts, residual, weight, eps, rounding, normed, kept)
    return normed, kept


class TestRules:
    """The specification against fp64, and against sums made one number at a time."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sums_are_those_of_the_order_of_ranks(self, dtype, kind):
        for tp in TPS:
            parts, residual, weight = inputs(dtype, tp, 3, 40, tp, kind)
            expected = exact_sum(list(parts))
            assert same(rmsnorm.sum_over_ranks(parts), expected)
            with np.errstate(all="ignore"):
                added = expected.astype(np.float32) + residual.astype(np.float32)
            for rounding in ROUNDINGS:
                assert same(rule(parts, None, weight, rounding=rounding)[1], expected)
                assert same(rule(parts, residual, weight, rounding=rounding)[1], added.astype(DTYPES[dtype]))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_order_of_ranks_shows(self, dtype):
        large, small = (np.float32(number) for number in SWALLOWED[dtype])
        parts = np.array([large, small, -large, small], np.float32).astype(DTYPES[dtype]).reshape(4, 1, 1)
        assert rmsnorm.sum_over_ranks(parts)[0, 0] == small
        assert rmsnorm.sum_over_ranks(parts[[0, 2, 1, 3]])[0, 0] == 2 * small

    def test_partial_sums_are_not_rounded(self):
        """Rounded at each step, both halves of a bf16's unit would be lost."""
        parts = np.array([1, 2.0**-8, 2.0**-8], np.float32).astype(DTYPES["bfloat16"]).reshape(3, 1, 1)
        assert rmsnorm.sum_over_ranks(parts)[0, 0] == 1 + 2.0**-7

    def test_minus_zero_alone_stays(self):
        minus = np.full((3, 1, 8), -0.0, np.float32)
        assert np.signbit(rmsnorm.sum_over_ranks(minus)).all()
        minus[1] = 0
        assert not np.signbit(rmsnorm.sum_over_ranks(minus)).any()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rounding", ROUNDINGS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_normed_is_near_an_fp64_reference(self, dtype, rounding, kind):
        for hidden, wide_weight in itertools.product((1, 8, 769, 5120, 16384), (False, True)):
            parts, residual, weight = inputs(dtype, 3, 4, hidden, hidden, kind)
            weight = weight.astype(np.float32) if wide_weight else weight
            normed, kept = rule(parts, residual, weight, rounding=rounding)
            h = kept
            if rounding == "unrounded_residual":
                with np.errstate(all="ignore"):
                    h = exact_sum(list(parts)).astype(np.float32) + residual.astype(np.float32)
            near = exact_norm(h, weight, EPS, rounding, DTYPES[dtype])
            nearest = np.min([distances(normed, one) for one in near], axis=0)
            assert nearest.max() <= (8 if dtype == "float32" else 1)

    @pytest.mark.parametrize("rounding", ROUNDINGS)
    def test_products_of_subnormal_size_are_rounded_there(self, rounding):
        """Where h * s is below fp32's smallest normal number, its last bit is one of 2^-149, times the weight."""
        h = np.array([[1e15] + [1e-30] * 7, [1e10] + [3e-30] * 7], np.float32)
        weight = np.full(8, 1e20, np.float32)
        normed = rule(h[None], None, weight, rounding=rounding)[0]
        (near,) = exact_norm(h, weight, EPS, rounding, np.dtype(np.float32))
        assert ulps(normed[0], near[0]) > 10000 and ulps(normed[:, :1], near[:, :1]) <= 8
        off = np.abs(normed.astype(np.float64) - near.astype(np.float64))
        assert (off[0] <= 1e20 * 2.0**-150 + 8 * np.spacing(near[0])).all()
        assert ulps(normed[1], near[1]) <= 8

    def test_roundings_differ(self):
        parts, residual, weight = inputs("bfloat16", 2, 5, 768)
        results = [rule(parts, residual, weight, rounding=rounding)[0] for rounding in ROUNDINGS]
        for a, b in itertools.combinations(results, 2):
            assert not same(a, b)

    def test_the_mean_is_that_of_its_tree(self):
        """Of any row, the sum of the halves of groups, of chunks, of all: computed without arrays."""

        def tree(numbers: list) -> np.float32:
            if len(numbers) == 1:
                return numbers[0]
            half = len(numbers) // 2
            return tree([a + b for a, b in zip(numbers[:half], numbers[half:], strict=True)])

        for hidden, group in ((1, 8), (8, 4), (300, 8), (769, 4), (5125, 8)):
            h = np.random.default_rng(hidden).standard_normal((2, hidden)).astype(np.float32)
            for row, mean in zip(h, rmsnorm.mean_of_squares(h, group), strict=True):
                squares = [number * number for number in row]
                squares += [np.float32(0)] * (-hidden % (32 * group))
                groups = [tree(squares[i : i + group]) for i in range(0, len(squares), group)]
                chunks = [tree(groups[i : i + 32]) for i in range(0, len(groups), 32)]
                while len(chunks) & (len(chunks) - 1):
                    chunks.append(np.float32(0))
                assert mean == tree(chunks) * np.float32(1 / hidden)


class TestBackends:
    """Every backend gives the bits of the rules, ``normed`` included."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_kinds_of_numbers(self, backend, dtype, kind):
        for number, (tp, rounding) in enumerate(itertools.product((1, 3, 8), ROUNDINGS)):
            if backend.is_slow and number % 4:  # all roundings, numbers of ranks and sizes, each once
                continue
            parts, residual, weight = inputs(dtype, tp, 3, (96, 769, 264)[number % 3], number, kind)
            weight = weight.astype(np.float32) if number % 2 else weight
            residual = None if number % 4 == 3 else residual
            self.check(backend, parts, residual, weight, rounding=rounding)

    @pytest.mark.parametrize("hidden", HIDDEN)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sizes(self, backend, dtype, hidden):
        for rows, tp in ((1 + hidden % 2, 3),) if backend.is_slow else ((1, 1), (7, 2), (83, 4), (2, 8)):
            self.check(backend, *inputs(dtype, tp, rows, hidden, rows))

    @pytest.mark.parametrize("hidden", [1, 2, 3, 7, 9, 255, 257, 16383, 16384])
    def test_small_and_largest_rows(self, backend, hidden):
        both = ("bfloat16", "float32")
        for dtype in both[hidden % 2 :][:1] if backend.is_slow else both:
            self.check(backend, *inputs(dtype, 2, 1, hidden), rounding="unrounded_residual")

    @pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0, 1e-42])
    def test_eps(self, backend, eps):
        for kind in ("random", "zeros", "subnormal"):
            self.check(backend, *inputs("float32", 2, 2, 96, 0, kind), eps=eps)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_memory_layouts(self, backend, dtype):
        """Strided, reversed and misaligned arrays, each on its own, give the same bits; nothing is written to them."""
        host, residual, weight = inputs(dtype, 2, 4, 264)
        expected = rule(host, residual, weight)
        for number, (memory, shift) in enumerate(
            (("padded_rows", 0), ("odd_rows", 1), ("reversed_rows", 3), ("column_major", 0), ("every_second_column", 1),
             ("contiguous", 1), ("reversed_columns", 2))
        ):  # fmt: skip
            parts = [backend.xp.asarray(part) for part in host]
            held, gain = backend.xp.asarray(residual), backend.xp.asarray(weight)
            if number % 3 != 1:
                parts[1] = laid_out(host[1], memory, backend.xp, shift)
            if number % 3 != 2:
                held = laid_out(residual, memory, backend.xp, shift)
            if number % 2:
                gain = laid_out(weight[None], memory, backend.xp, shift)[0]
            before = [to_host(array).copy() for array in (*parts, held, gain)]
            got = vpa.emulate_allreduce_rmsnorm(parts, held, gain, EPS, backend=backend.name)
            alone = vpa.emulate_allreduce_rmsnorm(parts[1:], held, gain, EPS, backend=backend.name)
            assert all(same(to_host(a), b) for a, b in zip(got, expected, strict=True)), memory
            expected_alone = rule(host[1:], residual, weight)
            assert all(same(to_host(a), b) for a, b in zip(alone, expected_alone, strict=True)), memory
            assert all(same(to_host(a), b) for a, b in zip((*parts, held, gain), before, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_modes_agree_bit_for_bit(self, backend, dtype):
        cases = ((5, 4, "once"), (1, 3, "unrounded_residual"), (8, 2, "gemma"), (3, 8, "once"))
        for rows, tp, rounding in cases[:1] if backend.is_slow else cases:
            parts, residual, weight = inputs(dtype, tp, rows, 136, rows)
            for mode in norm.MODES:
                self.check(backend, parts, residual, weight, rounding=rounding, mode=mode)
                self.check(backend, parts, None, weight, rounding=rounding, mode=mode)

    def test_a_row_depends_on_itself_alone(self, backend):
        parts, residual, weight = inputs("float32", 2, 6, 769)
        whole = self.run(backend, parts, residual, weight)
        for row in range(0, 6, 2):
            part = self.run(backend, parts[:, row : row + 1], residual[row : row + 1], weight)
            assert all(same(a, b[row : row + 1]) for a, b in zip(part, whole, strict=True))

    @pytest.mark.parametrize("mode", norm.MODES)
    def test_no_rows(self, backend, mode):
        parts, residual, weight = inputs("bfloat16", 3, 0, 96)
        normed, kept = self.run(backend, parts, residual, weight, mode=mode)
        assert normed.shape == kept.shape == (0, 96) and normed.dtype == DTYPES["bfloat16"]

    def test_results_are_of_the_callers_library_and_new(self, backend):
        parts, _, weight = (backend.xp.asarray(array) for array in inputs("float32", 1, 2, 96))
        normed, kept = vpa.allreduce_rmsnorm(
            parts[0], None, weight, EPS, vpa.comm.solo(), backend=None if backend.name == "numpy" else backend.name
        )
        assert type(normed) is type(kept) is backend.xp.ndarray
        kept[...] = 0
        assert same(to_host(parts)[0], inputs("float32", 1, 2, 96)[0][0])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_many_rows_are_each_a_row_of_its_own(self, dtype):
        """4096 rows, which NumPy takes in blocks, against calls with one."""
        parts, residual, weight = inputs(dtype, 4, 4096, 769)
        got = vpa.emulate_allreduce_rmsnorm(list(parts), residual, weight, EPS, backend="numpy")
        for row in (0, 1, 83, 1364, 1365, 2047, 2048, 4095):
            alone = rule(parts[:, row : row + 1], residual[row : row + 1], weight)
            assert all(same(many[row : row + 1], one) for many, one in zip(got, alone, strict=True))

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["raw", "numba"])
    def test_many_rows_on_a_gpu(self, name):
        import cupy

        for dtype, rows, hidden in (("bfloat16", 4096, 7168), ("float32", 4096, 5125), ("float16", 70001, 8)):
            parts, residual, weight = inputs(dtype, 4, rows, hidden)
            got = vpa.emulate_allreduce_rmsnorm(
                list(map(cupy.asarray, parts)), cupy.asarray(residual), cupy.asarray(weight), EPS, backend=name
            )
            assert all(same(to_host(a), b) for a, b in zip(got, rule(parts, residual, weight), strict=True))

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["raw", "numba"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_every_16_bit_number_passes_through(self, dtype, name):
        """Widened and rounded back: a sum over one rank keeps every number, and doubles it over two."""
        import cupy

        words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(DTYPES[dtype]).reshape(8, 8192)
        weight = np.ones(8192, DTYPES[dtype])
        for parts in ([words], [words, words]):
            got = vpa.emulate_allreduce_rmsnorm(
                list(map(cupy.asarray, parts)), None, cupy.asarray(weight), EPS, backend=name
            )[1]
            assert same(to_host(got), rmsnorm.sum_over_ranks(parts))

    @staticmethod
    def run(backend, parts, residual, weight, eps: float = EPS, **settings) -> list[np.ndarray]:
        xp = backend.xp
        given = [xp.asarray(part) for part in parts], None if residual is None else xp.asarray(residual)
        results = vpa.emulate_allreduce_rmsnorm(*given, xp.asarray(weight), eps, backend=backend.name, **settings)
        return [to_host(result) for result in results]

    def check(self, backend, parts, residual, weight, eps: float = EPS, rounding: str = "once", **settings) -> None:
        got = self.run(backend, parts, residual, weight, eps, rounding=rounding, **settings)
        expected = rule(parts, residual, weight, eps, rounding)
        assert same(got[1], expected[1]), "new_residual"
        assert same(got[0], expected[0]), f"normed, {ulps(got[0], expected[0])} ulps apart"
