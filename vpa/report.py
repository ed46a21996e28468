"""Tables from records. ``python -m vpa.report RECORD.json [...]`` prints the Markdown that README and docs show."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vpa import comparison, moved, record, study
from vpa.order import LOGITS_DTYPES
from vpa.tables import REFERENCES, Row, Table, grouped, heading, markdown, reference, text, timed, us

#: Arms whose ratios to those that they are compared with stand beside their times.
OURS = ("fused", "sharded (candidate)", "sharded (blocks)", "local argmax", "fused product")


def check_table(rows: Iterable[Row]) -> Table:
    """One line for each input and dtype that was checked: the batch sizes, and how many rows had a wrong token."""
    table = [["input", "dtype", "vocab", "tp", "rows", "wrong"]]
    checked = (row for row in rows if not row["samples_us"] and not row["skipped"] and not row["part"])
    for group in grouped(checked, "input", "dtype", "vocab", "tp"):
        sizes = " ".join(dict.fromkeys(str(row["rows"]) for row in group))
        wrong = sum(row["wrong"] for row in group)
        table.append([*(str(group[0][key]) for key in ("input", "dtype", "vocab", "tp")), sizes, str(wrong)])
    return table


def position_table(rows: Iterable[Row]) -> Table:
    """Of a draft loop, one line for each family, dtype and arm: wrong tokens at each position, over all batch sizes."""
    checked = [row for row in rows if not row["samples_us"] and row["part"].startswith("position ")]
    positions = list(dict.fromkeys(row["part"] for row in checked))
    names = [position.removeprefix("position ") for position in positions]
    table = [["family", "dtype", "vocab", "tp", "rows", "arm", *(f"wrong at {name}" for name in names)]]
    for group in grouped(checked, "input", "dtype", "vocab", "tp", "arm"):
        sizes = " ".join(dict.fromkeys(str(row["rows"]) for row in group))
        wrong = [[row["wrong"] for row in group if row["part"] == position] for position in positions]
        cells = [str(group[0][key]) for key in ("input", "dtype", "vocab", "tp")]
        table.append([*cells, sizes, group[0]["arm"], *(str(sum(each)) if each else "" for each in wrong)])
    return table


def verification_table(rows: Iterable[Row]) -> Table:
    """Of verifications, one line for each input, dtype and arm: requests with a wrong outcome and the mean number of
    tokens that a request samples, over all batch sizes."""
    checked = [row for row in rows if not row["samples_us"] and row["part"].startswith("K ")]
    table = [["input", "dtype", "vocab", "tp", "drafts", "requests", "arm", "wrong", "mean length"]]
    for group in grouped(checked, "input", "dtype", "vocab", "tp", "part", "arm"):
        sizes = " ".join(dict.fromkeys(str(row["rows"]) for row in group))
        cells = [str(group[0][key]) for key in ("input", "dtype", "vocab", "tp")]
        cells += [group[0]["part"].removeprefix("K "), sizes, group[0]["arm"], str(sum(row["wrong"] for row in group))]
        table.append([*cells, _mean_length(group)])
    return table


def _mean_length(group: Sequence[Row]) -> str:
    """The mean number of tokens over the requests of several rows that sample any; empty where none does.

    Older records do not say how many those are, and have 0 where there is none: there all requests count.
    """
    lengths = []
    for row in group:
        if row["acceptance_length"]:
            known = row["sampling_requests"] is not None
            lengths.append((row["acceptance_length"], row["sampling_requests" if known else "rows"]))
    requests = sum(count for _, count in lengths)
    return f"{sum(length * count for length, count in lengths) / requests:.2f}" if requests else ""


def time_table(rows: Iterable[Row]) -> Table:
    """One line for each time: the median with the 10th and 90th percentile, and its ratio to the reference arm's."""
    times = timed(rows)
    moves = any(row["bytes_moved"] is not None for row in times)
    accepts = any(row["acceptance_length"] is not None for row in times)
    heads = ["rows", "input", "dtype", "gather", "mode", "cache", "arm", "kernels", "wrong", "median us", "p10-p90 us"]
    more = ["bytes moved"] * moves + ["mean length"] * accepts
    table = [[*heads, "ratio", *more]]
    for group in grouped(times, "rows", "input", "dtype", "gather", "mode", "cache"):
        base = reference([row["arm"] for row in group])
        medians = {row["arm"]: row["median_us"] for row in group}
        for row in group:
            low, high = np.percentile(row["samples_us"], [10, 90])
            ratio = "" if base is None or row["wrong"] is None else f"{row['median_us'] / medians[base]:.2f}"
            cells = [str(row[key]) for key in ("rows", "input", "dtype", "gather", "mode", "cache", "arm")]
            kernels = "" if row["kernels"] is None else f"{row['kernels']:g}"
            wrong = "-" if row["wrong"] is None else str(row["wrong"])
            cells += [kernels, wrong, us(row["median_us"]), f"{us(low)}-{us(high)}", ratio]
            if moves:
                cells.append("" if row["bytes_moved"] is None else str(row["bytes_moved"]))
            if accepts:
                cells.append(_mean_length([row]))
            table.append(cells)
    return table


