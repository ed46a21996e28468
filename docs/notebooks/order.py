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
# # The order, and why ties and NaN matter
#
# Every rank has the largest logit of its part of the vocabulary, and the largest of those is the token. That is so as
# long as all stages agree on what *largest* means where values are equal, or are no numbers. This notebook cuts the
# same rows for 1 to 8 ranks, combines the parts by two plausible rules and by the project's order, and counts tokens
# that change.
#
# It runs on NumPy arrays; no GPU is used, if there is one either.

# %%
import ml_dtypes
import numpy as np
from matplotlib import pyplot as plt

import vpa
from vpa import order

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})

VOCAB, ROWS, TPS = 32000, 256, (1, 2, 3, 4, 5, 6, 7, 8)
rng = np.random.default_rng(0)
logits = rng.normal(size=(ROWS, VOCAB)).astype(ml_dtypes.bfloat16)

# %% [markdown]
# ## Ties are normal
#
# bf16 has 8 bits of precision: near 4, where the largest of some ten thousand bell-shaped logits lie, neighbours are
# 1/32 apart. Two of them share the first place in some rows of every hundred, and wherever a soft-cap or a scale
# rounds once more, in more.


# %%
def tied(rows: np.ndarray) -> float:
    """The share of rows whose maximum is there more than once."""
    wide = rows.astype(np.float32)
    return float((np.sum(wide == wide.max(axis=1, keepdims=True), axis=1) > 1).mean())


sizes = [1000, 4000, 16000, 64000, 128000]
dtypes = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
shares = dict.fromkeys(dtypes, 0)
for _ in range(4):  # of 256 rows each
    drawn = rng.standard_normal((ROWS, max(sizes)), dtype=np.float32)
    for name, dtype in dtypes.items():
        rounded = drawn.astype(dtype)
        shares[name] = shares[name] + np.array([tied(rounded[:, :size]) for size in sizes]) / 4
print("vocabulary  " + "  ".join(f"{size:6}" for size in sizes))
for name, line in shares.items():
    print(f"{name:10}  " + "  ".join(f"{100 * share:4.1f} %" for share in line))

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for (name, line), colour in zip(shares.items(), (BLUE, ORANGE, GREEN), strict=True):
    axes.plot(sizes, [100 * share for share in line], "o-", color=colour, markersize=4)
    axes.annotate(name, (sizes[-1], 100 * line[-1]), (6, 0), textcoords="offset points", color=colour, va="center")
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, [f"{size // 1000}k" for size in sizes])
axes.set_ylim(bottom=-0.3)
axes.set_xlabel("vocabulary")
axes.set_ylabel("of 1024 rows, %")
figure.suptitle("Rows in which two or more ids have the largest logit", x=0.12, ha="left", weight="bold")

# %% [markdown]
# ## Two plausible rules
#
# Both take NumPy's `argmax` on each rank, which is exact there: the first NaN, else the first of the largest values.
# They differ in how ranks are combined:
#
# - **the later rank wins a tie**: a running `>=` over ranks, or a candidate packed as `key << 32 | id`, whose maximum
#   is the highest id;
# - **a comparison of floats**: a running `>`. It gets ties right, and NaN wrong: `NaN > x` and `x > NaN` are both
#   false, so a NaN wins if rank 0 has it and loses if another has.


# %%
def cut(rows: np.ndarray, tp: int) -> list[tuple[int, np.ndarray]]:
    """The first id and the logits of each rank's shard."""
    shards = vpa.VocabShard.even(rows.shape[1], tp)
    firsts = np.cumsum([0] + [shard.width for shard in shards])
    return [(first, rows[:, first : first + shard.width]) for first, shard in zip(firsts, shards, strict=False)]


def combined(rows: np.ndarray, tp: int, replaces) -> np.ndarray:
    """Tokens of ranks' argmaxes, where ``replaces(new, old)`` says which of a later rank's values take the place."""
    best = None
    for first, part in cut(rows, tp):
        ids = part.astype(np.float32).argmax(axis=1)
        values = np.take_along_axis(part, ids[:, None], axis=1)[:, 0].astype(np.float32)
        if best is None:
            best, tokens = values, ids + first
        else:
            better = replaces(values, best)
            best, tokens = np.where(better, values, best), np.where(better, ids + first, tokens)
    return tokens


def by_vpa(rows: np.ndarray, tp: int) -> np.ndarray:
    """Tokens by the project's order."""
    parts = [np.ascontiguousarray(part) for _, part in cut(rows, tp)]
    return vpa.emulate_top_tokens(parts, vpa.VocabShard.even(rows.shape[1], tp))


RULES = {
    "the later rank wins a tie": lambda rows, tp: combined(rows, tp, np.greater_equal),
    "floats compared by >": lambda rows, tp: combined(rows, tp, np.greater),
    "the order of vpa": by_vpa,
}

with_nan = logits.copy()
for row in range(0, ROWS, 4):  # every fourth row has one NaN somewhere
    with_nan[row, rng.integers(VOCAB)] = np.nan
