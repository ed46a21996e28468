"""Figures of records: times against batch size, Numba against raw, and where the local argmax pays."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vpa.comparison import READ, Key, groups, medians
from vpa.crossover import size
from vpa.study import Study
from vpa.tables import Row, grouped, timed

#: Okabe and Ito's colours, which people with any kind of colour vision tell apart. A variant, "raw (...)", has the
#: colour of its form and a dash of its own.
_COLOURS = {
    "raw": "#0072B2",
    "numpy": "#0072B2",
    "numba": "#56B4E9",
    "existing (torch)": "#D55E00",
    "existing (cupy)": "#E69F00",
    "existing (numpy)": "#D55E00",
    "triton": "#009E73",
    "torch.argmax": "#CC79A7",
    "cupy.argmax": "#8C6D1F",
    "bfloat16": "#0072B2",
    "float16": "#D55E00",
    "float32": "#009E73",
    "local argmax": "#0072B2",
    "full gather": "#D55E00",
}
_OTHER = "#000000"
_DASHES = ((0, ()), (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
_MARKERS = "osD^vP"
_INK, _FAINT, _LIMIT = "#262626", "#D9D9D9", "#767676"

_PANELS = {"pair": "Logits to tokens", "local": "Local scan alone"}

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _LIMIT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "vpa",  # ids in an SVG come of its contents alone, so that figures of one record are equal
}

#: Labels at the end of lines stand at least this share of the axes' height apart.
_LABEL_STEP = 0.055


def write(folder: Path, stem: str, device: str, rows: Sequence[Row]) -> Iterator[Path]:
    """Write ``<stem>_times`` and, of records with both backends, ``<stem>_numba`` as PNG and SVG; yield their paths.

    rows: of a comparison; the first group of them is drawn, as in the summary. Raises ``ImportError`` without
    matplotlib, and ``OSError`` where the folder or a file cannot be made.
    """
    yield from _written(
        folder,
        {f"{stem}_times": lambda it: _times(it, device, rows), f"{stem}_numba": lambda it: _numba(it, device, rows)},
    )


def write_studies(folder: Path, stem: str, device: str, found: Sequence[Study]) -> Iterator[Path]:
    """Write ``<stem>_<input>_tp<tp>_<mode>`` of each study of a break-even record as PNG and SVG; yield their paths.

    Raises as ``write`` does.
    """
    several = len({one.row["dtype"] for one in found}) > 1
    figures = {}
    for one in found:
        row = one.row
        words = [stem, row["input"], f"tp{row['tp']}", *([row["dtype"]] if several else []), row["mode"]]
        figures["_".join(words).replace(" ", "_")] = lambda figure, one=one: _study(figure, device, one)
    yield from _written(folder, figures)


def _written(folder: Path, figures: Mapping[str, Callable[[Any], bool]]) -> Iterator[Path]:
    """Draw each figure and write it as PNG and SVG, unless its function says that there is nothing to draw."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need matplotlib, the extra 'plots': {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        for name, draw in figures.items():
            figure = Figure(figsize=(12, 5), dpi=150)
            if not draw(figure):
                continue
            for kind, undated in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{kind}"
                figure.savefig(path, metadata=undated)
                yield path