def pivot_tables(rows: Sequence[Row]) -> dict[str, Table]:
    """For each input, gather, mode and cache one table: a line for each batch size, each arm's median, our ratios."""
    tables = {}
    for group in grouped(timed(rows), "input", "dtype", "gather", "mode", "cache"):
        arms = list(dict.fromkeys(row["arm"] for row in group))
        ours = [arm for arm in arms if arm in OURS]
        pairs = [(our, arm) for our in ours for arm in arms if arm in REFERENCES]
        table = [["rows", *(f"{arm}, us" for arm in arms), *(f"{our} / {arm}" for our, arm in pairs), "wrong"]]
        for line in grouped(group, "rows"):
            medians = {row["arm"]: row["median_us"] for row in line}
            times = [us(medians[arm]) if arm in medians else "" for arm in arms]
            ratios = [
                f"{medians[our] / medians[arm]:.2f}" if {our, arm} <= medians.keys() else "" for our, arm in pairs
            ]
            wrong = sum(row["wrong"] or 0 for row in line)
            table.append([str(line[0]["rows"]), *times, *ratios, str(wrong)])
        tables[heading(group[0])] = table
    return tables


def print_rows(rows: Sequence[Row], out: Callable[[str], None] = print) -> None:
    """The tables of a run, for a terminal."""
    if comparison.has_parts(timed(rows)):
        for title, table in comparison.tables(rows).items():
            out(f"{title}:\n\n{text(table)}\n")
    else:
        for table in (check_table(rows), position_table(rows), verification_table(rows), time_table(rows)):
            if len(table) > 1:
                out(text(table) + "\n")
    for one in study.studies(rows):
        out(f"{one.title}:\n\n{text(one.table())}\n\n{one.words()}\n")
    for arm, reason in dict.fromkeys((row["arm"], row["skipped"]) for row in rows if row["skipped"]):
        out(f"without {arm}: {reason}\n")


