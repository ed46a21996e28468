"""Backend ``raw``: the CUDA/HIP source in ``kernels/`` on CuPy arrays, compiled by ``cupy.RawModule``."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from vpa.arrays import multiprocessors
from vpa.backends import head_launches, launches, norm_launches
from vpa.backends.launcher import Prepared, has_clusters, has_tensor_cores
from vpa.plan import MAX_THREADS
from vpa.transform import Transform
from vpa.vocab import VocabShard

#: ``local_argmax_candidates`` and what is prepared take a ``transform``.
TRANSFORMS = True


def run(launch: launches.Launch, overlap: bool = True) -> None:
    """Launch on the current device and stream; a kernel's first launch on a device compiles or loads it."""
    Prepared(launch, overlap)()


local_argmax_candidates = functools.partial(launches.local_argmax_candidates, run)
pick_from_candidates = functools.partial(launches.pick_from_candidates, run)
residual_rmsnorm = functools.partial(norm_launches.residual_rmsnorm, run, has_clusters)


def prepare_scan(
    logits: Any,
    shard: VocabShard,
    layout: str,
    splits: int,
    out: Any,
    transform: Transform | None = None,
    overlap: bool = True,
) -> Prepared:
    """``local_argmax_candidates`` packed once, for calls with other ``(logits, out)`` of the same kind; rows >= 1."""
    return Prepared(launches.scan(logits, shard, layout, splits, out, transform), overlap)


def prepare_pick(gathered: Any, num_rows: int, out: Any, overlap: bool = True) -> Prepared:
    """``pick_from_candidates`` packed once, for calls with other ``(gathered, out)`` of the same kind; rows >= 1."""
    return Prepared(launches.pick(gathered, num_rows, out), overlap)


def prepare_tokens(logits: Any, shard: VocabShard, out: Any, transform: Transform | None = None) -> Prepared:
    """Scan and pick of a vocabulary on one rank in one kernel, for calls with other ``(logits, out)``; rows >= 1."""
    return Prepared(launches.tokens(logits, shard, out, transform))


def prepare_scan_in_cluster(logits: Any, shard: VocabShard, layout: str, blocks: int, out: Any) -> Prepared:
    """A scan that gives one candidate a row, on which its ``blocks`` blocks (at most 8) agree; rows >= 1. Compute
    capability 9.0; for calls with other ``(logits, out)``."""
    return Prepared(launches.scan_by_rows(logits, shard, layout, blocks, out, most_threads=MAX_THREADS, cluster=True))


def apply_transform(transform: Transform, logits: Any) -> Any:
    """The transformed logits as a new C-contiguous array of the same shape and dtype; a NaN may have other bits."""
    words = cupy.ascontiguousarray(logits.view(f"u{logits.itemsize}")) if logits.size else logits
    out = cupy.empty(logits.shape, logits.dtype)
    if logits.size:
        run(head_launches.transform_logits(words.view(logits.dtype), out, transform))
    return out


def head_candidates(
    hidden: Any, weight: Any, shard: VocabShard, bias: Any, transform: Transform | None, out: Any
) -> None:
    """Write the best candidate of each row of ``hidden @ weight.T + bias`` to ``out`` uint64 [rows, 1], packed.

    hidden: [rows >= 1, size], C-contiguous; weight: [shard.width, size] of the same dtype, neighbouring columns side by
    side; bias: fp32 [width], C-contiguous, or None.
    """
    rows, size = hidden.shape
    tensor = head_launches.on_tensor(hidden, weight) and has_tensor_cores()
    shape = head_launches.head_shape(rows, size, shard.num_valid, tensor, multiprocessors())
    of_blocks = cupy.empty((rows, shape.blocks), np.uint64)
    run(head_launches.head(hidden, weight, shard, bias, of_blocks, transform, shape, tensor))
    run(launches.pick(of_blocks, rows, out))


def prepare_rmsnorm(
    partials: Any,
    residual: Any,
    weight: Any,
    eps: float,
    rounding: str,
    normed: Any,
    new_residual: Any,
    overlap: bool = True,
) -> Prepared:
    """``residual_rmsnorm`` packed once, for its own arrays, which have to live as long; rows >= 1."""
    arrays = (partials, residual, weight, eps, rounding, normed, new_residual)
    return Prepared(norm_launches.norm(*arrays, clusters=has_clusters()), overlap)
