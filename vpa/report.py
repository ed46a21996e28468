"""Tables from records. ``python -m vpa.report RECORD.json [...]`` prints the Markdown that README and docs show."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vpa import comparison, moved, record, study
from vpa.order import LOGITS_DTYPES
from vpa.tables import REFERENCES, Row, Table, grouped, heading, markdown, reference, text, timed, us, write_csv

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
    versions = [f"{name} {env['packages'][name]}" for name in wanted if name in env["packages"]]
    if record.nccl(env):
        versions.insert(0, f"NCCL {record.nccl(env)}")
    git = env["git"] or {"revision": "unknown", "dirty": False}
    revision = git["revision"][:12] + (", changed" if git["dirty"] else "")
    variables = "".join(f"{name}={value}; " for name, value in record.variables(env).items())
    return (
        f"`{content['command']}` on {ranks} rank{'s' if ranks > 1 else ''} ({record.device(env)}; {env['transport']}: "
        f"{env['reason']}); "
        f"{variables}{', '.join(versions)}; revision {revision}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of records as Markdown, or write them, or figures, as files; exit code 2 and one line for a file
    that is no record or lacks what is asked for."""
    options = _parser().parse_args(arguments)
    try:
        _check_options(options)
        if options.compare:
            _compare(options)
        for path in () if options.compare else options.records:
            _report(path, options)
    except ValueError as error:
        print(f"vpa.report: {error}", file=sys.stderr)
        return 2
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
    add("--csv", metavar="FOLDER", help="instead of printing the tables, a CSV file of each")
    add("--figures", metavar="FOLDER", help="of compare, break-even: instead of tables, figures as PNG and SVG")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options and records that do not go together."""
    paths = options.records
    if options.compare and len(paths) != 2:
        raise ValueError(f"--compare takes two records, before and after; got {len(paths)}")
    for name in ("summary", "figures"):
        if options.compare and getattr(options, name):
            raise ValueError(f"--{name} is of records by themselves, --compare of one table of two; give one of them")
    stems = [Path(path).stem for path in paths]
    if (options.csv or options.figures) and not options.compare and len(set(stems)) < len(stems):
        again = next(stem for stem in stems if stems.count(stem) > 1)
        raise ValueError(f"several records are called {again}, as their files would be; report them one by one")


def _report(path: str, options: argparse.Namespace) -> None:
    """Print or write what is asked for of one record; ``ValueError`` for what it lacks."""
    content = record.read(path)
    rows, arms = _wanted(path, content, options)
    if arms is not None:
        rows = [row for row in rows if row["arm"] in arms]
    try:
        found = study.studies(rows)
    except ValueError as error:  # times that are no pairs
        raise ValueError(f"{path}: {error}") from error
    if (options.summary or options.figures) and not comparison.has_parts(rows) and not found:
        raise _lacking(path, "times of parts, as compare takes them", (content["experiment"],))
    if not options.csv and not options.figures:
        _print(content, _titled(content["rows"], rows, found, options))
    if options.csv:
        _write_csv(options.csv, Path(path).stem, _titled(content["rows"], rows, found, options), path)
    if options.figures:
        _figures(path, content, rows, found, options.figures)


def _wanted(path: str, content: dict[str, Any], options: argparse.Namespace) -> tuple[list[Row], set[str] | None]:
    """The times of a record that the filters leave, and the arms that are asked for; None for all."""
    wanted = {key: getattr(options, key) for key in _FILTERS if getattr(options, key)}
    times = timed(content["rows"])
    rows = [row for row in times if wanted.items() <= row.items()]
    if wanted and not rows:
        there = (" ".join(row[key] for key in dict.fromkeys(("mode", "cache", *wanted))) for row in times)
        raise _lacking(path, f"{' '.join(wanted.values())} times", there)
    if options.arms is None:
        return rows, None
    arms = set(re.split(r",(?! )", options.arms))
    unknown = sorted(arms - {row["arm"] for row in rows})
    if unknown:
        raise _lacking(path, f"arm {', '.join(map(repr, unknown))}", (row["arm"] for row in rows))
    return rows, arms


class _Titled(NamedTuple):
    """A table, the name that its file has, what stands above it and the sentence below; both may be empty."""

    name: str
    title: str
    table: Table
    sentence: str = ""


def _titled(
    everything: Sequence[Row], rows: Sequence[Row], found: Sequence[study.Study], options: argparse.Namespace
) -> list[_Titled]:
    """The tables of a record in their order: times of ``rows`` and studies ``found`` in them; checks of everything."""
    tables = comparison.tables(rows, options.summary) if comparison.has_parts(rows) else pivot_tables(rows)
    if found and options.summary:
        tables = {}
    titled = [_Titled(title, title, table) for title, table in tables.items()]
    for one in found:
        title = f"{one.title}, what the local argmax saves"
        titled.append(_Titled(title, title, one.table(), one.words()))
    if options.arms is None and not (found and options.summary):
        checks = {"checks": check_table, "positions": position_table, "verifications": verification_table}
        made = {name: make(everything) for name, make in checks.items()}
        titled += [_Titled(name, "", table) for name, table in made.items() if len(table) > 1]
    return titled


def _print(content: dict[str, Any], titled: Iterable[_Titled]) -> None:
    print(describe(content))
    for _, title, table, sentence in titled:
        above, below = f"{title}:\n\n" if title else "", f"\n\n{sentence}." if sentence else ""
        print(f"\n{above}{markdown(table)}{below}")


def _write_csv(folder: str, stem: str, titled: Sequence[_Titled], path: str) -> None:
    """Write tables as CSV files and print their paths."""
    if not titled:
        raise _lacking(path, "table to write", ())
    try:
        written = list(write_csv(Path(folder), stem, ((name, table) for name, _, table, _ in titled)))
    except OSError as error:
        raise ValueError(f"--csv: {error}") from error
    print(*written, sep="\n")


def _compare(options: argparse.Namespace) -> None:
    """Print which times of the second record moved, against the first."""
    paths = options.records
    before, after = map(record.read, paths)
    (first, arms), (second, _) = (
        _wanted(path, content, options) for path, content in zip(paths, (before, after), strict=True)
    )
    found, *only = moved.changes(first, second, arms)
    if not found:
        kinds = " and ".join(f"{content['experiment']}" for content in (before, after))
        raise ValueError(f"the records have no times of the same thing; they are of {kinds}")
    lines = moved.table(found)
    caveat = moved.differences(before["environment"], after["environment"])
    if options.csv:
        if caveat:
            print(f"vpa.report: {caveat}", file=sys.stderr)
        stem = "_".join(Path(path).stem for path in paths)
        return _write_csv(options.csv, stem, [_Titled("moved", "", lines)], stem)
    print(f"before: {describe(before)}\n\nafter: {describe(after)}\n")
    if caveat:
        print(caveat + "\n")
    if len(lines) > 1:
        print(markdown(lines) + "\n")
    print(moved.words(found, *only) + ".")


def _figures(
    path: str, content: dict[str, Any], rows: Sequence[Row], found: Sequence[study.Study], folder: str
) -> None:
    from vpa import figures

    env = content["environment"]
    device = record.device(env) + (" (co-located)" if record.co_located(env) else "")
    try:
        drawing = figures.write_studies if found else figures.write
        written = list(drawing(Path(folder), Path(path).stem, device, found or rows))
    except (ImportError, OSError) as error:
        raise ValueError(f"--figures: {error}") from error
    if not written:
        raise _lacking(path, "whole or local times to draw", (row["arm"] for row in rows))
    print(*written, sep="\n")


def _lacking(path: str, what: str, there: Iterable[str]) -> ValueError:
    """The error that says what a record has not, and what it has instead."""
    return ValueError(f"{path} has no {what}; it has {', '.join(dict.fromkeys(there)) or 'none'}")


def end_with_the_reader() -> None:
    """Let this process end as other commands do where what reads its output leaves early, as ``head`` does."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


if __name__ == "__main__":
    end_with_the_reader()
    sys.exit(main())