def _study(figure: Any, device: str, one: Study) -> bool:
    """Both arms' times, and what the local argmax saves with its interval, over the crossover and its interval."""
    row, points, found = one.row, one.points, one.crossover
    sizes = [point.rows for point in points]
    gather = "" if row["gather"] == "included" else ", no gather: one process does all ranks' work"
    head = f"{row['input']}: {row['dtype']} [rows, {row['columns']}], tp {row['tp']} of {row['vocab']} ids on {device}"
    _title(
        figure, f"Where the local argmax pays, {head}", f"{row['mode']}, {row['cache']} cache{gather}; {found.words()}"
    )
    left, right = _axes(figure, 2, sharey=False)
    figure.subplots_adjust(left=0.08, right=0.95, wspace=0.5)
    lines = {
        "full gather": {point.rows: point.full for point in points},
        "local argmax": {point.rows: point.local for point in points},
    }
    shown = [value for line in lines.values() for value in line.values()]
    left.set_yscale("log")
    left.set_ylim(0.8 * min(shown), 1.25 * max(shown))
    left.yaxis.set_major_formatter(_plain)
    left.yaxis.set_major_locator(_ones_twos_fives())
    left.yaxis.minorticks_off()
    _panel(
        left,
        "Hidden states to tokens" if row["hidden_size"] else "Logits to tokens",
        "median time of a call, µs",
        lines,
    )
    _label_ends(left, [_line(left, name, line, list(lines)) for name, line in lines.items()])

    saved = {"saved": {point.rows: point.saved for point in points}}
    largest = max(abs(value) for point in points for value in (point.low, point.high, point.saved))
    right.set_yscale("symlog", linthresh=max(min(abs(point.saved) for point in points), largest / 1e3, 1e-3))
    right.yaxis.set_major_formatter(_plain)
    _panel(right, "Saved by the local argmax; grey: it against itself", "", saved)
    right.set_ylabel("full gather - local argmax, µs, 95% interval")
    right.axhline(0, color=_LIMIT, linewidth=1.2, zorder=1)
    noise = [abs(point.noise or 0) for point in points]
    right.fill_between(sizes, [-n for n in noise], noise, color=_FAINT, alpha=0.6, linewidth=0, zorder=0)
    errors = [
        [max(point.saved - point.low, 0) for point in points],
        [max(point.high - point.saved, 0) for point in points],
    ]
    right.errorbar(sizes, [point.saved for point in points], errors, color=_INK, fmt="o", markersize=4, capsize=3)
    between = np.geomspace(sizes[0], sizes[-1], 400)  # straight lines, as the crossover is taken from them
    right.plot(between, np.interp(between, sizes, [point.saved for point in points]), color=_INK, linewidth=1.5)
    if found.smallest <= found.rows <= found.largest:
        right.axvline(found.rows, color=_COLOURS["local argmax"], linewidth=1.2)
        right.annotate(
            f"crossover {size(found.rows)}", (found.rows, 1), (4, -4), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", color=_COLOURS["local argmax"],
        )  # fmt: skip
    ends = [min(max(end, found.smallest), found.largest) for end in (found.low, found.high)]
    if ends[0] < ends[1]:
        right.axvspan(*ends, color=_COLOURS["local argmax"], alpha=0.12, linewidth=0, zorder=0)
    return True


def _times(figure: Any, device: str, rows: Sequence[Row]) -> bool:
    """Time of each arm against batch size, whole and local, on logarithmic axes, over the time of a plain read; False
    where there is none."""
    group = groups(rows)[0]
    times = {key: line for key, line in medians(group).items() if not key[0].endswith("(again)")}
    panels = {part: {arm: times[arm, part] for arm, its in times if its == part} for part in _PANELS}
    panels = {part: lines for part, lines in panels.items() if lines}
    if not panels:
        return False
    shown = [value for lines in (*panels.values(), _limit(times)) for line in lines.values() for value in line.values()]
    low, high = 0.55 * min(shown), 1.5 * max(shown)
    first = group[0]
    how = f"{first['mode']}, {first['cache']} cache, a copy stands for the gather" if first["tp"] > 1 else first["mode"]
    _title(figure, f"{_shape(first)} on {device}", f"{how}; {first['input']} logits, {first['strides']}")
    arms = list(dict.fromkeys(arm for lines in panels.values() for arm in lines))
    for axes, (part, lines) in zip(_axes(figure, len(panels)), panels.items(), strict=True):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_major_locator(_ones_twos_fives())
        axes.yaxis.minorticks_off()
        _panel(axes, _PANELS[part], "median time of a call, µs", lines)
        labels = [_line(axes, arm, line, arms) for arm, line in lines.items()]
        for name, line in _limit(times).items():
            sizes, read = zip(*sorted(line.items()), strict=True)
            axes.fill_between(sizes, low, read, color=_FAINT, alpha=0.6, linewidth=0, zorder=0)
            axes.plot(sizes, read, color=_LIMIT, linewidth=1.2, zorder=1)
            labels.append((name, sizes[-1], read[-1], _LIMIT))
            axes.text(0.03, 0.03, "faster than a plain read", transform=axes.transAxes, color=_LIMIT)
        _label_ends(axes, labels)
    return True


