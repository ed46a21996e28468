"""One process plays every rank: the same local and finishing stages, with one buffer in place of the gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vpa import arrays
from vpa.pick import pick_from_candidates
from vpa.plan import Plan
from vpa.scan import candidates_shape, local_argmax_candidates
from vpa.transform import Transform
from vpa.vocab import VocabShard


def emulate_top_tokens(
    shards_of_logits: Sequence[Any],
    shards: Sequence[VocabShard],
    *,
    layout: str = "packed",
    backend: str | None = None,
    transform: Transform | None = None,
) -> Any:
    """What ``get_top_tokens`` gives on every rank, computed by one process that has all ranks' logits.

    shards_of_logits: one [B, width] array per shard, all of one library, dtype and B. Other arguments, the result and
    the errors are those of ``get_top_tokens``.
    """
    taken, shards = check_all_ranks(shards_of_logits, shards)
    first = taken[0].array
    arrays.check_layout(layout)
    rows = len(first)
    splits = plan_of(first, shards).splits(rows)
    shape = candidates_shape(rows, layout, splits)
    gathered = arrays.namespace(first).empty((len(shards) * rows, shape[1]), arrays.LAYOUTS[layout][1])
    for rank, (one, shard) in enumerate(zip(taken, shards, strict=True)):
        part = gathered[rank * rows : (rank + 1) * rows]
        local_argmax_candidates(
            one.array, shard, layout=layout, splits=splits, out=part, backend=backend, transform=transform
        )
    return taken[0].give_back(pick_from_candidates(gathered, rows, backend=backend))


def check_all_ranks(shards_of_logits: Any, shards: Any) -> tuple[list[arrays.Given], list[VocabShard]]:
    """All ranks' logits and shards, for one process that plays every rank; raise unless they fit each other."""
    shards_of_logits, shards = _listed("shards_of_logits", shards_of_logits), _listed("shards", shards)
    if len(shards_of_logits) != len(shards) or not shards:
        raise ValueError(f"{len(shards_of_logits)} arrays of logits for {len(shards)} shards; one for each is accepted")
    taken = [arrays.given(logits, f"shards_of_logits[{rank}]") for rank, logits in enumerate(shards_of_logits)]
    first = taken[0].array
    for rank, one in enumerate(taken):
        if one.array.ndim != 2:
            raise ValueError(f"shards_of_logits[{rank}] has shape {one.array.shape}; [rows, columns] is accepted")
        if _kind(one.array) != _kind(first):
            raise ValueError(
                f"shards_of_logits[0] is {_kind(first)}, [{rank}] is {_kind(one.array)}; "
                f"all have one library, dtype and B"
            )
        if not isinstance(shards[rank], VocabShard):
            raise TypeError(f"shards[{rank}] is a {type(shards[rank]).__name__}; a vpa.VocabShard is accepted")
        if (shards[rank].tp_size, shards[rank].vocab_size) != (len(shards), shards[0].vocab_size):
            raise ValueError(f"shards[{rank}] is of another vocabulary or number of ranks: {shards[rank]}")
    return taken, shards


def plan_of(logits: Any, shards: Sequence[VocabShard]) -> Plan:
    """What decides on the splits of all ranks' logits, which are like these."""
    multiprocessors = 0 if arrays.is_host(logits) else arrays.multiprocessors()
    return Plan.agreed([(shard.num_valid, multiprocessors) for shard in shards], logits.dtype.itemsize)


def _listed(name: str, argument: Any) -> list[Any]:
    if not isinstance(argument, Sequence):
        raise TypeError(f"{name} is a {type(argument).__name__}; a list or tuple with one entry per rank is accepted")
    return list(argument)


def _kind(array: Any) -> str:
    """What the arrays of all ranks have alike."""
    return f"{arrays.namespace(array).__name__} {array.dtype} of {len(array)} rows"
