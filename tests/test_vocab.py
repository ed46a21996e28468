"""Shards: every row of the padding table, shards made by hand, and how splits cut a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vpa import VocabShard, shard_vocab
from vpa.vocab import MAX_RANGES, SPLIT_ALIGNMENT, split_chunk, split_runs


@pytest.mark.parametrize(
    ("org", "added", "tp", "width", "valid"),
    [
        (65, 0, 8, 16, [16, 16, 16, 16, 1, 0, 0, 0]),
        (500, 0, 4, 128, [128, 128, 128, 116]),
        (32001, 0, 4, 8016, [8016, 8016, 8016, 7953]),
        (50257, 0, 8, 6288, [6288] * 7 + [6241]),
        (151666, 0, 4, 37920, [37920, 37920, 37920, 37906]),
        (32000, 256, 2, 16128, [16128, 16128]),
    ],
)
def test_padding_table(org, added, tp, width, valid):
    shards = shard_vocab(org, tp, added_vocab_size=added)
    assert [shard.width for shard in shards] == [width] * tp
    assert [shard.num_valid for shard in shards] == valid
    assert all(shard.vocab_size == org + added and shard.tp_size == tp for shard in shards)


def test_added_ids_follow_the_original_padding():
    first, second = shard_vocab(1010, 2, added_vocab_size=16)
    assert first.width == second.width == 1088 // 2
    assert first.ranges == ((0, 512, 0), (512, 16, 1010))
    assert second.ranges == ((0, 498, 512),)
    left, right = shard_vocab(32000, 2, added_vocab_size=256)
    assert left.ranges == ((0, 16000, 0), (16000, 128, 32000))
    assert right.ranges == ((0, 16000, 16000), (16000, 128, 32128))


def test_a_width_that_does_not_divide_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"129280.*tp_size 3.*pad_to=192.*VocabShard.even\(129280, 3\)"):
        shard_vocab(129280, 3)
    assert [shard.width for shard in shard_vocab(129280, 3, pad_to=192)] == [43136] * 3


@pytest.mark.parametrize(("vocab", "tp"), [(1001, 2), (32001, 3), (32001, 4), (32001, 8), (5, 8), (8, 8), (1, 1)])
def test_even_shards_cover_the_vocabulary_once(vocab, tp):
    shards = VocabShard.even(vocab, tp)
    assert np.concatenate([shard.ids() for shard in shards]).tolist() == list(range(vocab))
    assert len(shards) == tp


def test_even_is_a_ceiling_split():
    assert [shard.width for shard in VocabShard.even(1001, 2)] == [501, 500]
    assert [shard.width for shard in VocabShard.even(5, 8)] == [1, 1, 1, 1, 1, 0, 0, 0]


@given(st.integers(1, 5000), st.integers(0, 300), st.integers(1, 9), st.sampled_from([1, 8, 64]))
@settings(max_examples=200, deadline=None)
def test_padded_shards_cover_every_id_once(org, added, tp, pad):
    shards = shard_vocab(org, tp, added_vocab_size=added, pad_to=pad * tp)
    ids = np.concatenate([shard.ids() for shard in shards])
    assert sorted(ids[ids >= 0].tolist()) == list(range(org + added))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((2, 2, 10, 5, ()), ValueError, "rank is 2; with tp_size 2 it is 0 to 1"),
        ((0, 1, 0, 5, ()), ValueError, "vocab_size is 0"),
        ((0, 1, 2**32 - 1, 5, ((0, 5, 2**32 - 5),)), ValueError, "up to 4294967295; vocab_size is 4294967295"),
        ((0, 1, 2**32, 5, ()), ValueError, "vocab_size is 4294967296"),
        ((0, 1, 10, -1, ()), ValueError, "width is -1"),
        ((0, 1, 10, 5, ((0, 6, 0),)), ValueError, "columns up to 5; width is 5"),
        ((0, 1, 10, 5, ((-1, 2, 0),)), ValueError, "columns below 0"),
        ((0, 1, 10, 5, ((0, 3, 8),)), ValueError, "ids up to 10; vocab_size is 10"),
        ((0, 1, 10, 5, ((0, 3, 0), (2, 2, 5))), ValueError, "columns twice"),
        ((0, 1, 10, 5, ((0, 3, 0), (3, 2, 2))), ValueError, "ids twice"),
        ((0, 1, 10, 5, ((0, -1, 0),)), ValueError, "count of -1"),
        ((0, 1, 10, 5.0, ()), TypeError, "width is 5.0; an integer"),
        ((False, 1, 10, 5, ()), TypeError, "rank is False; an integer"),
        ((0, np.True_, 10, 5, ()), TypeError, "tp_size is .*True.*; an integer"),
        ((0, 1, 10, 5, None), TypeError, "ranges is None; .* triples"),
        ((0, 1, 10, 5, (3,)), TypeError, r"ranges\[0\] is 3; .* triples"),
        ((0, 1, 10, 5, ((0, 5),)), ValueError, r"ranges\[0\] is \(0, 5\); \(local_start, count, first_id\)"),
        ((0, 1, 1000, 1000, tuple((i, 1, i) for i in range(0, 2 * MAX_RANGES + 2, 2))), ValueError, "at most 128"),
    ],
)
def test_shards_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        VocabShard(*arguments)


def test_numpy_integers_are_taken_and_empty_ranges_dropped():
    shard = VocabShard(np.int64(0), np.int32(1), np.uint32(10), np.int64(5), [(np.int64(0), 0, 0), [0, 5, np.int64(2)]])
    assert shard == VocabShard(0, 1, 10, 5, ((0, 5, 2),)) and hash(shard) == hash(VocabShard(0, 1, 10, 5, ((0, 5, 2),)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard_vocab(0, 2), "org_vocab_size is 0"),
        (lambda: shard_vocab(10, 0), "tp_size is 0"),
        (lambda: shard_vocab(10, 2, added_vocab_size=-1), "added_vocab_size -1"),
        (lambda: shard_vocab(10, 2, pad_to=0), "pad_to is 0"),
        (lambda: VocabShard.even(0, 4), "vocab_size is 0"),
        (lambda: VocabShard.even(4, 0), "tp_size is 0"),
    ],
)
def test_bad_vocabularies_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@st.composite
def shards(draw):
    """Shards with gaps, ranges in any order of ids, some empty."""
    counts = draw(st.lists(st.integers(0, 300), max_size=5))
    gaps = draw(st.lists(st.integers(0, 70), min_size=len(counts) + 1, max_size=len(counts) + 1))
    order = draw(st.permutations(range(len(counts))))
    first_ids, next_id = {}, 0
    for index in order:
        first_ids[index], next_id = next_id, next_id + counts[index] + gaps[index]
    ranges, column = [], 0
    for index, count in enumerate(counts):
        ranges.append((column + gaps[index], count, first_ids[index]))
        column += gaps[index] + count
    return VocabShard(0, 1, max(next_id, 1), column + gaps[-1], tuple(ranges))


@given(shards(), st.sampled_from([1, 2, 3, 8, 50]))
@settings(max_examples=200, deadline=None)
def test_splits_cover_each_valid_column_once_in_chunks(shard, splits):
    runs = split_runs(shard, splits)
    chunk = split_chunk(shard.num_valid, splits)
    seen, per_split = np.full(shard.width, -1), np.zeros(splits, int)
    for split, start, count, first_id in runs:
        assert count > 0 and (seen[start : start + count] == -1).all()
        seen[start : start + count] = np.arange(first_id, first_id + count)
        per_split[split] += count
    assert np.array_equal(seen, shard.ids())
    assert chunk % SPLIT_ALIGNMENT == 0 and (per_split <= chunk).all()
