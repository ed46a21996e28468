"""The arms of a comparison: ways from logits to tokens, each as the same two stages with a gather between.

``existing`` is what engines do without the fused kernels: a reduction over the shard, ids made global, values and ids
cast to fp32 and stacked to [B, 2], a gather along the last dimension, then an argmax over ranks. ``fused`` is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays
from vpa.scan import SPLITS, candidates_shape
from vpa.vocab import VocabShard


def _same(array: Any) -> Any:
    return array


@dataclass(frozen=True)
class Arm:
    """One way. A contribution is what one rank gives to the gather, [B, ...].

    contribution: rows -> (shape, dtype). wrap: a NumPy or CuPy array as the arm's own library sees it, done once.
    local: (wrapped logits, shard, wrapped out) writes the rank's contribution to ``out``. finish: (wrapped gathered
    [tp * B, ...], rows) -> tokens int64 [B], NumPy's or CuPy's. library: whose CUDA graph captures it. external:
    others' code, compared with and shown, but not ours to be right.
    """

    name: str
    contribution: Callable[[int], tuple[tuple[int, ...], np.dtype]]
    local: Callable[[Any, VocabShard, Any], None]
    finish: Callable[[Any, int], Any]
    library: str
    wrap: Callable[[Any], Any] = _same
    external: bool = False


def fused(module: ModuleType, layout: str, library: str, name: str = "fused") -> Arm:
    """Scan and pick of one of our backends, below the checks of the public functions."""

    def contribution(rows: int) -> tuple[tuple[int, ...], np.dtype]:
        return candidates_shape(rows, layout, SPLITS), arrays.LAYOUTS[layout][1]

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        module.local_argmax_candidates(logits, shard, layout, SPLITS, out)

    def finish(gathered: Any, rows: int) -> Any:
        tokens = arrays.namespace(gathered).empty(rows, np.int64)
        module.pick_from_candidates(gathered, rows, tokens)
        return tokens

    return Arm(name, contribution, local, finish, library)


def existing(library: str) -> Arm:
    """The existing path in NumPy, or in CuPy as near to torch's nine kernels as its kernels allow."""
    if library == "numpy":
        return Arm("existing (numpy)", _stacked, _existing_local_numpy, _existing_finish_numpy, library)
    return Arm("existing (cupy)", _stacked, _existing_local_cupy, _existing_finish_cupy, library)


def existing_torch() -> Arm | None:
    """The existing path in torch, as engines have it; None where torch or its GPU support is not installed."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        start, count, first_id = shard.ranges[0]
        values, ids = logits[:, start : start + count].max(dim=-1)
        torch.stack((values.float(), (ids + first_id).float()), dim=-1, out=out)

    def finish(gathered: Any, rows: int) -> Any:
        import cupy

        ranks = len(gathered) // rows
        last_dim = gathered.view(ranks, rows, 2).movedim(0, 1).reshape(rows, ranks * 2)  # the rank axis moves: a copy
        by_row = last_dim.view(rows, ranks, 2)
        best = by_row[:, :, 0].argmax(dim=-1, keepdim=True)
        return cupy.from_dlpack(by_row[:, :, 1].gather(-1, best).squeeze(-1).to(torch.int64))

    return Arm("existing (torch)", _stacked, local, finish, "torch", torch.from_dlpack, external=True)


def _stacked(rows: int) -> tuple[tuple[int, ...], np.dtype]:
    return (rows, 2), np.dtype(np.float32)


def _existing_local_numpy(logits: np.ndarray, shard: VocabShard, out: np.ndarray) -> None:
    start, count, first_id = shard.ranges[0]
    values = logits[:, start : start + count].astype(np.float32, copy=False)  # NumPy has no reduction over bf16
    ids = values.argmax(axis=1)
    out[:, 0] = values[np.arange(len(values)), ids]
    out[:, 1] = ids + first_id


def _existing_finish_numpy(gathered: np.ndarray, rows: int) -> np.ndarray:
    by_row = np.ascontiguousarray(gathered.reshape(-1, rows, 2).transpose(1, 0, 2))  # the rank axis moves
    best = by_row[:, :, 0].argmax(axis=1)
    return by_row[np.arange(rows), best, 1].astype(np.int64)


def _existing_local_cupy(logits: Any, shard: VocabShard, out: Any) -> None:
    import cupy

    start, count, first_id = shard.ranges[0]
    values, ids = _max_with_index(logits[:, start : start + count])
    ids = ids + first_id
    cupy.stack((values.astype(np.float32), ids.astype(np.float32)), axis=1, out=out)


def _existing_finish_cupy(gathered: Any, rows: int) -> Any:
    import cupy

    ranks = len(gathered) // rows
    by_row = cupy.ascontiguousarray(gathered.reshape(ranks, rows, 2).transpose(1, 0, 2))  # the rank axis moves
    best = _max_with_index(by_row[:, :, 0])[1]  # cupy.argmax does not take the first NaN of strided rows
    return _take()(by_row, best, np.int64(ranks)).astype(np.int64)


@functools.cache
def _take() -> Any:
    """The id of the winning rank, by one kernel as torch's ``gather``; CuPy's own take_along_axis launches several."""
    import cupy

    return cupy.ElementwiseKernel(
        "raw float32 pairs, int64 best, int64 ranks", "float32 id", "id = pairs[2 * (i * ranks + best) + 1]", "take_id"
    )


def _max_with_index(array: Any) -> tuple[Any, Any]:
    """Each row's largest value and its first index, NaN first, in one reduction kernel, as torch's ``max(dim)``."""
    import cupy

    values, indices = cupy.empty(len(array), array.dtype), cupy.empty(len(array), np.int64)
    _reduction()(array, values, indices, axis=1)
    return values, indices


@functools.cache
def _reduction() -> Any:
    import cupy

    return cupy.ReductionKernel(
        "T x",
        "T value, int64 index",
        "Best<T>(x, _J)",
        "better(a, b)",
        "value = a.value, index = a.index",
        "Best<T>()",
        "max_with_index",
        reduce_type="Best<T>",
        preamble=_BEST,
    )


_BEST = """
template <typename T> struct Best {
    T value;
    long long index;
    __device__ Best() : value(T(0)), index(-1) {}
    __device__ Best(T v, long long i) : value(v), index(i) {}
};
template <typename T> __device__ Best<T> better(const Best<T>& a, const Best<T>& b) {
    if (a.index < 0) return b;
    if (b.index < 0) return a;
    const bool a_nan = !(a.value == a.value), b_nan = !(b.value == b.value);
    if (a_nan != b_nan) return a_nan ? a : b;
    if (!a_nan && !(a.value == b.value)) return a.value > b.value ? a : b;
    return a.index < b.index ? a : b;
}
"""
