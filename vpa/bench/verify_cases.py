"""What requests bring to a verification that is measured: seeded drafts of which a known part is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.acceptance import conditional_acceptance
from vpa.bench.verify_rules import reference

#: How often a draft agrees with the argmax, or is accepted by a draw.
AGREEMENT = 0.7

#: Kinds of requests. ``greedy``: all have all drafts. ``synthetic``: the same, accepted by a draw. ``mixed``: ragged
#: counts, no rows, no drafts, placeholders, ids outside the vocabulary, prompts.
KINDS = ("greedy", "synthetic", "mixed")


@dataclass(frozen=True)
class Case:
    """Requests on the host, and what has to come of them.

    arguments: of ``vpa.greedy_verify``, the arrays; num_draft_tokens, acceptance: likewise. outcome: tokens, and how
    many were sampled and rejected.
    """

    num_draft_tokens: int
    arguments: dict[str, np.ndarray]
    acceptance: np.ndarray | None
    outcome: tuple[np.ndarray, np.ndarray, np.ndarray]

    def placed(self, place: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        """All arguments, arrays where ``place`` puts them."""
        arrays = {name: place(array) for name, array in self.arguments.items()}
        return {"num_draft_tokens": self.num_draft_tokens, "acceptance": self.acceptance, **arrays}

    def lengths(self) -> dict[str, Any]:
        """For a row of the record: how many requests sample, and the mean number of tokens of those, None without."""
        sampled = self.outcome[1][self.outcome[1] > 0]
        mean = float(sampled.mean()) if len(sampled) else None
        return {"acceptance_length": mean, "sampling_requests": len(sampled)}

    def right(self, outcome: Any) -> np.ndarray:
        """Which requests have the right outcome, bool [R]."""
        same = [np.asarray(got) == wanted for got, wanted in zip(outcome, self.outcome, strict=True)]
        return same[0].all(axis=1) & same[1] & same[2]


def make_case(kind: str, seed: int, best: np.ndarray, num_draft_tokens: int, vocab_size: int) -> Case:
    """``len(best) // (num_draft_tokens + 1)`` requests over rows whose argmax is ``best``, the same on every rank."""
    each = num_draft_tokens + 1
    requests = len(best) // each
    rng = np.random.default_rng([seed % 2**64, requests, KINDS.index(kind)])
    counts = np.full(requests, each)
    drafts = np.concatenate([[0], best[:-1]])[: len(best)].astype(np.int64)
    wrong = rng.random(len(drafts)) >= AGREEMENT
    drafts[wrong] = rng.integers(0, vocab_size, int(wrong.sum()))
    prefill_lens, starts = np.full(requests, 5), rng.integers(5, 2**40, requests)
    if kind == "mixed":
        counts = rng.integers(0, each + 1, requests)
        odd = rng.random(len(drafts))
        drafts[odd < 0.05] = -1
        drafts[(odd >= 0.05) & (odd < 0.1)] = vocab_size
        prefill_lens[rng.random(requests) < 0.1] = 9  # still in prefill
        starts[rng.random(requests) < 0.1] = 3  # whose drafts belong to the prompt
    positions = np.zeros(len(drafts), np.int64)
    local = [np.arange(count) for count in counts]
    owned = int(counts.sum())
    positions[:owned] = np.repeat(starts, counts) + np.concatenate([*local, np.zeros(0, np.int64)])
    rates = [AGREEMENT ** (i + 1) for i in range(num_draft_tokens)]
    acceptance = conditional_acceptance(num_draft_tokens, rates=rates) if kind == "synthetic" else None
    arguments = {
        "draft_ids": drafts,
        "cu_num_rows": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "positions": positions,
        "seq_lens": np.full(requests, 8, np.int32),
        "prefill_lens": prefill_lens.astype(np.int32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, requests),
    }
    lists = {name: array.tolist() for name, array in arguments.items()}
    rates = None if acceptance is None else acceptance.tolist()
    tokens, *counts = reference(
        best.tolist(), lists["draft_ids"], lists["cu_num_rows"], num_draft_tokens, lists["positions"],
        lists["seq_lens"], lists["prefill_lens"], lists["seeds"], vocab_size, rates,
    )  # fmt: skip
    outcome = np.array(tokens, np.int64).reshape(requests, each), *(np.array(count, np.int32) for count in counts)
    return Case(num_draft_tokens, arguments, acceptance, outcome)
