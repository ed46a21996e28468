"""A layer's end over ranks: all-reduce of partial sums, residual, RMSNorm; by one kernel behind a gather, or in steps.

``vpa.rmsnorm`` says what is computed and where it is rounded. The modes differ in what travels:

    one_shot            all partial sums are gathered; one kernel adds them in the order of ranks and does the rest
    all_reduce          the communicator's sum; the same kernel, with one rank's numbers, does the rest
    sequence_parallel   each rank gets the sum of its rows and norms them; results are gathered

``one_shot`` gives the rules' bits over any communicator, since a gather adds nothing. The others do so where the
communicator adds as the rules do: ours over host memory does, NCCL does not, see ``sum_bound``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays, backends
from vpa.comm import agree, check_carries, check_communicator
from vpa.norm_steps import Call, prepare, prepare_emulated, rows_side_by_side
from vpa.order import LOGITS_DTYPES
from vpa.rmsnorm import ROUNDINGS

MODES = ("one_shot", "all_reduce", "sequence_parallel")

#: What a mode asks of a communicator beside ``all_gather``.
_NEEDS = {"one_shot": (), "all_reduce": ("all_reduce",), "sequence_parallel": ("reduce_scatter",)}

#: A kernel's block holds a whole row in registers.
MAX_HIDDEN = 16384

#: Half the distance of 1 and the next number, by which a sum of 1 to 2 is rounded at most.
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def allreduce_rmsnorm(
    partial: Any,
    residual: Any,
    weight: Any,
    eps: float,
    comm: Any,
    *,
    mode: str = "one_shot",
    rounding: str = "once",
    backend: str | None = None,
) -> tuple[Any, Any]:
    """(normed, new_residual), both [B, H], of the ranks' partial sums; every rank calls and gets the same.

    partial: this rank's [B, H], bf16, fp16 or fp32, 1 <= H <= 16384, any strides, any library that speaks DLPack.
    residual: [B, H] of the same dtype and library, the same on every rank; or None, and the sum is the new residual.
    weight: [H] of that dtype or fp32. eps: a number from 0 on, rounded to fp32.
    comm: a communicator; ``vpa.comm.solo()`` for one rank.
    mode: ``"one_shot"``, ``"all_reduce"`` or ``"sequence_parallel"``; ``vpa.norm_plan`` says which moves least.
    rounding: ``"once"``, ``"unrounded_residual"`` or ``"gemma"``, see ``vpa.rmsnorm``.
    backend: as for ``vpa.get_top_tokens``. GPU work is enqueued on CuPy's current stream.

    The results are new arrays of the caller's library; arguments are not written. With ``one_shot``, and over host
    memory with any mode, both have the bits that ``vpa.rmsnorm`` says (a NaN where it says NaN). Raises ``TypeError``
    or ``ValueError`` on every rank where one rank's arguments do not fit or ranks' differ; that takes an exchange over
    the host. Inside a capture of a CUDA graph it is refused: there its steps are made before, by ``vpa.norm_steps``.
    """
    check_communicator(comm)
    taken, call, module, error = None, None, None, None
    try:
        taken = arrays.given(partial, "partial")
        call, module = _checked(taken.array, residual, weight, eps, mode, rounding, backend)
        _check_comm(comm, mode, taken.array)
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts = {}
    if error is None:
        facts = {"function": "allreduce_rmsnorm", **call.facts(), "arrays": arrays.namespace(taken.array).__name__}
    agree(comm, facts, error)
    prepared = prepare(module, comm, taken.array, call)
    prepared()
    return taken.give_back(prepared.normed), taken.give_back(prepared.new_residual)


def emulate_allreduce_rmsnorm(
    partials: Sequence[Any],
    residual: Any,
    weight: Any,
    eps: float,
    *,
    mode: str = "one_shot",
    rounding: str = "once",
    backend: str | None = None,
) -> tuple[Any, Any]:
    """What ``allreduce_rmsnorm`` gives on every rank, computed by one process that has all ranks' partial sums.

    partials: one [B, H] array for each rank, all of one library, dtype and shape. Sums are in the order of ranks in
    every mode. Other arguments, the result and the errors are those of ``allreduce_rmsnorm``.
    """
    if not isinstance(partials, Sequence) or not partials:
        raise TypeError(f"partials is a {type(partials).__name__}; a list or tuple with one array per rank is accepted")
    taken = [arrays.given(partial, f"partials[{rank}]") for rank, partial in enumerate(partials)]
    first = taken[0].array
    call, module = _checked(first, residual, weight, eps, mode, rounding, backend, "partials[0]")
    for rank, one in enumerate(taken):
        if _kind(one.array) != _kind(first):
            raise ValueError(
                f"partials[0] is {_kind(first)}, [{rank}] is {_kind(one.array)}; all have one library, dtype and shape"
            )
    words = f"u{first.itemsize}"  # not every library copies bf16
    gathered = arrays.namespace(first).empty((len(taken), *first.shape), words)
    for rank, one in enumerate(taken):
        gathered[rank] = one.array.view(words)
    prepared = prepare_emulated(module, gathered.view(first.dtype), call)
    prepared()
    return taken[0].give_back(prepared.normed), taken[0].give_back(prepared.new_residual)


@np.errstate(over="ignore", invalid="ignore")  # infinities and NaNs are numbers like others
def rms_norm(x: Any, gain: Any, eps: float) -> Any:
    """RMSNorm of the rows of ``x`` [rows, n] with ``gain`` [n]: rounded once, to the gain's dtype; NumPy or CuPy."""
    if x.dtype != gain.dtype:
        wide = (array.astype(np.float32, copy=False) for array in (x, gain))
        return rms_norm(*wide, eps).astype(gain.dtype, copy=False)
    normed = arrays.namespace(x).empty(x.shape, f"u{x.itemsize}").view(x.dtype)  # not every library makes bf16
    if len(x):
        module = backends.select(None, x)
        module.residual_rmsnorm(
            rows_side_by_side(x)[None], None, rows_side_by_side(gain), np.float32(eps), "once", normed, None
        )
    return normed


