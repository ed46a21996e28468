"""Greedy verification in plain Python, request by request: the oracle of what is measured and tested.

Written from the rules of ``docs/semantics.md`` alone, apart from ``vpa.acceptance``, which backends and arms share: a
mistake there shows as a difference.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

#: Tokens of each request, -1 beyond the sampled ones, and how many were sampled and rejected.
Outcome = tuple[list[list[int]], list[int], list[int]]


def single(number: float) -> float:
    """The fp32 number nearest to a number."""
    return struct.unpack("<f", struct.pack("<f", number))[0]


def uniform(seed: int, position: int) -> float:
    """The draw of a seed and a position: the first word of Philox4x32-10, as a number in (0, 1)."""
    mask = 0xFFFFFFFF
    counter = [position & mask, position >> 32 & mask, 0, 0]
    key = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 32) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    word = counter[0] if counter[0] < 2**31 else counter[0] - 2**32
    step = single(4.6566127342e-10)
    return max(single(single(~word if word < 0 else word) * step), step)


def reference(
    argmax: Sequence[int],
    draft_ids: Sequence[int],
    cu: Sequence[int],
    k: int,
    positions: Sequence[int],
    seq_lens: Sequence[int],
    prefill_lens: Sequence[int],
    seeds: Sequence[int],
    vocab: int,
    rates: Sequence[float] | None = None,
) -> Outcome:
    """Tokens, and how many were sampled and rejected, request by request and draft by draft."""
    tokens, sampled, rejected = [], [], []
    for r in range(len(cu) - 1):
        start, end = int(cu[r]), int(cu[r + 1])
        line = [-1] * (k + 1)
        tokens.append(line)
        if start == end or seq_lens[r] < prefill_lens[r]:
            sampled.append(0)
            rejected.append(0)
            continue
        accepted = 0
        for i in range(end - start - 1):
            judged, row = start + i, start + i + 1
            draft, best = int(draft_ids[row]), int(argmax[judged])
            if int(positions[row]) - (row - start) < int(prefill_lens[r]):
                draft = -1
            if draft < 0 or draft >= vocab:
                good = False
            elif rates is None:
                good = draft == best
            else:
                good = uniform(int(seeds[r]), int(positions[judged])) < float(rates[i])
            line[i] = draft if good else best
            if not good:
                break
            accepted += 1
        if accepted == end - start - 1:
            line[accepted] = int(argmax[end - 1])
        sampled.append(accepted + 1)
        rejected.append(end - start - accepted - 1)
    return tokens, sampled, rejected
