"""The vocabulary-parallel head: one rank's rows, from a file or a seed, and its two products with hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vpa import arrays, backends, weights
from vpa.full_gather import widest
from vpa.linear import Linear
from vpa.transform import Transform
from vpa.vocab import VocabShard, integer


@dataclass(frozen=True, eq=False)
class ParallelLMHead:
    """One rank's rows of the head.

    weight: [shards[rank].width, hidden_size], bf16, fp16 or fp32, which is the logits' dtype; hidden states are rounded
        to it. Rows of padding may hold anything.
    shards: all ranks', which cover the vocabulary; the full gather has to know where the others' columns belong.
    bias: [width] of any of the dtypes, or None.

    Raises ``TypeError`` or ``ValueError`` for what does not fit.
    """

    weight: Any
    shards: tuple[VocabShard, ...]
    rank: int = 0
    bias: Any = None
    _linear: Linear = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", _covering(self.shards))
        object.__setattr__(self, "rank", integer("rank", self.rank))
        if not 0 <= self.rank < len(self.shards):
            raise ValueError(f"rank is {self.rank}; with {len(self.shards)} shards it is 0 to {len(self.shards) - 1}")
        object.__setattr__(self, "_linear", Linear(self.weight, self.bias))
        if len(self.weight) != self.shard.width:
            raise ValueError(
                f"weight is {list(self.weight.shape)}; rank {self.rank} takes [{self.shard.width}, hidden]: a row for "
                f"each local column, padding too"
            )

    @classmethod
    def load(
        cls,
        file: str,
        shards: Sequence[VocabShard],
        rank: int = 0,
        *,
        bias: str | None = None,
        dtype: Any = None,
        library: Any = np,
    ) -> ParallelLMHead:
        """The rank's rows of a head in ``FILE.safetensors[:TENSOR]``; no other row is read.

        bias: a tensor of the same file. dtype: to round both to; that of the file by default. library: whose arrays
        hold them. ``ValueError`` where file or tensor do not fit the vocabulary.
        """
        shards = _covering(shards)
        head = weights.find_head(file)
        if head.vocab_size != shards[0].vocab_size:
            raise ValueError(
                f"tensor {head.tensor!r} of {head.path} has {head.vocab_size} rows, the shards a vocabulary of "
                f"{shards[0].vocab_size}"
            )
        weight = weights.read_shard(head, shards[rank])
        vector = None if bias is None else weights.read_vector(head.path, bias, shards[rank])
        dtype = weight.dtype if dtype is None else arrays.check_logits_dtype(dtype)
        with np.errstate(all="ignore"):  # what a dtype does not hold is an infinity, or 0
            placed = [None if a is None else library.asarray(a.astype(dtype, copy=False)) for a in (weight, vector)]
        return cls(placed[0], shards, rank, placed[1])

    @classmethod
    def seeded(
        cls,
        seed: int,
        shards: Sequence[VocabShard],
        rank: int = 0,
        *,
        hidden_size: int,
        dtype: Any = "bfloat16",
        library: Any = np,
    ) -> ParallelLMHead:
        """A head whose row of an id is the same however the vocabulary is cut; its logits have variance about 1."""
        shards, dtype = _covering(shards), arrays.check_logits_dtype(dtype)
        weight = np.zeros((shards[rank].width, hidden_size), dtype)
        for start, count, first_id in shards[rank].ranges:
            sized = {"dtype": dtype, "scale": hidden_size**-0.5}
            weight[start : start + count] = weights.seeded_rows(seed, first_id, count, hidden_size, **sized)
        return cls(library.asarray(weight), shards, rank)

    @property
    def shard(self) -> VocabShard:
        return self.shards[self.rank]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def product(self, hidden: Any) -> Any:
        """Local logits [B, width] of hidden states [B, hidden_size], with the bias, before any transform."""
        return self._linear(hidden)

    def check_fused(self, hidden: Any) -> None:
        """Raise ``TypeError`` or ``ValueError`` unless ``candidates`` takes this weight and these hidden states."""
        self._linear.check(hidden)
        if arrays.is_host(hidden):
            raise TypeError("a fused product takes GPU arrays; got NumPy arrays: leave fused unset for them")
        if self.weight.strides[1] != self.weight.itemsize and self.hidden_size > 1:
            raise ValueError(
                f"weight has strides {self.weight.strides}; a fused product takes rows whose elements lie side by "
                f"side: copy it, or leave fused unset"
            )

    def candidates(self, hidden: Any, transform: Transform, out: Any = None) -> Any:
        """The best candidate of each row, uint64 [B, 1], packed, of hidden states [B, hidden_size], GPU arrays, by one
        kernel that multiplies and scans; what it promises says ``LogitsProcessor``. out: C-contiguous; fresh by
        default."""
        self.check_fused(hidden)
        module, xp = backends.select("raw", hidden), arrays.namespace(hidden)
        words = f"u{self.weight.itemsize}"
        rounded = xp.ascontiguousarray(hidden.astype(self.weight.dtype, copy=False).view(words))
        weight = self.weight
        out = xp.empty((len(hidden), 1), np.uint64) if out is None else out
        if len(hidden):
            applied = None if transform.is_identity else transform
            module.head_candidates(rounded.view(weight.dtype), weight, self.shard, self._linear.wide_bias, applied, out)
        return out


#: A head as a processor takes it: this rank's, or a list of all ranks' that one process plays.
Head = ParallelLMHead | Sequence[ParallelLMHead]


def one_of(head: Head) -> ParallelLMHead:
    """This rank's head, or the first of a list."""
    return head if isinstance(head, ParallelLMHead) else head[0]


