"""What the norm's calls accept, and RMSNorm alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from norm_oracle import exact_norm, inputs, ulps
from oracle import DTYPES
from test_norm import EPS

import vpa
from vpa import norm


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
        for function in (vpa.allreduce_rmsnorm, vpa.prepare_allreduce_rmsnorm):
            with pytest.raises(error, match=message):
                function(**settings)

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

    @pytest.mark.parametrize(
        ("x", "gain", "eps", "error", "message"),
        [
            ([[1.0]], np.ones(1, "f4"), EPS, TypeError, "x is a list; a NumPy or CuPy array is accepted"),
            (np.ones((2, 8)), np.ones(8, "f4"), EPS, TypeError, "x is float64; bfloat16, float16, float32 are"),
            (np.ones((2, 8), "f4"), np.ones(8), EPS, TypeError, "gain is float64; bfloat16, float16, float32 are"),
            (np.ones((2, 8), "f4"), np.ones(1, "f4"), EPS, ValueError, r"gain is \[1\], x \[2, 8\]; \[n\] and"),
            (np.ones((2, 0), "f4"), np.ones(0, "f4"), EPS, ValueError, r"gain is \[0\], x \[2, 0\]; \[n\] and"),
            (np.ones(8, "f4"), np.ones(8, "f4"), EPS, ValueError, "x has shape"),
            (np.ones((2, 8), "f4"), np.ones(8, "f4"), -1.0, ValueError, "eps is -1.0; a finite number from 0 on"),
            (np.ones((2, 8), "f4"), np.ones(8, "f4"), "1", TypeError, "eps is '1'; a real number is accepted"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit(self, x, gain, eps, error, message):
        with pytest.raises(error, match=message):
            norm.rms_norm(x, gain, eps)
