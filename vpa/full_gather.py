"""The full gather: all ranks' logits in the order of ids, and the argmax of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vpa import arrays, top_tokens
from vpa.comm import solo
from vpa.vocab import VocabShard


def full_logits(parts: Sequence[Any], shards: tuple[VocabShard, ...], comm: Any) -> Any:
    """All ranks' logits in the order of ids, [B, vocab_size], from this rank's, or from all that are played.

    Shards may differ in width, and a gather takes equal parts: narrower ones are filled up.
    """
    xp, dtype, rows, wide = arrays.namespace(parts[0]), parts[0].dtype, len(parts[0]), widest(shards)
    words = f"u{dtype.itemsize}"
    by_rank = [part.view(words) for part in parts]
    if len(parts) < len(shards):
        send, recv = xp.zeros((rows, wide), words), xp.empty((len(shards) * rows, wide), words)
        send[:, : parts[0].shape[1]] = by_rank[0]
        comm.all_gather(send, recv)
        by_rank = list(recv.reshape(len(shards), rows, wide))
    full = xp.empty((rows, shards[0].vocab_size), words)
    for part, shard in zip(by_rank, shards, strict=True):
        for start, count, first_id in shard.ranges:
            full[:, first_id : first_id + count] = part[:, start : start + count]
    return full.view(dtype)


def full_argmax(logits: Any) -> Any:
    """The argmax of whole rows [B, vocab_size], int64 [B]: the first NaN, else the first of the largest values.

    NumPy's own over NumPy arrays. CuPy's flushes subnormals and has none for bf16: there one rank scans it all.
    """
    if arrays.is_host(logits):
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            return logits.astype(np.float32, copy=False).argmax(axis=1)
    return top_tokens.get_top_tokens(logits, VocabShard.even(logits.shape[1], 1)[0], solo())


def widest(shards: Sequence[VocabShard]) -> int:
    """Columns of the widest shard, padding included."""
    return max(shard.width for shard in shards)
