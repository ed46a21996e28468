"""Whether a step's batch may be verified without gathering its logits, why not, and how often that was so.

The sharded path gives the argmax of the logits as they leave the head, and nothing else. A step whose requests need
more has to take the full path, and all ranks of it alike: the decision is a pure function of facts that all have.
"""

from __future__ import annotations

import enum
import math
import numbers
from dataclasses import dataclass, fields

import numpy as np

from vpa.order import MAX_VOCAB_SIZE
from vpa.requests import MAX_DRAFT_TOKENS
from vpa.vocab import integer

#: A request is greedy below this temperature.
GREEDY_TEMPERATURE = 1e-5

#: As engines keep temperatures, in fp32: rounded so, 1e-5 lies below itself, and is not below this.
_GREEDY_BELOW = float(np.float32(GREEDY_TEMPERATURE))


class Reason(enum.Enum):
    """Why a batch takes the full path: one for each condition, in words."""

    ONE_RANK = "one rank has the whole vocabulary, so that there is nothing to gather"
    ID_RANGE = f"a candidate holds ids below {MAX_VOCAB_SIZE}, and the vocabulary has more"
    DRAFT_TOKENS = f"a request may have more than {MAX_DRAFT_TOKENS} drafts, the most that one finish takes"
    SAMPLED = f"a request samples: its temperature is not below {GREEDY_TEMPERATURE}"
    FILTERED_SAMPLING = "a request's logits pass through min-p, top-p or top-k, which take whole rows"
    PENALTIES = "a request has repetition, presence or frequency penalties, which change its logits"
    LOGIT_BIAS = "a request has a logit bias"
    BAD_OR_ALLOWED_WORDS = "a request has bad words, or a list of allowed ones"
    MIN_TOKENS = "a request may not end before its least number of tokens"
    CUSTOM_PROCESSOR = "a logits processor of the user's own takes whole rows"
    GRAMMAR_BITMASK = "a request has structured output, whose grammar masks its logits"
    LOGPROBS = "a request asks for log-probabilities, which take whole rows"
    PROMPT_LOGPROBS = "a request asks for log-probabilities of its prompt"
    ADAPTIVE_VERIFICATION = "adaptive verification takes probabilities"
    BLOCK_VERIFICATION = "block verification takes probabilities"
    DRAFT_LOGITS = "acceptance takes the drafts' logits"
    WATERMARK = "a request is watermarked, which changes its logits"
    UNSUPPORTED_LORA = "a LoRA changes the head's logits, and the caller's own ones leave that out"
    UNSUPPORTED_ADDED_VOCABULARY = "there are added ids, and the caller's shards leave them out"


@dataclass(frozen=True, kw_only=True)
class VerifyBatch:
    """What decides about a step: facts that all ranks have alike. Each is asked for, so that none is forgotten.

    num_rows: rows of logits of the step; it decides nothing, and is what a ``GateCounter`` counts. num_draft_tokens:
    the most drafts of a request, as ``greedy_verify`` is given it. max_temperature: the highest of any request, 0 or
    more; NaN counts as one that samples. filtered_sampling: whether filters are applied to any request's logits, also
    where it is greedy; a caller that leaves greedy requests unfiltered gives False, since filters keep the argmax. The
    others: see the ``Reason`` of the same name, which is given where one is true.

    Facts may be NumPy's scalars, and are kept as Python's. Raises ``TypeError`` for a fact of another kind,
    ``ValueError`` for a number out of range.
    """

    num_rows: int
    tp_size: int
    vocab_size: int
    num_draft_tokens: int
    max_temperature: float
    filtered_sampling: bool
    penalties: bool
    logit_bias: bool
    bad_or_allowed_words: bool
    min_tokens: bool
    custom_processor: bool
    grammar_bitmask: bool
    logprobs: bool
    prompt_logprobs: bool
    adaptive_verification: bool
    block_verification: bool
    draft_logits: bool
    watermark: bool
    unsupported_lora: bool
    unsupported_added_vocabulary: bool

    def __post_init__(self) -> None:
        kept: dict[str, int | float | bool] = {}
        for name, least in (("num_rows", 0), ("tp_size", 1), ("vocab_size", 1), ("num_draft_tokens", 0)):
            kept[name] = integer(name, getattr(self, name))
            if kept[name] < least:
                raise ValueError(f"{name} is {kept[name]}; it is at least {least}")
        temperature = self.max_temperature
        if isinstance(temperature, (bool, np.bool_)) or not isinstance(temperature, numbers.Real):
            raise TypeError(f"max_temperature is {temperature!r}; a number is accepted")
        if temperature < 0:
            raise ValueError(f"max_temperature is {temperature}; it is at least 0, which is greedy")
        try:
            kept["max_temperature"] = float(temperature)
        except OverflowError:  # an integer that no float holds
            kept["max_temperature"] = math.inf
        for name in _FLAGS:
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise TypeError(f"{name} is {getattr(self, name)!r}; True or False is accepted")
            kept[name] = bool(getattr(self, name))
        # Kept as Python's: sums of NumPy's integers wrap, and a counter adds them up for as long as an engine serves.
        for name, fact in kept.items():
            object.__setattr__(self, name, fact)