def gathered_bytes(head: Head, rows: int) -> int:
    """Bytes of logits that a rank has after the full gather of ``rows`` rows, padding included."""
    one = one_of(head)
    return len(one.shards) * rows * widest(one.shards) * one.weight.dtype.itemsize


def heads_of(head: Any, comm: Any, ids: int | None = None) -> list[ParallelLMHead]:
    """The heads that this process has, checked against the communicator and the ``ids`` of a draft-to-target map."""
    played = [head] if isinstance(head, ParallelLMHead) else head
    if not isinstance(played, Sequence) or not played or not all(isinstance(one, ParallelLMHead) for one in played):
        raise TypeError(f"head is a {type(head).__name__}; a ParallelLMHead, or a list of all ranks', is accepted")
    shards = played[0].shards
    if played is head:
        if [one.rank for one in played] != list(range(len(shards))) or any(one.shards != shards for one in played):
            raise ValueError(
                f"head is a list of {len(played)} heads; one of each rank 0 to {len(shards) - 1} is accepted"
            )
        if comm.size != 1:
            raise ValueError(
                f"head is a list, by which one process plays every rank, and the communicator has {comm.size} ranks: "
                f"give this rank's head, or a solo communicator"
            )
    elif (head.rank, len(shards)) != (comm.rank, comm.size):
        raise ValueError(
            f"the head is rank {head.rank} of {len(shards)}, the communicator rank {comm.rank} of {comm.size}; they "
            f"have to match"
        )
    if ids is not None and ids != shards[0].vocab_size:
        raise ValueError(
            f"draft_to_target has {ids} numbers, the head {shards[0].vocab_size} ids; one for each is accepted"
        )
    return list(played)


def _covering(shards: Any) -> tuple[VocabShard, ...]:
    """The shards of all ranks as a tuple; raise unless they hold each id of one vocabulary once."""
    if not isinstance(shards, Sequence) or not shards or not all(isinstance(shard, VocabShard) for shard in shards):
        raise TypeError(
            f"shards is a {type(shards).__name__}; all ranks' VocabShards, in a list or tuple, are accepted"
        )
    if [(shard.rank, shard.tp_size) for shard in shards] != [(rank, len(shards)) for rank in range(len(shards))]:
        listed = ", ".join(f"rank {shard.rank} of {shard.tp_size}" for shard in shards)
        raise ValueError(f"shards are of {listed}; one of each rank, in order, is accepted")
    spans = sorted((first_id, count) for shard in shards for _, count, first_id in shard.ranges)
    end = 0
    for first_id, count in spans:
        if first_id != end:
            break
        end += count
    if end != shards[0].vocab_size or len({shard.vocab_size for shard in shards}) != 1:
        raise ValueError(
            f"the shards do not hold each id of a vocabulary of {shards[0].vocab_size} once, near id {end}"
        )
    return tuple(shards)
