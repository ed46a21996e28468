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
# # From the full gather to candidates
#
# Four emulated ranks pick the same tokens in three ways, each with less to move: all logits; each rank's best value
# and id, as engines without fused kernels do; candidates. Every step is drawn and checked, then the bytes are counted
# for a vocabulary of real size.

# %%
import itertools

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

import vpa
from vpa import order

try:
    import cupy

    gpu = cupy.cuda.runtime.getDeviceCount() > 0
except Exception as reason:  # CuPy is missing, or has no driver
    print(f"no GPU: {type(reason).__name__}")
    gpu = False
xp = cupy if gpu else np
print(f"arrays and scans: {'CuPy, backend raw' if gpu else 'NumPy, backend numpy'}")


def host(array) -> np.ndarray:
    """An array in host memory."""
    return cupy.asnumpy(array) if gpu else array


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of ranks 0 to 3
GREY = "#767676"
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})

# %% [markdown]
# ## The shards
#
# 22 ids, padded to 24, over 4 ranks: each has 6 columns, and the last 2 of rank 3 are padding. Padding holds NaN
# here, which would win if it were read.

# %%
ROWS, VOCAB, TP = 3, 22, 4
shards = vpa.shard_vocab(VOCAB, TP, pad_to=8)
rng = np.random.default_rng(3)
whole = rng.integers(-9, 10, (ROWS, VOCAB)).astype(np.float32)
whole[1, [4, 15]] = 9  # a tie of two ranks
whole[2, 13] = np.nan
parts = []
for shard in shards:
    part = np.full((ROWS, shard.width), np.nan, np.float32)
    for start, count, first in shard.ranges:
        part[:, start : start + count] = whole[:, first : first + count]
    parts.append(part)
    print(f"rank {shard.rank}: {shard.width} columns, ranges (first column, count, first id) {shard.ranges}")
oracle = whole.argmax(axis=1)
print("tokens by NumPy over whole rows:", oracle.tolist())


# %%
def cell(axes, x: float, y: float, text: str, colour: str, *, filled: bool = False, width: float = 1) -> None:
    """One box of a drawing."""
    face = colour if filled else "white"
    axes.add_patch(Rectangle((x, y), width * 0.94, 0.88, facecolor=face, edgecolor=colour, linewidth=1.2))
    ink = "white" if filled else "#262626"
    axes.text(x + 0.47 * width, y + 0.44, text, ha="center", va="center", size=7, color=ink)


def board(width: float, height: float, title: str):
    """Axes without axes, rows from the top down."""
    figure, axes = plt.subplots(figsize=(0.3 * width + 0.4, 0.3 * height + 0.5))
    axes.set_xlim(-0.2, width)
    axes.set_ylim(height, -0.2)
    axes.axis("off")
    figure.subplots_adjust(left=0, right=1, bottom=0, top=0.3 * height / (0.3 * height + 0.5))
    figure.suptitle(title, x=0.01, y=0.99, ha="left", weight="bold", size=10)
    return axes


axes = board(31, 4.4, "Logits on four ranks; each row's largest of a rank is filled, padding is grey")
for rank, (part, shard) in enumerate(zip(parts, shards, strict=True)):
    ids = shard.ids()
    axes.text(rank * 7.8, 0.3, f"rank {rank}", color=COLOURS[rank], weight="bold", va="center")
    best = part[:, ids >= 0].argmax(axis=1)
    for row in range(ROWS):
        for column in range(shard.width):
            padding = ids[column] < 0
            text = "" if padding else f"{part[row, column]:.0f}"
            colour = "#C8C8C8" if padding else COLOURS[rank]
            cell(axes, rank * 7.8 + column, row + 1, text, colour, filled=padding or column == best[row])

# %% [markdown]
# ## 1. The full gather
#
# Every rank gets all logits, and takes the argmax of whole rows. An all-gather puts ranks one after another along the
# first dimension, `[tp * B, columns]`, so that the rank axis has to be moved, and padding dropped, before rows are
# whole.

