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
# # Speculative decoding, end to end
#
# A drafter proposes K tokens, the target judges them all in one step, and what comes out is what the target alone
# would have given, token by token, in fewer steps. Here four emulated ranks do both without gathering logits: drafts
# by the local argmax of `vpa.draft_tokens`, verification by the scan and the one gather of `greedy_verify`.
#
# Target and drafters are toys of seeded weights with the parts that matter: a step that depends on the token and on
# what came before, and a head cut over ranks. Drafters are the target with noise on the weights of its step, so that
# how often they are right can be set. A GPU is used if there is one.

# %%
import dataclasses

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

import vpa
from vpa.drafters import seeded_drafter
from vpa.linear import Linear

try:
    import cupy

    gpu = cupy.cuda.runtime.getDeviceCount() > 0
except Exception as reason:  # CuPy is missing, or has no driver
    print(f"no GPU: {type(reason).__name__}")
    gpu = False
xp = cupy if gpu else np
print(f"arrays: {'CuPy, backend raw' if gpu else 'NumPy, backend numpy'}")


def host(array) -> np.ndarray:
    """An array in host memory."""
    return cupy.asnumpy(array) if gpu else array


BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})

# %% [markdown]
# ## A target and its drafters
#
# The step of a DeepSeek-V3.2 drafter (embedding, norms, projection, gated MLP, no attention) serves as the target: it
# carries a hidden state from token to token. The head has 5000 ids over 4 ranks.

# %%
TP, VOCAB, HIDDEN, REQUESTS, TOKENS, K = 4, 5000, 128, 16, 48, 4
shards = vpa.shard_vocab(VOCAB, TP)
processor = vpa.LogitsProcessor(vpa.comm.solo())  # a solo communicator and all ranks' heads: one process plays them
target = seeded_drafter(
    "deepseek-v3.2", shards, processor, hidden_size=HIDDEN, intermediate_size=256, dtype="float16", library=xp, seed=5
)


def noisy(share: float):
    """The target with noise on its step's projection and MLP: ``share`` of each matrix's own spread."""
    rng = np.random.default_rng(1)

    def changed(linear: Linear) -> Linear:
        weight = host(linear.weight).astype(np.float32)
        weight += share * weight.std() * rng.standard_normal(weight.shape, dtype=np.float32)
        return Linear(xp.asarray(weight.astype(np.float16)))

    (number, layer), *_ = target.layers.items()
    blocks = tuple(
        dataclasses.replace(block, gate=changed(block.gate), up=changed(block.up), down=changed(block.down))
        for block in layer.blocks
    )
    layer = dataclasses.replace(layer, projection=changed(layer.projection), blocks=blocks)
    return dataclasses.replace(target, layers={number: layer})


drafter = noisy(0.1)
vpa.validate_local_argmax_reduction(drafter)  # raises if its hook could draft other tokens than its logits
print(f"{TP} ranks of {shards[0].width} columns, {REQUESTS} requests, {K} drafts a step")

# %% [markdown]
# ## Plain greedy decoding
#
# One token a step: what every other way has to reproduce. All requests begin with a token and a hidden state of their
# own.

# %%
rng = np.random.default_rng(2)
first_tokens = rng.integers(0, VOCAB, REQUESTS)
first_hidden = xp.asarray(rng.standard_normal((REQUESTS, HIDDEN)).astype(np.float16))

plain = np.empty((REQUESTS, TOKENS), np.int64)
tokens, hidden = xp.asarray(first_tokens), first_hidden
for step in range(TOKENS):
    for_head, hidden = target.forward(tokens, xp.full(REQUESTS, 1 + step), hidden)
    tokens = target.get_top_tokens(for_head)
    plain[:, step] = host(tokens)
print("first tokens of request 0:", plain[0, :12].tolist())
print("distinct tokens of each request:", [len(set(line)) for line in plain.tolist()])

# %% [markdown]
# ## One step, piece by piece
#
# **Draft.** From each request's last token and hidden state, K tokens.

# %%
tokens, hidden, positions = xp.asarray(first_tokens), first_hidden, xp.ones(REQUESTS, np.int64)
drafts = vpa.draft_tokens(drafter, hidden, K, token_ids=tokens, positions=positions)
print("drafts of request 0:", host(drafts)[0].tolist(), " target alone:", plain[0, :K].tolist())

