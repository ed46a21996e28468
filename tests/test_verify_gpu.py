"""Verification on a GPU: graphs whose arrays change in place, captures of the caller's own, streams, 64-bit offsets."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from oracle import DTYPES, full_argmax
from test_verify import FORMS, best_of, whole_rows
from verification import batch, expected, lists

import vpa
from vpa import VocabShard

pytestmark = pytest.mark.gpu

K, REQUESTS, VOCAB = 3, 7, 30001
ROWS = REQUESTS * (K + 1)
SHARD = VocabShard.even(VOCAB, 1)[0]
RATES = vpa.conditional_acceptance(K, mean=2.6)


def built(name: str, **changes) -> vpa.GreedyVerify:
    sizes = {"max_rows": ROWS, "max_requests": REQUESTS, "num_draft_tokens": K, "dtype": "bfloat16"}
    return vpa.GreedyVerify(SHARD, vpa.comm.solo(), backend=name, **(sizes | changes))


def step(seed: int, nan: str = "first", rates=None):
    """A step's logits and requests on the host, and what has to come of them."""
    rng = np.random.default_rng(seed)
    whole = whole_rows(rng, ROWS, (SHARD,))
    best = best_of(whole, nan)
    given = batch(rng, best, K, VOCAB, REQUESTS)
    return whole, given, expected(best, given, K, VOCAB, rates)


def on_gpu(whole: np.ndarray, given: dict) -> tuple:
    import cupy

    return cupy.asarray(whole), {name: cupy.asarray(array) for name, array in given.items()}


