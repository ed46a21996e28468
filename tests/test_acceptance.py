"""Acceptance of drafts: against plain Python written from the rules, published vectors, and cases that broke others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verification import lists, reference

from vpa.acceptance import accept, conditional_acceptance, draws, philox

#: (seed, position) -> first word of Philox4x32-10, and the draw.
VECTORS = [
    (0, 0, 0x6627E8D5, 0.7980929),
    (42, 0, 0x9CEAF053, 0.7740802),
    (42, 2**32 + 7, 0x05B263F6, 0.0445065),
    (1234567890123, 5, 0x4CDDAACF, 0.6005147),
]


@st.composite
def layouts(draw):
    k = draw(st.integers(0, 4))
    counts = draw(st.lists(st.integers(0, k + 1), min_size=0, max_size=6))
    vocab = draw(st.integers(1, 4))
    rows = sum(counts)
    ids = st.lists(st.integers(-2, vocab + 1), min_size=rows, max_size=rows)
    argmax = st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows)
    lengths = st.lists(st.integers(0, 6), min_size=len(counts), max_size=len(counts))
    starts = draw(st.lists(st.integers(0, 6), min_size=len(counts), max_size=len(counts)))
    return dict(
        argmax=np.array(draw(argmax), np.int64),
        draft_ids=np.array(draw(ids), np.int64),
        cu=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        k=k,
        positions=np.array([s + i for s, c in zip(starts, counts, strict=True) for i in range(c)], np.int64),
        seq_lens=np.array(draw(lengths), np.int32),
        prefill_lens=np.array(draw(lengths), np.int32),
        seeds=np.array(draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(counts), max_size=len(counts)))),
        vocab=vocab,
        rates=draw(st.one_of(st.none(), st.just(np.linspace(1, 0.2, max(k, 1), dtype=np.float32)))),
    )


def accepted(case):
    return accept(
        case["argmax"], draft_ids=case["draft_ids"], cu_num_rows=case["cu"], num_draft_tokens=case["k"],
        positions=case["positions"], seq_lens=case["seq_lens"], prefill_lens=case["prefill_lens"],
        seeds=case["seeds"].astype(np.int64), vocab_size=case["vocab"], acceptance=case["rates"],
    )  # fmt: skip


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_against_the_rules_one_by_one(case):
    got = accepted(case)
    assert lists(got) == reference(*case.values())
    assert [array.dtype for array in got] == [np.int64, np.int32, np.int32]
    assert got[0].shape == (len(case["seeds"]), case["k"] + 1)


def one_request(targets, drafts, rates=None):
    rows = len(targets)
    tokens, sampled, rejected = accepted(
        dict(
            argmax=np.array(targets), draft_ids=np.array([0, *drafts]), cu=np.array([0, rows], np.int32), k=rows - 1,
            positions=np.arange(10, 10 + rows), seq_lens=np.array([20], np.int32), prefill_lens=np.array([5], np.int32),
            seeds=np.array([7]), vocab=100, rates=rates,
        )
    )  # fmt: skip
    return tokens[0, : sampled[0]].tolist(), int(sampled[0]), int(rejected[0])


@pytest.mark.parametrize(
    ("targets", "drafts", "tokens", "sampled", "rejected"),
    [
        ([4, 7, 9, 2], [-1, 7, 9], [4], 1, 3),
        ([4, 7, 9, 2], [4, -1, 9], [4, 7], 2, 2),
        ([4, 7, 9, 2], [4, 7, 9], [4, 7, 9, 2], 4, 0),
        ([1, 2, 3, 4, 6, 8], [1, 2, 3, 5, 7], [1, 2, 3, 4], 4, 2),
        ([6], [], [6], 1, 0),
        ([4, 7], [100], [4], 1, 1),
    ],
)
def test_cases_that_broke_others(targets, drafts, tokens, sampled, rejected):
    assert one_request(targets, drafts) == (tokens, sampled, rejected)


def test_a_placeholder_is_not_accepted_by_a_draw():
    always = np.ones(3, np.float32)
    assert one_request([4, 7, 9, 2], [-1, 7, 9], always) == ([4], 1, 3)
    assert one_request([4, 7, 9, 2], [4, -1, 9], always) == ([4, 7], 2, 2)
    assert one_request([4, 7, 9, 2], [5, 6, 8], always) == ([5, 6, 8, 2], 4, 0)
    assert one_request([4, 7, 9, 2], [4, 7, 9], np.zeros(3, np.float32)) == ([4], 1, 3)


@pytest.mark.parametrize(("seed", "position", "word", "draw"), VECTORS)
def test_draws_are_philox(seed, position, word, draw):
    assert int(philox(np.array([seed]), np.array([position]))[0]) == word
    assert draws([seed], [position])[0] == pytest.approx(draw, abs=1e-7)


def test_draws_are_even_and_never_0_or_1():
    drawn = draws(np.arange(100_000), np.full(100_000, 3))
    assert drawn.dtype == np.float32 and drawn.min() > 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
    assert np.histogram(drawn, 10, (0, 1))[0].min() > 9_500


def test_rates_hold_over_many_requests():
    requests, k = 100_000, 3
    rates = [0.9, 0.5, 0.2]
    rows = requests * (k + 1)
    _, sampled, _ = accept(
        np.zeros(rows, np.int64),
        draft_ids=np.ones(rows, np.int64),
        cu_num_rows=np.arange(0, rows + 1, k + 1, dtype=np.int32),
        num_draft_tokens=k,
        positions=np.tile(np.arange(k + 1) + 50, requests),
        seq_lens=np.full(requests, 60, np.int32),
        prefill_lens=np.zeros(requests, np.int32),
        seeds=np.arange(requests, dtype=np.int64),
        vocab_size=2,
        acceptance=conditional_acceptance(k, rates=rates),
    )
    for i, rate in enumerate(rates):
        assert np.mean(sampled > i + 1) == pytest.approx(rate, abs=0.006)


@pytest.mark.parametrize(
    ("count", "given_as", "rates"),
    [
        (3, {"rates": [0.9, 0.5, 0.2]}, [0.9, 0.5 / 0.9, 0.4]),
        (3, {"mean": 2.6}, [1, 0.6, 0]),
        (3, {"mean": 1}, [0, 0, 0]),
        (3, {"mean": 4}, [1, 1, 1]),
        (3, {"rates": [0.5, 0, 0]}, [0.5, 0, 0]),
        (0, {"mean": 1}, []),
        (0, {"rates": []}, []),
    ],
)
def test_conditional_rates(count, given_as, rates):
    result = conditional_acceptance(count, **given_as)
    assert result.dtype == np.float32 and np.allclose(result, rates, rtol=1e-6)


@pytest.mark.parametrize(
    ("count", "given_as", "message"),
    [
        (3, {}, "give either rates or mean"),
        (3, {"rates": [1, 1, 1], "mean": 2}, "give either rates or mean"),
        (3, {"rates": [1, 1]}, "2 rates for 3 drafts"),
        (2, {"rates": [0.5, 0.6]}, "none above the one before"),
        (2, {"rates": [1.5, 0.6]}, "numbers from 0 to 1"),
        (2, {"rates": [0.5, -0.1]}, "numbers from 0 to 1"),
        (2, {"rates": [0.5, float("nan")]}, r"rates\[1\] is nan; a number is accepted"),
        (2, {"rates": [10**400, 1]}, "numbers from 0 to 1"),
        (2, {"mean": 3.5}, "with 2 drafts it is 1 to 3 tokens"),
        (2, {"mean": 10**400}, "with 2 drafts it is 1 to 3 tokens"),
        (2, {"mean": np.float32("nan")}, "mean is nan; a number is accepted"),
        (-1, {"mean": 1}, "at least 0"),
        (1.5, {"mean": 1}, "an integer is accepted"),
    ],
)
def test_rates_that_do_not_fit(count, given_as, message):
    with pytest.raises((TypeError, ValueError), match=message):
        conditional_acceptance(count, **given_as)


@pytest.mark.parametrize(
    "rates",
    [
        "10", b"\1\0", bytearray(2), memoryview(b"\1\0"), {1, 0}, {1: 2, 0: 3}, {1: 2}.keys(),
        (rate for rate in (1, 0)), iter([1, 0]), map(float, "10"), 3, np.float32(1), np.ones((2, 1)), np.ones(()),
        None.__class__, np.ma.array([0.5, 0.2], mask=[True, False]),
    ],
    ids=lambda rates: type(rates).__name__,
)  # fmt: skip
def test_what_is_no_list_of_rates(rates):
    with pytest.raises(TypeError, match=r"^rates is .*; a list or a NumPy array \[n\] of numbers is accepted$"):
        conditional_acceptance(2, rates=rates)


@pytest.mark.parametrize("other", [True, np.True_, "2", b"2", None.__class__, [2], np.ones(1), 2j], ids=repr)
def test_what_is_no_number(other):
    for given_as, name in (({"mean": other}, "mean"), ({"rates": [1, other]}, r"rates\[1\]")):
        with pytest.raises(TypeError, match=f"^{name} is .*; a number is accepted$"):
            conditional_acceptance(2, **given_as)


@pytest.mark.parametrize("rates", [(1, 0), range(1, -1, -1), np.array([1, 0], np.float16), np.array([1, 0], np.uint8)])
def test_lists_and_arrays_of_rates(rates):
    assert conditional_acceptance(2, rates=rates).tolist() == [1, 0]


@pytest.mark.parametrize("position", [-(2**63), -(2**63) + 1, -(2**63) + 5, 2**63 - 1])
@pytest.mark.parametrize("prefill_len", [-(2**31), 0, 2**31 - 1])
def test_positions_do_not_wrap(position, prefill_len):
    """Drafts before the prompt's end are placeholders, as far before it as int64 goes."""
    case = dict(
        argmax=np.array([1, 1, 1]), draft_ids=np.array([1, 1, 1]), cu=np.array([0, 3], np.int32), k=2,
        positions=np.full(3, position), seq_lens=np.array([2**31 - 1], np.int32),
        prefill_lens=np.array([prefill_len], np.int32), seeds=np.array([7]), vocab=100, rates=None,
    )  # fmt: skip
    got = lists(accepted(case))
    assert got == reference(*case.values())
    assert got[1] == [3 if position > 0 else 1]
