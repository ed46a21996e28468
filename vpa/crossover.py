"""The batch size from which the local argmax pays: differences of paired samples, and the uncertainty of the crossover.

All is a pure function of samples. A sample of one arm and the sample of the other with the same number were taken one
after the other: they are a pair, and what is looked at is the difference within pairs, whose drift is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: Resamples of a bootstrap (Efron, 1979), and the share of them that an interval holds.
RESAMPLES = 2000
CONFIDENCE = 0.95

PAYS, COSTS, UNCLEAR = "pays", "costs", "within noise"


@dataclass(frozen=True)
class Point:
    """Both arms at one batch size, microseconds. saved: median of full - local over pairs; above 0 the local argmax
    pays. low, high: its bootstrap interval. noise: the same arm against itself, median over pairs; None where that was
    not measured."""

    rows: int
    full: float
    local: float
    saved: float
    low: float
    high: float
    noise: float | None

    @property
    def verdict(self) -> str:
        """``PAYS`` or ``COSTS`` where the interval leaves zero out and the difference exceeds the noise."""
        if abs(self.saved) <= abs(self.noise or 0.0) or self.low <= 0 <= self.high:
            return UNCLEAR
        return PAYS if self.saved > 0 else COSTS


@dataclass(frozen=True)
class Crossover:
    """Where the local argmax begins to pay, over measured batch sizes from ``smallest`` to ``largest``.

    rows: the batch size, between two measured ones; 0 where it pays at all of them, infinity where not at the largest:
    none in range. low, high: the interval, with the same two meanings, of a bootstrap and of differences that may be
    off by the noise. none: share of resamples with none in
    range. changes: how often the measured difference changes its sign, 1 where all is as expected.
    """

    smallest: int
    largest: int
    rows: float
    low: float
    high: float
    none: float
    changes: int

    def words(self) -> str:
        """One sentence for people."""
        if self.rows == np.inf and self.low < np.inf:
            text = f"crossover: undecided, at {self.largest} rows the difference is within its uncertainty"
        elif self.rows == np.inf:
            text = f"crossover: none in range ({self.smallest} to {self.largest} rows): the local argmax does not pay"
        elif self.rows == 0:
            text = f"crossover: none needed, the local argmax pays at every size from {self.smallest} rows on"
        else:
            text = f"crossover: the local argmax pays from {size(self.rows)} rows on"
        text += f"; {CONFIDENCE:.0%} of resamples: {self.span()}"
        if 0 < self.none < 1 or (self.none == 1 and self.rows != np.inf):
            text += f", {self.none:.0%} of them with none in range"
        if self.changes > 1:
            text += f"; the difference changes its sign {self.changes} times, and the last of them counts"
        return text

    def span(self) -> str:
        """The interval in words."""
        low, high = self.ends(self.low), self.ends(self.high)
        return low if low == high else f"{low} to {high}"

    def ends(self, rows: float) -> str:
        """A batch size as ``rows``, ``low`` and ``high`` hold it, in words."""
        if rows == 0:
            return f"below {self.smallest}"
        return f"above {self.largest}" if rows == np.inf else size(rows)


def point(rows: int, full: np.ndarray, local: np.ndarray, again: np.ndarray | None = None, seed: int = 0) -> Point:
    """A batch size's point from paired samples [pairs] of both arms, and of the local argmax against itself."""
    full, local = _paired(rows, full, local)
    saved = full - local
    low, high = median_interval(saved, np.random.default_rng([seed, rows]))
    noise = None if again is None else float(np.median(_paired(rows, again, local)[0] - local))
    return Point(
        rows, float(np.median(full)), float(np.median(local)), float(np.median(saved)), float(low), float(high), noise
    )


def crossover(saved: Mapping[int, np.ndarray], noise: Mapping[int, float] | None = None, seed: int = 0) -> Crossover:
    """The crossover of differences within pairs, full - local: batch size -> [pairs].

    noise: batch size -> what the same arm differs from itself, of either sign; a size without counts as none.

    The point estimate takes the median of each size's pairs; the interval takes the pairs of each size again and again,
    with replacement, and reaches from where all differences are larger by their noise to where all are smaller.
    ``ValueError`` for no size, one that is no integer from 1 on, or one without pairs.
    """
    sizes = sorted(saved)
    if not sizes or sizes[0] < 1 or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise ValueError(f"batch sizes are {sizes}; at least one integer, from 1 on, is accepted")
    pairs = {size: _samples(size, saved[size]) for size in sizes}
    medians = np.array([np.median(pairs[size]) for size in sizes])
    rng = np.random.default_rng(seed)
    drawn = np.stack([np.median(resampled(pairs[size], rng), axis=1) for size in sizes], axis=1)
    off = np.array([abs((noise or {}).get(size, 0.0)) for size in sizes])
    found, first, last = (np.array([pays_from(sizes, line) for line in drawn + shift]) for shift in (0, off, -off))
    (low, _), (_, high) = interval(first), interval(last)
    signs = medians > 0
    return Crossover(
        sizes[0], sizes[-1], pays_from(sizes, medians), low, high, float(np.isinf(found).mean()),
        int((signs[1:] != signs[:-1]).sum()),
    )  # fmt: skip


def pays_from(sizes: list[int], saved: np.ndarray) -> float:
    """The batch size from which ``saved`` [sizes] stays above zero, between sizes by a straight line, as both arms grow
    about linearly; 0 where it is above at all, infinity where not at the last."""
    at_most_zero = np.flatnonzero(np.asarray(saved) <= 0)
    if not len(at_most_zero):
        return 0.0
    last = int(at_most_zero[-1])
    if last == len(sizes) - 1:
        return float("inf")
    before, after = float(saved[last]), float(saved[last + 1])
    return sizes[last] + (sizes[last + 1] - sizes[last]) * -before / (after - before)


def size(rows: float) -> str:
    """A batch size between measured ones, with three figures."""
    return f"{rows:.3g}" if rows < 100 else f"{rows:.0f}"


def median_interval(samples: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """The bootstrap interval of the median of ``samples``."""
    return interval(np.median(resampled(np.asarray(samples, float), rng), axis=1))


def resampled(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[RESAMPLES, samples], each line as many of the samples as there are, drawn with replacement."""
    return samples[rng.integers(0, len(samples), (RESAMPLES, len(samples)))]


def interval(values: np.ndarray) -> tuple[float, float]:
    """The central share of ``values``, its ends among them: no mean of a number and infinity is taken."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def _samples(rows: int, samples: np.ndarray) -> np.ndarray:
    samples = np.asarray(samples, float)
    if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
        raise ValueError(f"samples of {rows} rows have shape {samples.shape}; finite numbers [pairs] are accepted")
    return samples


def _paired(rows: int, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = _samples(rows, first), _samples(rows, second)
    if len(first) != len(second):
        raise ValueError(f"{rows} rows have {len(first)} and {len(second)} samples; pairs of one of each are accepted")
    return first, second
