"""Two records of one experiment against each other: which times moved by more than their noise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa import record
from vpa.crossover import CONFIDENCE, interval, resampled
from vpa.record import SAME
from vpa.tables import Row, Table, timed, us

SLOWER, FASTER = "slower", "faster"


@dataclass(frozen=True)
class Change:
    """A time of both records. ratio: the second's median by the first's; low, high: its bootstrap interval. noise: by
    how much the same arm differs from itself at this point, as a part of its time, the larger of both records; 0 where
    neither says."""

    before: Row
    after: Row
    ratio: float
    low: float
    high: float
    noise: float

    @property
    def moved(self) -> str:
        """``SLOWER`` or ``FASTER`` where the interval leaves 1 out and the change exceeds the noise; else empty."""
        if self.low <= 1 <= self.high or abs(self.ratio - 1) <= self.noise:
            return ""
        return SLOWER if self.ratio > 1 else FASTER


def changes(
    before: Iterable[Row], after: Iterable[Row], arms: Collection[str] | None = None
) -> tuple[list[Change], int, int]:
    """The times that both records have, and how many only the first and only the second has; of ``arms`` alone, if
    they are given, whose noise is still that of all."""
    first, second = _by_key(before), _by_key(after)
    noises = [_noises(first), _noises(second)]
    if arms is not None:
        first, second = ({key: row for key, row in rows.items() if row["arm"] in arms} for rows in (first, second))
    found = []
    for key, row in first.items():
        if key in second:
            noise = max(noise.get(_point(key), 0.0) for noise in noises)
            found.append(_change(row, second[key], noise))
    return found, len(first.keys() - second.keys()), len(second.keys() - first.keys())


def table(found: Sequence[Change]) -> Table:
    """A line for each time that moved, the largest change first."""
    lines = [["rows", "input", "dtype", "gather", "mode", "cache", "arm", "part", "before, us", "after, us", "ratio",
              f"{CONFIDENCE:.0%} of it", "noise", "moved"]]  # fmt: skip
    for one in sorted((one for one in found if one.moved), key=lambda one: -abs(np.log(one.ratio))):
        cells = [str(one.before[key]) for key in ("rows", "input", "dtype", "gather", "mode", "cache", "arm", "part")]
        cells += [us(one.before["median_us"]), us(one.after["median_us"]), f"{one.ratio:.3f}"]
        lines.append([*cells, f"{one.low:.3f}-{one.high:.3f}", f"{one.noise:.3f}", one.moved])
    return lines


def words(found: Sequence[Change], only_first: int, only_second: int) -> str:
    """What was compared and what came of it, in a sentence."""
    slower, faster = (sum(one.moved == way for one in found) for way in (SLOWER, FASTER))
    text = f"{len(found)} times compared: {slower} slower, {faster} faster, the rest within noise"
    if only_first or only_second:
        text += f"; {only_first} times are in the first record only, {only_second} in the second only"
    return text


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """In a sentence, what beside the code may have moved times between two environments; empty for nothing."""
    told = []
    for (name, ours), theirs in zip(_setting(before).items(), _setting(after).values(), strict=True):
        if None not in (ours, theirs) and ours != theirs:
            told.append(f"{name} differ, {ours} and {theirs}")
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}: what moved is not the code's alone." if text else ""


def _setting(env: dict[str, Any]) -> dict[str, str | None]:
    """What times depend on beside the code, by its name in the plural; None for what does not apply."""
    acting = " ".join(f"{name}={value}" for name, value in record.variables(env).items())
    return {
        "the devices": record.device(env),
        "the transports": env["transport"] or "none",
        "the uses of GPUs": "co-located ranks that share one" if record.co_located(env) else "no GPU shared",
        "the numbers of hosts": str(len({rank["host"] for rank in env["ranks"]})),
        "the NCCL versions": record.nccl(env),
        "the variables": (acting or "none") if "variables" in env else None,  # older records do not tell
    }


def _by_key(rows: Iterable[Row]) -> dict[tuple, Row]:
    return {tuple(row[key] for key in SAME): row for row in timed(rows)}


def _point(key: tuple) -> tuple:
    """What is alike of all arms that were timed together."""
    arm, part = SAME.index("arm"), SAME.index("part")
    return tuple(value for place, value in enumerate(key) if place not in (arm, part))


def _noises(rows: dict[tuple, Row]) -> dict[tuple, float]:
    """Of each point, by how much an arm's median differs from that of the same arm again, as a part of it."""
    found: dict[tuple, float] = {}
    place = SAME.index("arm")
    for key, row in rows.items():
        arm = key[place]
        for name in (f"{arm} (again)", arm.removesuffix(")") + ", again)"):  # of a variant: "sharded (blocks, again)"
            again = (*key[:place], name, *key[place + 1 :])
            if again not in rows:
                continue
            noise = abs(rows[again]["median_us"] / row["median_us"] - 1)
            found[_point(key)] = max(noise, found.get(_point(key), 0.0))
    return found


def _change(before: Row, after: Row, noise: float) -> Change:
    """The ratio of medians, and its interval: samples of each record are drawn again, with replacement."""
    rng = np.random.default_rng(0)
    medians = [np.median(resampled(np.array(row["samples_us"], float), rng), axis=1) for row in (before, after)]
    low, high = interval(medians[1] / medians[0])
    return Change(before, after, after["median_us"] / before["median_us"], low, high, noise)
