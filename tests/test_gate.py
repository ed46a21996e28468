"""The gate of sharded verification: a reason for each condition, and the counter that tells a user of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from vpa import GateCounter, Reason, VerifyBatch, verify_gate
from vpa.gate import Share

GREEDY = VerifyBatch(
    num_rows=96, tp_size=4, vocab_size=200064, num_draft_tokens=3, max_temperature=0.0, filtered_sampling=False,
    penalties=False, logit_bias=False, bad_or_allowed_words=False, min_tokens=False, custom_processor=False,
    grammar_bitmask=False, logprobs=False, prompt_logprobs=False, adaptive_verification=False,
    block_verification=False, draft_logits=False, watermark=False, unsupported_lora=False,
    unsupported_added_vocabulary=False,
)  # fmt: skip

#: For each reason, the one fact that gives it.
CONDITIONS = {
    Reason.ONE_RANK: {"tp_size": 1},
    Reason.ID_RANGE: {"vocab_size": 2**32},
    Reason.DRAFT_TOKENS: {"num_draft_tokens": 1025},
    Reason.SAMPLED: {"max_temperature": 1e-5},
    Reason.FILTERED_SAMPLING: {"filtered_sampling": True},
    Reason.PENALTIES: {"penalties": True},
    Reason.LOGIT_BIAS: {"logit_bias": True},
    Reason.BAD_OR_ALLOWED_WORDS: {"bad_or_allowed_words": True},
    Reason.MIN_TOKENS: {"min_tokens": True},
    Reason.CUSTOM_PROCESSOR: {"custom_processor": True},
    Reason.GRAMMAR_BITMASK: {"grammar_bitmask": True},
    Reason.LOGPROBS: {"logprobs": True},
    Reason.PROMPT_LOGPROBS: {"prompt_logprobs": True},
    Reason.ADAPTIVE_VERIFICATION: {"adaptive_verification": True},
    Reason.BLOCK_VERIFICATION: {"block_verification": True},
    Reason.DRAFT_LOGITS: {"draft_logits": True},
    Reason.WATERMARK: {"watermark": True},
    Reason.UNSUPPORTED_LORA: {"unsupported_lora": True},
    Reason.UNSUPPORTED_ADDED_VOCABULARY: {"unsupported_added_vocabulary": True},
}


def batch(**changes) -> VerifyBatch:
    return dataclasses.replace(GREEDY, **changes)


def test_a_greedy_batch_takes_the_sharded_path():
    assert verify_gate(GREEDY) is None
    for changes in ({"max_temperature": 9.9e-6}, {"tp_size": 3}, {"vocab_size": 2**32 - 1}, {"num_draft_tokens": 1024}):
        assert verify_gate(batch(**changes)) is None
    for changes in ({"num_rows": 0}, {"num_draft_tokens": 0}, {"max_temperature": np.float32(9.9e-6)}):
        assert verify_gate(batch(**changes)) is None


@pytest.mark.parametrize("reason", Reason)
def test_each_condition_has_its_reason(reason):
    assert verify_gate(batch(**CONDITIONS[reason])) is reason


def test_each_fact_is_one_condition_and_has_no_default():
    facts = {name for change in CONDITIONS.values() for name in change}
    fields = dataclasses.fields(VerifyBatch)
    assert {field.name for field in fields} == facts | {"num_rows"}
    assert all(field.default is field.default_factory is dataclasses.MISSING for field in fields)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GREEDY.tp_size = 1


@pytest.mark.parametrize("temperature", [1.0, 1e-5, math.inf, math.nan, np.float32(0.7), np.float32(1e-5), 1, 10**400])
def test_what_samples(temperature):
    assert verify_gate(batch(max_temperature=temperature)) is Reason.SAMPLED


def test_of_several_reasons_the_first_is_given():
    assert verify_gate(batch(max_temperature=0.7, filtered_sampling=True, watermark=True)) is Reason.SAMPLED
    assert verify_gate(batch(watermark=True, logprobs=True)) is Reason.LOGPROBS


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tp_size": 0}, ValueError, "tp_size is 0; it is at least 1"),
        ({"tp_size": 2.0}, TypeError, "tp_size is 2.0; an integer"),
        ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens is -1; it is at least 0"),
        ({"max_temperature": -1.0}, ValueError, "max_temperature is -1.0; it is at least 0"),
        ({"max_temperature": -math.inf}, ValueError, "max_temperature is -inf; it is at least 0"),
        ({"max_temperature": np.float32(-1e-9)}, ValueError, "max_temperature is -.*e-10; it is at least 0"),
        ({"num_rows": -1}, ValueError, "num_rows is -1; it is at least 0"),
        ({"max_temperature": None}, TypeError, "max_temperature is None; a number"),
        ({"max_temperature": True}, TypeError, "max_temperature is True; a number"),
        ({"logprobs": None}, TypeError, "logprobs is None; True or False"),
        ({"penalties": 0}, TypeError, "penalties is 0; True or False"),
    ],
)
def test_facts_of_another_kind(changes, error, message):
    with pytest.raises(error, match=message):
        batch(**changes)


def test_the_counter_says_how_often_and_why_not():
    counter = GateCounter()
    assert str(counter) == "sharded verification: 0 of 0 steps, 0 of 0 rows"
    for changes in ({}, {"num_rows": 4}, {"max_temperature": 1.0, "num_rows": 200}, {"logprobs": True, "num_rows": 50}):
        assert counter.decide(batch(**changes)) is verify_gate(batch(**changes))
    counter.decide(batch(max_temperature=1.0, num_rows=50))
    assert counter.share(None) == Share(2, 100) and counter.total == Share(5, 400)
    assert counter.reasons() == {Reason.SAMPLED: Share(2, 250), Reason.LOGPROBS: Share(1, 50)}
    assert str(counter).splitlines() == [
        "sharded verification: 2 of 5 steps (40.0%), 100 of 400 rows (25.0%)",
        f"  full path, 2 of 5 steps (40.0%), 250 of 400 rows (62.5%): {Reason.SAMPLED.value}",
        f"  full path, 1 of 5 steps (20.0%), 50 of 400 rows (12.5%): {Reason.LOGPROBS.value}",
    ]


def test_facts_are_kept_as_pythons_so_that_no_count_wraps():
    """Row counts come from the last of an int32 array: two of 2^30 wrapped."""
    facts = {field.name: getattr(GREEDY, field.name) for field in dataclasses.fields(VerifyBatch)}
    kinds = {int: np.int32, float: np.float32, bool: np.bool_}
    of_numpy = batch(**{name: kinds[type(fact)](fact) for name, fact in facts.items()})
    assert of_numpy == GREEDY
    assert {name: type(getattr(of_numpy, name)) for name in facts} == {name: type(fact) for name, fact in facts.items()}
    counter = GateCounter()
    for _ in range(3):
        counter.decide(batch(num_rows=np.array([0, 2**30], np.int32)[-1]))
    assert counter.total == Share(3, 3 * 2**30)
    assert str(counter) == "sharded verification: 3 of 3 steps (100.0%), 3221225472 of 3221225472 rows (100.0%)"


@pytest.mark.parametrize("decide", [verify_gate, GateCounter().decide], ids=["verify_gate", "GateCounter"])
@pytest.mark.parametrize("other", [None, {"tp_size": 2}, VerifyBatch])
def test_what_is_no_batch(decide, other):
    with pytest.raises(TypeError, match=r"^batch is a (NoneType|dict|type); a vpa.VerifyBatch is accepted$"):
        decide(other)
