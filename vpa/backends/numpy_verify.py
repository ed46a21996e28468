"""Verification on NumPy arrays, for backend ``numpy``: statistics of blocks of ids, and the finish by the rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from vpa import order
from vpa.acceptance import accept
from vpa.backends.numpy_ import best_of_runs, equal_runs, pick_from_candidates, together
from vpa.contribution import BONUS_BLOCK, DRAFT_BLOCK, Contribution
from vpa.requests import Requests
from vpa.vocab import VocabShard, block_runs

Outputs = tuple[np.ndarray, np.ndarray, np.ndarray]


def prepare_verify_scan(
    logits: np.ndarray, shard: VocabShard, contribution: Contribution, nan: str, requests: Requests, out: np.ndarray
) -> Callable[[np.ndarray, Requests, np.ndarray], None]:
    """A function of logits [N, width], requests and ``out``, to which it writes the rank's contribution."""

    def scan(logits: np.ndarray, requests: Requests, out: np.ndarray) -> None:
        if contribution.form == "candidate":
            best_of_runs(logits, equal_runs(shard, contribution.draft_width), out, nan=nan)
        else:
            _write_blocks(logits, shard, contribution, nan, requests, out)

    return scan


def prepare_verify_finish(
    gathered: np.ndarray, contribution: Contribution, requests: Requests, vocab_size: int, outputs: Outputs
) -> Callable[[np.ndarray, Requests, Outputs], None]:
    """A function of what all ranks contributed, of requests and of the three outputs, which it writes."""

    def finish(gathered: np.ndarray, requests: Requests, outputs: Outputs) -> None:
        results = accept(
            _argmax(gathered, contribution, requests),
            draft_ids=requests.draft_ids,
            cu_num_rows=requests.cu_num_rows,
            num_draft_tokens=requests.num_draft_tokens,
            positions=requests.positions,
            seq_lens=requests.seq_lens,
            prefill_lens=requests.prefill_lens,
            seeds=requests.seeds,
            vocab_size=vocab_size,
            acceptance=requests.acceptance,
        )
        for output, result in zip(outputs, results, strict=True):
            output[...] = result

    return finish


@functools.lru_cache(maxsize=256)
def _block_runs(shard: VocabShard, size: int) -> Any:
    return together(block_runs(shard, size))


def _write_blocks(
    logits: np.ndarray, shard: VocabShard, contribution: Contribution, nan: str, requests: Requests, out: np.ndarray
) -> None:
    out[...] = order.NO_CANDIDATE
    width = contribution.draft_width
    rows, of_request, place = _draft_rows(requests)
    statistics = np.empty((len(rows), width), np.uint64)
    best_of_runs(logits[rows], _block_runs(shard, DRAFT_BLOCK), statistics, nan=nan)
    out[of_request[:, None], place[:, None] * width + np.arange(width)] = statistics
    rows, of_request = _bonus_rows(requests)
    statistics = np.empty((len(rows), contribution.bonus_width), np.uint64)
    best_of_runs(logits[rows], _block_runs(shard, BONUS_BLOCK), statistics, nan=nan)
    out[of_request, contribution.line - contribution.bonus_width :] = statistics


def _argmax(gathered: np.ndarray, contribution: Contribution, requests: Requests) -> np.ndarray:
    """The id of the best of each row's candidates, int64 [N]."""
    argmax = np.full(len(requests.draft_ids), -1, np.int64)
    if contribution.form == "candidate":
        pick_from_candidates(gathered, len(argmax), argmax)
        return argmax
    best = gathered.reshape(-1, requests.count, contribution.line).max(axis=0)
    drafts, bonus = np.split(best, [contribution.line - contribution.bonus_width], axis=1)
    rows, of_request, place = _draft_rows(requests)
    by_place = drafts.reshape(requests.count, requests.num_draft_tokens, contribution.draft_width).max(axis=2)
    argmax[rows] = order.unpack(by_place[of_request, place])[1]
    rows, of_request = _bonus_rows(requests)
    argmax[rows] = order.unpack(bonus[of_request].max(axis=1))[1]
    return argmax


def _draft_rows(requests: Requests) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows that drafts are judged against, the request of each, and its place there."""
    begins, counts = _extents(requests)
    drafts = np.maximum(counts - 1, 0)
    of_request = np.repeat(np.arange(len(drafts)), drafts)
    place = np.arange(len(of_request)) - np.repeat(np.cumsum(drafts) - drafts, drafts)
    return begins[of_request] + place, of_request, place


def _bonus_rows(requests: Requests) -> tuple[np.ndarray, np.ndarray]:
    """The bonus rows, and the request of each."""
    begins, counts = _extents(requests)
    of_request = np.flatnonzero(counts)
    return (begins + counts - 1)[of_request], of_request


def _extents(requests: Requests) -> tuple[np.ndarray, np.ndarray]:
    """Each request's first row, and how many it owns."""
    offsets = requests.cu_num_rows.astype(np.int64)
    return offsets[:-1], np.diff(offsets)