# %%
gathered = np.concatenate(parts)  # what an all-gather along dimension 0 gives
rows_first = gathered.reshape(TP, ROWS, -1).transpose(1, 0, 2).reshape(ROWS, -1)
ids = np.concatenate([shard.ids() for shard in shards])
restored = rows_first[:, ids >= 0]
full = restored.argmax(axis=1)
moved = {"full gather": gathered.nbytes}
print(f"gathered {gathered.shape}, {gathered.nbytes} bytes; tokens {full.tolist()}")
assert np.array_equal(restored, whole, equal_nan=True) and np.array_equal(full, oracle)

# %% [markdown]
# ## 2. A value and an id
#
# Each rank reduces first, and gives its largest value and that one's id, `[B, 2]` in fp32. It is what engines do
# without fused kernels, in nine small ones. An id in fp32 is exact below 2^24 only. The combination has to know the
# order too: here NumPy's `argmax` over ranks does, where ranks' ids ascend.

# %%
pairs = []
for part, shard in zip(parts, shards, strict=True):
    ids = shard.ids()
    local = part[:, ids >= 0].argmax(axis=1)
    pairs.append(np.stack([part[np.arange(ROWS), local], ids[ids >= 0][local].astype(np.float32)], axis=1))
gathered = np.concatenate(pairs)
by_rank = gathered.reshape(TP, ROWS, 2)
winner = by_rank[:, :, 0].argmax(axis=0)
tokens = by_rank[winner, np.arange(ROWS), 1].astype(np.int64)
moved["value and id"] = gathered.nbytes
print(f"gathered {gathered.shape}, {gathered.nbytes} bytes; tokens {tokens.tolist()}")
assert np.array_equal(tokens, oracle)

# %% [markdown]
# ## 3. Candidates
#
# A candidate is key and id in one uint64, of which the larger is better (see the notebook on the order). One rank may
# give several for a row, its best of each **split**, so that many thread blocks scan a row and none waits for
# another. Here a row is one split, since splits begin at multiples of 64 columns.

# %%
SPLITS = 1
placed = [xp.asarray(part) for part in parts]
candidates = [
    vpa.local_argmax_candidates(logits, shard, splits=SPLITS) for logits, shard in zip(placed, shards, strict=True)
]
gathered = xp.concatenate(candidates)
tokens = vpa.pick_from_candidates(gathered, ROWS)
moved["candidates"] = gathered.nbytes
print(f"gathered {gathered.shape} {gathered.dtype}, {gathered.nbytes} bytes; tokens {host(tokens).tolist()}")
assert np.array_equal(host(tokens), oracle)

# %% [markdown]
# What each rank has after its gather, by the three ways; a box is 4 or 8 bytes, and a row's winner is filled:

# %%
axes = board(22, TP * ROWS + 1.4, "After the gather: all logits; values and ids; candidates")
for line in range(TP * ROWS):
    rank, row = divmod(line, ROWS)
    ids, won = shards[rank].ids(), oracle[row]
    for column in range(6):
        text = f"{parts[rank][row, column]:.0f}" if ids[column] >= 0 else ""
        cell(axes, column, line + 1, text, COLOURS[rank], filled=bool(ids[column] == won))
    value, token = pairs[rank][row]
    cell(axes, 8, line + 1, f"{value:.0f}", COLOURS[rank], filled=bool(token == won), width=2)
    cell(axes, 10, line + 1, f"{token:.0f}", COLOURS[rank], filled=bool(token == won), width=2)
    text = f"0x{int(host(gathered)[line, 0]):016X}"
    cell(axes, 14, line + 1, text, COLOURS[rank], filled=bool(token == won), width=7)
for x, name in zip((0, 8, 14), moved, strict=True):
    axes.text(x, 0.3, f"{name}: {moved[name]} bytes", va="center", color=GREY)

# %% [markdown]
# Row b of rank r is line `r * B + b` of what was gathered. No copy moves the rank axis: the pick takes every B-th
# line.

# %%
lines = host(gathered)[:, 0]
keys, best_ids = order.unpack(lines)
values = order.values_of(keys)
axes = board(26, len(lines) + 1.4, "Candidates as gathered, and what the pick reads for each row")
axes.text(0, 0.3, "line   value, id", color=GREY, va="center")
for line in range(len(lines)):
    rank, row = divmod(line, ROWS)
    wins = best_ids[line] == oracle[row]
    axes.text(0.3, line + 1.44, f"{line}", va="center", color=GREY)
    cell(axes, 1.6, line + 1, f"{values[line]:.0f}, {best_ids[line]}", COLOURS[rank], filled=bool(wins), width=3.4)
    axes.text(5.4, line + 1.44, f"rank {rank}, row {row}", va="center", color=COLOURS[rank])
