"""How a vocabulary is cut over ranks: which global id each local column of a rank's logits has, if it has one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vpa.order import MAX_VOCAB_SIZE

#: A shard's ranges travel to a kernel by value, in the 4 KiB that every device has for arguments.
MAX_RANGES = 128

#: Splits of a row begin at multiples of this many valid columns: 128 bytes of 16-bit logits, one memory transaction.
SPLIT_ALIGNMENT = 64


@dataclass(frozen=True)
class VocabShard:
    """The columns of one rank's logits.

    rank, tp_size: this rank and how many there are.
    vocab_size: number of global ids, added ones included; ids are ``0 .. vocab_size - 1``.
    width: local columns, padding included: the second dimension of the rank's logits.
    ranges: ``((local_start, count, first_id), ...)``. Columns ``local_start .. local_start + count - 1`` hold ids
        ``first_id .. first_id + count - 1``. Columns in no range are padding: they are never read, whatever they hold.

    A lone shard is valid: nothing checks that the shards of all ranks cover the vocabulary. A rank may have no range.
    Raises ``TypeError`` for a number that is not an integer and ``ValueError`` for one that does not fit the others.
    """

    rank: int
    tp_size: int
    vocab_size: int
    width: int
    ranges: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        for name in ("rank", "tp_size", "vocab_size", "width"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        ranges = []
        for number, entry in enumerate(_sequence("ranges", self.ranges)):
            values = _sequence(f"ranges[{number}]", entry)
            if len(values) != 3:
                raise ValueError(f"ranges[{number}] is {entry!r}; (local_start, count, first_id) is accepted")
            start, count, first_id = (integer(f"ranges[{number}]", value) for value in values)
            if count > 0:
                ranges.append((start, count, first_id))
            elif count < 0:
                raise ValueError(f"ranges[{number}] has a count of {count}; a count is at least 0")
        object.__setattr__(self, "ranges", tuple(ranges))

        if not 0 <= self.rank < self.tp_size:
            raise ValueError(f"rank is {self.rank}; with tp_size {self.tp_size} it is 0 to {self.tp_size - 1}")
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size is {self.vocab_size}; it is 1 to {MAX_VOCAB_SIZE}")
        if self.width < 0:
            raise ValueError(f"width is {self.width}; it is at least 0")
        if len(ranges) > MAX_RANGES:
            raise ValueError(f"{len(ranges)} ranges; a shard has at most {MAX_RANGES}: merge those that adjoin")
        _check_apart("columns", [(start, count) for start, count, _ in ranges], self.width, "width")
        _check_apart("ids", [(first, count) for _, count, first in ranges], self.vocab_size, "vocab_size")

    @property
    def num_valid(self) -> int:
        """Number of columns that have an id."""
        return sum(count for _, count, _ in self.ranges)

    def ids(self) -> np.ndarray:
        """The global id of every local column, int64 [width]; -1 for padding."""
        ids = np.full(self.width, -1, np.int64)
        for start, count, first_id in self.ranges:
            ids[start : start + count] = np.arange(first_id, first_id + count)
        return ids

    @classmethod
    def even(cls, vocab_size: int, tp_size: int) -> tuple[VocabShard, ...]:
        """All ranks' shards of a vocabulary cut by ceiling division, without padding: the last are shorter or empty."""
        vocab_size, tp_size = integer("vocab_size", vocab_size), positive("tp_size", tp_size)
        share = -(-vocab_size // tp_size)
        bounds = [min(rank * share, vocab_size) for rank in range(tp_size + 1)]
        return tuple(
            cls(rank, tp_size, vocab_size, end - start, ((0, end - start, start),))
            for rank, (start, end) in enumerate(itertools.pairwise(bounds))
        )


def shard_vocab(
    org_vocab_size: int, tp_size: int, *, added_vocab_size: int = 0, pad_to: int = 64
) -> tuple[VocabShard, ...]:
    """All ranks' shards of a vocabulary padded as serving engines pad it.

    The original ids are padded to a multiple of ``pad_to``, and so are all ids with the added ones; either is cut in
    ``tp_size`` equal parts, and a rank's columns are: original ids, their padding, added ids, their padding. Raises
    ``ValueError`` where a padded size does not divide by ``tp_size``: pass ``pad_to=64 * tp_size``, or use
    ``VocabShard.even``.
    """
    org, added = integer("org_vocab_size", org_vocab_size), integer("added_vocab_size", added_vocab_size)
    tp_size, pad_to = positive("tp_size", tp_size), positive("pad_to", pad_to)
    if org < 1 or added < 0:
        raise ValueError(f"org_vocab_size is {org}, added_vocab_size {added}; at least 1 and at least 0 are accepted")
    org_padded = _round_up(org, pad_to)
    total_padded = _round_up(org_padded + added, pad_to)
    for name, size in (("original", org_padded), ("whole", total_padded)):
        if size % tp_size:
            raise ValueError(
                f"the {name} vocabulary, padded to {size}, does not divide by tp_size {tp_size}; "
                f"use pad_to={pad_to * tp_size} or VocabShard.even({org + added}, {tp_size})"
            )
    org_width, added_width = org_padded // tp_size, (total_padded - org_padded) // tp_size

    def cut(rank: int) -> VocabShard:
        start, added_start = rank * org_width, org + rank * added_width
        org_count = max(min(start + org_width, org) - start, 0)
        added_count = max(min(added_start + added_width, org + added) - added_start, 0)
        ranges = ((0, org_count, start), (org_width, added_count, added_start))
        return VocabShard(rank, tp_size, org + added, org_width + added_width, ranges)

    return tuple(cut(rank) for rank in range(tp_size))


def split_chunk(valid: int, splits: int) -> int:
    """Valid columns of one split: a row's ``valid`` columns cut in ``splits``, rounded up to ``SPLIT_ALIGNMENT``."""
    return _round_up(-(-valid // splits), SPLIT_ALIGNMENT)


#: A run of columns: ``(split, local_start, count, first_id)``.
Run = tuple[int, int, int, int]


def split_runs(shard: VocabShard, splits: int) -> list[Run]:
    """The runs of columns that the splits of a row consist of.

    Valid columns are numbered through all ranges; split ``s`` takes numbers ``s * chunk .. (s + 1) * chunk - 1``. All
    backends cut alike, so that their candidates are equal bit for bit.
    """
    before = itertools.accumulate((count for _, count, _ in shard.ranges), initial=0)
    return _runs(shard, before, split_chunk(shard.num_valid, splits))


def block_span(shard: VocabShard, size: int) -> tuple[int, int]:
    """Where a shard lies among the vocabulary's blocks of ``size`` ids, which no cut into shards moves.

    Returns the first block that holds one of its ids, and how many there are up to the last one, those between them
    included; (0, 0) for a rank without ids.
    """
    blocks = [block for _, count, first in shard.ranges for block in (first // size, (first + count - 1) // size)]
    return (min(blocks), max(blocks) - min(blocks) + 1) if blocks else (0, 0)


def block_runs(shard: VocabShard, size: int) -> list[Run]:
    """The runs of columns whose ids lie in one block of ``size`` ids each; blocks count from the shard's first one."""
    first_block, _ = block_span(shard, size)
    return _runs(shard, (first_id - first_block * size for _, _, first_id in shard.ranges), size)


def _runs(shard: VocabShard, numbers: Iterable[int], chunk: int) -> list[Run]:
    """Ranges cut at multiples of ``chunk`` of their columns' numbers; ``numbers``: those of the ranges' first ones."""
    runs = []
    for (start, count, first_id), number in zip(shard.ranges, numbers, strict=False):
        done = 0
        while done < count:
            split, used = divmod(number + done, chunk)
            length = min(chunk - used, count - done)
            runs.append((split, start + done, length, first_id + done))
            done += length
    return runs


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _sequence(name: str, value: object) -> list:
    try:
        return list(value)  # type: ignore[call-overload]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; (local_start, count, first_id) triples are accepted") from None


def integer(name: str, value: object) -> int:
    """An argument as an int; ``TypeError`` naming it if it is none, or a bool."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; an integer is accepted") from None


def positive(name: str, value: object) -> int:
    """An argument as an int from 1 on; ``TypeError`` or ``ValueError`` naming it if it is none."""
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name} is {number}; it is at least 1")
    return number


def _check_apart(what: str, spans: list[tuple[int, int]], end: int, end_name: str) -> None:
    """Raise unless the spans ``(first, count)`` lie in ``[0, end)`` and share nothing."""
    previous = 0
    for first, count in sorted(spans):
        if first < previous:
            raise ValueError(f"ranges hold {what} below 0 or {what} twice near {first}; each belongs to one range")
        previous = first + count
    if previous > end:
        raise ValueError(f"ranges reach {what} up to {previous - 1}; {end_name} is {end}")
