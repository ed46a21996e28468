"""The steps of a layer's end over ranks, on checked arguments: collectives, kernels, and the memory between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays


@dataclass(frozen=True)
class Call:
    """Everything but the partial sums, checked: residual (or None) and weight of their library, and settings.

    shape, dtype: of the partial sums [B, H]. residual and weight may have any strides of whole elements.
    """

    shape: tuple[int, int]
    dtype: np.dtype
    residual: Any
    weight: Any
    eps: np.float32
    mode: str
    rounding: str

    def facts(self) -> dict[str, Any]:
        """What ranks must have alike, in words that a message can use."""
        return {
            "mode": self.mode,
            "rows": self.shape[0],
            "hidden size": self.shape[1],
            "dtype": str(self.dtype),
            "dtype of the weight": str(self.weight.dtype),
            "residual": "none" if self.residual is None else "given",
            "eps": str(self.eps),
            "rounding": self.rounding,
        }


@dataclass(frozen=True)
class Prepared:
    """Steps over fixed memory: each call reads the arrays that it was made for and writes the two results again."""

    normed: Any
    new_residual: Any
    steps: tuple[Callable[[], None], ...]

    def __call__(self) -> None:
        for step in self.steps:
            step()


def prepare(module: ModuleType, comm: Any, partial: Any, call: Call) -> Prepared:
    """The steps of a call on checked arguments. Every rank makes the same; collectives are in the steps alone."""
    rows, hidden = call.shape
    if rows == 0:
        return Prepared(_empty(partial, 0, hidden), _empty(partial, 0, hidden), ())
    call, fills = _read_in_rows(call)
    if call.mode == "sequence_parallel" and comm.size > 1:
        made = _sequence_parallel(module, comm, partial, call)
        return replace(made, steps=(*fills, *made.steps))
    normed, kept = _empty(partial, rows, hidden), _empty(partial, rows, hidden)
    if comm.size == 1:
        partial, fill = _in_rows(partial)
        return Prepared(normed, kept, (*fills, *fill, _kernel(module, partial[None], call, normed, kept)))
    reduced = call.mode == "all_reduce"
    send, fill = _contiguous(partial)
    recv = _empty(partial, rows if reduced else comm.size * rows, hidden)
    collective = functools.partial(comm.all_reduce if reduced else comm.all_gather, send, recv)
    last = _kernel(module, recv.reshape(-1, rows, hidden), call, normed, kept)
    return Prepared(normed, kept, (*fills, *fill, collective, last))


def prepare_emulated(module: ModuleType, partials: Any, call: Call) -> Prepared:
    """The steps of one process that plays all ranks, whose partial sums are ``partials`` [ranks, B, H]."""
    ranks, rows, hidden = partials.shape
    normed, kept = _empty(partials, rows, hidden), _empty(partials, rows, hidden)
    call, fills = _read_in_rows(call)
    steps: list[Callable[[], None]] = [*fills]
    if rows and call.mode == "one_shot":
        steps.append(_kernel(module, partials, call, normed, kept))
    elif rows:
        total = _empty(partials, rows, hidden)
        shares = [(0, rows)] if call.mode == "all_reduce" else _shares(rows, ranks)
        for start, end in shares:
            if start < end:
                own = slice(start, end)
                steps.append(_kernel(module, partials[:, own], call, None, total[own], sum_only=True))
                steps.append(_kernel(module, total[None, own], call, normed[own], kept[own], own))
    return Prepared(normed, kept, tuple(steps))


def _sequence_parallel(module: ModuleType, comm: Any, partial: Any, call: Call) -> Prepared:
    """Rows are shared out in equal parts, the last ones filled up with rows of zeros: collectives take equal parts."""
    rows, hidden = call.shape
    start, end = _shares(rows, comm.size)[comm.rank]
    share = -(-rows // comm.size)
    send, fill = _contiguous(partial, comm.size * share)
    total, own_normed, own_kept = (_empty(partial, share, hidden, zeros=True) for _ in range(3))
    all_normed, all_kept = (_empty(partial, comm.size * share, hidden) for _ in range(2))
    steps = [*fill, functools.partial(comm.reduce_scatter, send, total)]
    if start < end:
        own = slice(0, end - start)
        steps.append(_kernel(module, total[None, own], call, own_normed[own], own_kept[own], slice(start, end)))
    steps.append(functools.partial(comm.all_gather, own_normed, all_normed))
    steps.append(functools.partial(comm.all_gather, own_kept, all_kept))
    return Prepared(all_normed[:rows], all_kept[:rows], tuple(steps))


def _kernel(
    module: ModuleType,
    partials: Any,
    call: Call,
    normed: Any,
    kept: Any,
    own: slice = slice(None),
    sum_only: bool = False,
) -> Callable[[], None]:
    """The kernel over ``partials`` [ranks, rows, H], where ``own`` are those rows' numbers; packed if it can be."""
    residual = None if sum_only or call.residual is None else call.residual[own]
    return kernel(module, partials, residual, None if sum_only else call.weight, call.eps, call.rounding, normed, kept)


