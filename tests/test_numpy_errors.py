"""A caller's ``np.seterr(all="raise")`` changes nothing: infinities, NaNs and subnormals are numbers like others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracle import DTYPES

import vpa
from vpa import full_gather, norm, order, rmsnorm, weights
from vpa.drafters import seeded_drafter
from vpa.linear import Linear

SOLO = vpa.comm.solo()
FAMILIES = ("deepseek", "deepseek-v3.2", "nemotron-h")


@pytest.fixture(autouse=True)
def _raising():
    with np.errstate(all="raise"):
        yield


def any_bits(dtype: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Numbers of any bits: a signalling NaN, an infinity and a subnormal in each row, too."""
    held = DTYPES[dtype]
    words = np.random.default_rng(seed).integers(0, 1 << (8 * held.itemsize), (rows, columns), f"u{held.itemsize}")
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    words[:, :3] = infinity + 1, infinity, 1
    return words.view(held)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    x, finite = any_bits(dtype, 4, 96), any_bits(dtype, 4, 96, 1)
    with np.errstate(all="ignore"):
        finite[~np.isfinite(finite.astype(np.float64))] = 1
    for mode, rounding, given in itertools.product(norm.MODES, rmsnorm.ROUNDINGS, (x, finite)):
        for weight in (given[0], np.full(96, 1e-40, np.float32)):
            settings = {"mode": mode, "rounding": rounding}
            vpa.emulate_allreduce_rmsnorm([given, given[::-1], given], given, weight, 0.0, **settings)
            vpa.allreduce_rmsnorm(given, None, weight, 1e-42, SOLO, **settings)
    norm.sum_bound([x, finite, x[::-1]], x)
    for gain in DTYPES:
        norm.rms_norm(x, any_bits(gain, 1, 96)[0], 1e-300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens(dtype):
    x, shard = any_bits(dtype, 6, 128), vpa.shard_vocab(128, 1)[0]
    transforms = (None, vpa.Transform(1e-30, 30.0), vpa.Transform(3.0, 1e-30), vpa.Transform(0.0))
    for layout, transform in itertools.product(("packed", "pairs"), transforms):
        vpa.get_top_tokens(x, shard, SOLO, layout=layout, transform=transform)
    full_gather.full_argmax(x)
    order.float_bits(x)


@pytest.mark.parametrize(("dtype", "weight"), list(itertools.product(DTYPES, DTYPES)))
def test_products(dtype, weight):
    x, matrix = any_bits(dtype, 6, 128), any_bits(weight, 64, 128)
    Linear(matrix, any_bits(weight, 1, 64)[0])(x)
    head = vpa.ParallelLMHead(matrix, vpa.shard_vocab(64, 1), 0)
    for settings in ({}, {"scale": 1e-30, "soft_cap": 30.0}):
        processor = vpa.LogitsProcessor(SOLO, **settings)
        processor.get_top_tokens(head, x)
        processor.compute_logits(head, x)


@pytest.mark.parametrize(("dtype", "family"), list(itertools.product(DTYPES, FAMILIES)))
def test_drafts(dtype, family):
    drafter = seeded_drafter(family, vpa.shard_vocab(64, 1), vpa.LogitsProcessor(SOLO), rank=0)
    hidden = any_bits(dtype, 3, drafter.embedding.shape[1])
    vpa.draft_tokens(drafter, hidden, 3, token_ids=np.arange(3), positions=np.arange(3))
    weights.seeded_rows(3, 0, 4, 64, dtype=DTYPES[dtype], scale=1e-20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_verification(dtype):
    vpa.conditional_acceptance(3, rates=(1e-300, 1e-310, 0.0))
    acceptance = vpa.conditional_acceptance(3, mean=2.6)
    for nan, form in itertools.product(("first", "ignore"), ("candidate", "blocks")):
        vpa.greedy_verify(
            any_bits(dtype, 8, 128), vpa.shard_vocab(128, 1)[0], SOLO, nan=nan, form=form,
            draft_ids=np.zeros(8, np.int64), positions=np.arange(10, 18), num_draft_tokens=3,
            cu_num_rows=np.array([0, 4, 8], np.int32), seq_lens=np.full(2, 20, np.int32),
            prefill_lens=np.full(2, 5, np.int32), seeds=np.arange(2), acceptance=acceptance,
        )  # fmt: skip
