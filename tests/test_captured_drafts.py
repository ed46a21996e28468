"""Drafters on a GPU: both arms, the fused product, and whole loops as one CUDA graph."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from oracle import to_host

import vpa
from vpa import LogitsProcessor, VocabShard, shard_vocab
from vpa.drafters import FAMILIES, seeded_drafter


def made(family: str, **settings):
    import cupy

    processor = LogitsProcessor(**settings)
    return seeded_drafter(
        family, shard_vocab(500, 4), processor, hidden_size=64, intermediate_size=96, seed=1, num_layers=2, library=cupy
    )


def inputs(rows: int, seed: int = 0) -> dict:
    import cupy

    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, 64)).astype(vpa.order.LOGITS_DTYPES["bfloat16"])
    given = {"hidden": hidden, "token_ids": rng.integers(0, 500, rows), "positions": np.arange(rows) % 5}
    return {name: cupy.asarray(array) for name, array in given.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, {"scale": -0.5, "soft_cap": 5.0}, {"backend": "numba", "scale": 0.25}], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_drafts_what_the_loop_drafts(family, settings):
    drafter = made(family, **settings)
    for rows in (1, 16, 33):
        first, second = inputs(rows, 1), inputs(rows, 2)
        for local in (True, False):
            eager = [
                vpa.draft_tokens(drafter, num_draft_tokens=5, use_local_argmax_reduction=local, **given).get()
                for given in (first, second)
            ]
            fixed = {name: array.copy() for name, array in first.items()}
            graph = vpa.capture_drafts(drafter, num_draft_tokens=5, use_local_argmax_reduction=local, **fixed)
            for given, wanted in ((first, eager[0]), (second, eager[1]), (first, eager[0])):
                for name, array in fixed.items():
                    words = f"u{array.itemsize}"
                    array.view(words)[...] = given[name].view(words)
                assert np.array_equal(to_host(graph.replay()), wanted)
            graph.close()
            with pytest.raises(RuntimeError, match="closed"):
                graph.replay()
        arms = [vpa.draft_tokens(drafter, num_draft_tokens=5, use_local_argmax_reduction=a, **first) for a in (0, 1)]
        assert np.array_equal(to_host(arms[0]), to_host(arms[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_and_host_drafters_step_alike(family):
    """One step from the same weights: sums differ in their order alone, by a few units of bf16's last place."""
    on_gpu = made(family)
    on_host = seeded_drafter(
        family, shard_vocab(500, 4), LogitsProcessor(), hidden_size=64, intermediate_size=96, seed=1, num_layers=2
    )
    given = inputs(9)
    ids, positions, hidden = (given[name] for name in ("token_ids", "positions", "hidden"))
    for step in (0, 1):
        theirs = on_gpu.forward(ids, positions, hidden, step)
        ours = on_host.forward(to_host(ids), to_host(positions), to_host(hidden), step)
        for one, other in zip(theirs, ours, strict=True):
            difference = np.abs(to_host(one).astype(np.float32) - other.astype(np.float32))
            assert (difference <= 0.03 * np.maximum(np.abs(other.astype(np.float32)), 1)).all()


@pytest.mark.gpu
def test_a_fused_product_is_captured_too():
    drafter = made("deepseek")
    fused = dataclasses.replace(drafter, logits_processor=LogitsProcessor(fused=True))
    given = inputs(4)
    eager = to_host(vpa.draft_tokens(fused, num_draft_tokens=3, **given))
    graph = vpa.capture_drafts(fused, num_draft_tokens=3, **given)
    assert np.array_equal(to_host(graph.replay()), eager)


def test_host_arrays_cannot_be_captured():
    drafter = seeded_drafter("deepseek", VocabShard.even(64, 1), LogitsProcessor(), hidden_size=8, intermediate_size=8)
    with pytest.raises(ValueError, match="captured from GPU arrays; got NumPy arrays"):
        vpa.capture_drafts(drafter, np.zeros((2, 8), drafter.embedding.dtype), 3)
