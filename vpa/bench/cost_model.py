"""A cost model of both ways to a token, latency and bytes over bandwidth for each stage, fitted to measured times.

Microseconds of B rows, vocabulary V over p ranks, w = V / p columns a rank, hidden size H, s bytes a logit, c bytes
of a row's candidates from one rank:

- product, in both arms: bytes read and written, ``w*H*s + B*(H + w)*s``, and multiplications, ``B*w*H``;
- all-gather of n bytes a rank, by the formula of a ring: ``base + (p-1)*step + (p-1)*n / bandwidth``. n is ``B*w*s`` of
  logits, ``B*c`` of candidates. Both arms have one, so that base and steps cancel out of their difference: an
  all-gather that sends to all at once, or doubles, has 1 or log2(p) steps for as many bytes, and the same crossover;
- full gather besides: one constant, a copy for each rank, and the bytes that are read and written, ``3*B*s*V``;
- local argmax besides: one constant (scan and pick), and the bytes that these read, ``B*w*s + p*B*c``.

All is linear in the coefficients, which are times: they are fitted together, to arms, floors and to the difference of
both arms, which is what the model is asked for, by least squares of relative errors, none below zero. Times of one
number of ranks cannot tell constants from what grows with ranks, and all is then taken to be constant. What the model
leaves out: that a stage hides behind another, caches, collectives that change their protocol with the size, and
products that turn from bytes to multiplications; the error on points that a fit has not seen says what that costs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.bench.break_even import FULL, GATHER_CANDIDATES, GATHER_LOGITS, LOCAL, PRODUCT
from vpa.bench.job import shards_of
from vpa.bench.links import Link
from vpa.order import LOGITS_DTYPES
from vpa.plan import Plan

#: Coefficients in order, and what one of each is: of two that the data cannot tell apart, the earlier one is taken.
TERMS = (
    ("gather, base", "us"),
    ("gather, step", "us for each rank but one"),
    ("gather, bandwidth", "us/byte"),
    ("product, bytes", "us/byte"),
    ("product, multiplications", "us for each"),
    ("full gather, launches", "us"),
    ("full gather, copy", "us for each rank"),
    ("full gather, bytes", "us/byte"),
    ("local argmax, launches", "us"),
    ("local argmax, bytes", "us/byte"),
)
_STEP, _BANDWIDTH = 1, 2

#: Arms and floors whose times are fitted.
FITTED = (FULL, LOCAL, PRODUCT, GATHER_LOGITS, GATHER_CANDIDATES)

#: What an error of the difference of both arms counts against: itself, or this share of the full gather's time if that
#: is more, since near the crossover it is nothing. Without differences a fit to two H200 had 22 us too much at one row.
_DIFFERENCE = 0.05

#: Bytes of a candidate in both layouts: 64 bits, or two of fp32.
_CANDIDATE = 8

#: Batch sizes among which a crossover is looked for.
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Case:
    """What is predicted. columns: of the widest rank, padding included. hidden_size: None behind the product.
    multiprocessors: of the GPU, 0 for none; the number of candidates follows from it."""

    rows: int
    vocab: int
    tp: int
    columns: int
    hidden_size: int | None
    dtype: str
    multiprocessors: int

    @classmethod
    def planned(cls, rows: int, vocab: int, tp: int, hidden_size: int | None, dtype: str, multiprocessors: int) -> Case:
        """A case that nobody measured: the vocabulary is padded and cut as an experiment does it."""
        columns = shards_of(vocab, tp)[0][0].width
        return cls(rows, vocab, tp, columns, hidden_size, dtype, multiprocessors)

    @property
    def itemsize(self) -> int:
        return LOGITS_DTYPES[self.dtype].itemsize

    def features(self, arm: str) -> np.ndarray:
        """What the coefficients are multiplied by, in their order."""
        logits = self.rows * self.columns * self.itemsize
        splits = Plan(min(self.columns, self.vocab), self.itemsize, self.multiprocessors).splits(self.rows)
        candidates = self.rows * splits * _CANDIDATE
        others = self.tp - 1
        found = np.zeros(len(TERMS))
        if arm in (FULL, GATHER_LOGITS, LOCAL, GATHER_CANDIDATES) and others:
            found[:3] = 1, others, others * (logits if arm in (FULL, GATHER_LOGITS) else candidates)
        if arm in (FULL, LOCAL, PRODUCT) and self.hidden_size is not None:
            weight = self.columns * self.hidden_size
            found[3] = weight * self.itemsize + self.rows * (self.hidden_size + self.columns) * self.itemsize
            found[4] = self.rows * weight
        if arm == FULL:
            found[5:8] = 1, self.tp, 3 * self.rows * self.vocab * self.itemsize
        if arm == LOCAL:
            found[8:10] = 1, logits + self.tp * candidates
        return found


@dataclass(frozen=True)
class Observation:
    """A measured median."""

    arm: str
    case: Case
    us: float


@dataclass(frozen=True)
class Model:
    """Fitted coefficients, in the order of ``TERMS``."""

    coefficients: tuple[float, ...]

    def us(self, arm: str, case: Case) -> float:
        """Microseconds of an arm or floor."""
        return float(case.features(arm) @ np.array(self.coefficients))

    def over(self, link: Link, measured: Link | None = None, rails: int = 1) -> Model:
        """The same with gathers over another link.

        rails: links of a machine that carry a ring each, in most one for each GPU: what crosses between machines is
        shared out among them. Over a network a ring passes through machines too, and is no faster than measured.

        measured: the link of the times that were fitted; the share of its peak that was reached is then taken to be
        reached of the other's too, and a step to take longer by the difference of their latencies. Without it the
        other link gives its peak, at best, and a step takes its latency on top of what was measured.
        """
        changed = list(self.coefficients)
        share = 1.0
        if measured is not None and self.coefficients[_BANDWIDTH] > 0:
            share = min(1 / (self.coefficients[_BANDWIDTH] * measured.bytes_per_us), 1.0)
        within = self.coefficients[_BANDWIDTH] if link.network else 0.0
        changed[_BANDWIDTH] = max(1 / (share * link.bytes_per_us * rails), within)
        changed[_STEP] = max(changed[_STEP] + link.step_us - (0.0 if measured is None else measured.step_us), 0.0)
        return Model(tuple(changed))

    def crossover(self, case: Case) -> float:
        """The fewest rows from which the local argmax takes less time at every size up to ``MOST_ROWS``; 0 where at
        all, infinity where not there."""
        sizes = np.unique(np.geomspace(1, MOST_ROWS, 400).astype(int))
        saved = [
            self.us(FULL, one) - self.us(LOCAL, one) for one in (dataclasses.replace(case, rows=int(n)) for n in sizes)
        ]
        losing = np.flatnonzero(np.array(saved) <= 0)
        if not len(losing):
            return 0.0
        if losing[-1] == len(sizes) - 1:
            return float("inf")
        low, high = sizes[losing[-1]], sizes[losing[-1] + 1]
        for rows in range(int(low) + 1, int(high)):
            one = dataclasses.replace(case, rows=rows)
            if self.us(FULL, one) > self.us(LOCAL, one):
                return float(rows)
        return float(high)


def observations(rows: Iterable[dict[str, Any]], multiprocessors: int) -> list[Observation]:
    """What a record of ``break-even`` measured with real gathers, of one mode. ``ValueError`` where it holds none."""
    found = [
        Observation(row["arm"], case_of(row, multiprocessors), row["median_us"])
        for row in rows
        if row["samples_us"] and row["arm"] in FITTED and row["gather"] == "included" and row["tp"] > 1
    ]
    if not {FULL, LOCAL} <= {one.arm for one in found}:
        raise ValueError(
            "no times of both arms with a gather between ranks; make a record by: mpirun -n 2 python -m vpa.run "
            "break-even --json NEW.json"
        )
    return found


def case_of(row: dict[str, Any], multiprocessors: int) -> Case:
    """The case of a record's row."""
    return Case(row["rows"], row["vocab"], row["tp"], row["columns"], row["hidden_size"], row["dtype"], multiprocessors)


