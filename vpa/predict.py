"""Where the local argmax would pay: ``python -m vpa.predict RECORD.json [...] --tp 8,64 --link ib-ndr``.

A cost model (``vpa.bench.cost_model``) is fitted to records of ``break-even``, judged on batch sizes that the fit has
not seen, and asked for other numbers of ranks, shapes, dtypes and interconnects.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from vpa import record, report, study
from vpa.bench import cost_model
from vpa.bench.break_even import FULL, LOCAL
from vpa.bench.cost_model import TERMS, Case, Model, Observation
from vpa.bench.links import LINKS
from vpa.bench.settings import DTYPE_NAMES
from vpa.order import LOGITS_DTYPES
from vpa.shapes import shape_of
from vpa.tables import Row, Table, markdown, timed, us

#: Ranks that share a machine, and its links, where nothing else is said.
NODE = 8

#: What fits are judged by: they have not seen one value of it.
LEFT_OUT = {"rows": "batch size", "shape": "shape", "tp": "number of ranks"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the fit, its errors and predictions as Markdown; exit code 2 for what no prediction can be made of."""
    options = _parser().parse_args(arguments)
    try:
        contents = [record.read(path) for path in options.records]
        rows, mode, multiprocessors = _rows(contents, options.mode)
        observed = cost_model.observations(rows, multiprocessors)
        cases = _cases(options, rows, multiprocessors)
        links = [(None if name == "measured" else LINKS[name]) for name in options.link]
    except (ValueError, KeyError) as error:
        print(f"vpa.predict: {error.args[0]}", file=sys.stderr)
        return 2
    model = cost_model.fit(observed)
    others = [one.model for by in LEFT_OUT for one in cost_model.held_out(observed, by)]
    for content in contents:
        print(report.describe(content) + "\n")
    if record.co_located(contents[0]["environment"]):
        print(
            "Ranks shared a GPU, on which a product takes as long for any number of them: what follows holds for no "
            "other number of ranks, and for no GPU of a rank's own.\n"
        )
    if len({one.case.tp for one in observed}) == 1:
        print(
            "Times of one number of ranks: what grows with ranks is not known but for bytes and products, and is left "
            "out of others.\n"
        )
    print(f"Fitted to {len(observed)} times, {mode}:\n\n{markdown(coefficient_table(model))}\n")
    print(f"Error on points that a fit had not seen:\n\n{markdown(error_table(observed))}\n")
    crossovers = markdown(crossover_table([_of(mode, content) for content in contents], model, multiprocessors))
    print(f"Crossover in rows, measured and by the model:\n\n{crossovers}\n")
    measured = LINKS.get(options.measured_over)
    print(
        f"Predicted, us a step{_over(options)}:\n\n{markdown(_plan(options, cases, links, measured, model, others))}\n"
    )
    print(
        "rows from: the fewest rows from which the local argmax takes less time, and, in brackets, the range over the "
        "fits that had not seen one batch size, shape or number of ranks."
    )
    return 0


def coefficient_table(model: Model) -> Table:
    """A line for each coefficient, rates as GB/s or billions a second too."""
    table = [["term", "fitted", "unit", "rate"]]
    for (name, unit), value in zip(TERMS, model.coefficients, strict=True):
        rate = ""
        if value > 0 and unit in ("us/byte", "us for each"):
            rate = f"{1e-3 / value:.3g} {'GB/s' if unit == 'us/byte' else '10^9/s'}"
        table.append([name, f"{value:.3g}", unit, rate])
    return table


def error_table(observed: Sequence[Observation]) -> Table:
    """Errors in percent, unsigned, where a batch size, a shape or a number of ranks was left out: of both arms, and of
    what the local argmax saves, in percent of the full gather."""
    table = [["left out", "of", "points", "median, %", "largest, %", "at"]]
    for by in LEFT_OUT:
        found = cost_model.held_out(observed, by)
        kinds = {arm: [(one.error, one) for one in found if one.observation.arm == arm] for arm in (FULL, LOCAL)}
        kinds["saved, of the full gather"] = cost_model.saved_errors(found)
        for name, errors in kinds.items():
            if not errors:
                continue
            sizes = [abs(error) for error, _ in errors]
            case = errors[int(np.argmax(sizes))][1].observation.case
            cells = f"{100 * np.median(sizes):.1f}", f"{100 * max(sizes):.1f}", f"{case.rows} rows, tp {case.tp}"
            table.append([f"one {LEFT_OUT[by]}", name, str(len(errors)), *cells])
    return table


