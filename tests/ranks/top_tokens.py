"""Run by every rank of a job: top tokens of a real head with integer weights, against the whole product on one rank.

usage: top_tokens.py TRANSPORT BACKEND      (auto|mpi|nccl, numpy|raw|numba)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle import DTYPES, full_argmax, laid_out, to_host

import vpa
from vpa.bench.families import FAMILIES, make_shard

HIDDEN = 48


def sharding(vocab: int, tp: int) -> tuple[vpa.VocabShard, ...]:
    return vpa.VocabShard.even(vocab, tp) if tp == 3 else vpa.shard_vocab(vocab, tp)


def head_logits(ids: np.ndarray, rows: int) -> np.ndarray:
    """Integer hidden states times integer weights, exact in fp32: few values, so ties abound in and across ranks."""
    hidden = np.random.default_rng(7).integers(-1, 2, (rows, HIDDEN)).astype(np.float32)
    weight = ((ids[:, None] * 31 + np.arange(HIDDEN) * 17) // 13 % 3 - 1).astype(np.float32)
    return np.maximum(hidden @ weight.T, -5)


def main() -> None:
    transport, backend = sys.argv[1:]
    with vpa.comm.from_mpi(transport, timeout=60) as comm:
        if transport != "auto":
            assert comm.transport == transport
        if backend == "numpy":
            xp = np
        else:
            import cupy as xp
        for vocab in (131072, 32001):
            shard = sharding(vocab, comm.size)[comm.rank]
            check_head(comm, shard, backend, xp)
        check_families(comm, shard, backend, xp)
        check_one_rank_with_its_own_memory_layout(comm, shard, backend, xp)
        if comm.rank == 0:
            print(f"agree: {vpa.comm.describe(comm)}")


def check_head(comm, shard, backend, xp) -> None:
    ids = shard.ids()
    expected = full_argmax(head_logits(np.arange(shard.vocab_size), 8))
    for dtype in DTYPES.values():
        host = head_logits(np.maximum(ids, 0), 8).astype(dtype)
        host[:, ids < 0] = np.nan
        logits = xp.asarray(host)
        for layout in ("packed", "pairs"):
            top = vpa.TopTokens(shard, comm, max_rows=8, dtype=dtype, layout=layout, backend=backend)
            for rows in (8, 1, 0, 3):
                part = logits[:rows]
                tokens = to_host(vpa.get_top_tokens(part, shard, comm, layout=layout, backend=backend))
                assert tokens.dtype == np.int64 and np.array_equal(tokens, expected[:rows]), (dtype, layout, rows)
                assert np.array_equal(to_host(top(part)), expected[:rows]), (dtype, layout, rows)
                if xp is np or not comm.capturable:
                    continue
                captured = top.capture(part)
                for shift in range(3 if rows else 1):
                    part[...] = xp.asarray(np.roll(host[:rows], shift, axis=0))
                    assert np.array_equal(to_host(captured.replay()), np.roll(expected[:rows], shift)), (dtype, layout)
                part[...] = xp.asarray(host[:rows])
    assert len(set(map(tuple, comm.exchange(tokens.tolist())))) == 1


def check_families(comm, shard, backend, xp) -> None:
    whole_shard = vpa.VocabShard.even(shard.vocab_size, 1)[0]
    for family in FAMILIES:
        for dtype in DTYPES.values():
            expected = full_argmax(make_shard(family, 1, 5, whole_shard, dtype))
            logits = xp.asarray(make_shard(family, 1, 5, shard, dtype))
            assert np.array_equal(to_host(vpa.get_top_tokens(logits, shard, comm, backend=backend)), expected), family


def check_one_rank_with_its_own_memory_layout(comm, shard, backend, xp) -> None:
    """Only the last rank's logits are strided, misaligned or reversed: no rank may take another collective for it."""
    dtype = DTYPES["bfloat16"]
    expected = full_argmax(make_shard("ties", 4, 5, vpa.VocabShard.even(shard.vocab_size, 1)[0], dtype))
    host = make_shard("ties", 4, 5, shard, dtype)
    for memory, shift in (("column_major", 0), ("every_second_column", 1), ("contiguous", 3), ("reversed_columns", 0)):
        logits = laid_out(host, memory if comm.rank == comm.size - 1 else "contiguous", xp, shift)
        assert np.array_equal(to_host(vpa.get_top_tokens(logits, shard, comm, backend=backend)), expected), memory


if __name__ == "__main__":
    main()