def sum_bound(parts: Sequence[np.ndarray], residual: np.ndarray | None = None) -> np.ndarray:
    """How far new_residual may be from the rules' where the sum is another's, fp64 of the arrays' shape.

    For a sum that adds in any order and rounds every addition to the dtype, as NCCL may: each of ``ranks - 1``
    roundings, and the one of the rules, is off by at most the dtype's unit roundoff times the sum of magnitudes (grown
    by roundings before; for the smallest numbers, by a subnormal's unit). With a residual, its addition is rounded on
    both sides. Where a sum on the way overflows, it is no bound.
    """
    dtype, terms = parts[0].dtype, [*parts, *([] if residual is None else [residual])]
    roundoff, roundings = _ROUNDOFF[str(dtype)], len(terms) + (residual is not None)
    magnitudes = sum(np.abs(term.astype(np.float64)) for term in terms)
    tiny = float(np.ones(1, f"u{dtype.itemsize}").view(dtype).astype(np.float64)[0])
    return roundings * ((1 + roundoff) ** roundings * roundoff * magnitudes + tiny)


def _checked(
    partial: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    mode: str,
    rounding: str,
    backend: str | None,
    name: str = "partial",
) -> tuple[Call, ModuleType]:
    """The arguments as a ``Call`` and the backend's module; ``TypeError`` or ``ValueError`` for what does not fit."""
    for what, value, accepted in (("mode", mode, MODES), ("rounding", rounding, ROUNDINGS)):
        if not isinstance(value, str) or value not in accepted:
            raise ValueError(f"{what} is {value!r}; {', '.join(accepted)} are accepted")
    if isinstance(eps, (bool, np.bool_)) or not isinstance(eps, numbers.Real):
        raise TypeError(f"eps is {eps!r}; a real number is accepted")
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(min(eps, 2.0**128))  # which fp32 has no number for, nor an integer that float() refuses
    if not (eps >= 0 and math.isfinite(single)):
        raise ValueError(f"eps is {eps!r}; a finite number from 0 on, which fp32 holds, is accepted")
    _check_array(name, partial, "[rows, hidden size]", 2, tuple(LOGITS_DTYPES.values()))
    shape = partial.shape
    if not 1 <= shape[1] <= MAX_HIDDEN:
        raise ValueError(f"{name} is {list(shape)}; a hidden size from 1 to {MAX_HIDDEN} is accepted")
    if residual is not None:
        residual = arrays.given(residual, "residual").array
        _check_array("residual", residual, str(list(shape)), 2, (partial.dtype,), partial)
    weight = arrays.given(weight, "weight").array
    dtypes = (partial.dtype,) if partial.dtype == np.float32 else (partial.dtype, np.dtype(np.float32))
    _check_array("weight", weight, str([shape[1]]), 1, dtypes, partial)
    for what, array, wanted in (("residual", residual, shape), ("weight", weight, shape[1:])):
        if array is not None and array.shape != wanted:
            raise ValueError(f"{what} is {list(array.shape)}; with {name} of {list(shape)} it is {list(wanted)}")
    module = backends.select(backend, partial)
    if not arrays.is_host(partial) and arrays.is_capturing():
        raise ValueError(
            "a call cannot be captured, since its memory would not outlive it; make the steps before the capture with "
            "vpa.norm_steps.prepare, and keep them as long as the graph"
        )
    held = None if residual is None else rows_side_by_side(residual)
    return Call(shape, partial.dtype, held, rows_side_by_side(weight), single, mode, rounding), module


def _check_array(
    name: str, array: Any, shape: str, dimensions: int, dtypes: tuple[np.dtype, ...], like: Any = None
) -> None:
    if like is not None and arrays.is_host(array) != arrays.is_host(like):
        raise TypeError(
            f"{name} is a {arrays.namespace(array).__name__} array, partial a {arrays.namespace(like).__name__} array; "
            f"copy one of them"
        )
    if array.dtype not in dtypes:
        hint = "; view it as ml_dtypes.bfloat16 if that is what the words hold" if array.dtype == np.uint16 else ""
        raise TypeError(f"{name} is {array.dtype}; {' or '.join(map(str, dtypes))} is accepted{hint}")
    arrays.check_device(array, name)
    if array.ndim != dimensions:
        raise ValueError(f"{name} has shape {list(array.shape)}; {shape} is accepted")
    if not arrays.is_aligned(array):
        raise ValueError(
            f"{name} starts at or steps by a fraction of a {array.dtype} (strides of {array.strides} bytes); "
            f"copy it first"
        )


def _check_comm(comm: Any, mode: str, partial: Any) -> None:
    for method in _NEEDS[mode]:
        if not hasattr(comm, method):
            raise TypeError(f"mode {mode!r} takes a communicator with {method}; {type(comm).__name__} has none")
    check_carries(comm, partial, "partial")


def _kind(array: Any) -> str:
    """What the partial sums of all ranks have alike."""
    return f"{arrays.namespace(array).__name__} {array.dtype}{list(array.shape)}"