# %% [markdown]
# **The target's rows.** A request has K + 1: one that follows its last token, and one that follows each draft. A
# model with attention computes them in one pass; this one takes them one after another and keeps the hidden states.
# Its products then have as many rows as in plain decoding: with another number of rows a product may be summed in
# another order, and a near tie fall otherwise, which is the product's doing and not verification's.
#
# **Verify.** The first draft that is not the target's own token ends the request's step, and the target's token takes
# its place. If none is refused, the last row gives one token more.


# %%
def rows_of(tokens, drafts, positions, hidden):
    """Each rank's logits of all rows, [REQUESTS * (K + 1), width], and the hidden states, K + 2 of them."""
    states, logits = [hidden], []
    for i in range(K + 1):
        for_head, hidden = target.forward(tokens if i == 0 else drafts[:, i - 1], positions + i, hidden)
        states.append(hidden)
        logits.append(target.compute_logits_local(for_head))  # a list of each rank's [REQUESTS, width]
    return [xp.stack(of_rank, axis=1).reshape(REQUESTS * (K + 1), -1) for of_rank in zip(*logits, strict=True)], states


def verified(logits, tokens, drafts, positions):
    """Tokens [REQUESTS, K + 1] and how many were sampled, from all ranks' logits of the rows."""
    draft_ids = xp.concatenate([tokens[:, None], drafts], axis=1).reshape(-1)
    places = (positions[:, None] + xp.arange(K + 1)).reshape(-1)
    sampled_tokens, sampled, _ = vpa.emulate_greedy_verify(
        logits,
        shards,
        num_draft_tokens=K,
        draft_ids=draft_ids,
        positions=places,
        cu_num_rows=xp.arange(0, len(draft_ids) + 1, K + 1, dtype=np.int32),
        seq_lens=(positions + 1).astype(np.int32),
        prefill_lens=xp.ones(REQUESTS, np.int32),
        seeds=xp.zeros(REQUESTS, np.int64),
    )
    return sampled_tokens, sampled


logits, states = rows_of(tokens, drafts, positions, hidden)
sampled_tokens, sampled = verified(logits, tokens, drafts, positions)
for request in range(4):
    count = int(sampled[request])
    print(
        f"request {request}: drafts {host(drafts)[request].tolist()}, accepted {count - 1}, "
        f"tokens {host(sampled_tokens)[request, :count].tolist()}"
    )
    assert host(sampled_tokens)[request, :count].tolist() == plain[request, :count].tolist()

# %% [markdown]
# ## The loop
#
# After a step with n tokens, the last of them is the next one to follow, and the hidden state is the one behind row n
# - 1.


# %%
def decoded(drafter):
    """Tokens [REQUESTS, TOKENS] by drafting and verifying, and the lengths of all steps of each request."""
    out, lengths = [[] for _ in range(REQUESTS)], [[] for _ in range(REQUESTS)]
    tokens, hidden, positions = xp.asarray(first_tokens), first_hidden, xp.ones(REQUESTS, np.int64)
    every = xp.arange(REQUESTS)
    while min(map(len, out)) < TOKENS:
        drafts = vpa.draft_tokens(drafter, hidden, K, token_ids=tokens, positions=positions)
        logits, states = rows_of(tokens, drafts, positions, hidden)
        sampled_tokens, sampled = verified(logits, tokens, drafts, positions)
        counts = sampled.astype(np.int64)
        for request, (line, count) in enumerate(zip(host(sampled_tokens), host(counts), strict=True)):
            if len(out[request]) < TOKENS:
                out[request] += line[:count].tolist()
                lengths[request].append(int(count))
        tokens, hidden = sampled_tokens[every, counts - 1], xp.stack(states)[counts, every]
        positions = positions + counts
    return np.array([line[:TOKENS] for line in out]), lengths


NOISE = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
results = {}
for share in NOISE:
    tokens, lengths = decoded(noisy(share))
    assert np.array_equal(tokens, plain), "speculative decoding changes no token"
    results[share] = lengths
    flat = np.concatenate(lengths)
    print(f"noise {share:4.2f}: {flat.mean():.2f} tokens a step, {len(flat)} steps for {REQUESTS} x {TOKENS} tokens")