def kernel(module: ModuleType, *arguments: Any) -> Callable[[], None]:
    """A backend's ``residual_rmsnorm`` over these arguments, packed once where it can be; rows >= 1."""
    if hasattr(module, "prepare_rmsnorm"):
        return functools.partial(_launched, module.prepare_rmsnorm(*arguments), arguments)
    return functools.partial(module.residual_rmsnorm, *arguments)


def _launched(launch: Callable[[], None], keep: tuple[Any, ...]) -> None:
    """Make a packed launch, which has the addresses of its arrays alone; ``keep`` lets them live as long."""
    launch()


def _shares(rows: int, ranks: int) -> list[tuple[int, int]]:
    """The rows [start, end) of each rank: equal shares but for the last ones, which may be short or empty."""
    share = -(-rows // ranks)
    return [(min(rank * share, rows), min((rank + 1) * share, rows)) for rank in range(ranks)]


def _empty(like: Any, rows: int, hidden: int, zeros: bool = False) -> Any:
    xp, words = arrays.namespace(like), f"u{like.itemsize}"
    return (xp.zeros if zeros else xp.empty)((rows, hidden), words).view(like.dtype)


def rows_side_by_side(array: Any) -> Any:
    """The array itself where a row's elements lie side by side, as the kernels read them; else a copy of it."""
    array, fill = _in_rows(array)
    for step in fill:
        step()
    return array


def _read_in_rows(call: Call) -> tuple[Call, tuple[Callable[[], None], ...]]:
    """The call with a residual and weight that kernels can read, and the steps that fill those that are copies."""
    weight, fill = _in_rows(call.weight)
    residual, other = (None, ()) if call.residual is None else _in_rows(call.residual)
    return replace(call, residual=residual, weight=weight), (*fill, *other)


def _in_rows(array: Any) -> tuple[Any, tuple[Callable[[], None], ...]]:
    """The array itself where a row's elements lie side by side; else room for a copy, and the step that fills it."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array, ()
    return _filled(array, array.shape)


def _contiguous(partial: Any, rows: int | None = None) -> tuple[Any, tuple[Callable[[], None], ...]]:
    """What a collective can send, of so many rows, and the step that fills it before each, if it is a copy."""
    rows = len(partial) if rows is None else rows
    if partial.flags.c_contiguous and rows == len(partial):
        return partial, ()
    return _filled(partial, (rows, partial.shape[1]))


def _filled(array: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[Callable[[], None], ...]]:
    """Zeros of a shape, of the array's library and dtype, and the step that copies the array to their first rows."""
    words = f"u{array.itemsize}"  # not every library copies bf16
    copy = arrays.namespace(array).zeros(shape, words)
    source, target = array.view(words), copy[: len(array)]

    def fill() -> None:
        target[...] = source

    return copy.view(array.dtype), (fill,)
