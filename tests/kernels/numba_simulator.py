"""Run the Numba twins under Numba's CUDA simulator on small shapes; started with NUMBA_ENABLE_CUDASIM=1."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
from numba import config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle import DTYPES, full_argmax, laid_out

from vpa import VocabShard, local_argmax_candidates, shard_vocab
from vpa.bench.families import make_shard
from vpa.kernels import numba_argmax
from vpa.vocab import split_chunk

assert config.ENABLE_CUDASIM
warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, where uint32 wraps around as on a GPU
ROWS, SPLITS = 2, 2

SHARDS = (
    VocabShard.even(150, 1)[0],
    shard_vocab(100, 2, added_vocab_size=20)[0],
    VocabShard(0, 1, 500, 130, ((3, 60, 400), (70, 1, 7), (80, 50, 100))),
    VocabShard.even(703, 1)[0],
)
#: memory, words before it, threads, loads in flight
WALKS = (
    ("contiguous", 0, 32, 1),
    ("odd_rows", 1, 64, 2),
    ("every_second_column", 0, 32, 1),
    ("contiguous", 3, 32, 4),
    ("reversed_columns", 1, 64, 1),
)


def scanned(host: np.ndarray, shard: VocabShard, pairs: bool, walk: tuple[str, int, int, int]) -> np.ndarray:
    """The candidates [rows, words] as uint64."""
    memory, shift, threads, loads = walk
    logits = laid_out(host, memory, shift=shift)
    out = np.zeros((len(host), SPLITS), np.uint64)
    row_stride, column_stride = (stride // host.itemsize for stride in logits.strides)
    chunk = split_chunk(shard.num_valid, SPLITS)
    contiguous = column_stride == 1
    once = contiguous and min(chunk, shard.num_valid) * host.itemsize <= 16 * threads * loads
    scan = numba_argmax.local_argmax_candidates(
        host.dtype.name, pairs, SPLITS, len(shard.ranges), contiguous, threads, loads, once
    )
    scan[len(out) * SPLITS, threads](
        logits.ctypes.data, row_stride, column_stride, chunk, shard.ranges, out.ctypes.data
    )
    return out


number = 0
for dtype in DTYPES:
    for family in ("ties", "nan", "zeros", "minus_inf", "random"):
        shard, walk, pairs = SHARDS[number % len(SHARDS)], WALKS[number % len(WALKS)], number % 2 == 1
        number += 1
        host = make_shard(family, number, ROWS, shard, DTYPES[dtype])
        expected = local_argmax_candidates(host, shard, layout="pairs" if pairs else "packed", splits=SPLITS)
        candidates = scanned(host, shard, pairs, walk)
        assert candidates.tobytes() == expected.tobytes(), (dtype, family, walk)
        tokens = np.zeros(ROWS, np.int64)
        numba_argmax.pick_from_candidates(pairs, SPLITS, 64)[1, 64](candidates.ctypes.data, ROWS, 1, tokens.ctypes.data)
        ids = shard.ids()
        by_id = np.argsort(np.where(ids < 0, shard.vocab_size, ids), kind="stable")[: shard.num_valid]
        assert np.array_equal(tokens, ids[by_id][full_argmax(host[:, by_id])]), (dtype, family)
print("simulated")
