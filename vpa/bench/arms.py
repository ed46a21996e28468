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

import vpa
from vpa import arrays
from vpa.bench.job import to_host
from vpa.scan import SPLITS, candidates_shape
from vpa.vocab import VocabShard


def _same(array: Any) -> Any:
    return array


@dataclass(frozen=True)
class Arm:
    """One way. A contribution is what one rank gives to the gather, [B, ...].

    contribution: rows -> (shape, dtype). wrap: a NumPy or CuPy array as the arm's own library sees it, done once.
    local: (wrapped logits, shard, wrapped out) writes the rank's contribution to ``out``. finish: (wrapped gathered
    [tp * B, ...], rows) -> tokens int64 [B] of the arm's own library; None for an arm that is a local part alone, whose
    contribution is the columns [B] of the shard's range. library: whose CUDA graph captures it. to_host: tokens as
    NumPy's. one_range: takes only shards of one range, with ids that fp32 holds. external: others' code, compared with
    and shown, but not ours to be right.
    """

    name: str
    contribution: Callable[[int], tuple[tuple[int, ...], np.dtype]]
    local: Callable[[Any, VocabShard, Any], None]
    finish: Callable[[Any, int], Any] | None
    library: str
    wrap: Callable[[Any], Any] = _same
    to_host: Callable[[Any], np.ndarray] = to_host
    one_range: bool = False
    external: bool = False


def if_installed(make: Callable[[], Arm | str]) -> Arm | str:
    """The arm; where it cannot run here, as a library that it is made of is missing, the reason."""
    try:
        return make()
    except ImportError as error:
        return " ".join(str(error).split()) or type(error).__name__


def fused(
    module: ModuleType, layout: str, library: str, splits: Callable[[int], int] = lambda _: SPLITS, name: str = "fused"
) -> Arm:
    """Scan and pick of one of our backends, below the checks of the public functions; launches are packed once where it
    can. splits: of a number of rows."""
    prepares = hasattr(module, "prepare_scan")
    ready: dict[Any, Callable[..., None]] = {}  # for each kind of call, made at its first, as ``vpa.TopTokens`` does

    def contribution(rows: int) -> tuple[tuple[int, ...], np.dtype]:
        return candidates_shape(rows, layout, splits(rows)), arrays.LAYOUTS[layout][1]

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        if not prepares:
            module.local_argmax_candidates(logits, shard, layout, splits(len(logits)), out)
            return
        kind = shard.rank, arrays.kind_of(logits)
        if kind not in ready:
            ready[kind] = module.prepare_scan(logits, shard, layout, splits(len(logits)), out)
        ready[kind](logits, out)

    def finish(gathered: Any, rows: int) -> Any:
        tokens = arrays.namespace(gathered).empty(rows, np.int64)
        if not prepares:
            module.pick_from_candidates(gathered, rows, tokens)
            return tokens
        kind = rows, arrays.kind_of(gathered)
        if kind not in ready:
            ready[kind] = module.prepare_pick(gathered, rows, tokens)
        ready[kind](gathered, tokens)
        return tokens

    return Arm(name, contribution, local, finish, library)


def one_kernel(module: ModuleType, library: str, name: str) -> Arm:
    """A local part alone, by the kernel that gives tokens where one rank has the whole vocabulary."""
    ready: dict[Any, Callable[..., None]] = {}

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        kind = shard.rank, arrays.kind_of(logits)
        if kind not in ready:
            ready[kind] = module.prepare_tokens(logits, shard, out)
        ready[kind](logits, out)

    return Arm(name, lambda rows: ((rows,), np.dtype(np.int64)), local, None, library)


def top_tokens(backend: str, library: str) -> Arm:
    """A local part alone, by the public class, for one rank whose whole vocabulary is the shard's columns: what a call
    costs its caller, checks and all."""
    made: dict[Any, vpa.TopTokens] = {}

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        kind = shard.rank, len(logits), logits.dtype
        if kind not in made:
            start, count, _ = shard.ranges[0]
            alone = VocabShard(0, 1, count, shard.width, ((start, count, 0),))
            made[kind] = vpa.TopTokens(
                alone, vpa.comm.solo(), max_rows=len(logits), dtype=logits.dtype, backend=backend
            )
        made[kind](logits, out=out)

    return Arm("TopTokens", _columns, local, None, library, one_range=True)


def existing(library: str) -> Arm:
    """The existing path in NumPy, or in CuPy as near to torch's nine kernels as its kernels allow."""
    if library == "numpy":
        return Arm("existing (numpy)", _stacked, _existing_local_numpy, _existing_finish_numpy, library, one_range=True)
    return Arm("existing (cupy)", _stacked, _existing_local_cupy, _existing_finish_cupy, library, one_range=True)


