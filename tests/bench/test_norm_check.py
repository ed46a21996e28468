"""The check of the norm finds what is wrong, and lets pass what another order of additions may give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from norm_oracle import KINDS, inputs
from oracle import DTYPES

from vpa import rmsnorm
from vpa.bench.norm_check import Rules
from vpa.rmsnorm import ROUNDINGS

EPS = 1e-6


def added_otherwise(rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel gives behind a sum that adds from the last rank on and rounds each addition to the dtype."""
    total = rules.parts[-1]
    with np.errstate(all="ignore"):
        for part in rules.parts[-2::-1]:
            total = (total.astype(np.float32) + part.astype(np.float32)).astype(total.dtype)
    found = np.empty_like(total), np.empty_like(total)
    rmsnorm.residual_rmsnorm(total[None], rules.residual, rules.weight, EPS, rules.rounding, *found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_passes(dtype, rounding, kind):
    for ranks, held, wide in itertools.product((2, 3, 8), (True, False), (True, False)):
        parts, residual, weight = inputs(dtype, ranks, 4, 136, ranks, kind)
        weight = weight.astype(np.float32) if wide else weight
        rules = Rules(parts, residual if held else None, weight, EPS, rounding)
        assert rules.wrong(*added_otherwise(rules), same_sum=False).tolist() == [0] * 4
        assert rules.wrong(*rules.results, same_sum=True).tolist() == [0] * 4


@pytest.mark.parametrize("same_sum", [True, False])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_wrong_is_found(dtype, rounding, same_sum):
    rules = Rules(*inputs(dtype, 3, 6, 136), EPS, rounding)
    normed, kept = (each.copy() for each in (rules.results if same_sum else added_otherwise(rules)))
    kept[0, 5], kept[1, 5], kept[2, 5] = np.nan, np.inf, 1.5 * float(kept[2, 5]) + 1
    normed[3, 5], normed[4, 5] = np.nan, 1.25 * float(normed[4, 5]) + 0.25
    assert rules.wrong(normed, kept, same_sum).tolist() == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("rounding", ["once", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_another_sum_is_checked_to_the_last_bit(dtype, rounding):
    rules = Rules(*inputs(dtype, 3, 2, 136), EPS, rounding)
    normed, kept = added_otherwise(rules)
    normed.view(f"u{normed.itemsize}")[1, 7] ^= 1
    assert rules.wrong(normed, kept, same_sum=False).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_nan_do_not_count(dtype):
    rules = Rules(*inputs(dtype, 3, 3, 136, kind="nan"), EPS, "once")
    normed, kept = (result.copy() for result in rules.results)
    for array in (normed, kept):
        nan = np.isnan(array.astype(np.float32))
        assert nan.any()
        array.view(f"u{array.itemsize}")[nan] ^= 1 | 1 << (8 * array.itemsize - 1)  # another payload and sign
        assert np.array_equal(nan, np.isnan(array.astype(np.float32)))
    for same_sum in (True, False):
        assert not rules.wrong(normed, kept, same_sum).any()
    normed[0, 0] = 1
    assert rules.wrong(normed, kept, True).tolist() == [1, 0, 0]
