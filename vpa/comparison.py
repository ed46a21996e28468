"""What a record of ``compare`` says: a summary over batch sizes, and a table for each dtype, stride, input and mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vpa.tables import Row, Table, grouped, heading, reference, timed, us

#: What is compared: the first backend that a table has, and the peer whose parts stand beside its.
OURS = ("raw", "numba", "numpy", "simt")
PEER = "triton (by lane)"

#: An arm and its part; see ``vpa.bench.compare``.
Key = tuple[str, str]

READ: Key = ("floor: plain read", "")

#: What the rows of one table have in common.
_POINT = ("dtype", "strides", "input", "mode", "cache")


def has_parts(rows: Iterable[Row]) -> bool:
    """Whether the rows are those of a comparison."""
    return any(row["part"] for row in rows)


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The timed rows of each table, those of the summary first."""
    return grouped(timed(rows), *_POINT)


def medians(group: Iterable[Row]) -> dict[Key, dict[int, float]]:
    """Microseconds of each arm and part by batch size."""
    found: dict[Key, dict[int, float]] = {}
    for row in group:
        found.setdefault((row["arm"], row["part"]), {})[row["rows"]] = row["median_us"]
    return found


def words(key: Key) -> str:
    """An arm and its part as a heading says it: a pair goes without saying."""
    arm, part = key
    return arm.removeprefix("floor: ") if part in ("", "pair") else f"{arm} {part}"


def tables(rows: Sequence[Row], summary_only: bool = False) -> dict[str, Table]:
    """Tables by their titles: the summary of the first input, then one for each group with a line for each arm."""
    found = groups(rows)
    named = {f"{heading(group[0])}, summary": summary(group) for group in found[:1]}
    if not summary_only:
        named.update({heading(group[0]): arm_table(group) for group in found})
    return named


def summary(group: Sequence[Row]) -> Table:
    """A line for each batch size: our pair and local part, what they are compared with, the read limit, and ratios."""
    times = medians(group)
    ours = next((arm for arm in OURS if (arm, "local") in times or (arm, "pair") in times), "")
    base = reference(arm for arm, _ in times) or ""
    pairs = [(ours, "pair"), (base, "pair"), (PEER, "pair")]
    locals_ = [(ours, "local"), (PEER, "local"), READ]
    there = [key for key in (*pairs, *locals_) if key in times]
    ratios = [(ours, other) for ours, *others in (pairs, locals_) for other in others if {ours, other} <= times.keys()]
    table = [
        ["rows", *(f"{words(key)}, us" for key in there), *(f"{words(a)} / {words(b)}" for a, b in ratios), "wrong"]
    ]
    for line in grouped(group, "rows"):
        rows = line[0]["rows"]
        cells = [us(times[key][rows]) if rows in times[key] else "" for key in there]
        cells += [
            f"{times[a][rows] / times[b][rows]:.2f}" if rows in times[a] and rows in times[b] else "" for a, b in ratios
        ]
        wrong = sum(row["wrong"] or 0 for row in line if not row["external"])
        table.append([str(rows), *cells, str(wrong)])
    return table


def arm_table(group: Sequence[Row]) -> Table:
    """A line for each arm and part: kernels per call, wrong rows, and its median for each batch size."""
    sizes = sorted({row["rows"] for row in group})
    table = [["arm", "part", "kernels", "wrong", *(f"{size}, us" for size in sizes)]]
    for line in grouped(group, "arm", "part"):
        ((key, times),) = medians(line).items()
        kernels = sorted({row["kernels"] for row in line if row["kernels"] is not None})
        wrong = [row["wrong"] for row in line if row["wrong"] is not None]
        cells = [us(times[size]) if size in times else "" for size in sizes]
        table.append(
            [
                *key,
                "-".join(f"{count:g}" for count in kernels[:1] + kernels[1:][-1:]),
                str(sum(wrong)) if wrong else "-",
                *cells,
            ]
        )
    return table
