# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Break-even: fit, predict, plot
#
# The local argmax moves little and launches more; the full gather is the other way about. From which batch size on
# the first pays depends on the machine. This notebook takes times of both ways, looks for the crossover and its
# uncertainty, fits a cost model to the times, judges it on points that the fit has not seen, and asks it about other
# numbers of ranks and links.
#
# Times come from the first of these that there is: two GPUs or more here, joined by NCCL; a committed record; two and
# four ranks on this machine's CPU. The last ones exercise everything and say nothing about GPUs.

# %%
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

import vpa
from vpa import record, study
from vpa.bench import cost_model
from vpa.bench.break_even import FULL, LOCAL
from vpa.bench.links import LINKS
from vpa.comm.device import visible_gpus
from vpa.predict import coefficient_table, error_table
from vpa.tables import timed

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#767676"
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})

ROOT = Path(vpa.__file__).resolve().parent.parent  # the checkout, as the package is installed from it


def mpirun() -> str:
    """The launcher beside this Python, if MPI came from PyPI, else the site's."""
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    return str(beside if beside.exists() else shutil.which("mpirun"))


def measured(tp: int, *options: str) -> dict:
    """A record of ``break-even`` made now by ``tp`` ranks."""
    path = Path(tempfile.mkdtemp()) / f"break_even_tp{tp}.json"
    command = [mpirun(), "-n", str(tp), sys.executable, "-m", "vpa.run", "break-even", *options, "--json", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=90)
    return record.read(path)


gpus, _ = visible_gpus()
committed = {path.name: record.read(path) for path in sorted((ROOT / "mpi_runs/results").glob("break_even*.json"))}
if gpus >= 2:
    print("measured here, NCCL")
    options = ("--comm", "nccl", "--shape", "deepseek-v3", "--rows", "1,4,16,64,256")
    contents = [measured(tp, *options) for tp in (2, 4, 8) if tp <= gpus]
elif committed:
    # Of one kind of device and link: those of GPUs that no other rank shares, where there are such.
    kinds = {
        name: (
            record.co_located(one["environment"]),
            one["environment"]["transport"],
            record.device(one["environment"]),
        )
        for name, one in committed.items()
    }
    best = min(kinds.values(), key=lambda kind: (kind[0], kind[1] != "nccl"))
    chosen = [name for name, kind in kinds.items() if kind == best]
    print("committed records:", ", ".join(chosen))
    contents = [committed[name] for name in chosen]
else:
    print("measured here, on the CPU, ranks over host memory: fewer than two GPUs, and no committed record")
    options = ("--comm", "mpi", "--backend", "numpy", "--shape", "64x32001", "--rows", "1,4,16,64,128")
    contents = [measured(tp, *options) for tp in (2, 4)]
for content in contents:
    environment = content["environment"]
    print(f"{record.device(environment)}; {environment['reason']}; {content['command']}")

# %% [markdown]
# ## The crossover
#
# At each batch size five pairs of samples were taken, one of each way, in turn forwards and backwards. `saved` is the
# median difference within pairs, and its interval is a bootstrap's. Where it leaves 0 out, and exceeds what the same
# way differs from itself, the local argmax pays or costs; else nothing can be said.

# %%
rows = [row for content in contents for row in timed(content["rows"]) if row["gather"] == "included"]
modes = [mode for mode in ("captured", "eager", "host") if any(row["mode"] == mode for row in rows)]
mode = modes[0]
rows = [row for row in rows if row["mode"] == mode]
studies = study.studies(rows)
for one in studies:
    print(one.title)
    for point in one.points:
        interval = f"{study.signed(point.low)} to {study.signed(point.high)}"
        print(f"  {point.rows:5} rows: saved {study.signed(point.saved):>8} us, 95 %: {interval:20} {point.verdict}")
    print(f"  {one.words()}\n")

# %%
shown = studies[-1]
sizes = [point.rows for point in shown.points]
figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4))
for name, times, colour in (
    (FULL, [point.full for point in shown.points], ORANGE),
    (LOCAL, [point.local for point in shown.points], BLUE),
):
    left.plot(sizes, times, "o-", color=colour, markersize=4, label=name)
left.set_yscale("log")
left.set_ylabel("us per call")
left.legend(frameon=False)
saved = np.array([point.saved for point in shown.points])
low, high = (np.array([getattr(point, end) for point in shown.points]) for end in ("low", "high"))
right.fill_between(sizes, low, high, color=BLUE, alpha=0.2, linewidth=0)
right.plot(sizes, saved, "o-", color=BLUE, markersize=4)
right.axhline(0, color=GREY, linewidth=1)
right.set_yscale("symlog", linthresh=max(float(np.abs(saved).max()) / 100, 1.0))
right.set_ylabel("saved by the local argmax, us")
for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("rows")
figure.suptitle(f"{shown.row['input']}, tp {shown.row['tp']}, {mode}", x=0.08, ha="left", weight="bold")
figure.tight_layout()

