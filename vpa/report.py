"""Tables from records. ``python -m vpa.report RECORD.json [...]`` prints the Markdown that README and docs show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from vpa import record

Row = dict[str, Any]
Table = list[list[str]]

#: What arms are compared with, the first that a table has: the existing path of an engine, of CuPy, of NumPy.
_REFERENCES = ("existing (torch)", "existing (cupy)", "existing (numpy)", "numpy argmax")


def check_table(rows: Iterable[Row]) -> Table:
    """One line for each input and dtype that was checked: the batch sizes, and how many rows had a wrong token."""
    table = [["input", "dtype", "vocab", "tp", "rows", "wrong"]]
    checked = (row for row in rows if not row["samples_us"] and not row["skipped"])
    for group in _grouped(checked, "input", "dtype", "vocab", "tp"):
        sizes = " ".join(str(row["rows"]) for row in group)
        wrong = sum(row["wrong"] for row in group)
        table.append([*(str(group[0][key]) for key in ("input", "dtype", "vocab", "tp")), sizes, str(wrong)])
    return table


def time_table(rows: Iterable[Row]) -> Table:
    """One line for each time: the median with the 10th and 90th percentile, and its ratio to the reference arm's."""
    table = [
        [
            "rows",
            "input",
            "dtype",
            "gather",
            "mode",
            "cache",
            "arm",
            "kernels",
            "wrong",
            "median us",
            "p10-p90 us",
            "ratio",
        ]
    ]
    for group in _grouped(_timed(rows), "rows", "input", "dtype", "gather", "mode", "cache"):
        base = _reference([row["arm"] for row in group])
        medians = {row["arm"]: row["median_us"] for row in group}
        for row in group:
            low, high = np.percentile(row["samples_us"], [10, 90])
            ratio = "" if base is None or row["wrong"] is None else f"{row['median_us'] / medians[base]:.2f}"
            cells = [str(row[key]) for key in ("rows", "input", "dtype", "gather", "mode", "cache", "arm")]
            kernels = "" if row["kernels"] is None else f"{row['kernels']:g}"
            wrong = "-" if row["wrong"] is None else str(row["wrong"])
            table.append([*cells, kernels, wrong, _us(row["median_us"]), f"{_us(low)}-{_us(high)}", ratio])
    return table


def pivot_tables(rows: Sequence[Row]) -> dict[str, Table]:
    """For each input, gather, mode and cache one table: a line for each batch size, each arm's median, our ratios."""
    tables = {}
    for group in _grouped(_timed(rows), "input", "dtype", "gather", "mode", "cache"):
        first = group[0]
        arms = list(dict.fromkeys(row["arm"] for row in group))
        references = [arm for arm in arms if arm.startswith(_REFERENCES) and "fused" in arms]
        table = [["rows", *(f"{arm}, us" for arm in arms), *(f"fused / {arm}" for arm in references), "wrong"]]
        for line in _grouped(group, "rows"):
            medians = {row["arm"]: row["median_us"] for row in line}
            times = [_us(medians[arm]) if arm in medians else "" for arm in arms]
            ratios = [
                f"{medians['fused'] / medians[arm]:.2f}" if {"fused", arm} <= medians.keys() else ""
                for arm in references
            ]
            wrong = sum(row["wrong"] or 0 for row in line)
            table.append([str(line[0]["rows"]), *times, *ratios, str(wrong)])
        words = [f"{first['dtype']} [rows, {first['columns']}]", f"tp {first['tp']}", first["input"], first["mode"]]
        words += [f"{first['cache']} cache", *([f"gather {first['gather']}"] if first["gather"] else [])]
        tables[", ".join(words)] = table
    return tables


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


def print_rows(rows: Sequence[Row], out: Callable[[str], None] = print) -> None:
    """The tables of a run, for a terminal."""
    for table in (check_table(rows), time_table(rows)):
        if len(table) > 1:
            out(text(table) + "\n")
    for arm, reason in dict.fromkeys((row["arm"], row["skipped"]) for row in rows if row["skipped"]):
        out(f"without {arm}: {reason}\n")


def describe(content: dict[str, Any]) -> str:
    """One paragraph on a record: the command, the devices, the versions and the revision."""
    env = content["environment"]
    gpus = [rank["gpu"]["name"] for rank in env["ranks"] if rank["gpu"]]
    device = f"{gpus[0]}" if gpus else env["ranks"][0]["cpu"]
    ranks = len(env["ranks"])
    wanted = ("vpa", "numpy", "cupy-cuda13x", "cupy-cuda12x", "numba-cuda", "torch", "triton")
    versions = ", ".join(f"{name} {env['packages'][name]}" for name in wanted if name in env["packages"])
    git = env["git"] or {"revision": "unknown", "dirty": False}
    revision = git["revision"][:12] + (", changed" if git["dirty"] else "")
    variables = "".join(f"{name}={value}; " for name, value in env.get("variables", {}).items())
    return (
        f"`{content['command']}` on {ranks} rank{'s' if ranks > 1 else ''} ({device}; {env['transport']}: "
        f"{env['reason']}); "
        f"{variables}{versions}; revision {revision}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of records as Markdown; exit code 2 for a file that is no record or lacks what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m vpa.report", description=__doc__)
    parser.add_argument("records", nargs="+", metavar="RECORD.json")
    parser.add_argument("--arms", metavar="ARM,...", help="only these arms (default: all)")
    parser.add_argument("--mode", choices=("captured", "eager", "host"), help="only times of this mode (default: all)")
    parser.add_argument("--cache", choices=("hot", "cold"), help="only times with this cache (default: both)")
    options = parser.parse_args(arguments)
    arms = None if options.arms is None else options.arms.split(",")
    for path in options.records:
        try:
            content = record.read(path)
        except ValueError as error:
            print(f"vpa.report: {error}", file=sys.stderr)
            return 2
        wanted = {key: value for key, value in (("mode", options.mode), ("cache", options.cache)) if value}
        times = _timed(content["rows"])
        rows = [row for row in times if all(row[key] == value for key, value in wanted.items())]
        if wanted and not rows:
            there = (f"{row['mode']} {row['cache']}" for row in times)
            return _lacking(path, f"{' '.join(wanted.values())} times", there)
        unknown = sorted(set(arms or ()) - {row["arm"] for row in rows})
        if unknown:
            return _lacking(path, f"arm {', '.join(map(repr, unknown))}", (row["arm"] for row in rows))
        print(describe(content))
        for title, table in pivot_tables([row for row in rows if arms is None or row["arm"] in arms]).items():
            print(f"\n{title}:\n\n{markdown(table)}")
        checks = check_table(content["rows"])
        if len(checks) > 1 and arms is None:
            print(f"\n{markdown(checks)}")
    return 0


def _lacking(path: str, what: str, there: Iterable[str]) -> int:
    """Say what a record has not, and what it has instead. Returns the exit code."""
    print(f"vpa.report: {path} has no {what}; it has {', '.join(dict.fromkeys(there)) or 'none'}", file=sys.stderr)
    return 2


def _timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["samples_us"]]


def _reference(arms: Sequence[str]) -> str | None:
    return next((arm for arm in _REFERENCES if arm in arms), None)


def _grouped(rows: Iterable[Row], *keys: str) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers."""
    return [all(_is_number(line[column]) for line in table[1:]) for column in range(len(table[0]))]


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").replace("-", "").isdigit() or cell in ("", "-")


if __name__ == "__main__":
    sys.exit(main())
