"""The full gather: all ranks' logits in the order of ids, and the argmax of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vpa import arrays, top_tokens
from vpa.comm import solo
from vpa.vocab import VocabShard


def full_logits(parts: Sequence[Any], shards: tuple[VocabShard, ...], comm: Any) -> Any:
    """All ranks' logits in the order of ids, [B, vocab_size], from this rank's, or from all that are played."""
    if len(parts) == len(shards):
        return in_order_of_ids(parts, shards, parts[0].dtype)
    send = send_of(parts[0], shards)
    recv = arrays.namespace(send).empty((len(shards) * len(send), send.shape[1]), send.dtype)
    comm.all_gather(send, recv)
    return in_order_of_ids(list(recv.reshape(len(shards), *send.shape)), shards, parts[0].dtype)


def send_of(logits: Any, shards: Sequence[VocabShard]) -> Any:
    """What a rank gives to a gather of logits [B, width]: words [B, width of the widest shard], C-contiguous.

    Shards may differ in width, and a gather takes equal parts: narrower ones are filled up.
    """
    words, wide = logits.view(f"u{logits.itemsize}"), widest(shards)
    if words.shape[1] == wide and words.flags.c_contiguous:
        return words
    send = arrays.namespace(logits).zeros((len(logits), wide), words.dtype)
    send[:, : words.shape[1]] = words
    return send


def in_order_of_ids(by_rank: Sequence[Any], shards: Sequence[VocabShard], dtype: np.dtype) -> Any:
    """All ranks' logits, or the words that they are, [B, width or more] each, as [B, vocab_size] of ``dtype``."""
    words = f"u{dtype.itemsize}"
    full = arrays.namespace(by_rank[0]).empty((len(by_rank[0]), shards[0].vocab_size), words)
    for part, shard in zip(by_rank, shards, strict=True):
        for start, count, first_id in shard.ranges:
            full[:, first_id : first_id + count] = part.view(words)[:, start : start + count]
    return full.view(dtype)


def full_argmax(logits: Any) -> Any:
    """The argmax of whole rows [B, vocab_size], int64 [B]: the first NaN, else the first of the largest values.

    NumPy's own over NumPy arrays. CuPy's flushes subnormals and has none for bf16: there one rank scans it all.
    """
    if arrays.is_host(logits):
        with np.errstate(all="ignore"):  # a signalling NaN is a NaN
            return logits.astype(np.float32, copy=False).argmax(axis=1)
    return top_tokens.get_top_tokens(logits, VocabShard.even(logits.shape[1], 1)[0], solo())


def widest(shards: Sequence[VocabShard]) -> int:
    """Columns of the widest shard, padding included."""
    return max(shard.width for shard in shards)
