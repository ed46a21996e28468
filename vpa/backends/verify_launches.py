"""What the kernels of a verification are launched with, as pure functions of shapes and dtypes.

``raw_verify`` and ``simt_verify`` run these launches; ``numba_verify`` takes grid, block and most arguments from here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vpa.backends import launches
from vpa.backends.launches import Launch
from vpa.contribution import BONUS_BLOCK, DRAFT_BLOCK, Contribution
from vpa.requests import Requests
from vpa.vocab import VocabShard, block_span

#: Threads of a block of the finish at most: a warp picks a row at a time.
_FINISH_THREADS = 256


def scan(logits: Any, shard: VocabShard, contribution: Contribution, nan: str, cu_num_rows: Any, out: Any) -> Launch:
    """The launch that writes a rank's contribution, for ``logits`` [rows >= 1, width] of at least one request."""
    if contribution.form == "candidate":
        launch = launches.scan(logits, shard, "packed", contribution.draft_width, out)
    else:
        launch = _scan_of_blocks(logits, shard, contribution, cu_num_rows, out)
    ignored = {"nan_ignored": 1} if nan == "ignore" else {}  # else it is the kernel that top tokens use, too
    return dataclasses.replace(launch, defines={**launch.defines, **ignored})


def _scan_of_blocks(logits: Any, shard: VocabShard, contribution: Contribution, cu_num_rows: Any, out: Any) -> Launch:
    """A scan by rows whose splits are blocks of ids; a bonus row's are an eighth of what its thread blocks can take."""
    launch = launches.scan_by_rows(logits, shard, "packed", 1, out)
    contiguous = bool(launch.defines["contiguous"])
    widest = max((min(count, DRAFT_BLOCK) for _, count, _ in shard.ranges), default=0)
    shape = launches.scan_shape(widest, logits.dtype, contiguous)
    defines = {**launch.defines, **request_defines(contribution)}
    defines.update(threads=shape.threads, loads=shape.loads, once=int(shape.once))
    defines.update(draft_block=DRAFT_BLOCK, bonus_block=BONUS_BLOCK)
    requests = len(cu_num_rows) - 1
    blocks = launches.checked_grid(requests * contribution.line, f"{requests} requests of {contribution.line} blocks")
    first_ids = (np.int64(block_span(shard, size)[0] * size) for size in (DRAFT_BLOCK, BONUS_BLOCK))
    args = (*launch.args, cu_num_rows, np.int64(len(logits)), *first_ids)
    return Launch(launch.kernel, defines, blocks, shape.threads, args)


def finish(gathered: Any, contribution: Contribution, requests: Requests, vocab_size: int, outputs: Any) -> Launch:
    """The launch of the finish, of at least one row and one request."""
    rows, count = len(requests.draft_ids), requests.count
    lines, _ = contribution.shape(rows, count)
    threads = min(32 * (contribution.num_draft_tokens + 1), _FINISH_THREADS)
    synthetic = requests.acceptance is not None
    defines = {**request_defines(contribution), "ranks": len(gathered) // lines, "pairs": 0, "threads": threads}
    defines["synthetic"] = int(synthetic)
    blocks = launches.checked_grid(count, f"{count} requests")
    args = (gathered, np.int64(rows), np.int64(vocab_size), *inputs(requests), *outputs)
    return Launch("greedy_verify", defines, blocks, threads, args)


def inputs(requests: Requests) -> tuple[Any, ...]:
    """The requests' arrays that the finish reads, in its order; draws only where acceptance is synthetic."""
    drawn = () if requests.acceptance is None else (requests.seeds, requests.acceptance)
    return (requests.draft_ids, requests.cu_num_rows, requests.positions, requests.seq_lens, requests.prefill_lens,
            *drawn)  # fmt: skip


def request_defines(contribution: Contribution) -> dict[str, int]:
    """What ``kernels/requests.cuh`` needs."""
    return {
        "blocks": int(contribution.form == "blocks"),
        "drafts": contribution.num_draft_tokens,
        "width": contribution.draft_width,
        "bonus_width": contribution.bonus_width,
    }