def existing_torch() -> Arm:
    """The existing path in torch, as engines have it. ``ImportError`` where torch or its GPU support is missing."""
    torch = torch_on_gpu()

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        values, ids = _valid(logits, shard).max(dim=-1)
        torch.stack((values.float(), (ids + shard.ranges[0][2]).float()), dim=-1, out=out)

    def finish(gathered: Any, rows: int) -> Any:
        ranks = len(gathered) // rows
        last_dim = gathered.view(ranks, rows, 2).movedim(0, 1).reshape(rows, ranks * 2)  # the rank axis moves: a copy
        by_row = last_dim.view(rows, ranks, 2)
        best = by_row[:, :, 0].argmax(dim=-1, keepdim=True)
        return by_row[:, :, 1].gather(-1, best).squeeze(-1).to(torch.int64)

    return in_torch("existing (torch)", _stacked, local, finish)


def argmax_torch() -> Arm:
    """``torch.argmax`` over the shard: a local part alone. ``ImportError`` as for ``existing_torch``."""
    torch = torch_on_gpu()

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        torch.argmax(_valid(logits, shard), dim=1, out=out)

    return in_torch("torch.argmax", _columns, local, None)


def argmax_cupy() -> Arm:
    """``cupy.argmax`` over the shard: a local part alone."""
    import cupy

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        cupy.argmax(_valid(logits, shard), axis=1, out=out)

    return Arm("cupy.argmax", _columns, local, None, "cupy", one_range=True, external=True)


def in_torch(name: str, contribution: Callable, local: Callable, finish: Callable | None) -> Arm:
    """An arm of others' code on torch tensors, which share the memory of CuPy's arrays."""
    return Arm(
        name, contribution, local, finish, "torch", torch_on_gpu().from_dlpack, lambda tensor: tensor.cpu().numpy(),
        one_range=True, external=True,
    )  # fmt: skip


def torch_on_gpu() -> ModuleType:
    """torch; ``ImportError`` where it is not installed, or has no GPU here."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("this torch has no GPU here")
    return torch


def _columns(rows: int) -> tuple[tuple[int, ...], np.dtype]:
    return (rows,), np.dtype(np.int64)


def _valid(logits: Any, shard: VocabShard) -> Any:
    """The columns of a shard's one range."""
    start, count, _ = shard.ranges[0]
    return logits[:, start : start + count]


def _stacked(rows: int) -> tuple[tuple[int, ...], np.dtype]:
    return (rows, 2), np.dtype(np.float32)


def _existing_local_numpy(logits: np.ndarray, shard: VocabShard, out: np.ndarray) -> None:
    values = _valid(logits, shard).astype(np.float32, copy=False)  # NumPy has no reduction over bf16
    ids = values.argmax(axis=1)
    out[:, 0] = values[np.arange(len(values)), ids]
    out[:, 1] = ids + shard.ranges[0][2]


def _existing_finish_numpy(gathered: np.ndarray, rows: int) -> np.ndarray:
    by_row = np.ascontiguousarray(gathered.reshape(-1, rows, 2).transpose(1, 0, 2))  # the rank axis moves
    best = by_row[:, :, 0].argmax(axis=1)
    return by_row[np.arange(rows), best, 1].astype(np.int64)


def _existing_local_cupy(logits: Any, shard: VocabShard, out: Any) -> None:
    import cupy

    values, ids = max_with_index(_valid(logits, shard))
    ids = ids + shard.ranges[0][2]
    cupy.stack((values.astype(np.float32), ids.astype(np.float32)), axis=1, out=out)


def _existing_finish_cupy(gathered: Any, rows: int) -> Any:
    import cupy

    ranks = len(gathered) // rows
    by_row = cupy.ascontiguousarray(gathered.reshape(ranks, rows, 2).transpose(1, 0, 2))  # the rank axis moves
    best = max_with_index(by_row[:, :, 0])[1]  # cupy.argmax does not take the first NaN of strided rows
    return _take()(by_row, best, np.int64(ranks)).astype(np.int64)


@functools.cache
def _take() -> Any:
    """The id of the winning rank, by one kernel as torch's ``gather``; CuPy's own take_along_axis launches several."""
    import cupy

    return cupy.ElementwiseKernel(
        "raw float32 pairs, int64 best, int64 ranks", "float32 id", "id = pairs[2 * (i * ranks + best) + 1]", "take_id"
    )


def max_with_index(array: Any) -> tuple[Any, Any]:
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
