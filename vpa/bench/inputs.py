"""What the ranks scan: logits of seeded families, or the product of a real head and hidden states."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.bench.families import make_shard
from vpa.bench.job import Job
from vpa.bench.settings import UsageError
from vpa.order import LOGITS_DTYPES
from vpa.weights import HeadFile, find_head, read_rows, read_shard

#: Noise on hidden states drawn from a head's own rows, relative to a row's root mean square.
NOISE = 0.5


@dataclass(frozen=True)
class HeadInput:
    """A head's file and the hidden states [rows, hidden] in fp32; None draws them from the head's rows."""

    head: HeadFile
    hidden: np.ndarray | None

    @property
    def rows(self) -> int | None:
        """How many hidden states there are, if they are given."""
        return None if self.hidden is None else len(self.hidden)


def open_head(lm_head: str | None, hidden_path: str | None) -> HeadInput | None:
    """The files of --lm-head and --hidden, the head's header checked; None without a head. Raises ``UsageError``."""
    if lm_head is None:
        return None
    try:
        head = find_head(lm_head)
    except ValueError as error:
        raise UsageError(f"--lm-head: {error}") from error
    if hidden_path is None:
        return HeadInput(head, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged header is parsed as Python, which warns: the error says enough
            hidden = np.load(hidden_path, allow_pickle=False)
    except Exception as error:  # by where the file is damaged, a dozen kinds, as tokenize's and struct's own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"--hidden: cannot read {hidden_path} as .npy: {reason}") from error
    if not isinstance(hidden, np.ndarray):
        raise UsageError(f"--hidden: {hidden_path} holds several arrays; a .npy file with one is accepted")
    if hidden.dtype.kind != "f" or hidden.ndim != 2 or hidden.shape[1] != head.hidden_size:
        raise UsageError(
            f"--hidden: {hidden_path} is {hidden.dtype}{list(hidden.shape)}; floats [rows, {head.hidden_size}] fit "
            f"{head.tensor}"
        )
    with np.errstate(all="ignore"):
        single = hidden.astype(np.float32)
    if (np.isinf(single) & np.isfinite(hidden)).any():
        raise UsageError(f"--hidden: {hidden_path} holds numbers beyond fp32's range, 3.4e38; scale them")
    return HeadInput(head, single)


def family_logits(family: str, seed: int, rows: int, dtype: str, job: Job) -> dict[int, Any]:
    """Logits of the ranks that this process plays, [rows, width] each, in the job's library."""
    made = {rank: make_shard(family, seed, rows, job.shards[rank], LOGITS_DTYPES[dtype]) for rank in job.played}
    return {rank: job.place(logits) for rank, logits in made.items()}


@np.errstate(all="ignore")  # infinities and NaNs are logits like others
def head_logits(source: HeadInput, seed: int, rows: int, job: Job) -> dict[int, Any]:
    """The product of hidden states and each played rank's part of the head, fp32 [rows, width]."""
    hidden = source.hidden[:rows] if source.hidden is not None else _drawn(source.head, seed, rows, job)
    hidden = job.place(np.ascontiguousarray(hidden))
    return {
        rank: hidden @ job.place(read_shard(source.head, job.shards[rank]).astype(np.float32)).T for rank in job.played
    }


def _drawn(head: HeadFile, seed: int, rows: int, job: Job) -> np.ndarray:
    """Hidden states near rows of the head: each is read by the rank that has it, and told to the others."""
    mine: dict[int, np.ndarray] = {}
    for row in range(rows):
        rng = np.random.default_rng([seed % 2**64, row])
        token = int(rng.integers(head.vocab_size))
        for rank in job.played:
            if any(first <= token < first + count for _, count, first in job.shards[rank].ranges):
                weight = read_rows(head, token, 1)[0].astype(np.float32)
                scale = NOISE * np.sqrt(np.mean(np.square(weight)))
                mine[row] = weight + scale * rng.standard_normal(head.hidden_size, dtype=np.float32)
    drawn = {row: hidden for theirs in job.comm.exchange(mine) for row, hidden in theirs.items()}
    return np.stack([drawn[row] for row in range(rows)]) if rows else np.empty((0, head.hidden_size), np.float32)