inputs = {"ties alone": logits, "a NaN in every fourth row": with_nan}
wrong = {}
for name, rows in inputs.items():
    oracle = rows.astype(np.float32).argmax(axis=1)  # the first NaN, else the first of the largest
    for rule, tokens in RULES.items():
        wrong[name, rule] = [int((tokens(rows, tp) != oracle).sum()) for tp in TPS]
        print(f"{name:26} {rule:26} wrong of {ROWS} at tp 1 to 8: {wrong[name, rule]}")
assert all(counts == [0] * len(TPS) for (_, rule), counts in wrong.items() if rule == "the order of vpa")

# %% [markdown]
# With one rank each rule is right, so a test on one GPU finds neither mistake. From two ranks on a token depends on
# how many there are: the same model answers otherwise on other hardware.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for axes, name in zip(panels, inputs, strict=True):
    for rule, colour, dash in zip(RULES, (ORANGE, GREEN, BLUE), ("o--", "s-.", "D-"), strict=True):
        axes.plot(TPS, wrong[name, rule], dash, color=colour, label=rule, markersize=4)
    axes.set_title(name, loc="left")
    axes.set_xlabel("ranks")
panels[0].set_ylabel(f"wrong tokens of {ROWS}")
panels[0].legend(frameon=False, loc="center right")
figure.suptitle("Tokens that change with the number of ranks", x=0.08, ha="left", y=1.02, weight="bold")

# %% [markdown]
# ## The order
#
# `vpa.order` says it once: NaN precedes every number, else the larger value, -0 equals +0; equal values: the lower
# **id**. It is a strict total order on (value, id), and the best of some parts' bests is then the best of all,
# however the parts are cut. Values are ranked by an integer **key**, since GPU code that flushes subnormals to zero
# compares floats wrongly.

# %%
patterns = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
keys = order.keys(patterns)
wide = patterns.astype(np.float32)
numbers = ~np.isnan(wide)
ranked = np.argsort(keys[numbers], kind="stable")
ascending = wide[numbers][ranked]
assert np.all(ascending[:-1] <= ascending[1:]), "a larger key, a larger value"
assert np.all(keys[~numbers] == 0xFFFFFFFF) and keys.min() > 0
names = {
    "-inf": -np.inf, "-1": -1, "-1e-40": -1e-40, "-0": -0.0, "+0": 0.0, "1e-40": 1e-40, "1": 1, "+inf": np.inf,
    "NaN": np.nan, "-NaN": -np.nan,
}  # fmt: skip
for name, value in names.items():
    print(f"{name:>7}  key 0x{int(order.keys(np.array([value], np.float32))[0]):08X}")

# %%
figure, axes = plt.subplots(figsize=(6, 3.4))
finite = np.isfinite(wide)
for sign, colour in ((wide < 0, ORANGE), (wide >= 0, BLUE)):
    shown = finite & sign
    axes.plot(wide[shown], keys[shown] / 2**32, ",", color=colour)
axes.set_xscale("symlog", linthresh=1e-38)
axes.set_xticks([-1e38, -1, 0, 1, 1e38])
axes.xaxis.minorticks_off()
axes.axhline(1, color=GREY, linewidth=1)
axes.text(-1e38, 0.96, f"all {int((~numbers).sum())} NaN patterns", color=GREY, va="top")
axes.set_xlabel("value")
axes.set_ylabel("key / 2^32")
axes.set_ylim(-0.03, 1.05)
figure.suptitle("Keys of all 65,536 bf16 patterns", x=0.12, ha="left", weight="bold")

# %% [markdown]
# A **candidate** is 8 bytes, `key << 32 | (0xFFFFFFFF - id)`. The larger integer precedes, ties included, so a
# maximum over uint64 is the whole reduction. The complement of the id is what makes the *lower* one win.

# %%
values, ids = np.array([2, 7, 7, np.nan, np.nan], np.float32), np.array([10, 30, 20, 900, 800])
candidates = order.pack(order.keys(values), ids)
for value, number, candidate in zip(values, ids, candidates, strict=True):
    print(f"value {value:4}  id {number:3}  candidate 0x{int(candidate):016X}")
for count, best in ((3, 20), (5, 800)):
    key, token = order.unpack(candidates[:count].max(keepdims=True))
    print(f"the best of the first {count}: id {token[0]}")
    assert token[0] == best

# %% [markdown]
# ## The lower rank is not the lower id
#
# Engines append added ids to the vocabulary and cut both parts over the ranks. Rank 0 then holds ids above rank 1's,
# so "the lower rank wins" is a third plausible rule that is wrong.

# %%
shards = vpa.shard_vocab(1010, 2, added_vocab_size=16)
for shard in shards:
    ids = shard.ids()
    parts = [(int(ids[start]), int(ids[start + count - 1])) for start, count, _ in shard.ranges]
    print(f"rank {shard.rank}: ids " + " and ".join(f"{first} to {last}" for first, last in parts))
parts = [np.zeros((1, shard.width), np.float32) for shard in shards]
parts[0][0, shards[0].ids() == 1015] = 5  # an added id, on rank 0
parts[1][0, shards[1].ids() == 700] = 5  # an original one, on rank 1
print("a tie of id 1015 on rank 0 and id 700 on rank 1 goes to", vpa.emulate_top_tokens(parts, shards)[0])
assert vpa.emulate_top_tokens(parts, shards)[0] == 700
