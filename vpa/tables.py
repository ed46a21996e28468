"""Tables of rows: grouping, headings, cells, and their text for a terminal, as Markdown or as CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Table = list[list[str]]

#: What arms are compared with, the first that a table has: the existing path of an engine, of CuPy, of NumPy; a drafter
#: or a verification that gathers its logits; a head's product and a scan after it; a norm in separate kernels, or one
#: behind an all-reduce.
REFERENCES = (
    "existing (torch)", "existing (cupy)", "existing (numpy)", "numpy argmax", "full gather", "full path (cupy)",
    "full path (numpy)", "product, scan", "unfused", "all_reduce",
)  # fmt: skip


def reference(arms: Iterable[str]) -> str | None:
    """The arm of these that others are compared with; None where there is none."""
    there = set(arms)
    return next((arm for arm in REFERENCES if arm in there), None)


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that hold times."""
    return [row for row in rows if row["samples_us"]]


def grouped(rows: Iterable[Row], *keys: str) -> list[list[Row]]:
    """Rows that are alike in ``keys``, together, in the order of their first ones."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def heading(row: Row) -> str:
    """What the rows of a table have in common: shape, ranks, input, mode, cache and gather."""
    words = [f"{row['dtype']} [rows, {row['columns']}]", row["strides"], f"tp {row['tp']}", row["input"], row["mode"]]
    words += [f"{row['cache']} cache", f"gather {row['gather']}" if row["gather"] else ""]
    return ", ".join(filter(None, words))


def us(value: float) -> str:
    """Microseconds, with two decimals below 100."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def text(table: Table) -> str:
    """A table for a terminal: columns aligned, numbers to the right."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    numeric = _numeric(table)
    lines = []
    for line in table:
        cells = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """A table as Markdown."""
    lines = [table[0], ["---:" if numeric else "---" for numeric in _numeric(table)], *table[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_csv(folder: Path, stem: str, named: Iterable[tuple[str, Table]]) -> Iterator[Path]:
    """Write each table, with the cells that Markdown has, to ``STEM_NAME.csv``; a name that comes again is numbered.
    Gives the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: dict[str, int] = {}
    for name, table in named:
        plain = re.sub(r"[^A-Za-z0-9.+-]+", "_", name).strip("_")
        taken[plain] = taken.get(plain, 0) + 1
        path = folder / f"{stem}_{plain}{f'_{taken[plain]}' if taken[plain] > 1 else ''}.csv"
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
        yield path


def _numeric(table: Sequence[list[str]]) -> list[bool]:
    """Which columns hold numbers."""
    return [all(_is_number(line[column]) for line in table[1:]) for column in range(len(table[0]))]


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").replace("-", "").isdigit() or cell in ("", "-")