def fit(observed: Sequence[Observation]) -> Model:
    """The model that errs least, by squares of relative errors, among those without a negative coefficient."""
    times = np.array([one.us for one in observed])
    matrix = np.array([one.case.features(one.arm) for one in observed]) / times[:, None]
    pairs = _pairs(observed)
    saved = np.array([full.us - local.us for full, local in pairs])
    scale = np.maximum(np.abs(saved), [_DIFFERENCE * full.us for full, _ in pairs])
    features = np.array([one.case.features(FULL) - one.case.features(LOCAL) for one, _ in pairs])
    if pairs:
        matrix = np.vstack([matrix, features / scale[:, None]])
    return Model(tuple(_non_negative(matrix, np.concatenate([np.ones(len(times)), saved / scale]))))


def _pairs(observed: Iterable[Observation]) -> list[tuple[Observation, Observation]]:
    """Full gather and local argmax of the same case."""
    by_case: dict[Case, dict[str, Observation]] = {}
    for one in observed:
        by_case.setdefault(one.case, {})[one.arm] = one
    return [(arms[FULL], arms[LOCAL]) for arms in by_case.values() if {FULL, LOCAL} <= arms.keys()]


@dataclass(frozen=True)
class HeldOut:
    """A prediction of a point that the fit had not seen. left_out: what else it had not, as ``8 rows``."""

    observation: Observation
    left_out: str
    predicted: float
    model: Model

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10 % too much."""
        return self.predicted / self.observation.us - 1


def saved_errors(found: Sequence[HeldOut]) -> list[tuple[float, HeldOut]]:
    """The error of full - local at each point, as a share of the full gather's time: 0.1 is that much too much."""
    by_case: dict[Case, dict[str, HeldOut]] = {}
    for one in found:
        by_case.setdefault(one.observation.case, {})[one.observation.arm] = one
    both = [(arms[FULL], arms[LOCAL]) for arms in by_case.values() if {FULL, LOCAL} <= arms.keys()]
    return [
        (
            (full.predicted - local.predicted - full.observation.us + local.observation.us) / full.observation.us,
            full,
        )
        for full, local in both
    ]