def crossover_table(contents: Sequence[Sequence[Row]], model: Model, multiprocessors: int) -> Table:
    """A line for each study of each record's rows: where it crosses as measured, its interval, and by the model."""
    table = [["input", "dtype", "vocab", "tp", "measured", "interval", "model"]]
    for rows in contents:
        for one in study.studies(row for row in rows if row["gather"] == "included"):
            row, found = one.row, one.crossover
            cells = [str(row[key]) for key in ("input", "dtype", "vocab", "tp")]
            modelled = model.crossover(cost_model.case_of(row, multiprocessors))
            table.append([*cells, found.ends(found.rows), found.span(), _rows_words(modelled)])
    return table


def _plan(options: Any, cases: list[tuple[str, Case]], links: list, measured: Any, model: Model, others: list) -> Table:
    """A line for each case and link: the crossover, and both arms' times and difference at a few batch sizes."""
    sizes = options.rows
    heads = [f"{words} at {size}" for size in sizes for words in ("full gather", "local argmax", "saved")]
    table = [["shape", "dtype", "tp", "link", "rows from", *heads]]
    others = list(dict.fromkeys(others))
    for name, case in cases:
        used_links = [link if link and (not link.network or case.tp > options.node) else None for link in links]
        for link in dict.fromkeys(used_links):
            rails = options.rails or options.node if link and link.network else 1
            used = [one.over(link, measured, rails) if link else one for one in (model, *others)]
            found = [one.crossover(case) for one in used]
            spread = f" ({_rows_words(min(found))} to {_rows_words(max(found))})" if others else ""
            words = "as measured" if link is None else link.name + (f" x {rails}" if link.network else "")
            cells = [name, case.dtype, str(case.tp), words]
            cells.append(_rows_words(found[0]) + spread)
            for size in sizes:
                times = [used[0].us(arm, _at(case, size)) for arm in (FULL, LOCAL)]
                cells += [*map(us, times), study.signed(times[0] - times[1])]
            table.append(cells)
    return table


def _rows(contents: Sequence[dict[str, Any]], mode: str | None) -> tuple[list[Row], str, int]:
    """The timed rows of all records in one mode, that mode, and the multiprocessors of the one kind of GPU."""
    for content in contents:
        if not study.studies(content["rows"]):
            raise ValueError(
                f"`{content['command']}` has no times of both ways in pairs; a record of break-even is accepted"
            )
    envs = [content["environment"] for content in contents]
    for name, kinds in (
        ("of", {record.device(env) for env in envs}),
        ("over", {env["transport"] or "none" for env in envs}),
        ("of ranks that", {"shared a GPU" if record.co_located(env) else "shared none" for env in envs}),
        ("of hosts numbering", {str(len({rank["host"] for rank in env["ranks"]})) for env in envs}),
    ):
        if len(kinds) > 1:
            raise ValueError(f"the records are {name} {', '.join(sorted(kinds))}; records alike in that are accepted")
    rows = [row for content in contents for row in timed(content["rows"])]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    mode = mode or next((one for one in ("captured", "eager", "host") if one in modes), "")
    if mode not in modes:
        raise ValueError(f"no times of mode {mode or 'any'}; there are {', '.join(modes) or 'none'}")
    gpus = [rank["gpu"] for env in envs for rank in env["ranks"]]
    multiprocessors = 0 if None in gpus else min(gpu.get("multiprocessors", 0) for gpu in gpus)
    return [row for row in rows if row["mode"] == mode], mode, multiprocessors


def _of(mode: str, content: dict[str, Any]) -> list[Row]:
    return [row for row in timed(content["rows"]) if row["mode"] == mode]