def describe(content: dict[str, Any]) -> str:
    """One paragraph on a record: the command, the devices, the versions and the revision."""
    env = content["environment"]
    ranks = len(env["ranks"])
    wanted = ("vpa", "numpy", "cupy-cuda13x", "cupy-cuda12x", "numba-cuda", "torch", "triton")
    versions = ", ".join(f"{name} {env['packages'][name]}" for name in wanted if name in env["packages"])
    git = env["git"] or {"revision": "unknown", "dirty": False}
    revision = git["revision"][:12] + (", changed" if git["dirty"] else "")
    variables = "".join(f"{name}={value}; " for name, value in env.get("variables", {}).items())
    return (
        f"`{content['command']}` on {ranks} rank{'s' if ranks > 1 else ''} ({record.device(env)}; {env['transport']}: "
        f"{env['reason']}); "
        f"{variables}{versions}; revision {revision}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of records as Markdown; exit code 2 for a file that is no record or lacks what is asked for."""
    options = _parser().parse_args(arguments)
    arms = None if options.arms is None else re.split(r",(?! )", options.arms)
    if options.compare:
        return _compare(options.records, {key: getattr(options, key) for key in _FILTERS if getattr(options, key)})
    for path in options.records:
        try:
            content = record.read(path)
        except ValueError as error:
            print(f"vpa.report: {error}", file=sys.stderr)
            return 2
        wanted = {key: getattr(options, key) for key in _FILTERS if getattr(options, key)}
        times = timed(content["rows"])
        rows = [row for row in times if all(row[key] == value for key, value in wanted.items())]
        if wanted and not rows:
            there = (" ".join(row[key] for key in dict.fromkeys(("mode", "cache", *wanted))) for row in times)
            return _lacking(path, f"{' '.join(wanted.values())} times", there)
        unknown = sorted(set(arms or ()) - {row["arm"] for row in rows})
        if unknown:
            return _lacking(path, f"arm {', '.join(map(repr, unknown))}", (row["arm"] for row in rows))
        rows = [row for row in rows if arms is None or row["arm"] in arms]
        if (options.summary or options.figures) and not comparison.has_parts(rows) and not study.studies(rows):
            return _lacking(path, "times of parts, as compare takes them", (content["experiment"],))
        if options.figures:
            code = _figures(path, content, rows, options.figures)
        else:
            code = _print(content, rows, summary_only=options.summary, checks_too=arms is None)
        if code:
            return code
    return 0


#: Options that leave the rows with one value of a key.
_FILTERS = ("mode", "cache", "dtype", "strides", "input")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vpa.report", description=__doc__)
    add = parser.add_argument
    add("records", nargs="+", metavar="RECORD.json")
    add("--arms", metavar="ARM,...", help="only these arms, no space between (default: all)")
    add("--mode", choices=("captured", "eager", "host"), help="only times of this mode (default: all)")
    add("--cache", choices=("hot", "cold"), help="only times with this cache (default: both)")
    add("--dtype", choices=tuple(LOGITS_DTYPES), help="only times of logits of this dtype (default: all)")
    add("--input", metavar="FAMILY", help="only times of this input (default: all)")
    add("--strides", metavar="NAME", help="of compare: only times of logits laid out so (default: all)")
    add("--compare", action="store_true", help="of two records: only the times that moved by more than their noise")
    add("--summary", action="store_true", help="of compare: only the first table; of break-even: only what is saved")
    add("--figures", metavar="FOLDER", help="of compare, break-even: instead of tables, figures as PNG and SVG")
    return parser


def _print(content: dict[str, Any], rows: Sequence[Row], summary_only: bool, checks_too: bool) -> int:
    print(describe(content))
    found = study.studies(rows)
    tables = comparison.tables(rows, summary_only) if comparison.has_parts(rows) else pivot_tables(rows)
    if found and summary_only:
        tables, checks_too = {}, False
    for title, table in tables.items():
        print(f"\n{title}:\n\n{markdown(table)}")
    for one in found:
        print(f"\n{one.title}, what the local argmax saves:\n\n{markdown(one.table())}\n\n{one.words()}.")
    for checks in (made(content["rows"]) for made in (check_table, position_table, verification_table)):
        if len(checks) > 1 and checks_too:
            print(f"\n{markdown(checks)}")
    return 0


def _compare(paths: Sequence[str], wanted: dict[str, str]) -> int:
    """Print which times of the second record moved, against the first. Returns the exit code."""
    if len(paths) != 2:
        print(f"vpa.report: --compare takes two records, before and after; got {len(paths)}", file=sys.stderr)
        return 2
    try:
        before, after = map(record.read, paths)
    except ValueError as error:
        print(f"vpa.report: {error}", file=sys.stderr)
        return 2
    found, *only = moved.changes(
        *([row for row in content["rows"] if wanted.items() <= row.items()] for content in (before, after))
    )
    if not found:
        kinds = " and ".join(f"{content['experiment']}" for content in (before, after))
        print(f"vpa.report: the records have no times of the same thing; they are of {kinds}", file=sys.stderr)
        return 2
    print(f"before: {describe(before)}\n\nafter: {describe(after)}\n")
    devices = [record.device(content["environment"]) for content in (before, after)]
    if devices[0] != devices[1]:
        print(f"The devices differ, {devices[0]} and {devices[1]}: what moved is not the code's alone.\n")
    lines = moved.table(found)
    if len(lines) > 1:
        print(markdown(lines) + "\n")
    print(moved.words(found, *only) + ".")
    return 0


def _figures(path: str, content: dict[str, Any], rows: Sequence[Row], folder: str) -> int:
    from vpa import figures

    found, env = study.studies(rows), content["environment"]
    device = record.device(env) + (" (co-located)" if record.co_located(env) else "")
    try:
        drawing = figures.write_studies if found else figures.write
        written = list(drawing(Path(folder), Path(path).stem, device, found or rows))
    except (ImportError, OSError) as error:
        print(f"vpa.report: --figures: {error}", file=sys.stderr)
        return 2
    if not written:
        return _lacking(path, "whole or local times to draw", (row["arm"] for row in rows))
    print(*written, sep="\n")
    return 0


def _lacking(path: str, what: str, there: Iterable[str]) -> int:
    """Say what a record has not, and what it has instead. Returns the exit code."""
    print(f"vpa.report: {path} has no {what}; it has {', '.join(dict.fromkeys(there)) or 'none'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
