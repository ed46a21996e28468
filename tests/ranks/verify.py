"""Run by every rank of a job: verification over real ranks, against the rules in plain Python; errors on one rank.

usage: verify.py TRANSPORT BACKEND      (auto|mpi|nccl, numpy|raw|numba)
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle import DTYPES, full_argmax, laid_out, to_host
from verification import batch, expected, lists

import vpa
from vpa.bench.families import make_shard

K, REQUESTS, VOCAB = 3, 6, 20001
ROWS = REQUESTS * (K + 1)


def raised(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def arguments(seed: int, best: np.ndarray, xp) -> tuple[dict, dict]:
    """The same requests on every rank: on the host, and where the logits are."""
    given = batch(np.random.default_rng(seed), best, K, VOCAB, REQUESTS)
    return given, {name: xp.asarray(array) for name, array in given.items()}


def main() -> None:
    transport, backend = sys.argv[1:]
    with vpa.comm.from_mpi(transport, timeout=60) as comm:
        xp = np
        if backend != "numpy":
            import cupy as xp
        shard = vpa.VocabShard.even(VOCAB, comm.size)[comm.rank]
        whole_shard = vpa.VocabShard.even(VOCAB, 1)[0]
        rates = vpa.conditional_acceptance(K, mean=2.6)
        for family, form, acceptance in itertools.product(
            ("random", "ties", "nan"), ("candidate", "blocks"), (None, rates)
        ):
            dtype = DTYPES["bfloat16"]
            best = full_argmax(make_shard(family, 3, ROWS, whole_shard, dtype))
            host = make_shard(family, 3, ROWS, shard, dtype)
            # Only the last rank's logits are strided.
            logits = laid_out(host, "column_major" if comm.rank == comm.size - 1 else "contiguous", xp)
            verify = vpa.GreedyVerify(
                shard, comm, max_rows=ROWS, max_requests=REQUESTS, num_draft_tokens=K, dtype=dtype,
                acceptance=acceptance, form=form, backend=backend,
            )  # fmt: skip
            for seed in (1, 2):
                given, there = arguments(seed, best, xp)
                wanted = expected(best, given, K, VOCAB, acceptance)
                outcome = vpa.greedy_verify(
                    logits, shard, comm, **there, num_draft_tokens=K, acceptance=acceptance, form=form, backend=backend
                )
                assert lists(outcome) == wanted, (family, form)
                assert lists(verify(logits, **there)) == wanted, (family, form)
                told = comm.exchange([to_host(array).tobytes() for array in outcome])
                assert all(theirs == told[0] for theirs in told)
            if xp is not np and comm.capturable:
                check_captured(verify, logits, best, acceptance, xp)
        check_errors(comm, shard, backend, xp)
        if comm.rank == 0:
            print(f"agree: {vpa.comm.describe(comm)}")


def check_captured(verify, logits, best, acceptance, xp) -> None:
    """One graph, replayed on other requests in the same memory."""
    _, there = arguments(1, best, xp)
    captured = verify.capture(logits, **there)
    for seed in range(10, 15):
        given, other = arguments(seed, best, xp)
        for name, array in other.items():
            there[name][...] = array
        assert lists(captured.replay()) == expected(best, given, K, VOCAB, acceptance)


def results(numbers=None) -> tuple:
    """Memory for the results; ``numbers`` for two of them at once."""
    fresh = [np.zeros(REQUESTS, np.int32) if numbers is None else numbers for _ in range(2)]
    return np.zeros((REQUESTS, K + 1), np.int64), *fresh


def check_errors(comm, shard, backend, xp) -> None:
    """Whatever is wrong on the last rank alone is an error on all, and the next call works."""
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    logits = xp.zeros((ROWS, shard.width), np.float32)
    _, there = arguments(1, np.zeros(ROWS, np.int64), xp)

    def call(**changes):
        given = {"num_draft_tokens": K, "backend": backend, **there, **changes}
        return vpa.greedy_verify(given.pop("logits", logits), shard, comm, **given)

    def build(**changes):
        sizes = {"max_rows": ROWS, "max_requests": REQUESTS, "num_draft_tokens": K, "dtype": "float32"}
        return vpa.GreedyVerify(shard, comm, backend=backend, **(sizes | changes))

    calls = [
        (lambda: call(logits=logits[1:] if odd else logits), "ValueError"),
        (lambda: call(logits=logits.astype(np.float16) if odd else logits), "different dtype"),
        (lambda: call(num_draft_tokens=K + odd), "different num_draft_tokens"),
        (lambda: call(form="blocks" if odd else "candidate"), "different form"),
        (lambda: call(nan="ignore" if odd else "first"), "different nan"),
        (lambda: call(acceptance=np.ones(K, np.float32) if odd else None), "different acceptance"),
        (lambda: call(seeds=there["seeds"].astype(np.int32) if odd else there["seeds"]), "TypeError"),
        (lambda: build(max_requests=REQUESTS + odd), "different max_requests"),
        (lambda: build(form="x" if odd else "blocks"), "ValueError"),
        (lambda: build(acceptance=np.full(K, 0.5 + odd / 4, np.float32)), "different contents of acceptance"),
    ]
    if xp is np:
        calls.append((lambda: call(draft_ids=there["draft_ids"] + odd), "different contents of draft_ids"))
        calls.append((lambda: build()(logits[: ROWS - odd], **there), "ValueError"))
        numbers = np.zeros(REQUESTS, np.int32)
        calls.append((lambda: build()(logits, **there, out=results(numbers if odd else None)), "shares memory with"))
        calls.append(
            (lambda: build()(logits, **there, **({"splits": 3} if odd else {})), "TypeError: GreedyVerify() got")
        )
        for name, value in (("nan", "ignore"), ("form", "blocks")):
            # Each rank builds both alike, and then they call different ones.
            pair = build(), build(**{name: value})
            calls.append((lambda pair=pair: pair[odd](logits, **there), f"ranks call with different {name}"))
    for one, told in calls:
        for text in comm.exchange(raised(one)):
            assert told in text, (told, text)
        call()


if __name__ == "__main__":
    main()
