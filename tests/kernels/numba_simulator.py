"""Run the Numba twins under Numba's CUDA simulator on small shapes; started with NUMBA_ENABLE_CUDASIM=1."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
from numba import config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle import DTYPES, full_argmax, laid_out
from verification import batch

from vpa import VocabShard, local_argmax_candidates, shard_vocab
from vpa.backends import numpy_verify, verify_launches
from vpa.bench.families import make_shard
from vpa.contribution import BONUS_BLOCK, DRAFT_BLOCK, Contribution, blocks_of
from vpa.kernels import numba_argmax, numba_verify
from vpa.requests import Requests
from vpa.vocab import block_span, split_chunk

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


def verified(form: str, nan: str, dtype: str, synthetic: bool) -> None:
    """Scan and finish of a verification over two ranks, against the numpy backend."""
    k, count, shards = 2, 3, VocabShard.even(1100, 2)
    rng = np.random.default_rng(k)
    given = batch(rng, rng.integers(0, 3, count * (k + 1)), k, 1100, count)
    rates = np.array([0.8, 0.4], np.float32) if synthetic else None
    hosts = [make_shard("nan", 1, count * (k + 1), shard, DTYPES[dtype]) for shard in shards]
    requests = Requests.given(hosts[0], k, rates, **given)
    contribution = Contribution.agreed(form, k, SPLITS, [blocks_of(shard) for shard in shards], 1100)
    lines, width = contribution.shape(len(hosts[0]), count)
    wanted, gathered = np.zeros((2 * lines, width), np.uint64), np.zeros((2 * lines, width), np.uint64)
    for rank, (host, shard) in enumerate(zip(hosts, shards, strict=True)):
        part, out = (array[rank * lines : (rank + 1) * lines] for array in (wanted, gathered))
        numpy_verify.prepare_verify_scan(host, shard, contribution, nan, requests, part)(host, requests, part)
        walk = (dtype, len(shard.ranges), True, 32, 1, False)
        address, stride, ignored = host.ctypes.data, host.shape[1], nan == "ignore"
        if form == "candidate":
            scan = numba_argmax.local_argmax_candidates(walk[0], False, width, *walk[1:], ignored)
            scan[lines * width, 32](
                address, stride, 1, split_chunk(shard.num_valid, width), shard.ranges, out.ctypes.data
            )
        else:
            widths = (contribution.draft_width, contribution.bonus_width)
            scan = numba_verify.local_argmax_blocks(*walk, ignored, k, *widths, DRAFT_BLOCK, BONUS_BLOCK)
            firsts = (block_span(shard, size)[0] * size for size in (DRAFT_BLOCK, BONUS_BLOCK))
            offsets = requests.cu_num_rows.ctypes.data
            scan[lines * width, 32](address, stride, 1, shard.ranges, out.ctypes.data, offsets, len(host), *firsts)
        assert np.array_equal(out, part), (form, nan, dtype, rank)
    outputs = [
        (np.zeros((count, k + 1), np.int64), np.zeros(count, np.int32), np.zeros(count, np.int32)) for _ in range(2)
    ]
    numpy_verify.prepare_verify_finish(wanted, contribution, requests, 1100, outputs[0])(wanted, requests, outputs[0])
    finish = numba_verify.greedy_verify(
        form == "blocks", k, contribution.draft_width, contribution.bonus_width, synthetic, 64
    )
    inputs = [array.ctypes.data for array in verify_launches.inputs(requests)] + ([] if synthetic else [0, 0])
    addresses = [array.ctypes.data for array in outputs[1]]
    finish[count, 64](gathered.ctypes.data, lines, 2, len(hosts[0]), 1100, *inputs, *addresses)
    for got, expected in zip(outputs[1], outputs[0], strict=True):
        assert np.array_equal(got, expected), (form, nan, dtype, got, expected)


for form, nan, dtype, synthetic in (
    ("candidate", "ignore", "bfloat16", False),
    ("blocks", "ignore", "float16", True),
    ("blocks", "first", "float32", False),
):
    verified(form, nan, dtype, synthetic)
print("simulated")
