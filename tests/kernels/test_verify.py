"""The kernels of verification run and checked on the CPU: orders of blocks, warps of 32 and 64, arrays of nonsense."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from oracle import DTYPES, laid_out
from verification import batch

from kernels.test_simt import ORDERS, SHARDS, WARPS, run
from vpa import VocabShard
from vpa.backends import numpy_verify, verify_launches
from vpa.bench.families import make_shard
from vpa.contribution import Contribution, blocks_of
from vpa.requests import Requests

K, REQUESTS = 2, 5
ROWS = REQUESTS * (K + 1)


def requests_of(seed: int, vocab: int, synthetic: bool = False) -> Requests:
    rng = np.random.default_rng(seed)
    given = batch(rng, rng.integers(0, vocab, ROWS), K, vocab, REQUESTS)
    rates = np.array([0.7, 0.5], np.float32) if synthetic else None
    return Requests.given(np.zeros((ROWS, 1), np.float32), K, rates, **given)


def contribution_of(form: str, shard: VocabShard) -> Contribution:
    return Contribution.agreed(form, K, 3, [blocks_of(shard)], shard.vocab_size)


def outputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.full((REQUESTS, K + 1), -7, np.int64), np.full(REQUESTS, -7, np.int32), np.full(REQUESTS, -7, np.int32)


def finish_launch(form: str, ranks: int = 3, synthetic: bool = False, seed: int = 0):
    """A launch of the finish over what ``ranks`` ranks might give, with those outputs that it has to write."""
    rng, vocab = np.random.default_rng(seed), 9
    requests, contribution = (
        requests_of(seed, vocab, synthetic),
        Contribution(form, K, 3, 3 if form == "candidate" else 40),
    )
    lines, width = contribution.shape(ROWS, REQUESTS)
    gathered = rng.integers(1 << 62, 1 << 63, (ranks * lines, width)).astype(np.uint64) & ~np.uint64(0xFFFFFFFF)
    gathered |= np.uint64(0xFFFFFFFF) - rng.integers(0, vocab, gathered.shape).astype(np.uint64)
    gathered[rng.random(gathered.shape) < 0.3] = 0
    wanted, out = outputs(), outputs()
    numpy_verify.prepare_verify_finish(gathered, contribution, requests, vocab, wanted)(gathered, requests, wanted)
    return verify_launches.finish(gathered, contribution, requests, vocab, out), out, wanted


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("form", ["candidate", "blocks"])
def test_finish(form, warp_size):
    for ranks, synthetic, order in itertools.product((1, 3), (False, True), ORDERS):
        launch, out, wanted = finish_launch(form, ranks, synthetic)
        run(launch, warp_size, order)
        assert [array.tolist() for array in out] == [array.tolist() for array in wanted], (ranks, synthetic, order)


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("nan", ["first", "ignore"])
@pytest.mark.parametrize("name", ["narrow", "several_iterations", "ranges_out_of_order", "empty"])
def test_scans(name, nan, warp_size):
    """Candidates are the scan's of top tokens, unless NaN is ignored."""
    shard, families = SHARDS[name], ("nan", "ties", "nan")
    forms = ("blocks",) if nan == "first" else ("candidate", "blocks")
    for (dtype, family), form in itertools.product(zip(DTYPES, families, strict=True), forms):
        host = make_shard(family, 1, ROWS, shard, DTYPES[dtype])
        logits = laid_out(host, "every_second_column" if dtype == "float16" else "odd_rows", shift=1)
        logits.flags.writeable = False
        requests, contribution = requests_of(1, shard.vocab_size), contribution_of(form, shard)
        shape = contribution.shape(ROWS, REQUESTS)
        wanted, out = np.full(shape, 7, np.uint64), np.full(shape, 7, np.uint64)
        numpy_verify.prepare_verify_scan(host, shard, contribution, nan, requests, wanted)(host, requests, wanted)
        launch = verify_launches.scan(logits, shard, contribution, nan, requests.cu_num_rows, out)
        for order in ORDERS if form == "blocks" else ORDERS[:1]:
            run(launch, warp_size, order)
            assert np.array_equal(out, wanted), (dtype, form, order)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_that_is_ignored_ties_with_minus_infinity(dtype):
    """Rows of both alone, and the first is one or the other: a whole load of columns is searched for either."""
    shard = VocabShard.even(700, 1)[0]
    host = np.full((ROWS, 700), -np.inf, np.float32)
    host[np.indices(host.shape).sum(axis=0) % 2 == 1] = np.nan
    host[ROWS // 2 :, ::3] = -np.inf
    host = host.astype(DTYPES[dtype])
    requests = requests_of(1, 700)
    for form, splits in (("candidate", 1), ("candidate", 5), ("blocks", 0)):
        contribution = Contribution.agreed(form, K, splits, [blocks_of(shard)], 700)
        wanted, out = (np.zeros(contribution.shape(ROWS, REQUESTS), np.uint64) for _ in range(2))
        numpy_verify.prepare_verify_scan(host, shard, contribution, "ignore", requests, wanted)(host, requests, wanted)
        run(
            verify_launches.scan(
                laid_out(host, "padded_rows"), shard, contribution, "ignore", requests.cu_num_rows, out
            )
        )
        assert np.array_equal(out, wanted), (form, splits)


@pytest.mark.parametrize("form", ["candidate", "blocks"])
def test_whatever_offsets_hold_nothing_outside_the_arrays_is_touched(form):
    """What arrays on a GPU hold is not checked; here an access out of bounds is an exception."""
    shard = VocabShard.even(3000, 1)[0]
    logits = make_shard("ties", 1, ROWS, shard, DTYPES["bfloat16"])
    good, contribution = requests_of(0, 3000), contribution_of(form, shard)
    candidates = np.zeros(contribution.shape(ROWS, REQUESTS), np.uint64)
    rng = np.random.default_rng(0)
    for number in range(12):
        offsets = (
            rng.integers(-(2**31), 2**31, REQUESTS + 1) if number % 2 else rng.integers(-9, ROWS + 9, REQUESTS + 1)
        )
        requests = dataclasses.replace(good, cu_num_rows=offsets.astype(np.int32))
        run(verify_launches.scan(logits, shard, contribution, "first", requests.cu_num_rows, candidates))
        out = outputs()
        run(verify_launches.finish(candidates, contribution, requests, 3000, out))
        assert ((out[0] >= -1) & (out[0] <= 3000)).all() and ((out[1] >= 0) & (out[1] <= K + 1)).all()
