"""Input families: a value depends on seed, row and global id alone, and each family holds what it says."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DTYPES, full_argmax

from vpa import VocabShard, shard_vocab
from vpa.bench import families
from vpa.bench.families import FAMILIES, make_shard

VOCAB = 32001


def whole(family: str, seed: int = 5, rows: int = 4, dtype: str = "float32") -> np.ndarray:
    return make_shard(family, seed, rows, VocabShard.even(VOCAB, 1)[0], DTYPES[dtype])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [2, 3, 8])
def test_the_number_of_ranks_changes_no_value(family, tp):
    for shards in (VocabShard.even(VOCAB, tp), shard_vocab(VOCAB, tp, pad_to=64 * tp)):
        joined = np.empty((4, VOCAB), np.float32)
        for shard in shards:
            part, ids = make_shard(family, 5, 4, shard, DTYPES["float32"]), shard.ids()
            joined[:, ids[ids >= 0]] = part[:, ids >= 0]
            assert np.isnan(part[:, ids < 0]).all()
        assert np.array_equal(joined.view(np.uint32), whole(family).view(np.uint32))


@pytest.mark.parametrize("family", FAMILIES)
def test_how_many_are_made_at_once_changes_no_value(family, monkeypatch):
    expected = whole(family)
    monkeypatch.setattr(families, "_BLOCK", 1000)
    assert np.array_equal(whole(family).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_rows_are_the_first_rows(family):
    assert np.array_equal(whole(family, rows=2).view(np.uint32), whole(family)[:2].view(np.uint32))


@pytest.mark.parametrize("family", ["random", "ties"])
def test_seeds_and_rows_differ(family):
    one, other = whole(family), whole(family, seed=6)
    assert (one != other).any() and (one[0] != one[1]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_family_holds_what_it_says(dtype):
    expected = {
        "planted": VOCAB // 3,
        "minus_inf": 0,
        "plus_inf": VOCAB // 2,
        "nan": VOCAB // 3,
        "zeros": VOCAB // 4 + 3,
    }
    for family, token in expected.items():
        assert full_argmax(whole(family, dtype=dtype)).tolist() == [token] * 4, family
    ties = whole("ties", dtype=dtype).astype(np.float32)
    assert set(np.unique(ties)) == set(range(-3, 4))
    assert ((ties == 3).sum(axis=1) > 1000).all()


def test_random_is_bell_shaped_and_centred():
    values = whole("random", rows=8)
    assert abs(values.mean()) < 0.02 and 1.1 < values.std() < 1.2 and np.abs(values).max() < 4