def _numba(figure: Any, device: str, rows: Sequence[Row]) -> bool:
    """Numba's time divided by raw's against batch size, for each dtype; False where a record has not both."""
    alike = ("strides", "input", "mode", "cache")
    first = groups(rows)[0][0]
    same = [row for row in timed(rows) if all(row[key] == first[key] for key in alike)]
    panels: dict[str, dict[str, dict[int, float]]] = {part: {} for part in _PANELS}
    for group in grouped(same, "dtype"):
        times = medians(group)
        for part, lines in panels.items():
            raw, numba = times.get(("raw", part), {}), times.get(("numba", part), {})
            both = {size: numba[size] / raw[size] for size in sorted(raw.keys() & numba.keys())}
            if both:
                lines[group[0]["dtype"]] = both
    panels = {part: lines for part, lines in panels.items() if lines}
    if not panels:
        return False
    shown = [value for lines in panels.values() for line in lines.values() for value in line.values()]
    title = f"Numba CUDA against CUDA source: [rows, {first['columns']}], tp {first['tp']} on {device}"
    _title(figure, title, f"{first['mode']}, {first['cache']} cache; {first['input']} logits, {first['strides']}")
    dtypes = list(dict.fromkeys(dtype for lines in panels.values() for dtype in lines))
    for axes, (part, lines) in zip(_axes(figure, len(panels)), panels.items(), strict=True):
        low, high = min(1.0, *shown), max(1.0, *shown)
        axes.set_ylim(max(low - 0.25 * (high - low) - 0.05, 0), high + 0.15 * (high - low) + 0.05)
        axes.axhline(1, color=_LIMIT, linewidth=1.2, zorder=1)
        _panel(axes, _PANELS[part], "time of numba / time of raw", lines)
        labels = [_line(axes, dtype, line, dtypes) for dtype, line in lines.items()]
        _label_ends(axes, [*labels, ("as fast as raw", max(max(line) for line in lines.values()), 1.0, _LIMIT)])
    return True


def _limit(times: dict[Key, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {"plain read": times[READ]} if READ in times else {}


def _shape(row: Row) -> str:
    return f"Greedy token of {row['dtype']} logits [rows, {row['columns']}], tp {row['tp']} of {row['vocab']} ids"


def _title(figure: Any, title: str, below: str) -> None:
    """A title, and below it smaller text, in lines that fit into the figure."""
    figure.text(0.06, 0.945, title, size=12, weight="bold")
    figure.text(0.06, 0.93, textwrap.fill(below, 150), size=9, color=_LIMIT, va="top")


def _axes(figure: Any, count: int, sharey: bool = True) -> list[Any]:
    """Panels side by side with room for labels to the right of each."""
    grid = figure.subplots(1, count, sharey=sharey, squeeze=False)
    figure.subplots_adjust(left=0.06, right=0.875, top=0.82, bottom=0.12, wspace=0.42)
    return list(grid[0])


def _panel(axes: Any, title: str, measure: str, lines: dict[str, dict[int, float]]) -> None:
    sizes = sorted({size for line in lines.values() for size in line})
    axes.set_title(title, loc="left", size=10, weight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[:: -(-len(sizes) // 8)])
    axes.xaxis.set_major_formatter(_plain)
    axes.xaxis.minorticks_off()
    axes.set_xlabel("rows (batch size)")
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel(measure)
    axes.tick_params(labelleft=True, length=3)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def _ones_twos_fives() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5), numticks=20)


def _line(axes: Any, name: str, line: dict[int, float], names: Sequence[str]) -> tuple[str, float, float, str]:
    """Draw one line; return its label: name, end point and colour."""
    form = name if name in _COLOURS else name.partition(" (")[0]
    colour = _COLOURS.get(form, _OTHER)
    variant = [other for other in names if other == form or other.startswith(f"{form} (")].index(name)
    ours = colour == _COLOURS["raw"]
    sizes, values = zip(*sorted(line.items()), strict=True)
    axes.plot(
        sizes, values, color=colour, linestyle=_DASHES[variant % len(_DASHES)], linewidth=2.4 if ours else 1.5,
        marker=_MARKERS[list(names).index(name) % len(_MARKERS)], markersize=4.5 if ours else 3.5,
        zorder=3 if ours else 2,
    )  # fmt: skip
    return name, sizes[-1], values[-1], colour


def _label_ends(axes: Any, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Names to the right of the axes at the height of their lines' ends, moved apart where they would overlap."""
    to_axes: Callable[[Any], Any] = (axes.transData + axes.transAxes.inverted()).transform
    ends = sorted(labels, key=lambda label: (label[2], label[0]))
    heights = spread([float(to_axes((x, y))[1]) for _, x, y, _ in ends], _LABEL_STEP)
    for (name, x, y, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            name, (x, y), (1.05, height), textcoords="axes fraction", va="center", color=colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def spread(heights: Sequence[float], step: float) -> list[float]:
    """Ascending ``heights`` moved so that neighbours are at least ``step`` apart, each as little as its block allows.

    Blocks of neighbours that touch are centred on the mean of where they would be.
    """
    blocks: list[list[float]] = []
    for height in heights:
        blocks.append([height])
        while (
            len(blocks) > 1
            and _middle(blocks[-1]) - _middle(blocks[-2]) < step * (len(blocks[-1]) + len(blocks[-2])) / 2
        ):
            last = blocks.pop()
            blocks[-1] += last
    return [_middle(block) + step * (place - (len(block) - 1) / 2) for block in blocks for place in range(len(block))]


def _middle(block: Sequence[float]) -> float:
    return float(np.mean(block))
