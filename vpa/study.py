"""What a record of ``break-even`` says: absolute differences of both arms at each batch size, and the crossover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vpa.bench.break_even import AGAIN, FULL, LOCAL
from vpa.crossover import CONFIDENCE, Crossover, Point, crossover, point
from vpa.tables import Row, Table, grouped, heading, timed, us

#: What the times of one study have in common.
POINT = ("input", "dtype", "vocab", "hidden_size", "tp", "layout", "backend", "gather", "mode", "cache")


@dataclass(frozen=True)
class Study:
    """Times of one shape, dtype, tp and mode: a point for each batch size, and the crossover."""

    row: Row
    points: tuple[Point, ...]
    bytes_moved: tuple[tuple[int | None, int | None], ...]
    crossover: Crossover

    @property
    def title(self) -> str:
        return heading(self.row)

    def words(self) -> str:
        """The crossover in a sentence; where no rank gathers, it says so, since then it tells nothing of links."""
        text = self.crossover.words()
        return (
            text
            if self.row["gather"] == "included"
            else f"{text}. No gather was timed: one process did all ranks' work"
        )

    def table(self) -> Table:
        """A line for each batch size: both times, what the local argmax saves, the noise, and bytes per step."""
        table = [["rows", "full gather, us", "local argmax, us", "saved, us", f"{CONFIDENCE:.0%} of it", "noise, us",
                  "local argmax", "full gather, bytes", "local argmax, bytes"]]  # fmt: skip
        for one, moved in zip(self.points, self.bytes_moved, strict=True):
            noise = "" if one.noise is None else signed(one.noise)
            cells = [str(one.rows), us(one.full), us(one.local), signed(one.saved)]
            cells += [f"{signed(one.low)} to {signed(one.high)}", noise, one.verdict]
            table.append(cells + ["" if count is None else str(count) for count in moved])
        return table


def studies(rows: Iterable[Row]) -> list[Study]:
    """The studies that these rows hold: none unless both arms were timed in pairs, as ``break-even`` does."""
    found = []
    for group in grouped(timed(rows), *POINT):
        by_size = {line[0]["rows"]: {row["arm"]: row for row in line} for line in grouped(group, "rows")}
        by_size = {size: arms for size, arms in by_size.items() if {FULL, LOCAL, AGAIN} <= arms.keys()}
        if by_size:
            found.append(_study(group, by_size))
    return found


def signed(value: float) -> str:
    """Microseconds with their sign."""
    return f"{'-' if value < 0 else '+'}{us(abs(value))}"


def _study(group: Sequence[Row], by_size: dict[int, dict[str, Row]]) -> Study:
    points, saved, moved = [], {}, []
    for size in sorted(by_size):
        arms = by_size[size]
        full, local, again = (np.array(arms[name]["samples_us"]) for name in (FULL, LOCAL, AGAIN))
        points.append(point(size, full, local, again))
        saved[size] = full - local
        moved.append((arms[FULL]["bytes_moved"], arms[LOCAL]["bytes_moved"]))
    noise = {one.rows: one.noise or 0.0 for one in points}
    return Study(group[0], tuple(points), tuple(moved), crossover(saved, noise))
