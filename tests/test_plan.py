"""The plan of a scan: a pure table of shapes, its bounds, and that no number of splits changes a token."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DTYPES

from vpa import shard_vocab
from vpa.backends.launches import ScanShape, scan_shape
from vpa.emulate import emulate_top_tokens
from vpa.plan import MAX_SPLITS, SPLITS, Plan

H200 = 132


@pytest.mark.parametrize(
    ("columns", "itemsize", "rows", "splits"),
    [
        (32768, 2, 1, 16),
        (32768, 2, 8, 16),
        (32768, 2, 33, 16),
        (32768, 2, 34, 8),
        (32768, 2, 64, 8),
        (32768, 2, 67, 4),
        (32768, 2, 4096, 4),
        (32768, 4, 64, 8),
        (16160, 2, 8, 8),
        (4096, 2, 1, 2),
        (4096, 2, 1024, 1),
        (128256, 2, 1, 63),
        (128256, 2, 64, 16),
        (10**6, 4, 1, MAX_SPLITS),
        (5, 2, 1, 1),
        (0, 2, 3, 1),
    ],
)
def test_splits_of_a_row(columns, itemsize, rows, splits):
    assert Plan(columns, itemsize, H200).splits(rows) == splits


def test_without_a_gpu_on_every_rank_or_word_of_it_all_rows_are_cut_alike():
    assert Plan.agreed([(100, 132), (100, 0)], 2).splits(1) == SPLITS
    assert Plan.agreed(None, 2).splits(10**6) == SPLITS


def test_ranks_agree_on_the_widest_shard_and_the_smallest_gpu():
    assert Plan.agreed([(100, 132), (32768, 108), (7, 114)], 2) == Plan(32768, 2, 108)


@pytest.mark.parametrize(
    ("columns", "itemsize", "multiprocessors", "one"),
    [(32768, 2, 132, True), (32769, 2, 132, False), (16384, 4, 132, True), (32768, 4, 132, False), (5, 2, 0, False)],
)
def test_a_row_that_fits_into_one_block_needs_no_pick(columns, itemsize, multiprocessors, one):
    assert Plan(columns, itemsize, multiprocessors).in_one_kernel() is one


@pytest.mark.parametrize("columns", [0, 5, 4096, 32768, 128256, 10**7])
@pytest.mark.parametrize("multiprocessors", [0, 1, 16, 132, 1000])
def test_no_number_of_rows_gives_more_candidates_than_were_planned_for(columns, multiprocessors):
    plan = Plan(columns, 2, multiprocessors)
    for max_rows in (1, 3, 64, 1000):
        most = plan.most_candidates(max_rows)
        assert all(rows * plan.splits(rows) <= most for rows in range(1, max_rows + 1))


@pytest.mark.parametrize(
    ("columns", "dtype", "contiguous", "shape"),
    [
        (2048, "bfloat16", True, ScanShape(256, 1, True)),
        (2049, "bfloat16", True, ScanShape(256, 2, True)),
        (8192, "bfloat16", True, ScanShape(256, 4, True)),
        (8193, "bfloat16", True, ScanShape(256, 2, False)),
        (4096, "float32", True, ScanShape(256, 4, True)),
        (63, "float32", True, ScanShape(32, 1, True)),
        (0, "float32", True, ScanShape(32, 1, True)),
        (100, "float16", False, ScanShape(128, 1, False)),
        (10**6, "float16", False, ScanShape(256, 1, False)),
    ],
)
def test_the_shape_of_a_scan(columns, dtype, contiguous, shape):
    assert scan_shape(columns, DTYPES[dtype], contiguous) == shape


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 200])
def test_planned_splits_give_the_full_argmax(rows):
    import cupy

    shards = shard_vocab(40960, 2)
    logits = np.random.default_rng(rows).integers(-3, 4, (rows, 40960)).astype(np.float32)
    parts = [cupy.asarray(logits[:, shard.ranges[0][2] :][:, : shard.width]) for shard in shards]
    assert np.array_equal(emulate_top_tokens(parts, shards).get(), logits.argmax(1))
