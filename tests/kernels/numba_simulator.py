"""Run the Numba twins under Numba's CUDA simulator on small shapes; started with NUMBA_ENABLE_CUDASIM=1."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numba import config, cuda

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle import DTYPES, full_argmax

from vpa import VocabShard, local_argmax_candidates, shard_vocab
from vpa.bench.families import make_shard
from vpa.kernels import numba_argmax
from vpa.vocab import split_chunk

assert config.ENABLE_CUDASIM
THREADS, SPLITS = 32, 2

SHARDS = (
    VocabShard.even(150, 1)[0],
    shard_vocab(100, 2, added_vocab_size=20)[0],
    VocabShard(0, 1, 500, 130, ((3, 60, 400), (70, 1, 7), (80, 50, 100))),
)

for dtype in DTYPES:
    for number, family in enumerate(("ties", "nan", "zeros", "minus_inf")):
        shard, pairs = SHARDS[number % len(SHARDS)], number % 2 == 1
        host = make_shard(family, 1, 2, shard, DTYPES[dtype])
        expected = local_argmax_candidates(host, shard, layout="pairs" if pairs else "packed", splits=SPLITS)
        words = host.view(f"u{host.itemsize}").ravel()
        out = cuda.to_device(np.zeros((2 * SPLITS, 2), np.uint32))
        scan = numba_argmax.local_argmax_candidates(dtype, pairs, SPLITS, len(shard.ranges), THREADS)
        chunk = split_chunk(shard.num_valid, SPLITS)
        scan[2 * SPLITS, THREADS](words, 0, shard.width, 1, chunk, shard.ranges, out, out.view(np.float32))
        candidates = out.copy_to_host()
        assert candidates.tobytes() == expected.tobytes(), (dtype, family)
        tokens = np.zeros(2, np.int64)
        pick = numba_argmax.pick_from_candidates(pairs, SPLITS)
        pick[2, 32](candidates, candidates.view(np.float32), 2, 1, tokens)
        ids = shard.ids()
        by_id = np.argsort(np.where(ids < 0, shard.vocab_size, ids), kind="stable")[: shard.num_valid]
        assert np.array_equal(tokens, ids[by_id][full_argmax(host[:, by_id])]), (dtype, family)
print("simulated")
