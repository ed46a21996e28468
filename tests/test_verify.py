"""greedy_verify, its emulation and GreedyVerify in one process, against the rules in plain Python; what they refuse."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DTYPES, full_argmax, laid_out, to_host
from verification import argmax, batch, expected, lists, uniform

import vpa
from vpa import VocabShard, backends, emulate_greedy_verify, greedy_verify, shard_vocab
from vpa.contribution import BONUS_BLOCK, DRAFT_BLOCK, Contribution, blocks_of
from vpa.requests import Requests
from vpa.vocab import block_runs, block_span

FORMS = ("candidate", "blocks")
NAN_RULES = ("first", "ignore")
NAN, INF = math.nan, math.inf


def sharding(vocab: int, tp: int) -> tuple[VocabShard, ...]:
    """Padded as engines pad, so that shards have padding columns; three ranks get an even cut."""
    return VocabShard.even(vocab, tp) if tp == 3 else shard_vocab(vocab, tp)


def parts_of(whole: np.ndarray, shards, xp=np, memory: str = "contiguous") -> list:
    """The ranks' logits of whole rows [N, vocabulary]; what lies in padding would change tokens."""
    parts = []
    for shard in shards:
        part = np.empty((len(whole), shard.width), whole.dtype)
        part[...] = np.resize(np.array([INF, NAN, 9], np.float32), shard.width).astype(whole.dtype)
        ids = shard.ids()
        part[:, ids >= 0] = whole[:, ids[ids >= 0]]
        parts.append(laid_out(part, memory, xp, shift=1))
    return parts