def _cases(options: Any, rows: Sequence[Row], multiprocessors: int) -> list[tuple[str, Case]]:
    """What to predict: each shape asked for, else those of the records, in each dtype and number of ranks."""
    measured = {row["input"]: (row["hidden_size"], row["vocab"]) for row in rows if row["arm"] == FULL}
    shapes = dict(measured)
    if options.shape:
        product = any(hidden is not None for hidden, _ in measured.values())
        asked = [shape_of(name) for name in options.shape]
        unknown = [shape.name for shape in asked if product and shape.hidden_size is None]
        if unknown:
            raise ValueError(f"the hidden size of {', '.join(unknown)} is not known; name HIDDENxVOCAB instead")
        shapes = {shape.name: (shape.hidden_size if product else None, shape.vocab_size) for shape in asked}
    dtypes = options.dtype or list(dict.fromkeys(row["dtype"] for row in rows))
    tps = options.tp or sorted({row["tp"] for row in rows})
    return [
        (name, Case.planned(1, vocab, tp, hidden, dtype, multiprocessors))
        for name, (hidden, vocab) in shapes.items()
        for dtype in dtypes
        for tp in tps
    ]


def _at(case: Case, rows: int) -> Case:
    return Case(rows, case.vocab, case.tp, case.columns, case.hidden_size, case.dtype, case.multiprocessors)


def _rows_words(rows: float) -> str:
    if rows == np.inf:
        return f"none up to {cost_model.MOST_ROWS}"
    return f"{max(rows, 1):.0f}"


def _over(options: Any) -> str:
    if options.measured_over:
        return f"; links reach the share of their peak that the measured {options.measured_over} reached"
    return "" if options.link == ["measured"] else "; links at their published peak, so at best"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vpa.predict", description=__doc__)
    add = parser.add_argument
    network = ", ".join(name for name, link in LINKS.items() if link.network)
    add(
        "records",
        nargs="+",
        metavar="RECORD.json",
        help="of break-even, with 2 or more ranks; several are fitted as one",
    )
    add("--mode", choices=("captured", "eager", "host"), help="times to fit (default: the first that there are)")
    add("--tp", type=_positives, metavar="N,...", help="numbers of ranks (default: the records')")
    add("--shape", type=lambda text: text.split(","), metavar="NAME,...", help="see vpa.run (default: the records')")
    add("--dtype", type=_dtypes, metavar="NAME,...", help="bf16, fp16, fp32 (default: the records')")
    add("--link", type=_links, default=["measured"], metavar="NAME,...", help=f"measured, {', '.join(LINKS)}")
    add(
        "--node",
        type=_positive,
        default=NODE,
        metavar="N",
        help=f"ranks up to which {network} do not come in (default: 8)",
    )
    add("--rails", type=_positive, metavar="N", help="network adapters of a machine (default: --node, one a GPU)")
    add("--measured-over", choices=tuple(LINKS), help="the link of the records, whose share of the peak others reach")
    add("--rows", type=_positives, default=[1, 64, 1024], metavar="N,...", help="batch sizes to show times of")
    return parser


def _positive(text: str) -> int:
    numbers = _positives(text)
    if len(numbers) != 1:
        raise argparse.ArgumentTypeError(f"{text}: one number is accepted")
    return numbers[0]


def _positives(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1 or max(numbers) > cost_model.MOST_ROWS:
        raise argparse.ArgumentTypeError(f"{text}: integers from 1 to {cost_model.MOST_ROWS} are accepted")
    return numbers


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= DTYPE_NAMES.keys():
        raise argparse.ArgumentTypeError(f"{text}: {', '.join(DTYPE_NAMES)} are accepted")
    return [DTYPE_NAMES[name] for name in names if DTYPE_NAMES[name] in LOGITS_DTYPES]


def _links(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {"measured", *LINKS}:
        raise argparse.ArgumentTypeError(f"{text}: measured, {', '.join(LINKS)} are accepted")
    return names


if __name__ == "__main__":
    report.end_with_the_reader()
    sys.exit(main())
