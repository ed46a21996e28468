"""Who plays which rank: one process that emulates all of them, or one process for each over a communicator."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import vpa
from vpa import arrays
from vpa.plan import Plan
from vpa.vocab import VocabShard, shard_vocab


@dataclass(frozen=True)
class Job:
    """A run's ranks and their shards.

    comm: the communicator; a solo one where this process emulates. shards: all ranks'. library: ``numpy`` or ``cupy``.
    """

    comm: Any
    shards: tuple[VocabShard, ...]
    library: ModuleType
    backend: str

    def __post_init__(self) -> None:
        spans = sorted((first_id, count) for shard in self.shards for _, count, first_id in shard.ranges)
        ends = itertools.accumulate((count for _, count in spans), initial=0)
        if [*(first_id for first_id, _ in spans), self.shards[0].vocab_size] != list(ends):
            raise ValueError("the shards do not hold each id of the vocabulary once: the oracle would miss some")

    @property
    def tp_size(self) -> int:
        return len(self.shards)

    @property
    def emulated(self) -> bool:
        """Whether this process plays more ranks than its communicator has."""
        return self.tp_size > self.comm.size

    @property
    def played(self) -> range:
        """The ranks that this process plays."""
        return range(self.tp_size) if self.emulated else range(self.comm.rank, self.comm.rank + 1)

    @property
    def timed(self) -> int:
        """The rank whose work this process times."""
        return 0 if self.emulated else self.comm.rank

    def describe(self) -> str:
        """One line on who plays the ranks."""
        if self.emulated:
            return f"one process emulates {self.tp_size} ranks, on {self.library.__name__} arrays"
        return vpa.comm.describe(self.comm)

    def by_rank(self, parts: Any) -> dict[int, Any]:
        """What a processor gives for this rank's head, or in a list for all ranks' heads, by the ranks played."""
        return dict(zip(self.played, parts if isinstance(parts, list) else [parts], strict=True))

    def place(self, host: np.ndarray) -> Any:
        """A host array in the job's library."""
        return self.library.asarray(host)

    def plan(self, logits: Any) -> Plan:
        """What decides on the splits of logits of this kind. Every rank calls it."""
        here = 0 if arrays.is_host(logits) else arrays.multiprocessors()
        fewest = min(self.comm.exchange(here))
        return Plan.agreed([(shard.num_valid, fewest) for shard in self.shards], logits.dtype.itemsize)

    def top_tokens(self, logits: dict[int, Any], layout: str) -> np.ndarray:
        """The tokens that the public functions give for the played ranks' logits, on the host."""
        if self.emulated:
            parts = [logits[rank] for rank in self.played]
            return to_host(vpa.emulate_top_tokens(parts, self.shards, layout=layout, backend=self.backend))
        rank = self.comm.rank
        return to_host(
            vpa.get_top_tokens(logits[rank], self.shards[rank], self.comm, layout=layout, backend=self.backend)
        )

    def gather(self, contributions: dict[int, Any]) -> Any:
        """All ranks' contributions, concatenated in rank order, from those of the played ranks."""
        if self.emulated:
            return self.library.concatenate([contributions[rank] for rank in self.played])
        (mine,) = contributions.values()
        if self.tp_size == 1:
            return mine
        gathered = self.library.empty((self.tp_size * mine.shape[0], *mine.shape[1:]), mine.dtype)
        self.comm.all_gather(mine, gathered)
        return gathered

    def full_argmax(self, logits: dict[int, Any]) -> np.ndarray:
        """The oracle: host NumPy's argmax of each row over the whole vocabulary, of the very logits that are scanned.

        Logits are copied back and brought together row block by row block; the ranks take turns at ranking them.
        """
        hosts = {rank: to_host(array) for rank, array in logits.items()}
        rows = len(next(iter(hosts.values())))
        vocab_size = self.shards[0].vocab_size
        step = max((1 << 22) // vocab_size, 1)
        results: dict[int, np.ndarray] = {}
        for turn, row in enumerate(range(0, rows, step)):
            parts = {rank: host[row : row + step] for rank, host in hosts.items()}
            if not self.emulated:
                parts = dict(enumerate(self.comm.exchange(next(iter(parts.values())))))
            if turn % self.comm.size != self.comm.rank:
                continue
            whole = np.full((len(parts[0]), vocab_size), -np.inf, np.float32)
            for rank, part in parts.items():
                for start, count, first_id in self.shards[rank].ranges:
                    whole[:, first_id : first_id + count] = part[:, start : start + count].astype(np.float32)
            results[turn] = whole.argmax(axis=1)
        for theirs in self.comm.exchange(results):
            results.update(theirs)
        return np.concatenate([results[turn] for turn in sorted(results)] or [np.empty(0, np.int64)])

    def shard_argmax(self, logits: Any) -> np.ndarray:
        """The oracle of the timed rank's shard alone: each row's id among those that the shard holds, on the host."""
        shard = self.shards[self.timed]
        ids = np.sort(shard.ids())[shard.width - shard.num_valid :]  # padding, -1, comes first
        ranges = tuple((start, count, int(np.searchsorted(ids, first))) for start, count, first in shard.ranges)
        alone = VocabShard(0, 1, shard.num_valid, shard.width, ranges)
        return ids[Job(vpa.comm.solo(), (alone,), self.library, self.backend).full_argmax({0: logits})]

    def largest(self, samples: np.ndarray) -> np.ndarray:
        """The element-wise maximum of every rank's ``samples``: over ranks a time is the slowest's."""
        return np.max(self.comm.exchange(samples), axis=0)

    def total(self, count: int) -> int:
        """The sum of every rank's ``count``."""
        return sum(self.comm.exchange(count))


def shards_of(vocab_size: int, tp_size: int) -> tuple[tuple[VocabShard, ...], str]:
    """All ranks' shards, padded as engines pad, and in words how: to 64, or where that does not divide to 64 * tp."""
    for pad_to in (64, 64 * tp_size):
        try:
            shards = shard_vocab(vocab_size, tp_size, pad_to=pad_to)
        except ValueError:
            continue
        padded = shards[0].width * tp_size
        return shards, f"vocabulary {vocab_size} padded to {padded} (pad_to {pad_to}), {shards[0].width} columns a rank"
    raise AssertionError("padding to 64 * tp_size always divides")


def to_host(array: Any) -> np.ndarray:
    """A NumPy or CuPy array as NumPy's."""
    return array if isinstance(array, np.ndarray) else array.get()


def copy(source: Any, target: Any) -> None:
    """Copy a C-contiguous array to another of its library, as bytes: on a GPU one memory-copy node of a graph."""
    if isinstance(source, np.ndarray):
        np.copyto(target, source)
    else:
        target.data.copy_from_device_async(source.data, source.nbytes)


def wait() -> None:
    """Wait for all work on the current GPU."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def wrong_rows(tokens: np.ndarray, expected: np.ndarray) -> int:
    """How many rows have another token than expected."""
    return int((np.asarray(tokens) != expected).sum())