def whole_rows(rng: np.random.Generator, rows: int, shards, dtype: str = "bfloat16") -> np.ndarray:
    """Rows [N, vocabulary] of every kind: ties, equal maxima across edges of shards and blocks, NaN, infinities."""
    vocab = shards[0].vocab_size
    whole = rng.integers(-300, 300, (rows, vocab)).astype(np.float32) / 64  # rounded to bf16 they tie
    edges = [first for shard in shards for _, _, first in shard.ranges if first > 0] or [vocab // 2]
    blocks = [size for size in (DRAFT_BLOCK, BONUS_BLOCK, 3 * BONUS_BLOCK) if size < vocab] or [vocab // 3]
    for row in range(rows):
        edge = (edges + blocks)[row % len(edges + blocks)]
        match row % 7:
            case 1:
                whole[row, [edge - 1, edge]] = 8
            case 2:
                whole[row] = -INF
            case 3:
                whole[row] = NAN
            case 4:
                whole[row, rng.integers(0, vocab, 3)] = NAN
            case 5:
                whole[row, [edge, vocab - 1]] = INF
            case 6:
                whole[row] = np.where(rng.random(vocab) < 0.5, np.float32(-INF), np.float32(NAN))
    return whole.astype(DTYPES[dtype])


def best_of(whole: np.ndarray, nan: str) -> np.ndarray:
    """The argmax of whole rows by host NumPy."""
    if nan == "ignore":
        wide = whole.astype(np.float32)
        return full_argmax(np.where(np.isnan(wide), np.float32(-INF), wide))
    return full_argmax(whole)


def placed(given: dict, xp) -> dict:
    return {name: xp.asarray(array) for name, array in given.items()}


def check(backend, whole, shards, k, seed=0, nan_rules=NAN_RULES, memory="contiguous", requests=7) -> None:
    """Both forms, both kinds of acceptance, against the rules."""
    vocab, rng = shards[0].vocab_size, np.random.default_rng(seed)
    parts = parts_of(whole, shards, backend.xp, memory)
    for nan, rates in itertools.product(nan_rules, (None, vpa.conditional_acceptance(k, mean=1 + 0.6 * k))):
        best = best_of(whole, nan)
        given = batch(rng, best, k, vocab, requests)
        wanted = expected(best, given, k, vocab, rates)
        for form in FORMS:
            outcome = emulate_greedy_verify(
                parts, shards, **placed(given, backend.xp), num_draft_tokens=k, acceptance=rates, form=form, nan=nan,
                backend=backend.name,
            )  # fmt: skip
            assert [array.dtype for array in outcome] == [np.int64, np.int32, np.int32]
            assert lists(outcome) == wanted, (form, nan, rates, shards[0].tp_size)


@pytest.mark.parametrize("vocab", [1000, 50257, 200064])
@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_the_matrix_of_ranks_vocabularies_and_drafts(backend, tp, vocab):
    """Shards narrower than a block, ties across the edge of one, padding, NaN rows, prefill, placeholders."""
    drafts = (1, 3, 5)
    if backend.is_slow:  # every access is checked, and kernels are compiled for each number of drafts
        drafts = {(2, 1000): (1,), (8, 1000): (5,), (4, 200064): (3,)}.get((tp, vocab), ())
        if not drafts:
            pytest.skip("simt takes three of these")
    shards = sharding(vocab, tp)
    for k in drafts:
        requests = 5 if backend.is_slow else 7
        whole = whole_rows(np.random.default_rng(vocab + tp + k), requests * (k + 1), shards)
        check(backend, whole, shards, k, seed=tp, requests=requests)


@pytest.mark.parametrize("memory", ["column_major", "every_second_column", "odd_rows", "reversed_columns"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_memory(backend, dtype, memory):
    shards = VocabShard.even(20001, 2)
    whole = whole_rows(np.random.default_rng(1), 16, shards, dtype)
    check(backend, whole, shards, 2, memory=memory, nan_rules=("ignore",), requests=5)


def test_added_vocabulary_and_ranks_without_ids(backend):
    for shards in (shard_vocab(9000, 2, added_vocab_size=70), shard_vocab(65, 8), shard_vocab(700, 1)):
        nan_rules = ("ignore",) if backend.is_slow else NAN_RULES
        whole = whole_rows(np.random.default_rng(2), 12, shards, "float16")
        check(backend, whole, shards, 2, requests=4, nan_rules=nan_rules)


@pytest.mark.parametrize("k", [0, 128])
def test_no_drafts_and_many(backend, k):
    shards = VocabShard.even(300, 2)
    requests = 4 if k else 7
    whole = whole_rows(np.random.default_rng(3), requests * (k + 1), shards, "float32")
    check(backend, whole, shards, k, requests=requests, nan_rules=("first",))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_where_nan_is_ignored(backend, dtype):
    """A row for each pattern, beside others and itself: NaN wins no row that has anything else, and ties with -inf."""
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    if backend.is_slow:  # those around zeros, infinities and the last NaNs, each beside each
        edges = [0, 0x7C00, 0x7F80, 0x8000, 0xFC00, 0xFF80]
        few = patterns[(np.array(edges)[:, None] + np.arange(-2, 3)).ravel() % (1 << 16)]
        rows = np.stack([*np.meshgrid(few, few), np.full((len(few),) * 2, few[0])], axis=-1).reshape(-1, 3)
    else:
        rows = np.stack([np.roll(patterns, -shift) for shift in (0, 1, 7, 1 << 15, 0)], axis=1)
    whole = np.ascontiguousarray(rows).view(DTYPES[dtype])
    count, shards = len(whole), VocabShard.even(whole.shape[1], 2)
    given = {
        "draft_ids": np.zeros(count, np.int64),
        "cu_num_rows": np.arange(count + 1, dtype=np.int32),
        "positions": np.zeros(count, np.int64),
        "seq_lens": np.ones(count, np.int32),
        "prefill_lens": np.ones(count, np.int32),
        "seeds": np.zeros(count, np.int64),
    }
    parts = parts_of(whole, shards, backend.xp)
    for form in FORMS:
        tokens, sampled, _ = emulate_greedy_verify(
            parts,
            shards,
            **placed(given, backend.xp),
            num_draft_tokens=0,
            form=form,
            nan="ignore",
            backend=backend.name,
        )
        assert np.array_equal(to_host(tokens)[:, 0], best_of(whole, "ignore"))
        assert to_host(sampled).tolist() == [1] * count


class TestInputsThatBrokeOthers:
    """Targets and drafts of one request, over two ranks."""

    def outcome(self, backend, targets, drafts, rates=None, form="candidate"):
        rows, shards = len(targets), VocabShard.even(12, 2)
        whole = np.zeros((rows, 12), np.float32)
        whole[np.arange(rows), targets] = 1
        given = placed(
            {
                "draft_ids": np.array([0, *drafts], np.int64),
                "cu_num_rows": np.array([0, rows], np.int32),
                "positions": np.arange(10, 10 + rows),
                "seq_lens": np.array([20], np.int32),
                "prefill_lens": np.array([5], np.int32),
                "seeds": np.array([7]),
            },
            backend.xp,
        )
        outcome = emulate_greedy_verify(
            parts_of(whole, shards, backend.xp), shards, **given, num_draft_tokens=rows - 1, acceptance=rates,
            form=form, backend=backend.name,
        )  # fmt: skip
        tokens, sampled, rejected = lists(outcome)
        assert tokens[0][sampled[0] :] == [-1] * (rows - sampled[0])
        return tokens[0][: sampled[0]], sampled[0], rejected[0]

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        ("targets", "drafts", "outcome"),
        [
            ([4, 7, 9, 2], [-1, 7, 9], ([4], 1, 3)),
            ([4, 7, 9, 2], [4, -1, 9], ([4, 7], 2, 2)),
            ([4, 7, 9, 2], [4, 7, 9], ([4, 7, 9, 2], 4, 0)),
            ([1, 2, 3, 4, 6, 8], [1, 2, 3, 5, 7], ([1, 2, 3, 4], 4, 2)),
            ([6], [], ([6], 1, 0)),
            ([4, 7, 9, 0], [4, 7, 9], ([4, 7, 9, 0], 4, 0)),
        ],
    )
    def test_placeholders_and_bonus_positions(self, backend, targets, drafts, outcome, form):
        assert self.outcome(backend, targets, drafts, form=form) == outcome

    def test_a_placeholder_is_never_drawn(self, backend):
        always = np.ones(3, np.float32)
        assert self.outcome(backend, [4, 7, 9, 2], [-1, 7, 9], always) == ([4], 1, 3)
        assert self.outcome(backend, [4, 7, 9, 2], [4, -1, 9], always) == ([4, 7], 2, 2)
        assert self.outcome(backend, [4, 7, 9, 2], [4, 12, 9], always) == ([4, 7], 2, 2)
        assert self.outcome(backend, [4, 7, 9, 2], [5, 6, 8], always) == ([5, 6, 8, 2], 4, 0)
        assert self.outcome(backend, [4, 7, 9, 2], [4, 7, 9], np.zeros(3, np.float32)) == ([4], 1, 3)


@pytest.mark.parametrize("requests", [0, 3])
def test_empty_batches(backend, requests):
    shards = VocabShard.even(100, 2)
    given = {
        "draft_ids": np.zeros(0, np.int64),
        "cu_num_rows": np.zeros(requests + 1, np.int32),
        "positions": np.zeros(0, np.int64),
        **{name: np.ones(requests, np.int32) for name in ("seq_lens", "prefill_lens")},
        "seeds": np.zeros(requests, np.int64),
    }
    for form in FORMS:
        outcome = emulate_greedy_verify(
            parts_of(np.zeros((0, 100), np.float32), shards, backend.xp), shards, **placed(given, backend.xp),
            num_draft_tokens=2, form=form, backend=backend.name,
        )  # fmt: skip
        assert outcome[0].shape == (requests, 3)
        assert lists(outcome) == ([[-1] * 3] * requests, [0] * requests, [0] * requests)


def test_rates_hold_over_100_000_requests(backend):
    """Drafts that are never the argmax, taken at given rates; fewer requests where every access is checked."""
    requests, k, rates = 3_000 if backend.is_slow else 100_000, 3, [0.9, 0.5, 0.2]
    rows = requests * (k + 1)
    shards = VocabShard.even(4, 2)
    whole = np.zeros((rows, 4), np.float32)
    whole[:, 1] = 1
    xp = backend.xp
    tokens, sampled, rejected = emulate_greedy_verify(
        parts_of(whole, shards, xp), shards, draft_ids=xp.full(rows, 2, np.int64),
        cu_num_rows=xp.arange(0, rows + 1, k + 1, dtype=np.int32), num_draft_tokens=k,
        positions=xp.tile(xp.arange(k + 1) + 50, requests), seq_lens=xp.full(requests, 60, np.int32),
        prefill_lens=xp.zeros(requests, np.int32), seeds=xp.arange(requests), backend=backend.name,
        acceptance=vpa.conditional_acceptance(k, rates=rates),
    )  # fmt: skip
    sampled = to_host(sampled)
    for i, rate in enumerate(rates):  # within four standard deviations
        assert np.mean(sampled > i + 1) == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / requests))
    assert np.array_equal(to_host(rejected), k + 1 - sampled)
    places = np.arange(k + 1)
    wanted = np.where(places < sampled[:, None] - 1, 2, np.where(places == sampled[:, None] - 1, 1, -1))
    assert np.array_equal(to_host(tokens), wanted)


def test_draws_are_exact_to_the_last_bit(backend):
    """A rate that is the very draw does not accept, the next fp32 number does; at each of many positions."""
    k, shards, seed = 64, VocabShard.even(4, 2), -1234567890123456789
    first = 2**32 - 20
    drawn = np.array([uniform(seed, first + i) for i in range(k)], np.float32)
    above = np.nextafter(drawn, np.float32(2))
    for refused in (k, 0, 1, 31, 40, 63):
        rates = np.where(np.arange(k) == refused, drawn, above)
        outcome = emulate_greedy_verify(
            parts_of(np.eye(1, 4, 3, dtype=np.float32).repeat(k + 1, 0), shards, backend.xp), shards,
            **placed(
                {
                    "draft_ids": np.ones(k + 1, np.int64),
                    "cu_num_rows": np.array([0, k + 1], np.int32),
                    "positions": np.arange(first, first + k + 1),
                    "seq_lens": np.ones(1, np.int32),
                    "prefill_lens": np.ones(1, np.int32),
                    "seeds": np.array([seed]),
                },
                backend.xp,
            ),
            num_draft_tokens=k, acceptance=rates, backend=backend.name,
        )  # fmt: skip
        assert lists(outcome) == ([[1] * refused + [3] + [-1] * (k - refused)], [refused + 1], [k - refused])


@st.composite
def layouts(draw):
    """Logits and requests of any layout, over any number of ranks."""
    k, vocab = draw(st.integers(0, 4)), draw(st.integers(1, 30))
    counts = draw(st.lists(st.integers(0, k + 1), max_size=5))
    rows = sum(counts)
    values = st.sampled_from([0.0, -0.0, 1.0, 1e-40, -1.0, INF, -INF, NAN])
    whole = draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows))

    def numbers(count, low, high, dtype):
        return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype)

    requests = {
        "draft_ids": numbers(rows, -2, vocab + 1, np.int64),
        "cu_num_rows": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "positions": numbers(rows, 0, 9, np.int64),
        "seq_lens": numbers(len(counts), 0, 4, np.int32),
        "prefill_lens": numbers(len(counts), 0, 4, np.int32),
        "seeds": numbers(len(counts), -(2**63), 2**63 - 1, np.int64),
    }
    rates = draw(st.one_of(st.none(), st.lists(st.sampled_from([0, 0.3, 0.8, 1]), min_size=k, max_size=k)))
    shards = VocabShard.even(vocab, draw(st.integers(1, 5)))
    return k, whole, requests, None if rates is None else np.array(rates, np.float32), shards


