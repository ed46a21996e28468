"""Who plays which rank: the shards of a job hold every id once, however many ids there are."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import vpa
from vpa import VocabShard, shard_vocab
from vpa.bench.job import Job, shards_of


def job(shards) -> Job:
    return Job(vpa.comm.solo(), tuple(shards), np, "numpy")


@pytest.mark.parametrize(
    "shards", [VocabShard.even(5, 8), shard_vocab(1010, 2, added_vocab_size=16), shards_of(65, 3)[0]]
)
def test_shards_that_cover_the_vocabulary(shards):
    assert job(shards).tp_size == len(shards)


@pytest.mark.parametrize(
    "shards",
    [
        VocabShard.even(10, 2)[:1],
        VocabShard.even(10, 2)[1:],
        (VocabShard(0, 2, 10, 6, ((0, 6, 0),)), VocabShard(1, 2, 10, 5, ((0, 5, 5),))),
        (VocabShard(0, 2, 10, 4, ((0, 4, 0),)), VocabShard(1, 2, 10, 5, ((0, 5, 5),))),
        (VocabShard(0, 1, 10, 9, ((0, 4, 0), (4, 5, 4))),),
        (VocabShard(0, 1, 10, 9, ()),),
    ],
)
def test_shards_that_miss_an_id_or_hold_one_twice_are_refused(shards):
    with pytest.raises(ValueError, match="do not hold each id of the vocabulary once"):
        job(shards)


def test_a_huge_vocabulary_takes_no_memory_to_check():
    tracemalloc.start()
    assert job(shards_of(2**32 - 1, 1024)[0]).tp_size == 1024
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