for row in range(ROWS):
    y = 1.44 + row * (len(lines) - 1) / (ROWS - 1)
    for rank in range(TP):
        line = rank * ROWS + row
        wins = best_ids[line] == oracle[row]
        axes.plot([10.4, 18], [line + 1.44, y], color=COLOURS[rank], linewidth=2.2 if wins else 0.7)
    axes.text(18.4, y, f"row {row}: token {oracle[row]}", va="center", weight="bold")

# %% [markdown]
# ## In one call
#
# Scan, gather and pick are one call, over a communicator (`vpa.get_top_tokens`) or by one process that plays all
# ranks. The number of splits changes no token, nor does the number of ranks.

# %%
tokens = host(vpa.emulate_top_tokens(placed, shards))
assert np.array_equal(tokens, oracle)

big = rng.integers(-100, 100, (64, 5000)).astype(np.float32)  # thousands of ties
for tp in (1, 2, 5, 8):
    cut = vpa.VocabShard.even(5000, tp)
    edges = np.cumsum([0] + [shard.width for shard in cut])
    scanned = [xp.asarray(np.ascontiguousarray(big[:, a:b])) for a, b in itertools.pairwise(edges)]
    for splits in (1, 3, 8):
        some = xp.concatenate(
            [vpa.local_argmax_candidates(x, shard, splits=splits) for x, shard in zip(scanned, cut, strict=True)]
        )
        assert np.array_equal(host(vpa.pick_from_candidates(some, 64)), big.argmax(axis=1))
print("64 rows of 5000 ids: the same tokens for 1, 2, 5 and 8 ranks of 1, 3 and 8 splits")

# %% [markdown]
# ## What moves, at real sizes
#
# Bytes that each rank has after the gather, of bf16 logits, a vocabulary of 131072 and 4 ranks: computed from shapes,
# not measured. They say nothing about time by themselves. A gather has a latency that no size undercuts, so at few
# rows the difference is small; the scan that comes before the gather is work that the full gather's argmax does too,
# and there on tp times as many columns.

# %%
BATCHES = 2 ** np.arange(0, 13)
shard = vpa.shard_vocab(131072, TP)[0]
bytes_of = {
    "full gather": TP * shard.width * 2 * BATCHES,
    "candidates, 8 splits": TP * 8 * 8 * BATCHES,
    "value and id": TP * 2 * 4 * BATCHES,
    "candidates, 1 split": TP * 8 * BATCHES,
}
row = xp.zeros((1, shard.width), np.float16)  # as wide as bf16
for splits in (1, 8):
    plural = "s" if splits > 1 else ""
    candidates = vpa.local_argmax_candidates(row, shard, splits=splits)
    assert TP * candidates.nbytes == bytes_of[f"candidates, {splits} split{plural}"][0]
print(f"a row of 131072 ids: {bytes_of['full gather'][0]} bytes against {bytes_of['candidates, 8 splits'][0]}")

# %%
figure, axes = plt.subplots(figsize=(6.4, 3.4))
for (name, line), colour, dash in zip(
    bytes_of.items(), ("#D55E00", "#0072B2", "#009E73", "#0072B2"), ("-", "-", "-", "--"), strict=True
):
    axes.plot(BATCHES, line, dash, color=colour, linewidth=3.5 if name == "value and id" else 1.6)
    if name == "value and id":
        continue
    label = "candidates, 1 split;\nvalue and id" if name == "candidates, 1 split" else name
    axes.annotate(label, (BATCHES[-1], line[-1]), (6, 0), textcoords="offset points", color=colour, va="center")
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(BATCHES[::3], [str(size) for size in BATCHES[::3]])
axes.set_yticks([1e2, 1e4, 1e6, 1e8], ["100 B", "10 kB", "1 MB", "100 MB"])
axes.yaxis.minorticks_off()
axes.set_xlabel("rows")
axes.set_ylabel("bytes on a rank after the gather")
figure.suptitle("What a gather brings, vocabulary 131072, 4 ranks, bf16", x=0.12, ha="left", weight="bold")