@given(layouts(), st.sampled_from(NAN_RULES))
@settings(max_examples=200, deadline=None)
def test_any_layout_against_the_rules_in_plain_python(layout, nan):
    k, whole, requests, rates, shards = layout
    vocab = shards[0].vocab_size
    best = [argmax(row, nan) for row in whole]
    parts = parts_of(np.array(whole, np.float32).reshape(-1, vocab), shards)
    wanted = expected(best, requests, k, vocab, rates)
    for form in FORMS:
        outcome = emulate_greedy_verify(
            parts, shards, **requests, num_draft_tokens=k, acceptance=rates, form=form, nan=nan
        )
        assert lists(outcome) == wanted, form


class TestBlocks:
    """Statistics of blocks of ids: of the vocabulary's blocks, wherever shards are cut."""

    def statistics(self, backend, whole, shards, offsets, k) -> tuple[Contribution, list[np.ndarray]]:
        """What each rank contributes."""
        contribution = Contribution.agreed("blocks", k, 0, [blocks_of(shard) for shard in shards], whole.shape[1])
        rows, requests = len(whole), len(offsets) - 1
        vectors = [backend.xp.zeros(rows, np.int64)] * 2, [backend.xp.zeros(requests, np.int32)] * 2
        offsets = backend.xp.asarray(offsets)
        given = Requests(k, vectors[0][0], offsets, vectors[0][1], *vectors[1], backend.xp.zeros(requests, np.int64))
        contributed = []
        for part, shard in zip(parts_of(whole, shards, backend.xp), shards, strict=True):
            out = backend.xp.full(contribution.shape(rows, requests), 7, np.uint64)
            module = backends.verification(backend.name, part)
            module.prepare_verify_scan(part, shard, contribution, "first", given, out)(part, given, out)
            contributed.append(to_host(out))
        return contribution, contributed

    def test_those_of_all_ranks_are_those_of_whole_rows(self, backend):
        k, offsets = 2, np.array([0, 3, 3, 4, 6], np.int32)
        vocab = 20000
        for shards in (VocabShard.even(vocab, 3), shard_vocab(vocab, 2, pad_to=3000), VocabShard.even(vocab, 1)):
            whole = whole_rows(np.random.default_rng(5), 6, shards)
            contribution, contributed = self.statistics(backend, whole, shards, offsets, k)
            merged = {}
            for shard, lines in zip(shards, contributed, strict=True):
                for request, line in enumerate(lines):
                    for place, statistic in enumerate(line.tolist()):
                        draft, block = divmod(place, contribution.draft_width)
                        if draft >= k:
                            draft, block = k, place - k * contribution.draft_width
                        first, _ = block_span(shard, BONUS_BLOCK if draft == k else DRAFT_BLOCK)
                        key = request, draft, first + block
                        merged[key] = max(merged.get(key, 0), statistic)
            wanted = {}
            for request, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
                for row in range(begin, end):
                    bonus = row == end - 1
                    size = BONUS_BLOCK if bonus else DRAFT_BLOCK
                    for block in range(-(-vocab // size)):
                        ids = np.arange(block * size, min((block + 1) * size, vocab))
                        packed = vpa.order.pack(vpa.order.keys(whole[row, ids]), ids)
                        wanted[request, k if bonus else row - begin, block] = int(packed.max())
            assert {key: statistic for key, statistic in merged.items() if statistic} == wanted

    @pytest.mark.parametrize("size", [1, 7, 64, 1000])
    def test_runs_cut_a_shard_at_multiples_of_a_size(self, size):
        for shard in (*VocabShard.even(1001, 3), *shard_vocab(1010, 2, added_vocab_size=16), shard_vocab(65, 8)[6]):
            first, count = block_span(shard, size)
            ids = shard.ids()
            seen = np.full(shard.width, -1)
            for block, start, length, first_id in block_runs(shard, size):
                assert 0 <= block < count
                assert first_id // size == (first_id + length - 1) // size == first + block
                assert np.array_equal(ids[start : start + length], np.arange(first_id, first_id + length))
                seen[start : start + length] = first + block
            assert np.array_equal(seen[ids >= 0], ids[ids >= 0] // size) and (seen[ids < 0] == -1).all()
            assert count == 0 if shard.num_valid == 0 else {first, first + count - 1} <= set(seen.tolist())


class TestTheClass:
    k, shard = 3, VocabShard.even(3000, 1)[0]

    def built(self, backend, **changes) -> vpa.GreedyVerify:
        arguments = {"max_rows": 40, "max_requests": 9, "num_draft_tokens": self.k, "dtype": "bfloat16", **changes}
        return vpa.GreedyVerify(self.shard, vpa.comm.solo(), backend=backend.name, **arguments)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("rates", [None, np.array([0.9, 0.5, 0.5], np.float32)], ids=["greedy", "synthetic"])
    def test_calls_of_many_sizes_share_its_memory(self, backend, form, rates):
        verify = self.built(backend, form=form, acceptance=rates, nan="ignore")
        rng, kept = np.random.default_rng(0), []
        for requests in (7, 3, 7, 5):
            whole = whole_rows(rng, requests * (self.k + 1), (self.shard,))
            best = best_of(whole, "ignore")
            given = batch(rng, best, self.k, 3000, requests)
            outcome = verify(backend.xp.asarray(whole), **placed(given, backend.xp))
            kept.append((outcome, expected(best, given, self.k, 3000, rates)))
        for outcome, wanted in kept:  # results are fresh memory
            assert lists(outcome) == wanted

    def test_results_in_memory_of_the_callers(self, backend):
        verify, rng = self.built(backend), np.random.default_rng(1)
        whole = whole_rows(rng, 28, (self.shard,))
        best = best_of(whole, "first")
        given = batch(rng, best, self.k, 3000)
        out = tuple(backend.xp.empty(shape, dtype) for shape, dtype in (((7, 4), "i8"), ((7,), "i4"), ((7,), "i4")))
        outcome = verify(backend.xp.asarray(whole), **placed(given, backend.xp), out=out)
        assert all(a is b for a, b in zip(outcome, out, strict=True))
        assert lists(out) == expected(best, given, self.k, 3000)

    def test_the_function_gives_the_same(self, backend):
        rng = np.random.default_rng(2)
        whole = whole_rows(rng, 28, (self.shard,))
        best = best_of(whole, "first")
        given = batch(rng, best, self.k, 3000)
        outcome = greedy_verify(
            backend.xp.asarray(whole), self.shard, vpa.comm.solo(), **placed(given, backend.xp),
            num_draft_tokens=self.k, backend=backend.name,
        )  # fmt: skip
        assert lists(outcome) == expected(best, given, self.k, 3000)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"max_requests": 0}, ValueError, "max_requests is 0; it is at least 1"),
            ({"num_draft_tokens": 1025}, ValueError, "num_draft_tokens is 1025; 0 to 1024"),
            ({"num_draft_tokens": 1.5}, TypeError, "num_draft_tokens is 1.5; an integer"),
            ({"acceptance": np.ones(2, np.float32)}, ValueError, r"acceptance has shape \(2,\); \[3\] is accepted"),
            ({"acceptance": [1, 1, 1]}, TypeError, "acceptance is a builtins.list"),
            ({"acceptance": np.ones(3)}, TypeError, "acceptance is float64; float32"),
            ({"form": "pairs"}, ValueError, "form is 'pairs'; 'candidate' and 'blocks'"),
            ({"nan": None}, ValueError, "nan is None; 'first' and 'ignore'"),
            ({"dtype": "float64"}, TypeError, "logits are float64"),
            ({"shard": 3}, TypeError, "shard is a int"),
        ],
    )
    def test_building_refuses(self, change, error, message):
        arguments = {"max_rows": 4, "max_requests": 2, "num_draft_tokens": 3, "dtype": "float32", **change}
        with pytest.raises(error, match=message):
            vpa.GreedyVerify(arguments.pop("shard", self.shard), vpa.comm.solo(), **arguments)

    def test_calls_refuse_what_it_was_not_built_for(self):
        verify = vpa.GreedyVerify(
            self.shard, vpa.comm.solo(), max_rows=4, max_requests=1, num_draft_tokens=3, dtype="float32"
        )
        good = TestRefusals().arguments()
        logits = np.zeros((4, 3000), np.float32)
        with pytest.raises(
            ValueError, match=r"got 4 rows of float32 of 2 requests; .* of at most 4|built for at most 4"
        ):
            verify(logits, **good)
        with pytest.raises(TypeError, match="without seeds; of requests it takes draft_ids"):
            verify(logits, **{name: value for name, value in good.items() if name != "seeds"})
        with pytest.raises(ValueError, match="captured from GPU arrays; got a NumPy array"):
            verify.capture(logits[:, :], **{**good, **self.one(good)})
        with pytest.raises(TypeError, match="out is a ndarray; three arrays"):
            verify(logits, **{**good, **self.one(good)}, out=np.zeros(3))
        with pytest.raises(ValueError, match=r"out: num_sampled is int64\[1\]; a C-contiguous int32\[1\]"):
            verify(
                logits, **{**good, **self.one(good)}, out=(np.zeros((1, 4), np.int64),) + (np.zeros(1, np.int64),) * 2
            )

    def one(self, good):
        """The arguments of one request of four rows."""
        return {"cu_num_rows": np.array([0, 4], np.int32)} | {
            name: good[name][:1] for name in ("seq_lens", "prefill_lens", "seeds")
        }