# %% [markdown]
# A drafter that is the target accepts all: K + 1 tokens a step. One that knows nothing gives one token a step, the
# target's own. All gave the same text.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.3), width_ratios=(1, 1.15))
means = [np.concatenate(results[share]).mean() for share in NOISE]
left.plot(range(len(NOISE)), means, "o-", color=BLUE, markersize=4)
left.axhline(K + 1, color=GREY, linewidth=1)
left.text(len(NOISE) - 1, K + 0.95, f"all {K} drafts and one more", color=GREY, ha="right", va="top")
left.axhline(1, color=GREY, linewidth=1)
left.text(0, 1.05, "plain decoding", color=GREY, va="bottom")
left.set_xticks(range(len(NOISE)), [f"{share:g}" for share in NOISE])
left.set_ylim(0.7, K + 1.3)
left.set_xlabel("noise on the drafter's weights, of their spread")
left.set_ylabel("tokens a step, mean")
bottom = np.zeros(len(NOISE))
shades = ("#D9D9D9", "#B3CDE3", "#7FB2D9", "#3C8DC5", "#0072B2")
for length, shade in zip(range(1, K + 2), shades, strict=True):
    shares = [100 * np.mean(np.concatenate(results[share]) == length) for share in NOISE]
    right.bar(range(len(NOISE)), shares, bottom=bottom, color=shade, width=0.8, label=f"{length - 1} accepted")
    bottom += shares
right.set_xticks(range(len(NOISE)), [f"{share:g}" for share in NOISE])
right.set_xlabel("noise on the drafter's weights, of their spread")
right.set_ylabel("steps, %")
right.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
figure.suptitle(f"Accepted drafts of {K}", x=0.08, y=0.98, ha="left", weight="bold")

# %% [markdown]
# One request, step by step: which tokens were drafts, which one in each step is the target's.

# %%
SHOWN = 0.1
lengths = results[SHOWN][0]
figure, axes = plt.subplots(figsize=(9, 0.22 * len(lengths) + 0.7))
place = 0
for step, count in enumerate(lengths):
    for i in range(min(count, TOKENS - place)):
        is_draft = i < count - 1
        face = BLUE if is_draft else ORANGE
        axes.add_patch(Rectangle((place + 0.05, step + 0.1), 0.9, 0.8, color=face))
        place += 1
axes.set_xlim(0, TOKENS)
axes.set_ylim(len(lengths), 0)
axes.set_xlabel("token of the text")
axes.set_ylabel("step")
axes.text(TOKENS, 0.2, "accepted draft", color=BLUE, ha="right", va="top")
axes.text(TOKENS, 1.6, "the target's own", color=ORANGE, ha="right", va="top")
axes.set_yticks(np.arange(len(lengths)) + 0.5, [str(step + 1) for step in range(len(lengths))])
title = f"Request 0 with noise {SHOWN:g}: {len(lengths)} steps for {TOKENS} tokens"
figure.suptitle(title, x=0.1, y=0.95, ha="left", weight="bold")

# %% [markdown]
# ## What moved
#
# A step gathers K drafts' candidates for each request, and the candidates of K + 1 rows. The full path gathers logits
# as often.

# %%
candidate_bytes = TP * 8 * 8  # of 8 splits, on each rank after the gather
logit_bytes = sum(shard.width for shard in shards) * 2
rows_a_step = K + (K + 1)
print(f"candidates of a step of a request: {rows_a_step * candidate_bytes} bytes; logits: {rows_a_step * logit_bytes}")

# %% [markdown]
# ## Acceptance without a model
#
# A serving benchmark wants an acceptance rate, and no model behind it: synthetic acceptance takes drafts by draws,
# which every rank draws alike from a seed and a position. The mean comes out as it was asked for.

# %%
for mean in (1.5, 2.6, 4.0):
    count = 4000
    rows = xp.zeros((count * (K + 1), shards[0].width), np.float16)
    _, sampled, _ = vpa.emulate_greedy_verify(
        [rows] * TP,
        shards,
        num_draft_tokens=K,
        acceptance=vpa.conditional_acceptance(K, mean=mean),
        draft_ids=xp.zeros(len(rows), np.int64),
        positions=xp.tile(xp.arange(10, 10 + K + 1), count),
        cu_num_rows=xp.arange(0, len(rows) + 1, K + 1, dtype=np.int32),
        seq_lens=xp.full(count, 9, np.int32),
        prefill_lens=xp.ones(count, np.int32),
        seeds=xp.arange(count),
    )
    got = float(host(sampled).mean())
    print(f"asked for {mean} tokens a step: {got:.3f} over {count} requests")
    assert abs(got - mean) < 0.05
