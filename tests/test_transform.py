"""Scale and soft-cap: each step rounded to the logits' dtype, the same bits whole and in the scan, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DTYPES, full_argmax, laid_out, to_host

import vpa
from vpa import Transform, VocabShard, emulate_top_tokens, shard_vocab, transform
from vpa.bench.families import FAMILIES, make_shard

TRANSFORMS = [
    Transform(),
    Transform(scale=0.37),
    Transform(scale=-1.5),
    Transform(scale=0),
    Transform(soft_cap=30),
    Transform(scale=-2.5, soft_cap=0.8),
    Transform(scale=0.0625, soft_cap=5.5),
]


def step_by_step(settings: Transform, logits: np.ndarray) -> np.ndarray:
    """The rule, word for word, with the host library's tanh of fp64."""
    dtype = logits.dtype
    with np.errstate(all="ignore"):
        if settings.soft_cap is not None:
            cap = np.float32(settings.soft_cap)
            logits = (logits.astype(np.float32) / cap).astype(dtype)
            logits = np.tanh(logits.astype(np.float64)).astype(np.float32).astype(dtype)
            logits = (logits.astype(np.float32) * cap).astype(dtype)
        return (logits.astype(np.float32) * np.float32(settings.scale)).astype(dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, but for those of NaN."""
    words = f"u{a.itemsize}"
    nan = np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    return bool((nan | (a.view(words) == b.view(words))).all())


def numbers(dtype: np.dtype) -> np.ndarray:
    """Every 16-bit pattern, or many of fp32: [rows, 256]."""
    if dtype.itemsize == 2:
        return np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype).reshape(-1, 256)
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, (500, 256), dtype=np.uint32).view(np.float32)
    usual = rng.standard_normal((500, 256), dtype=np.float32) * np.float32(5)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001]
    words = np.array(special, np.uint32)
    edges = np.resize(np.concatenate([words, words | np.uint32(1 << 31)]), (2, 256)).view(np.float32)
    return np.concatenate([patterns, usual, edges])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", TRANSFORMS, ids=str)
def test_every_step_rounds_to_the_dtype(settings, dtype):
    logits = numbers(DTYPES[dtype])
    result = transform.apply(settings, logits)
    assert result.dtype == logits.dtype and same(result, step_by_step(settings, logits))
    turned = transform.apply(settings, logits.T[::-1])
    assert same(turned, step_by_step(settings, logits.T[::-1]))


def test_tanh_is_rounded_right_nearly_everywhere():
    """Within one unit of fp32's last place; no wrong rounding was seen among 2 * 10^7 numbers."""
    with np.errstate(invalid="ignore"):
        values = numbers(np.dtype(np.float32))
        assert same(transform.tanh(values), np.tanh(values.astype(np.float64)).astype(np.float32))
    assert transform.tanh(np.array([-np.inf, -0.0, 1e-45, np.inf], np.float32)).tolist() == [
        -1,
        0,
        np.float32(1e-45),
        1,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", TRANSFORMS, ids=str)
def test_the_scan_ranks_the_results(backend, settings, dtype):
    shards = shard_vocab(1000, 4)
    for family in FAMILIES:
        whole = make_shard(family, 1, 5, VocabShard.even(1000, 1)[0], DTYPES[dtype])
        parts = [backend.xp.asarray(make_shard(family, 1, 5, shard, DTYPES[dtype])) for shard in shards]
        tokens = emulate_top_tokens(parts, shards, backend=backend.name, transform=settings)
        assert np.array_equal(to_host(tokens), full_argmax(step_by_step(settings, whole))), family


@pytest.mark.parametrize("layout", ["packed", "pairs"])
@pytest.mark.parametrize("memory", ["contiguous", "column_major", "every_second_column", "odd_rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates_hold_the_results_of_any_layout_and_shard(backend, dtype, memory, layout):
    """Bit for bit those of transformed logits; padding, here NaN, is no part of it."""
    settings = Transform(scale=-0.7, soft_cap=3)
    for shard in (shard_vocab(1010, 2, added_vocab_size=16)[0], VocabShard.even(9, 1)[0], shard_vocab(65, 8)[6]):
        host = make_shard("random", 5, 9, shard, DTYPES[dtype])
        logits = laid_out(host, memory, backend.xp)
        got = vpa.local_argmax_candidates(logits, shard, layout=layout, backend=backend.name, transform=settings)
        applied = transform.apply(settings, host)
        expected = vpa.local_argmax_candidates(applied, shard, layout=layout, backend="numpy")
        assert np.array_equal(to_host(got).view(np.uint8), expected.view(np.uint8))
        words = f"u{host.itemsize}"
        assert np.array_equal(to_host(logits).view(words), host.view(words)), "inputs are never written"


def test_large_rows_are_transformed_block_by_block(monkeypatch):
    """No copy of the shard: what is transformed at once fits into a block of the numpy backend."""
    from vpa.backends import numpy_

    sizes = []

    def counted(settings, logits):
        sizes.append(logits.nbytes)
        return transform.apply(settings, logits)

    monkeypatch.setattr(numpy_, "apply_transform", counted)
    shard = VocabShard.even(40000, 1)[0]
    logits = make_shard("random", 0, 128, shard, DTYPES["bfloat16"])
    candidates = vpa.local_argmax_candidates(logits, shard, transform=Transform(soft_cap=30))
    assert sum(sizes) == logits.nbytes and max(sizes) <= numpy_._BLOCK_BYTES
    tokens = vpa.pick_from_candidates(candidates, 128)
    assert np.array_equal(tokens, full_argmax(step_by_step(Transform(soft_cap=30), logits)))


def test_a_soft_cap_makes_ties_in_16_bits(backend):
    """1000 and 2000 are both 30 behind a soft-cap of 30: the lower id wins, not the larger logit."""
    shard = VocabShard.even(2, 1)[0]
    logits = backend.xp.asarray(np.array([[1000, 2000]], np.float32).astype(DTYPES["bfloat16"]))
    candidates = vpa.local_argmax_candidates(logits, shard, backend=backend.name, transform=Transform(soft_cap=30))
    assert to_host(vpa.pick_from_candidates(candidates, 1, backend=backend.name)).tolist() == [0]


def test_one_object_for_many_calls(backend):
    shard = VocabShard.even(3000, 1)[0]
    settings = Transform(scale=-1)
    top = vpa.TopTokens(shard, vpa.comm.solo(), max_rows=7, dtype="float16", backend=backend.name, transform=settings)
    host = make_shard("planted", 0, 7, shard, DTYPES["float16"])
    for rows in (7, 1, 0, 3):
        tokens = to_host(top(backend.xp.asarray(host[:rows])))
        assert np.array_equal(tokens, full_argmax(step_by_step(settings, host[:rows])))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"scale": "2"}, TypeError, "scale is '2'; a real number is accepted"),
        ({"scale": True}, TypeError, "scale is True; a real number"),
        ({"scale": np.nan}, ValueError, "scale is nan; a finite number that fp32 holds"),
        ({"scale": 1e39}, ValueError, "scale is 1e[+]39; a finite number that fp32 holds"),
        ({"scale": 1e-60}, ValueError, "scale is 1e-60; a finite number that fp32 holds"),
        ({"soft_cap": 0}, ValueError, "soft_cap is 0.0; a number above 0"),
        ({"soft_cap": -3}, ValueError, "soft_cap is -3.0; a number above 0"),
        ({"soft_cap": np.inf}, ValueError, "soft_cap is inf; a finite number"),
    ],
)
def test_settings_that_do_not_fit(given, error, message):
    with pytest.raises(error, match=message):
        Transform(**given)


def test_what_is_no_transform_is_refused():
    shard = VocabShard.even(4, 1)[0]
    with pytest.raises(TypeError, match=r"transform is a float; a vpa.Transform or None"):
        vpa.get_top_tokens(np.zeros((1, 4), np.float32), shard, vpa.comm.solo(), transform=2.0)
    with pytest.raises(TypeError, match=r"transform is a float; a vpa.Transform or None"):
        vpa.TopTokens(shard, vpa.comm.solo(), max_rows=1, dtype="float32", transform=2.0)