class TestRefusals:
    shard = VocabShard.even(50, 1)[0]

    def arguments(self) -> dict:
        """Two requests of two rows."""
        return {
            "draft_ids": np.zeros(4, np.int64),
            "cu_num_rows": np.array([0, 2, 4], np.int32),
            "positions": np.arange(5, 9),
            "seq_lens": np.ones(2, np.int32),
            "prefill_lens": np.ones(2, np.int32),
            "seeds": np.zeros(2, np.int64),
        }

    def call(self, **changes):
        logits = changes.pop("logits", np.zeros((4, 50), np.float32))
        arguments = {"num_draft_tokens": 1, **self.arguments(), **changes}
        return greedy_verify(logits, self.shard, vpa.comm.solo(), **arguments)

    def test_what_it_refuses_otherwise_works(self):
        assert lists(self.call()) == ([[0, 0], [0, 0]], [2, 2], [0, 0])

    def test_rows_beyond_the_last_request_are_padding(self):
        outcome = self.call(cu_num_rows=np.array([0, 2, 2], np.int32))
        assert lists(outcome) == ([[0, 0], [-1, -1]], [2, 0], [0, 0])

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"logits": np.zeros((4, 51), np.float32)}, ValueError, r"logits have shape \(4, 51\)"),
            ({"logits": np.zeros((4, 50))}, TypeError, "logits are float64"),
            ({"draft_ids": np.zeros(4, np.int32)}, TypeError, "draft_ids is int32; int64 is accepted"),
            ({"draft_ids": np.zeros(3, np.int64)}, ValueError, r"draft_ids has shape \(3,\); \[4\] is accepted"),
            ({"draft_ids": np.zeros((4, 1), np.int64)}, ValueError, r"draft_ids has shape \(4, 1\)"),
            ({"draft_ids": [0] * 4}, TypeError, "draft_ids is a builtins.list; a NumPy or CuPy array"),
            ({"positions": np.zeros(8, np.int64)[::2]}, ValueError, "positions has gaps between its elements"),
            ({"seeds": np.zeros(2, np.uint64)}, TypeError, "seeds is uint64; int64"),
            ({"seq_lens": np.zeros(4, np.int32)}, ValueError, r"seq_lens has shape \(4,\); \[2\] is accepted"),
            ({"prefill_lens": None}, TypeError, "prefill_lens is a builtins.NoneType"),
            ({"cu_num_rows": np.zeros(0, np.int32)}, ValueError, r"shape \(0,\); \[requests \+ 1\]"),
            ({"cu_num_rows": np.array([0, 2, 4])}, TypeError, "cu_num_rows is int64; int32"),
            ({"cu_num_rows": np.array([0, 2, 5], np.int32)}, ValueError, r"cu_num_rows is \[0 2 5\]; .* none above 4"),
            ({"cu_num_rows": np.array([1, 2, 4], np.int32)}, ValueError, r"numbers from 0 on"),
            ({"cu_num_rows": np.array([0, 3, 2], np.int32)}, ValueError, r"none below the one before"),
            ({"cu_num_rows": np.array([0, 1, 4], np.int32)}, ValueError, "request 1 owns 3 rows; .* at most 2: a row"),
            ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens is -1; 0 to 1024"),
            ({"num_draft_tokens": True}, TypeError, "num_draft_tokens is True; an integer"),
            ({"acceptance": np.ones(2, np.float32)}, ValueError, r"acceptance has shape \(2,\); \[1\]"),
            ({"acceptance": np.array([1.5], np.float32)}, ValueError, r"acceptance is \[1.5\]; numbers from 0 to 1"),
            ({"acceptance": np.array([NAN], np.float32)}, ValueError, r"acceptance is \[nan\]; numbers from 0 to 1"),
            ({"form": "block"}, ValueError, "form is 'block'; 'candidate' and 'blocks' are accepted"),
            ({"nan": "last"}, ValueError, "nan is 'last'; 'first' and 'ignore' are accepted"),
            ({"backend": "cuda"}, ValueError, "numpy, raw"),
            ({"backend": "raw"}, TypeError, "works on CuPy arrays, got NumPy"),
        ],
    )
    def test_arguments_that_do_not_fit(self, changes, error, message):
        with pytest.raises(error, match=message):
            self.call(**changes)

    def test_emulating(self):
        shards = VocabShard.even(50, 2)
        parts = [np.zeros((4, 25), np.float32)] * 2
        arguments = {"num_draft_tokens": 1, **self.arguments()}
        assert lists(emulate_greedy_verify(parts, shards, **arguments)) == ([[0, 0], [0, 0]], [2, 2], [0, 0])
        with pytest.raises(ValueError, match="1 arrays of logits for 2 shards"):
            emulate_greedy_verify(parts[:1], shards, **arguments)
        with pytest.raises(ValueError, match="form is 'x'"):
            emulate_greedy_verify(parts, shards, **arguments, form="x")
        with pytest.raises(TypeError, match="unexpected keyword argument 'splits'"):
            emulate_greedy_verify(parts, shards, **arguments, splits=3)

    def test_inputs_are_not_written(self):
        arguments = self.arguments()
        for array in arguments.values():
            array.flags.writeable = False
        for backend in ("numpy", "simt"):
            assert lists(self.call(**arguments, backend=backend)) == ([[0, 0], [0, 0]], [2, 2], [0, 0])
