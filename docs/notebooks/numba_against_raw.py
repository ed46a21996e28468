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
# # Numba against CUDA source
#
# Each kernel is there twice: as CUDA/HIP source text, which CuPy compiles (backend `raw`), and as a twin in Python,
# which Numba compiles (backend `numba`). This notebook reads one rule in both languages, checks that both give the
# same bits, and draws what the twin costs.
#
# With a GPU it runs both there and measures. Without one the source runs on the CPU by the backend `simt`, the twin
# in Numba's simulator, and times come from a record that was made on an H200.

# %%
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
from matplotlib import pyplot as plt

import vpa
from vpa import comparison, kernels, record

try:
    import cupy

    gpu = cupy.cuda.runtime.getDeviceCount() > 0
except Exception as reason:  # CuPy is missing, or has no driver
    print(f"no GPU: {type(reason).__name__}")
    gpu = False
if not gpu:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's in the simulator, where uint32 wraps around as on a GPU
print("kernels run " + ("on the GPU" if gpu else "on the CPU: source by simt, twins by Numba's simulator"))

from vpa.backends import launches  # noqa: E402
from vpa.kernels import numba_argmax, numba_order  # noqa: E402

# %% [markdown]
# ## One rule in two languages
#
# The key of a logit, in `kernels/order.cuh` and in `kernels/numba_order.py`. Numba computes on 64-bit integers unless
# it is cut back, and turns a mixture of int64 and uint64 into a float, hence the many `u32`.

# %%
lines = kernels.read("order.cuh").splitlines()
start = next(number for number, line in enumerate(lines) if "u32 key_of_bits(" in line)
end = next(number for number in range(start, len(lines)) if lines[number] == "}")
print("\n".join(lines[start : end + 1]))

# %%
twin = numba_order.key_of_bits
print(inspect.getsource(twin.py_func if gpu else twin.fn))

# %% [markdown]
# ## Equal bits
#
# Candidates are equal bit for bit, whatever is among the logits: ties, NaN of both signs, zeros of both, subnormals,
# infinities.

# %%
ROWS, SPLITS = 2, 2
shard = vpa.VocabShard.even(700, 1)[0]
rng = np.random.default_rng(0)
words = rng.integers(0, 65536, (ROWS, shard.width)).astype(np.uint16)  # any pattern at all
few = np.array([0x8000, 0x0000, 0x0001, 0x8001, 0xBF80], np.uint16)  # zeros, subnormals, -1
words[1] = rng.choice(few, shard.width)
logits = words.view(ml_dtypes.bfloat16)
expected = vpa.local_argmax_candidates(logits, shard, splits=SPLITS, backend="numpy")


def simulated_twin(logits: np.ndarray) -> np.ndarray:
    """Candidates by the twin's kernel in Numba's simulator, launched as backend ``numba`` launches it."""
    out = np.zeros((len(logits), SPLITS), np.uint64)
    launch = launches.scan_by_rows(logits, shard, "packed", SPLITS, out)
    defines = {**launch.defines, "dtype": logits.dtype.name, "pairs": False}
    del defines["write"], defines["cluster"]
    kernel = numba_argmax.local_argmax_candidates(**defines, nan_ignored=False)
    strides = (int(stride) for stride in launch.args[1:4])
    kernel[launch.grid, launch.block](logits.ctypes.data, *strides, shard.ranges, out.ctypes.data)
    return out


if gpu:
    given = cupy.asarray(logits)
    got = {
        name: cupy.asnumpy(vpa.local_argmax_candidates(given, shard, splits=SPLITS, backend=name))
        for name in ("raw", "numba")
    }
else:
    got = {
        "raw, on the CPU by simt": vpa.local_argmax_candidates(logits, shard, splits=SPLITS, backend="simt"),
        "numba, simulated": simulated_twin(logits),
    }
for name, candidates in {"numpy": expected, **got}.items():
    print(f"{name:24}", [f"0x{int(one):016X}" for one in candidates.ravel()])
    assert candidates.tobytes() == expected.tobytes()

# %% [markdown]
# ## What the twin costs
#
# `python -m vpa.run compare` measures both, and everything else that there is, and writes a record. Which record it
# is, by which command it was made, and from which revision, stands below; [measuring](../measuring.md) defines the
# columns.

# %%
if gpu:
    path = Path(tempfile.mkdtemp()) / "compare.json"
    command = [sys.executable, "-m", "vpa.run", "compare", "--rows", "1,8,64,1024", "--dtype", "bf16", "--json", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
else:
    # The checkout's root, as this package is installed from it; the record is not part of an installed package.
    root = Path(importlib.util.find_spec("vpa").origin).resolve().parent.parent
    path = root / "mpi_runs/results/compare_h200.json"
content = record.read(path)
environment = content["environment"]
print("measured here" if gpu else f"committed record {path.relative_to(root)}")
print(f"device    {environment['ranks'][0]['gpu']['name']}")
print(f"command   {content['command']}")
print(f"revision  {environment['git']['revision'][:12]}")

# %%
PARTS = {"pair": "logits to tokens", "local": "the scan alone"}
found = {}  # (dtype, strides) -> times of each arm and part, by batch size
for group in comparison.groups(content["rows"]):
    first = group[0]
    if (first["mode"], first["cache"], first["input"]) == ("captured", "hot", "random"):
        found[first["dtype"], first["strides"]] = comparison.medians(group)
for (dtype, strides), times in found.items():
    if strides != "contiguous":
        continue
    sizes = [size for size in (1, 8, 64, 1024, 4096) if size in times["raw", "pair"]]
    print(f"{dtype:10} numba / raw, us" + "".join(f"{size:10} rows" for size in sizes))
    for part, words in PARTS.items():
        raw, numba = times["raw", part], times["numba", part]
        print(f"  {words:23}" + "".join(f"  {numba[size]:5.2f} / {raw[size]:5.2f}" for size in sizes))

# %%
COLOURS = {"bfloat16": "#0072B2", "float16": "#D55E00", "float32": "#009E73"}
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})


def ratios(times: dict, part: str) -> dict[int, float]:
    """Numba's time divided by raw's, by batch size."""
    raw, numba = times.get(("raw", part), {}), times.get(("numba", part), {})
    return {size: numba[size] / raw[size] for size in sorted(raw.keys() & numba.keys())}


figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for axes, (part, words) in zip(panels, PARTS.items(), strict=True):
    for dtype, colour in COLOURS.items():
        line = ratios(found.get((dtype, "contiguous"), {}), part)
        if line:
            axes.plot(*zip(*line.items(), strict=True), "o-", color=colour, label=dtype, markersize=4)
    axes.axhline(1, color="#767676", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4096"])
    axes.set_title(words, loc="left")
    axes.set_xlabel("rows")
panels[0].set_ylim(0, 1.05 * max(value for axes in panels for line in axes.lines for value in line.get_ydata()))
panels[0].set_ylabel("time of numba / time of raw")
panels[0].legend(frameon=False, loc="lower left")
title = f"Numba against CUDA source, contiguous logits, {environment['ranks'][0]['gpu']['name']}"
figure.suptitle(title, x=0.08, y=1.02, ha="left", weight="bold")

# %% [markdown]
# The twins walk rows as the source does. They have no launches that overlap their neighbours, and no walk of their
# own for column-major logits (see [design](../design.md)), which is where most is lost:

# %%
for (dtype, strides), times in found.items():
    line = ratios(times, "local")
    if strides != "contiguous" and line:
        shown = ", ".join(f"{ratio:.1f} ({size} rows)" for size, ratio in line.items())
        print(f"{dtype}, {strides}, numba / raw of the scan: {shown}")