# %% [markdown]
# ## The fit
#
# Each stage is a latency and bytes over a bandwidth: product, gather, what comes after. All coefficients are fitted
# together, to both ways, to their difference and to the floors that were timed beside them, by least squares of
# relative errors, none below zero.


# %%
def shown_as_text(table: list[list[str]]) -> None:
    """Print a table with its columns aligned."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


devices = [rank["gpu"] for content in contents for rank in content["environment"]["ranks"]]
multiprocessors = 0 if None in devices else min(gpu.get("multiprocessors", 0) for gpu in devices)
observed = cost_model.observations(rows, multiprocessors)
model = cost_model.fit(observed)
shown_as_text(coefficient_table(model))

# %% [markdown]
# ## What the fit has not seen
#
# A model with ten coefficients fits what it was given. So each batch size is left out in turn, and predicted by a fit
# to the others; likewise each shape and number of ranks. The first and the last are predicted from one side, which is
# where errors are largest.

# %%
unseen = cost_model.held_out(observed)
shown_as_text(error_table(observed))

# %%
figure, axes = plt.subplots(figsize=(4.6, 4.2))
for arm, colour, marker in ((FULL, ORANGE, "o"), (LOCAL, BLUE, "D")):
    points = [(one.observation.us, one.predicted) for one in unseen if one.observation.arm == arm]
    axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, label=arm)
ends = np.array([min(one.observation.us for one in unseen) / 1.5, max(one.observation.us for one in unseen) * 1.5])
axes.plot(ends, ends, color=GREY, linewidth=1)
axes.fill_between(ends, 0.8 * ends, 1.2 * ends, color=GREY, alpha=0.15, linewidth=0)
axes.set_xscale("log")
axes.set_yscale("log")
axes.set_xlabel("measured, us")
axes.set_ylabel("predicted by a fit without that batch size, us")
axes.legend(frameon=False)
figure.suptitle("Held-out batch sizes; grey: within 20 %", x=0.12, ha="left", weight="bold", size=10)

# %% [markdown]
# ## Predictions
#
# The same fit, asked for other numbers of ranks and another link. This is arithmetic on paper: far from what was
# measured it is no better than the model's assumptions, and with a fit to CPU ranks it says nothing about GPUs. A
# step's difference decides where the switch would be.

# %%
first = next(row for row in rows if row["arm"] == FULL)
shape = (first["vocab"], first["hidden_size"], first["dtype"])
RANKS, BATCHES = (2, 4, 8, 16, 32, 64), 2 ** np.arange(0, 11)


def saved_by(fitted: cost_model.Model, rows: int, tp: int) -> float:
    """Microseconds that the local argmax saves by the model."""
    vocab, hidden_size, dtype = shape
    case = cost_model.Case.planned(int(rows), vocab, tp, hidden_size, dtype, multiprocessors)
    return fitted.us(FULL, case) - fitted.us(LOCAL, case)


for tp in RANKS:
    vocab, hidden_size, dtype = shape
    case = cost_model.Case.planned(1, vocab, tp, hidden_size, dtype, multiprocessors)
    found = {"as measured": model.crossover(case), "ib-ndr": model.over(LINKS["ib-ndr"]).crossover(case)}
    words = [f"{link}: {'none' if np.isinf(rows) else f'from {max(rows, 1):.0f} rows'}" for link, rows in found.items()]
    print(f"tp {tp:2}  the local argmax pays  " + ";  ".join(words))

# %%
figure, axes = plt.subplots(figsize=(6.4, 3.6))
shades = plt.get_cmap("viridis")(np.linspace(0.0, 0.85, len(RANKS)))
for tp, shade in zip(RANKS, shades, strict=True):
    line = [saved_by(model, size, tp) for size in BATCHES]
    axes.plot(BATCHES, line, color=shade, linewidth=1.6, label=f"tp {tp}")
    largest = max(abs(one) for one in line)
axes.axhline(0, color=GREY, linewidth=1)
axes.set_xscale("log", base=2)
axes.set_yscale("symlog", linthresh=max(largest / 1000, 1.0))
axes.set_xticks(BATCHES[::2], [str(size) for size in BATCHES[::2]])
axes.set_xlabel("rows")
axes.set_ylabel("saved by the local argmax, us, predicted")
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
figure.suptitle(f"Predicted for {first['input']}, links as measured", x=0.12, ha="left", weight="bold")

# %% [markdown]
# `python -m vpa.predict RECORD.json --tp 8,64 --link measured,ib-ndr` prints the same tables; `vpa.calibrate`
# measures on the ranks of a running job and gives `LogitsProcessor(mode="auto")` a table to choose by.
