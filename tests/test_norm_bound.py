"""How far a sum over ranks in another order and rounding may be from the rules': hunted for, not only drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from norm_oracle import KINDS, inputs
from oracle import DTYPES

from vpa import norm, rmsnorm

PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}


def add(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """One addition, rounded once: fp32 has twice the bits of a 16-bit dtype, and two more, so twice is once there."""
    return (a.astype(np.float32) + b.astype(np.float32)).astype(dtype)


def in_every_order(terms: list[np.ndarray], dtype: np.dtype):
    """The sums of all orders and brackets of the terms."""
    if len(terms) == 1:
        yield terms[0]
    rest = range(1, len(terms))
    for count in range(len(terms) - 1):
        for chosen in itertools.combinations(rest, count):  # the first term is in the left half: a + b is b + a
            left = [terms[0], *(terms[i] for i in chosen)]
            right = [terms[i] for i in rest if i not in chosen]
            for a, b in itertools.product(in_every_order(left, dtype), in_every_order(right, dtype)):
                yield add(a, b, dtype)


@np.errstate(all="ignore")
def most(parts: np.ndarray, residual: np.ndarray | None = None) -> float:
    """The largest distance from the rules of any order, of sums rounded to the dtype or kept in fp32, as a part of the
    bound; each is asserted to be within it."""
    dtype, bound = parts[0].dtype, norm.sum_bound(parts, residual)
    kept = np.empty_like(parts[0])
    rmsnorm.residual_rmsnorm(parts, residual, None, 0.0, "once", None, kept)
    largest = 0.0
    wide = (total.astype(dtype) for total in in_every_order([part.astype(np.float32) for part in parts], np.float32))
    for total in itertools.chain(in_every_order(list(parts), dtype), wide):
        total = total if residual is None else add(total, residual, dtype)
        off = np.abs(total.astype(np.float64) - kept.astype(np.float64))
        within = (off <= bound) | rmsnorm.alike(total, kept) | (total == kept) | np.isinf(bound)
        assert within.all(), [part[~within].tolist() for part in (*parts, kept, total)]
        known = np.isfinite(bound) & (bound > 0)
        largest = max(largest, float((off[known] / bound[known]).max(initial=0)))
    return largest


def few_bits(dtype: str) -> np.ndarray:
    """Numbers that are rounded most: near 1, and halves of its last bit, a little more and less, of both signs."""
    unit = 2.0 ** (1 - PRECISION[dtype])
    sizes = [1, 1 + unit, 1 + 2 * unit, 1.5, unit / 2, unit / 2 * (1 + unit), 0.75 * unit, unit]
    return np.array([sign * size for size in sizes for sign in (1, -1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_numbers_of_few_bits_in_all_orders(dtype):
    """All of them: nowhere beyond the bound, and close to it somewhere, so that it is no wider than it has to be."""
    numbers = few_bits(dtype).astype(DTYPES[dtype])
    parts = np.array(list(itertools.product(numbers, repeat=3))).T[:, None].astype(numbers.dtype)
    assert most(parts) > (0.99 if dtype == "float32" else 0.6)
    for residual in numbers[::3]:
        assert most(parts, np.full_like(parts[0], residual)) > 0.4


@pytest.mark.parametrize("ranks", [4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_numbers_of_few_bits_in_all_orders(dtype, ranks):
    rng = np.random.default_rng(ranks)
    numbers = few_bits(dtype).astype(np.float32)
    scales = 2.0 ** rng.integers(-2, 3, (ranks, 1, 4000))
    parts = (rng.choice(numbers, (ranks, 1, 4000)) * scales).astype(DTYPES[dtype])
    residual = rng.choice(numbers, (1, 4000)).astype(DTYPES[dtype])
    assert most(parts) > 0.4
    assert most(parts, residual) > 0.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kinds_of_numbers_in_all_orders(dtype, kind):
    for ranks in (1, 2, 3, 4):
        parts, residual, _ = inputs(dtype, ranks, 3, 96, ranks, kind)
        most(parts)
        most(parts, residual)


def test_a_sum_that_a_count_of_the_dtypes_roundings_alone_would_not_hold():
    parts = np.array([1 + 2.0**-23, 2.0**-24, 1.5 * 2.0**-23], np.float32)[:, None, None]
    ours, other = rmsnorm.sum_over_ranks(parts), (parts[0] + parts[2]) + parts[1]
    assert 2.0**-22 == abs(float(ours[0, 0]) - float(other[0, 0])) <= norm.sum_bound(parts)[0, 0] < 2.0**-22 * 1.001


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_one_and_two_ranks_every_sum_is_the_rules(dtype):
    for ranks in (1, 2):
        parts, residual, _ = inputs(dtype, ranks, 2, 8)
        assert not norm.sum_bound(parts).any() and not norm.sum_bound(parts, residual).any()


def test_where_a_sum_may_overflow_nothing_is_said():
    top = np.float16(60000)
    parts = np.array([[top, top, np.inf, np.nan], [top, 0, top, top], [-top, 1, top, top]], np.float16)[:, None]
    assert norm.sum_bound(parts)[0].tolist() == [np.inf, norm.sum_bound(parts[:, :, 1:2])[0, 0], np.inf, 0]
    parts = np.array([[np.inf, np.inf], [1, -np.inf], [2, 3]], np.float16)[:, None]
    assert norm.sum_bound(parts)[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("parts", "residual", "error", "message"),
    [
        ([], None, ValueError, "parts is empty; an array for each rank is accepted"),
        ([np.ones((1, 2))], None, TypeError, r"parts\[0\] is float64; NumPy arrays of bfloat16 or float16 or float32"),
        ([[1.0]], None, TypeError, r"parts\[0\] is a list; NumPy arrays of"),
        ([np.ones((1, 2), "f4"), np.ones((1, 3), "f4")], None, ValueError, r"\[1, 2\], parts\[1\] is numpy float32"),
        ([np.ones((1, 2), "f4")], np.ones((1, 2), "f2"), ValueError, "residual is numpy float16"),
    ],
)  # fmt: skip
def test_what_does_not_fit(parts, residual, error, message):
    with pytest.raises(error, match=message):
        norm.sum_bound(parts, residual)
