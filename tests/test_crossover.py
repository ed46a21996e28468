"""The crossover's statistics: what they give on differences whose crossover is known, and how sure they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpa.crossover import CONFIDENCE, COSTS, PAYS, UNCLEAR, crossover, median_interval, pays_from, point

SIZES = [1, 2, 4, 8, 16, 32, 64]


def line(at: float, slope: float = 1.0) -> dict[int, np.ndarray]:
    """Differences of five pairs without noise that pay from ``at`` rows on."""
    return {size: np.full(5, slope * (size - at)) for size in SIZES}


@pytest.mark.parametrize("at", [1.5, 2.5, 11.0, 63.0])
def test_a_straight_line_is_found_where_it_crosses(at):
    found = crossover(line(at))
    assert found.rows == pytest.approx(at) and found.low == pytest.approx(at) and found.high == pytest.approx(at)
    assert (found.none, found.changes) == (0, 1)
    assert f"pays from {at:.3g} rows on" in found.words()


def test_large_sizes_are_written_out():
    assert "pays from 768 rows on" in crossover({512: np.array([-1.0]), 1024: np.array([1.0])}).words()


def test_none_in_range_and_none_needed():
    found = crossover(line(100))
    assert (found.rows, found.low, found.high, found.none) == (np.inf, np.inf, np.inf, 1.0)
    assert "none in range (1 to 64 rows)" in found.words() and found.words().endswith("resamples: above 64")
    found = crossover(line(0.5))
    assert (found.rows, found.low, found.high, found.none) == (0, 0, 0, 0)
    assert "pays at every size from 1 rows on" in found.words() and found.words().endswith("resamples: below 1")


def test_noise_widens_the_interval_and_may_leave_it_open():
    saved = {1: np.full(5, -2.0), 2: np.full(5, 8.0), 4: np.full(5, 15.0)}
    assert crossover(saved).span() == "1.2"
    found = crossover(saved, {1: -5.0, 2: 1.0})
    assert (found.rows, found.low) == (pytest.approx(1.2), 0) and found.high == pytest.approx(1.5)  # -7 to 7
    assert crossover(saved, {1: 1.0}).low == pytest.approx(1 + 1 / 9)  # -1 to 8
    last = crossover({1: np.full(5, 100.0), 2: np.full(5, -0.1)}, {2: 0.3})
    assert (last.rows, last.low, last.high) == (np.inf, 0, np.inf) and "undecided, at 2 rows" in last.words()


def test_a_difference_of_zero_does_not_pay():
    assert crossover({size: np.zeros(5) for size in SIZES}).rows == np.inf
    assert pays_from([1, 2, 4], np.array([0, 0, 5])) == 2


def test_the_last_change_of_sign_counts_and_others_are_told():
    saved = dict(zip(SIZES, ([-1.0], [3.0], [-2.0], [2.0], [2.0], [2.0], [2.0]), strict=True))
    found = crossover(saved)
    assert found.rows == pytest.approx(6) and found.changes == 3
    assert "changes its sign 3 times" in found.words()


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """200 studies of five noisy pairs: at least nine in ten hold it."""
    rng, at, held = np.random.default_rng(1), 11.0, 0
    for study in range(200):
        found = crossover({size: size - at + rng.normal(0, 3, 5) for size in SIZES}, seed=study)
        held += found.low <= at <= found.high
    assert held >= 180


def test_more_pairs_narrow_the_interval():
    widths = []
    for pairs in (5, 200):
        rng = np.random.default_rng(2)
        found = crossover({size: size - 11 + rng.normal(0, 3, pairs) for size in SIZES})
        widths.append(found.high - found.low)
    assert 0 < widths[1] < widths[0] / 2


def test_noise_that_reaches_the_range_s_end_says_so():
    rng = np.random.default_rng(3)
    found = crossover({size: (size - 60) / 30 + rng.normal(0, 3, 5) for size in SIZES})
    assert 0 < found.none < 1 and found.high == np.inf
    assert "above 64" in found.words() and "of them with none in range" in found.words()


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), min_size=1, max_size=5),
    st.floats(1e-3, 1e3),
)
def test_properties(samples, scale):
    """Deterministic; alike in any unit of time; within its range or at its two ends; ends in order."""
    saved = {2**i: np.array(line) for i, line in enumerate(samples)}
    found = crossover(saved)
    assert found == crossover(dict(reversed(saved.items())))
    largest = 2 ** (len(samples) - 1)
    for value in (found.rows, found.low, found.high):
        assert value in (0, np.inf) or 1 <= value <= largest
    assert found.low <= found.high and 0 <= found.none <= 1 and found.words()
    pays = [np.median(line) > 0 for line in samples]
    assert (found.rows == np.inf) == (not pays[-1]) and (found.rows == 0) == all(pays)
    if all(abs(value) > 1e-9 or value == 0 for line in samples for value in line):
        scaled = crossover({size: scale * line for size, line in saved.items()})
        assert scaled.rows == pytest.approx(found.rows, rel=1e-6)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({}, "at least one"),
        ({0: [1.0]}, "from 1 on"),
        ({1.5: [1.0]}, "at least one integer"),
        ({True: [1.0]}, "at least one integer"),
        ({1: []}, "samples of 1 rows have shape"),
        ({1: [[1.0]]}, "samples of 1 rows have shape"),
        ({1: [np.nan]}, "finite numbers"),
    ],
)
def test_samples_that_do_not_fit(saved, message):
    with pytest.raises(ValueError, match=message):
        crossover(saved)


def test_a_point_is_judged_by_its_pairs_and_the_noise():
    local = np.array([10.0, 20.0, 30.0, 40.0, 50.0])  # a drift that both arms share is none of their difference
    found = point(8, local + 5, local, local + 1)
    assert (found.full, found.local, found.saved, found.low, found.high) == (35, 30, 5, 5, 5)
    assert (found.noise, found.verdict) == (1, PAYS)
    assert point(8, local - 5, local, local + 1).verdict == COSTS
    assert point(8, local + 5, local, local - 6).verdict == UNCLEAR  # less than the same arm differs from itself
    assert point(8, local + np.array([-5, 9, 9, -9, 9]), local).verdict == UNCLEAR  # the interval holds zero
    with pytest.raises(ValueError, match="8 rows have 4 and 5 samples"):
        point(8, local[:4], local)


def test_the_interval_of_a_median():
    """Against all resamples of three samples, counted."""
    samples = np.array([1.0, 2.0, 10.0])
    medians = sorted(np.median(list(drawn)) for drawn in itertools.product(samples, repeat=3))
    low, high = median_interval(samples, np.random.default_rng(0))
    tail = (1 - CONFIDENCE) / 2
    assert (low, high) == (medians[int(tail * len(medians))], medians[-1 - int(tail * len(medians))])
