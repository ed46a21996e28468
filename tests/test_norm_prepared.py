"""The norm's call made once over fixed memory: it follows its arrays, and so does a CUDA graph of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from norm_oracle import inputs, same
from oracle import DTYPES, laid_out, to_host
from test_norm import EPS, rule

import vpa
from vpa import norm
from vpa.rmsnorm import ROUNDINGS


class TestPrepared:
    """``prepare_allreduce_rmsnorm``: the same call over fixed memory."""

    @pytest.mark.parametrize("memory", ["contiguous", "padded_rows", "every_second_column", "column_major"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_it_follows_what_its_arrays_hold_and_writes_the_same_results(self, dtype, memory):
        for mode, rounding in itertools.product(norm.MODES, ROUNDINGS):
            parts, residual, weight = inputs(dtype, 1, 4, 40)
            partial, held, gain = (laid_out(one, memory) for one in (parts[0], residual, weight[None]))
            settings = {"mode": mode, "rounding": rounding}
            prepared = vpa.prepare_allreduce_rmsnorm(partial, held, gain[0], EPS, vpa.comm.solo(), **settings)
            for seed in range(3):
                new = inputs(dtype, 1, 4, 40, seed)
                partial[...], held[...], gain[...] = new[0][0], new[1], new[2]
                results = prepared()
                assert results[0] is prepared.normed and results[1] is prepared.new_residual
                once = vpa.allreduce_rmsnorm(partial, held, gain[0], EPS, vpa.comm.solo(), **settings)
                for got, called, expected in zip(results, once, rule(*new, rounding=rounding), strict=True):
                    assert same(got, expected) and same(called, expected)

    def test_no_rows(self):
        normed, kept = vpa.prepare_allreduce_rmsnorm(
            np.zeros((0, 8), np.float16), None, np.ones(8, np.float16), EPS, vpa.comm.solo()
        )()
        assert normed.shape == kept.shape == (0, 8)

    @pytest.mark.gpu
    def test_a_call_inside_a_capture_is_refused(self):
        import cupy

        parts, residual, weight = (cupy.asarray(array) for array in inputs("float32", 1, 2, 96))
        arguments = parts[0], residual, weight, EPS, vpa.comm.solo()
        prepared = vpa.prepare_allreduce_rmsnorm(*arguments)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                for function in (vpa.allreduce_rmsnorm, vpa.prepare_allreduce_rmsnorm):
                    with pytest.raises(ValueError, match=r"cannot be captured, .* vpa.prepare_allreduce_rmsnorm"):
                        function(*arguments)
                with pytest.raises(RuntimeError, match="the first call cannot be captured"):
                    prepared()
            finally:
                stream.end_capture()

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["raw", "numba"])
    @pytest.mark.parametrize("memory", ["contiguous", "padded_rows", "every_second_column"])
    def test_a_prepared_call_is_captured_and_follows_its_arrays(self, name, memory):
        import cupy

        parts, residual, weight = inputs("bfloat16", 1, 5, 264)
        partial, held, gain = (laid_out(one, memory, cupy) for one in (parts[0], residual, weight[None]))
        prepared = vpa.prepare_allreduce_rmsnorm(partial, held, gain[0], EPS, vpa.comm.solo(), backend=name)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            results = prepared()
            stream.begin_capture()
            prepared()
            graph = stream.end_capture()
        for shift in range(1, 4):
            moved = [np.roll(one, shift, axis=1) for one in (parts[0], residual, weight[None])]
            for array, new in zip((partial, held, gain), moved, strict=True):
                array.view("u2")[...] = cupy.asarray(new.view("u2"))
            cupy.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
            expected = rule(moved[0][None], moved[1], moved[2][0])
            assert all(same(to_host(a), b) for a, b in zip(results, expected, strict=True)), shift