def held_out(observed: Sequence[Observation], by: str = "rows") -> list[HeldOut]:
    """Both arms predicted at each batch size (``by`` rows), number of ranks (``tp``) or ``shape`` by a fit without it;
    the first and the last are predicted from one side. Empty where there is one value alone."""
    values = sorted({_left_out(one.case, by) for one in observed})
    found = []
    for value in values if len(values) > 1 else ():
        model = fit([one for one in observed if _left_out(one.case, by) != value])
        words = {"rows": f"{value[0]} rows", "tp": f"tp {value[0]}", "shape": f"vocabulary {value[0]}"}[by]
        found += [
            HeldOut(one, words, model.us(one.arm, one.case), model)
            for one in observed
            if _left_out(one.case, by) == value and one.arm in (FULL, LOCAL)
        ]
    return found


def _left_out(case: Case, by: str) -> tuple[int, ...]:
    return (case.vocab, case.hidden_size or 0) if by == "shape" else (getattr(case, by),)


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with no coefficient below zero, exactly: of all choices of columns whose own least squares has none
    below zero, the one with the least error, and among equals the one with the fewest columns, then the first."""
    scale = np.linalg.norm(matrix, axis=0)
    used = np.flatnonzero(scale > 0)
    scaled = matrix[:, used] / scale[used]
    gram, right, whole = scaled.T @ scaled, scaled.T @ target, float(target @ target)
    best, least = np.zeros(len(used)), whole
    for count in range(1, len(used) + 1):
        for columns in map(list, itertools.combinations(range(len(used)), count)):
            part = np.linalg.lstsq(gram[np.ix_(columns, columns)], right[columns], rcond=1e-10)[0]
            error = whole - float(right[columns] @ part)
            if (part >= 0).all() and error < least - 1e-9 * whole:
                best, least = np.zeros(len(used)), error
                best[columns] = part
    found = np.zeros(matrix.shape[1])
    found[used] = best / scale[used]
    return found
