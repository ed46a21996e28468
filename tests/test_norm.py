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

    @pytest.mark.gpu
    def test_a_call_inside_a_capture_is_refused(self):
        import cupy

        parts, residual, weight = (cupy.asarray(array) for array in inputs("float32", 1, 2, 96))
        arguments = parts[0], residual, weight, EPS, vpa.comm.solo()
        vpa.allreduce_rmsnorm(*arguments)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                with pytest.raises(ValueError, match=r"cannot be captured, .* vpa.norm_steps.prepare"):
                    vpa.allreduce_rmsnorm(*arguments)
            finally:
                stream.end_capture()

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


class TestArguments:
    """What does not fit is refused in words that say what was got and what is accepted."""

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"mode": "two_shot"}, ValueError, "mode is 'two_shot'; one_shot, all_reduce, sequence_parallel are"),
            ({"rounding": None}, ValueError, "rounding is None; once, unrounded_residual, gemma are accepted"),
            ({"eps": "1e-6"}, TypeError, "eps is '1e-6'; a real number is accepted"),
            ({"eps": -1e-6}, ValueError, "eps is -1e-06; a finite number from 0 on"),
            ({"eps": float("nan")}, ValueError, "eps is nan; a finite number from 0 on"),
            ({"eps": 10**400}, ValueError, "a finite number from 0 on, which fp32 holds"),
            ({"eps": 1e39}, ValueError, r"eps is 1e\+39; a finite number from 0 on"),
            ({"partial": np.zeros((2, 96))}, TypeError, "partial is float64; bfloat16 or float16 or float32 is"),
            ({"partial": np.zeros((2, 96), np.uint16)}, TypeError, "partial is uint16; .*; view it as ml_dtypes"),
            ({"partial": np.zeros(96, np.float32)}, ValueError, r"partial has shape \[96\]; \[rows, hidden size\] is"),
            ({"partial": np.zeros((2, 16385), np.float32)}, ValueError, "a hidden size from 1 to 16384 is accepted"),
            ({"partial": np.zeros((2, 0), np.float32)}, ValueError, "a hidden size from 1 to 16384 is accepted"),
            ({"partial": [[1.0]]}, TypeError, "partial is a builtins.list"),
            ({"residual": np.zeros((3, 96), np.float32)}, ValueError, r"residual is \[3, 96\]; .* it is \[2, 96\]"),
            ({"residual": np.zeros((2, 96), np.float16)}, TypeError, "residual is float16; float32 is accepted"),
            ({"weight": np.zeros(95, np.float32)}, ValueError, r"weight is \[95\]; .* it is \[96\]"),
            ({"weight": np.zeros(96, np.float16)}, TypeError, "weight is float16; float32 is accepted"),
            ({"weight": np.zeros((1, 96), np.float32)}, ValueError, r"weight has shape \[1, 96\]; \[96\] is accepted"),
            ({"backend": "triton"}, ValueError, "backend is 'triton'; numpy, raw, numba, simt and None"),
            ({"backend": "raw"}, TypeError, "backend 'raw' works on CuPy arrays, got NumPy"),
            ({"comm": None}, TypeError, "comm is a NoneType without rank"),
        ],
    )  # fmt: skip
    def test_one_that_does_not_fit(self, change, error, message):
        settings = {
            "partial": np.zeros((2, 96), np.float32),
            "residual": None,
            "weight": np.ones(96, np.float32),
            "eps": EPS,
            "comm": vpa.comm.solo(),
            **change,
        }
        with pytest.raises(error, match=message):
            vpa.allreduce_rmsnorm(**settings)

    def test_a_communicator_without_sums(self):
        class Bare:
            rank, size = 0, 1

            def all_gather(self, send, recv):
                recv[...] = send

            def close(self):
                pass

        arguments = np.ones((2, 96), np.float32), None, np.ones(96, np.float32), EPS, Bare()
        assert vpa.allreduce_rmsnorm(*arguments)[0].shape == (2, 96)
        for mode, method in (("all_reduce", "all_reduce"), ("sequence_parallel", "reduce_scatter")):
            with pytest.raises(TypeError, match=f"mode '{mode}' takes a communicator with {method}; Bare has none"):
                vpa.allreduce_rmsnorm(*arguments, mode=mode)

    @pytest.mark.parametrize(
        ("partials", "error", "message"),
        [
            ([], TypeError, "partials is a list; a list or tuple with one array per rank"),
            (np.zeros((2, 2, 8)), TypeError, "partials is a ndarray"),
            ([np.zeros((2, 8), np.float32), np.zeros((3, 8), np.float32)], ValueError, r"\[2, 8\], \[1\] is numpy"),
            ([np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float16)], ValueError, "all have one library, dtype"),
        ],
    )  # fmt: skip
    def test_partials_of_ranks(self, partials, error, message):
        with pytest.raises(error, match=message):
            vpa.emulate_allreduce_rmsnorm(partials, None, np.ones(8, np.float32), EPS)

    def test_a_weight_of_fp32_or_of_the_same_dtype(self):
        parts, residual, weight = inputs("bfloat16", 2, 2, 96)
        for dtype in (np.float32, DTYPES["bfloat16"]):
            assert vpa.emulate_allreduce_rmsnorm(list(parts), residual, weight.astype(dtype), EPS)[0].shape == (2, 96)
        with pytest.raises(TypeError, match="weight is float16; bfloat16 or float32 is accepted"):
            vpa.emulate_allreduce_rmsnorm(list(parts), residual, weight.astype(np.float16), EPS)


class TestNormAlone:
    """``rms_norm``, as a drafter's parts take it."""

    @pytest.mark.parametrize(("dtype", "gain"), list(itertools.product(DTYPES, DTYPES)))
    def test_of_two_dtypes_is_rounded_once_to_the_gains(self, dtype, gain):
        (x,), _, weight = inputs(dtype, 1, 3, 33)
        weight = weight.astype(DTYPES[gain])
        got = norm.rms_norm(x, weight, EPS)
        assert got.dtype == weight.dtype and got.shape == x.shape
        (near,) = exact_norm(x, weight, EPS, "once", weight.dtype)
        assert ulps(got, near) <= (8 if gain == "float32" else 1)
        assert norm.rms_norm(x[:0], weight, EPS).shape == (0, 33)


class TestBound:
    """How far a sum in another order and rounding may be."""

    @pytest.mark.parametrize("kind", ["random", "order", "subnormal", "zeros"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sums_in_any_order_and_rounding_are_within(self, dtype, kind):
        for tp in TPS:
            parts, residual, _ = inputs(dtype, tp, 3, 264, tp, kind)
            sums = rmsnorm.sum_over_ranks(parts)
            ours, bound = sums.astype(np.float64), norm.sum_bound(parts)
            for order in (range(tp), reversed(range(tp)), np.random.default_rng(tp).permutation(tp)):
                total = None
                for rank in order:
                    added = parts[rank] if total is None else total.astype(np.float32) + parts[rank].astype("f4")
                    total = added.astype(DTYPES[dtype])
                assert (np.abs(total.astype(np.float64) - ours) <= bound).all()
                kept, right = (
                    (each.astype("f4") + residual.astype("f4")).astype(DTYPES[dtype]) for each in (total, sums)
                )
                off = np.abs(kept.astype(np.float64) - right.astype(np.float64))
                assert (off <= norm.sum_bound(parts, residual)).all()

    def test_it_is_no_wider_than_it_has_to_be(self):
        parts = inputs("bfloat16", 4, 3, 264)[0]
        assert (norm.sum_bound(parts) < 5 * 2.0**-8 * np.abs(parts.astype(np.float64)).sum(axis=0)).all()
