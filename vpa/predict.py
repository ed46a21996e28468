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
from vpa.bench.cost_model import TERMS, Case, HeldOut, Model, Observation
from vpa.bench.links import LINKS
from vpa.bench.settings import DTYPE_NAMES
from vpa.order import LOGITS_DTYPES
from vpa.shapes import shape_of
from vpa.tables import Row, Table, markdown, timed, us

#: Ranks that share a machine, and its links, where nothing else is said.
NODE = 8


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
    unseen = cost_model.held_out(observed)
    for content in contents:
        print(report.describe(content) + "\n")
    if any(record.co_located(content["environment"]) for content in contents):
        print(
            "Ranks shared a GPU, on which a product takes as long for any number of them: what follows holds for no "
            "other number of ranks, and for no GPU of a rank's own.\n"
        )
    print(f"Fitted to {len(observed)} times, {mode}:\n\n{markdown(coefficient_table(model))}\n")
    print(f"Error on points that a fit had not seen:\n\n{markdown(error_table(unseen, observed))}\n")
    print(
        f"Crossover in rows, measured and by the model:\n\n{markdown(crossover_table(rows, model, multiprocessors))}\n"
    )
    measured = LINKS.get(options.measured_over)
    print(
        f"Predicted, us a step{_over(options)}:\n\n{markdown(_plan(options, cases, links, measured, model, unseen))}\n"
    )
    print(
        "rows from: the fewest rows from which the local argmax takes less time, and, in brackets, the range over the "
        "fits that had not seen one batch size."
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


def error_table(unseen: Sequence[HeldOut], observed: Sequence[Observation]) -> Table:
    """Errors of both arms in percent, unsigned, where a batch size, a shape or a number of ranks was left out."""
    table = [["left out", "arm", "points", "median, %", "largest, %", "at"]]
    by_shape, by_tp = (cost_model.held_out(observed, by) for by in ("shape", "tp"))
    for kind, found in (("one batch size", unseen), ("one shape", by_shape), ("one tp", by_tp)):
        for arm in (FULL, LOCAL):
            errors = [(abs(one.error), one) for one in found if one.observation.arm == arm]
            if not errors:
                continue
            worst, one = max(errors, key=lambda pair: pair[0])
            middle = float(np.median([error for error, _ in errors]))
            where = f"{one.observation.case.rows} rows, tp {one.observation.case.tp}"
            table.append([kind, arm, str(len(errors)), f"{100 * middle:.1f}", f"{100 * worst:.1f}", where])
    return table


def crossover_table(rows: Sequence[Row], model: Model, multiprocessors: int) -> Table:
    """A line for each study of the records: where it crosses as measured, with its interval, and by the model."""
    table = [["input", "dtype", "vocab", "tp", "measured", "interval", "model"]]
    for one in study.studies(row for row in rows if row["gather"] == "included"):
        row, found = one.row, one.crossover
        cells = [str(row[key]) for key in ("input", "dtype", "vocab", "tp")]
        modelled = model.crossover(cost_model.case_of(row, multiprocessors))
        table.append([*cells, found.ends(found.rows), found.span(), _rows_words(modelled)])
    return table


def _plan(options: Any, cases: list[tuple[str, Case]], links: list, measured: Any, model: Model, unseen: list) -> Table:
    """A line for each case and link: the crossover, and both arms' times and difference at a few batch sizes."""
    sizes = options.rows
    heads = [f"{words} at {size}" for size in sizes for words in ("full gather", "local argmax", "saved")]
    table = [["shape", "dtype", "tp", "link", "rows from", *heads]]
    others = list({id(one.model): one.model for one in unseen}.values())
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
    devices = {record.device(content["environment"]) for content in contents}
    if len(devices) > 1:
        raise ValueError(f"the records are of {', '.join(sorted(devices))}; records of one device are accepted")
    transports = {content["environment"]["transport"] or "none" for content in contents}
    if len(transports) > 1:
        raise ValueError(
            f"the records are over {', '.join(sorted(transports))}; records over one transport are accepted"
        )
    rows = [row for content in contents for row in timed(content["rows"])]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    mode = mode or next((one for one in ("captured", "eager", "host") if one in modes), "")
    if mode not in modes:
        raise ValueError(f"no times of mode {mode or 'any'}; there are {', '.join(modes) or 'none'}")
    gpus = [rank["gpu"] for content in contents for rank in content["environment"]["ranks"]]
    multiprocessors = 0 if None in gpus else min(gpu.get("multiprocessors", 0) for gpu in gpus)
    return [row for row in rows if row["mode"] == mode], mode, multiprocessors


def _cases(options: Any, rows: Sequence[Row], multiprocessors: int) -> list[tuple[str, Case]]:
    """What to predict: each shape asked for, else those of the records, in each dtype and number of ranks."""
    measured = {row["input"]: (row["hidden_size"], row["vocab"]) for row in rows if row["arm"] == FULL}
    shapes = dict(measured)
    if options.shape:
        product = any(hidden is not None for hidden, _ in measured.values())
        asked = [shape_of(name) for name in options.shape]
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
    numbers = [int(word) for word in text.split(",")]
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
    sys.exit(main())
