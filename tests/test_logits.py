"""The head and its processor: both ways to a token agree, over ranks, paddings, dtypes, transforms and maps."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from oracle import DTYPES, full_argmax
from safetensors.numpy import save_file

import vpa
from vpa import LogitsProcessor, ParallelLMHead, VocabShard, logits, shard_vocab, weights
from vpa.linear import Linear

HIDDEN = 24
BF16 = np.dtype(ml_dtypes.bfloat16)

#: vocabulary -> all its ids in shards, for each number of ranks: padded as engines pad, with added ids, uneven.
SHARDINGS = {
    "500 in 512": lambda tp: shard_vocab(500, tp, pad_to=64 * tp if tp == 3 else 64),
    "32001": lambda tp: VocabShard.even(32001, tp) if tp == 3 else shard_vocab(32001, tp),
    "129280": lambda tp: VocabShard.even(129280, tp) if tp == 3 else shard_vocab(129280, tp),
    "1010 and 16 added": lambda tp: shard_vocab(1010, tp, added_vocab_size=16, pad_to=64 * tp),
    "1001 uneven": lambda tp: VocabShard.even(1001, tp),
}
TPS = (1, 2, 3, 4, 8)


def integer_heads(shards, dtype=BF16, bias: bool = False) -> list[ParallelLMHead]:
    """Heads of small integers: products are exact, so that no cut of the vocabulary changes a logit. Ties abound.

    Rows of padding are NaN, which would win everywhere.
    """
    heads = []
    for shard in shards:
        ids = shard.ids()
        weight = ((ids[:, None] * 31 + np.arange(HIDDEN) * 17) // 13 % 5 - 2).astype(dtype)
        weight[ids < 0] = np.nan
        vector = (ids % 7 / 4).astype(dtype) if bias else None
        heads.append(ParallelLMHead(weight, shards, shard.rank, vector))
    return heads


def integer_hidden(rows: int, dtype=BF16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, (rows, HIDDEN)).astype(dtype)


def both(processor: LogitsProcessor, heads, hidden) -> np.ndarray:
    """The tokens by the local argmax, once they agree with those of the full gather."""
    tokens = processor.get_top_tokens(heads, hidden)
    assert tokens.dtype == np.int64
    assert np.array_equal(tokens, logits.full_argmax(processor.compute_logits(heads, hidden)))
    return tokens


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("vocab", SHARDINGS)
def test_both_ways_agree_with_the_whole_product(vocab, tp):
    shards = SHARDINGS[vocab](tp)
    size = shards[0].vocab_size
    whole = integer_heads(VocabShard.even(size, 1), bias=True)[0]
    heads = integer_heads(shards, bias=True)
    for rows in (1, 16, 128):
        hidden = integer_hidden(rows)
        expected = whole.product(hidden)
        for processor in (LogitsProcessor(), LogitsProcessor(scale=-0.5, soft_cap=30, layout="pairs")):
            full = processor.compute_logits(heads, hidden)
            assert full.shape == (rows, size) and full.dtype == BF16
            wanted = vpa.transform.apply(processor.transform, expected)
            assert np.array_equal(full.view(np.uint16), wanted.view(np.uint16))
            assert np.array_equal(both(processor, heads, hidden), full_argmax(wanted))


@pytest.mark.parametrize("hidden_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_heads_dtype_is_the_logits(dtype, hidden_dtype):
    """Hidden states of another dtype are rounded to it; the product and the bias are rounded once, together."""
    shards = shard_vocab(1000, 4)
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((5, HIDDEN)).astype(DTYPES[hidden_dtype])
    whole = rng.standard_normal((1000, HIDDEN)).astype(DTYPES[dtype])
    bias = rng.standard_normal(1000).astype(DTYPES[dtype])
    heads = []
    for shard in shards:
        ids = shard.ids()
        heads.append(ParallelLMHead(whole[ids], shards, shard.rank, bias[ids]))
    full = LogitsProcessor().compute_logits(heads, hidden)
    assert full.dtype == DTYPES[dtype]
    exact = hidden.astype(DTYPES[dtype]).astype(np.float64) @ whole.astype(np.float64).T + bias.astype(np.float64)
    ulp = np.finfo(np.float32).eps if dtype == "float32" else float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    assert np.allclose(full.astype(np.float64), exact, rtol=0.51 * ulp, atol=1e-5)
    both(LogitsProcessor(), heads, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 0.37, -1.3, 0])
@pytest.mark.parametrize("soft_cap", [None, 2.0, 30])
def test_scale_and_soft_cap(scale, soft_cap, dtype):
    processor = LogitsProcessor(scale=scale, soft_cap=soft_cap)
    tokens = both(
        processor, integer_heads(shard_vocab(1010, 2, added_vocab_size=16), DTYPES[dtype]), integer_hidden(16)
    )
    if scale == 0:
        assert not tokens.any()


def test_local_logits_are_those_that_are_gathered():
    shards = shard_vocab(500, 4)
    heads, hidden = integer_heads(shards), integer_hidden(3)
    processor = LogitsProcessor(scale=2, soft_cap=9)
    parts, full = processor.compute_logits_local(heads, hidden), processor.compute_logits(heads, hidden)
    for part, shard in zip(parts, shards, strict=True):
        ids = shard.ids()
        assert part.shape == (3, shard.width) and np.array_equal(part[:, ids >= 0], full[:, ids[ids >= 0]])
    one = integer_heads(VocabShard.even(500, 1))[0]
    assert np.array_equal(processor.compute_logits_local(one, hidden), full)


def test_no_rows_and_empty_ranks():
    heads = integer_heads(VocabShard.even(10, 8))
    assert both(LogitsProcessor(), heads, integer_hidden(0)).shape == (0,)
    assert LogitsProcessor().compute_logits(heads, integer_hidden(0)).shape == (0, 10)
    both(LogitsProcessor(), heads, integer_hidden(4))


class TestMap:
    def test_a_draft_vocabulary_in_the_targets(self):
        """Offsets [0, 3, 10] on draft logits [0, 5, 1]: draft id 1 is target id 4."""
        processor = LogitsProcessor(draft_to_target=[0, 3, 10], target_vocab_size=13)
        head = ParallelLMHead(np.array([[0], [5], [1]], np.float32), VocabShard.even(3, 1))
        hidden = np.ones((1, 1), np.float32)
        full = processor.compute_logits(head, hidden)
        assert full.shape == (1, 13) and full[0, [0, 4, 12]].tolist() == [0, 5, 1] and np.isneginf(full).sum() == 10
        assert both(processor, head, hidden).tolist() == [4]

    @pytest.mark.parametrize("tp", TPS)
    def test_over_ranks_with_ties(self, tp):
        shards = VocabShard.even(1001, tp)
        offsets = np.cumsum(np.random.default_rng(0).integers(0, 3, 1001))
        processor = LogitsProcessor(draft_to_target=offsets, target_vocab_size=int(1001 + offsets[-1]))
        plain = LogitsProcessor()
        heads, hidden = integer_heads(shards), integer_hidden(16)
        tokens = both(plain, heads, hidden)
        assert np.array_equal(both(processor, heads, hidden), tokens + offsets[tokens])

    def test_a_row_without_a_finite_logit(self):
        processor = LogitsProcessor(draft_to_target=[4, 4], target_vocab_size=9)
        head = ParallelLMHead(np.full((2, 1), -np.inf, np.float32), VocabShard.even(2, 1))
        assert processor.get_top_tokens(head, np.ones((1, 1), np.float32)).tolist() == [4]

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ({"draft_to_target": [0]}, ValueError, "draft_to_target and target_vocab_size go together"),
            ({"target_vocab_size": 3}, ValueError, "draft_to_target and target_vocab_size go together"),
            ({"draft_to_target": [0.5], "target_vocab_size": 3}, TypeError, r"float64\[1\]; integers"),
            ({"draft_to_target": [[1]], "target_vocab_size": 3}, TypeError, r"int64\[1, 1\]; integers"),
            (
                {"draft_to_target": [0, 5], "target_vocab_size": 6},
                ValueError,
                "leads to ids 0 to 6; ascending.* 0 to 5",
            ),
            ({"draft_to_target": [-1], "target_vocab_size": 6}, ValueError, "leads to ids -1 to -1"),
            ({"draft_to_target": [5, -1], "target_vocab_size": 9}, ValueError, "leads to ids 0 to 5; ascending"),
            ({"draft_to_target": [1, 0], "target_vocab_size": 9}, ValueError, "leads to ids 1 to 1; ascending"),
        ],
    )
    def test_maps_that_do_not_fit(self, given, error, message):
        with pytest.raises(error, match=message):
            LogitsProcessor(**given)

    def test_a_map_of_another_vocabulary(self):
        processor = LogitsProcessor(draft_to_target=[0, 0], target_vocab_size=2)
        head = integer_heads(VocabShard.even(3, 1))[0]
        for method in (processor.get_top_tokens, processor.compute_logits):
            with pytest.raises(ValueError, match="draft_to_target has 2 numbers, the head 3 ids"):
                method(head, integer_hidden(1))


class TestFiles:
    @pytest.fixture
    def file(self, tmp_path) -> str:
        rng = np.random.default_rng(0)
        tensors = {
            "lm_head.weight": rng.standard_normal((1000, HIDDEN)).astype(BF16),
            "lm_head.bias": rng.standard_normal(1000).astype(np.float32),
            "short": np.zeros(3, np.float32),
        }
        save_file(tensors, tmp_path / "model.safetensors")
        return str(tmp_path / "model.safetensors")

    @pytest.mark.parametrize("tp", TPS)
    def test_each_rank_loads_its_rows(self, file, tp):
        shards = shard_vocab(1000, tp, pad_to=64 * tp)
        whole = ParallelLMHead.load(file, VocabShard.even(1000, 1), bias="lm_head.bias")
        heads = [ParallelLMHead.load(file, shards, rank, bias="lm_head.bias") for rank in range(tp)]
        for head in heads:
            ids = head.shard.ids()
            assert head.weight.dtype == BF16
            assert np.array_equal(head.weight[ids >= 0], whole.weight[ids[ids >= 0]])
            assert np.array_equal(head.bias[ids >= 0], whole.bias[ids[ids >= 0]]) and not head.weight[ids < 0].any()
        both(LogitsProcessor(), heads, integer_hidden(5))

    def test_another_dtype(self, file):
        head = ParallelLMHead.load(file, VocabShard.even(1000, 1), dtype="float32")
        assert head.weight.dtype == np.float32
        assert head.product(integer_hidden(2)).dtype == np.float32

    def test_what_does_not_fit(self, file):
        one = VocabShard.even(1000, 1)
        with pytest.raises(ValueError, match="has 1000 rows, the shards a vocabulary of 999"):
            ParallelLMHead.load(file, VocabShard.even(999, 1))
        with pytest.raises(ValueError, match=r"has no tensor 'bias'; it has lm_head.bias, lm_head.weight, short"):
            ParallelLMHead.load(file, one, bias="bias")
        with pytest.raises(ValueError, match=r"tensor 'short' of .* is F32\[3\]; \[1000\] of BF16"):
            ParallelLMHead.load(file, one, bias="short")
        with pytest.raises(ValueError, match="cannot read"):
            ParallelLMHead.load("/no/such.safetensors", one)
        with pytest.raises(TypeError, match="logits are float64"):
            ParallelLMHead.load(file, one, dtype="float64")


def test_seeded_heads_do_not_depend_on_the_cut(monkeypatch):
    whole = ParallelLMHead.seeded(5, VocabShard.even(1010, 1), hidden_size=30).weight
    assert 0.9 < whole.astype(np.float32).std() * 30**0.5 < 1.1
    monkeypatch.setattr(weights, "_SEEDED_WORDS", 999)
    for shards in (VocabShard.even(1010, 3), shard_vocab(1010, 4)):
        for shard in shards:
            head = ParallelLMHead.seeded(5, shards, shard.rank, hidden_size=30)
            ids = shard.ids()
            assert np.array_equal(head.weight[ids >= 0], whole[ids[ids >= 0]]) and not head.weight[ids < 0].any()


class TestRefusals:
    shards = VocabShard.even(100, 2)
    weight = np.zeros((50, 8), np.float32)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (
                {"weight": np.zeros((51, 8), np.float32)},
                ValueError,
                r"weight is \[51, 8\]; rank 0 takes \[50, hidden\]",
            ),
            ({"weight": np.zeros(50, np.float32)}, ValueError, r"weight has shape \(50,\); 2 dimensions"),
            ({"weight": np.zeros((50, 8))}, TypeError, "weight is float64; bfloat16, float16, float32"),
            ({"weight": "w"}, TypeError, "weight is a str; a NumPy or CuPy array"),
            ({"bias": np.zeros(49, np.float32)}, ValueError, "bias has 49 numbers, the weight 50 rows"),
            ({"rank": 2}, ValueError, "rank is 2; with 2 shards it is 0 to 1"),
            ({"rank": "0"}, TypeError, "rank is '0'; an integer"),
            ({"shards": shards[0]}, TypeError, "shards is a VocabShard; all ranks' VocabShards, in a list or tuple"),
            (
                {"shards": shards[::-1]},
                ValueError,
                "shards are of rank 1 of 2, rank 0 of 2; one of each rank, in order",
            ),
            ({"shards": shards[:1]}, ValueError, "shards are of rank 0 of 2; one of each"),
            (
                {"shards": (shards[0], dataclasses.replace(shards[1], ranges=((0, 49, 51),)))},
                ValueError,
                "do not hold each id of a vocabulary of 100 once, near id 50",
            ),
        ],
    )
    def test_heads(self, change, error, message):
        arguments = {"weight": self.weight, "shards": self.shards, "rank": 0, "bias": None, **change}
        with pytest.raises(error, match=message):
            ParallelLMHead(**arguments)

    @pytest.mark.parametrize("method", ["compute_logits", "get_top_tokens", "compute_logits_local"])
    def test_calls(self, method):
        heads = [ParallelLMHead(self.weight, self.shards, rank) for rank in (0, 1)]
        call = getattr(LogitsProcessor(), method)
        for head, hidden, error, message in (
            (heads, np.zeros((2, 9), np.float32), ValueError, r"hidden is \[2, 9\]; the weight takes \[rows, 8\]"),
            (heads, np.zeros(8, np.float32), ValueError, r"hidden has shape \(8,\); 2 dimensions"),
            (heads, np.zeros((2, 8)), TypeError, "hidden is float64; bfloat16"),
            (heads, [[0] * 8], TypeError, "hidden is a builtins.list"),
            (heads[:1], np.zeros((2, 8), np.float32), ValueError, "a list of 1 heads; one of each rank 0 to 1"),
            (
                heads[0],
                np.zeros((2, 8), np.float32),
                ValueError,
                "the head is rank 0 of 2, the communicator rank 0 of 1",
            ),
            (None, np.zeros((2, 8), np.float32), TypeError, "head is a NoneType; a ParallelLMHead"),
        ):
            with pytest.raises(error, match=message):
                call(head, hidden)

    def test_processors(self):
        with pytest.raises(TypeError, match="comm is a str without rank"):
            LogitsProcessor("solo")
        with pytest.raises(ValueError, match="layout is 'x'"):
            LogitsProcessor(layout="x")
        with pytest.raises(ValueError, match=r"soft_cap is -1.0"):
            LogitsProcessor(soft_cap=-1)


def test_products_round_once():
    """2^8 + 1 from two products, and a bias that takes it across a rounding boundary of bf16."""
    x = np.array([[256, 1]], np.float32)
    one = Linear(np.ones((1, 2), BF16), np.full(1, 0.5, BF16))
    assert one(x).astype(np.float32).tolist() == [[258]]
    assert Linear(np.ones((1, 2), BF16))(x).astype(np.float32).tolist() == [[256]]
