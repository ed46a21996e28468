"""Verification by the Numba CUDA twins in ``kernels/``, for backend ``numba``; launches are packed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vpa.backends import numba_, verify_launches
from vpa.contribution import Contribution
from vpa.kernels import numba_verify
from vpa.requests import Requests
from vpa.vocab import VocabShard


def prepare_verify_scan(
    logits: Any, shard: VocabShard, contribution: Contribution, nan: str, requests: Requests, out: Any
) -> Callable[[Any, Requests, Any], None]:
    """As for backend ``numpy``, for calls with other arrays of the same kind, on CuPy's current stream."""
    if contribution.form == "candidate":
        packed = numba_.prepare_scan(logits, shard, "packed", contribution.draft_width, out, nan)
        return lambda logits, requests, out: packed(logits, out)
    launch = verify_launches.scan(logits, shard, contribution, nan, requests.cu_num_rows, out)
    names = ("ranges", "contiguous", "threads", "loads", "once", "drafts", "width", "bonus_width", "draft_block")
    kernel = numba_verify.local_argmax_blocks(
        logits.dtype.name,
        nan_ignored=nan == "ignore",
        **{name: launch.defines[name] for name in (*names, "bonus_block")},
    )
    row_stride, column_stride, num_rows, draft_from, bonus_from = (
        int(launch.args[place]) for place in (1, 2, -3, -2, -1)
    )
    ranges = shard.ranges or ((0, 0, 0),)
    prepared = numba_.Prepared(
        kernel, launch,
        (logits, row_stride, column_stride, ranges, out, requests.cu_num_rows, num_rows, draft_from, bonus_from),
    )  # fmt: skip
    return lambda logits, requests, out: prepared(logits, out, requests.cu_num_rows)


def prepare_verify_finish(
    gathered: Any, contribution: Contribution, requests: Requests, vocab_size: int, outputs: Any
) -> Callable[[Any, Requests, Any], None]:
    """As for backend ``numpy``, for calls with other arrays of the same kind, on CuPy's current stream."""
    launch = verify_launches.finish(gathered, contribution, requests, vocab_size, outputs)
    names = ("blocks", "drafts", "width", "bonus_width", "synthetic", "threads")
    kernel = numba_verify.greedy_verify(**{name: launch.defines[name] for name in names})
    rows, ranks = len(requests.draft_ids), launch.defines["ranks"]
    inputs = verify_launches.inputs(requests)
    drawn = () if launch.defines["synthetic"] else (0, 0)
    lines = len(gathered) // ranks
    prepared = numba_.Prepared(kernel, launch, (gathered, lines, ranks, rows, vocab_size, *inputs, *drawn, *outputs))
    return lambda gathered, requests, outputs: prepared(gathered, *verify_launches.inputs(requests), *outputs)