#: Fields of ``VerifyBatch`` that are conditions by themselves, and the reason that each gives.
_FLAGS = {
    reason.name.lower(): reason for reason in Reason if reason.name.lower() in {f.name for f in fields(VerifyBatch)}
}


def verify_gate(batch: VerifyBatch) -> Reason | None:
    """None where the batch may take the sharded path; else why it takes the full one, the first reason of several.

    ``TypeError`` for what is no ``VerifyBatch``.
    """
    if not isinstance(batch, VerifyBatch):
        raise TypeError(f"batch is a {type(batch).__name__}; a vpa.VerifyBatch is accepted")
    if batch.tp_size == 1:
        return Reason.ONE_RANK
    if batch.vocab_size > MAX_VOCAB_SIZE:
        return Reason.ID_RANGE
    if batch.num_draft_tokens > MAX_DRAFT_TOKENS:
        return Reason.DRAFT_TOKENS
    if not batch.max_temperature < _GREEDY_BELOW:
        return Reason.SAMPLED
    return next((reason for name, reason in _FLAGS.items() if getattr(batch, name)), None)


@dataclass(frozen=True)
class Share:
    """Steps, and rows of logits in them."""

    steps: int = 0
    rows: int = 0


class GateCounter:
    """The gate, with a record of what it decided: how often the sharded path was taken, and why it was not.

    counter = GateCounter(); reason = counter.decide(batch); print(counter)
    """

    def __init__(self) -> None:
        self._shares: dict[Reason | None, Share] = {}

    def decide(self, batch: VerifyBatch) -> Reason | None:
        """``verify_gate(batch)``, counted."""
        reason = verify_gate(batch)
        before = self.share(reason)
        self._shares[reason] = Share(before.steps + 1, before.rows + batch.num_rows)
        return reason

    def share(self, reason: Reason | None) -> Share:
        """What was decided for a reason; for None, what took the sharded path."""
        return self._shares.get(reason, Share())

    @property
    def total(self) -> Share:
        """All that was decided."""
        shares = self._shares.values()
        return Share(sum(share.steps for share in shares), sum(share.rows for share in shares))

    def reasons(self) -> dict[Reason, Share]:
        """Why the full path was taken, the most frequent reason first."""
        found = {reason: share for reason, share in self._shares.items() if reason is not None}
        return dict(sorted(found.items(), key=lambda item: (-item[1].steps, -item[1].rows)))

    def __str__(self) -> str:
        """A line for the sharded path, then one for each reason: its share of steps and rows."""
        lines = [f"sharded verification: {self._words(self.share(None))}"]
        lines += [f"  full path, {self._words(share)}: {reason.value}" for reason, share in self.reasons().items()]
        return "\n".join(lines)

    def _words(self, share: Share) -> str:
        total = self.total
        parts = ((share.steps, total.steps, "steps"), (share.rows, total.rows, "rows"))
        return ", ".join(
            f"{count} of {whole} {what}" + (f" ({count / whole:.1%})" if whole else "") for count, whole, what in parts
        )