@pytest.mark.parametrize("rates", [None, RATES], ids=["greedy", "synthetic"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["raw", "numba"])
class TestCaptured:
    def test_fifty_replays_follow_logits_requests_and_offsets(self, name, form, rates):
        import cupy

        logits, there = on_gpu(*step(0)[:2])
        captured = built(name, form=form, nan="ignore", acceptance=rates).capture(logits, **there)
        for seed in range(50):
            whole, given, wanted = step(seed % 10, "ignore", rates)
            logits.view(np.uint16)[...] = cupy.asarray(whole.view(np.uint16))
            for key, array in given.items():
                there[key][...] = cupy.asarray(array)
            outcome = captured.replay()
            assert all(a is b for a, b in zip(outcome, captured.results, strict=True))
            assert lists(outcome) == wanted, seed
        captured.close()
        with pytest.raises(RuntimeError, match="closed"):
            captured.replay()

    def test_a_capture_of_the_callers_own(self, name, form, rates):
        import cupy

        verify = built(name, form=form, acceptance=rates)
        whole, given, wanted = step(1, rates=rates)
        logits, there = on_gpu(whole, given)
        out = (cupy.empty((REQUESTS, K + 1), np.int64), cupy.empty(REQUESTS, np.int32), cupy.empty(REQUESTS, np.int32))
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            with pytest.raises(RuntimeError, match="call once before the capture"):
                verify(logits, **there, out=out)
            stream.end_capture()
        assert lists(verify(logits, **there)) == wanted
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            with pytest.raises(ValueError, match="pass out="):
                verify(logits, **there)
            verify(logits, **there, out=out)
            graph = stream.end_capture()
            for array in out:
                array.fill(-9)
            graph.launch(stream)
        stream.synchronize()
        assert lists(out) == wanted


@pytest.mark.parametrize("name", ["raw", "numba"])
def test_a_capture_as_the_very_first_call(name):
    program = f"""
import cupy, numpy as np, vpa
shard = vpa.VocabShard.even(1000, 1)[0]
verify = vpa.GreedyVerify(shard, vpa.comm.solo(), max_rows=2, max_requests=1, num_draft_tokens=1, dtype="float32",
                          form="blocks", backend={name!r})
logits = cupy.asarray(np.eye(2, 1000, 7, dtype=np.float32))
there = dict(draft_ids=cupy.asarray([0, 7]), cu_num_rows=cupy.asarray([0, 2], np.int32), positions=cupy.arange(5, 7),
             seq_lens=cupy.ones(1, np.int32), prefill_lens=cupy.ones(1, np.int32), seeds=cupy.zeros(1, np.int64))
captured = verify.capture(logits, **there)
assert [array.tolist() for array in captured.replay()] == [[[7, 8]], [2], [0]]
there["draft_ids"][1] = 6
assert [array.tolist() for array in captured.replay()] == [[[7, -1]], [1], [1]]
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("fine"), done.stderr


@pytest.mark.parametrize("name", ["raw", "numba"])
def test_calls_on_two_streams_share_buffers_safely(name):
    import cupy

    verify = built(name)
    steps = [step(seed) for seed in range(12)]
    arrays = [on_gpu(whole, given) for whole, given, _ in steps]
    cupy.cuda.runtime.deviceSynchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    outcomes = []
    for number, (logits, there) in enumerate(arrays):
        with streams[number % 2]:
            outcomes.append(verify(logits, **there))
    cupy.cuda.runtime.deviceSynchronize()
    for (_, _, wanted), outcome in zip(steps, outcomes, strict=True):
        assert lists(outcome) == wanted


@pytest.mark.parametrize("name", ["raw", "numba"])
def test_arrays_on_the_host_are_refused_where_logits_are_on_a_gpu(name):
    whole, given, _ = step(3)
    logits, there = on_gpu(whole, given)
    for key in given:
        with pytest.raises(TypeError, match=f"{key} is a numpy array, logits are a cupy array"):
            built(name)(logits, **{**there, key: given[key]})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["raw", "numba"])
def test_offsets_beyond_32_bits(name, form):
    """Rows of a row-major array that begin more than 2^31 elements from its start: 15004 rows of 155264 ids."""
    import cupy

    rows, vocab, shard = 15004, 155264, VocabShard.even(155264, 1)[0]
    words = cupy.zeros((rows, vocab), np.uint16)
    best = np.zeros(rows, np.int64)
    for row in (*range(8), *range(13826, 13842), *range(rows - 40, rows)):
        best[row] = (row * 7919) % vocab
        words[row, int(best[row])] = 0x3F80
    requests = rows // (K + 1)
    drafts = np.concatenate([[0], best[:-1]])
    drafts[rows - 2] = 5
    given = {
        "draft_ids": drafts,
        "cu_num_rows": np.arange(0, rows + 1, K + 1, dtype=np.int32),
        "positions": np.arange(rows) + 5,
        "seq_lens": np.ones(requests, np.int32),
        "prefill_lens": np.ones(requests, np.int32),
        "seeds": np.zeros(requests, np.int64),
    }
    outcome = vpa.greedy_verify(
        words.view(DTYPES["bfloat16"]), shard, vpa.comm.solo(), num_draft_tokens=K, form=form, backend=name,
        **{key: cupy.asarray(array) for key, array in given.items()},
    )  # fmt: skip
    assert lists(outcome) == expected(best, given, K, vocab)
    assert outcome[1][-1] == 2


@pytest.mark.parametrize("form", FORMS)
def test_both_gpu_backends_contribute_the_same_bits_as_numpy(form):
    import cupy

    from vpa import backends
    from vpa.contribution import Contribution, blocks_of
    from vpa.requests import Requests

    whole, given, _ = step(4)
    assert np.array_equal(best_of(whole, "first"), full_argmax(whole))
    contribution = Contribution.agreed(form, K, 5, [blocks_of(SHARD)], VOCAB)
    shape, contributed = contribution.shape(ROWS, REQUESTS), []
    for name, xp in (("numpy", np), ("raw", cupy), ("numba", cupy)):
        logits, there = xp.asarray(whole), {key: xp.asarray(array) for key, array in given.items()}
        requests, out = Requests.given(logits, K, **there), xp.zeros(shape, np.uint64)
        scan = backends.verification(name, logits).prepare_verify_scan(
            logits, SHARD, contribution, "ignore", requests, out
        )
        scan(logits, requests, out)
        contributed.append(out.tolist())
    assert contributed[0] == contributed[1] == contributed[2]
