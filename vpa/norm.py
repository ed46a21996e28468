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

import ml_dtypes
import numpy as np

from vpa import arrays, backends
from vpa.captured import check_capturable
from vpa.comm import agree, check_carries, check_communicator
from vpa.linear import check_floats
from vpa.norm_steps import Call, Prepared, prepare, prepare_emulated, rows_side_by_side
from vpa.order import LOGITS_DTYPES
from vpa.rmsnorm import ROUNDINGS

MODES = ("one_shot", "all_reduce", "sequence_parallel")

#: What a mode asks of a communicator beside ``all_gather``.
_NEEDS = {"one_shot": (), "all_reduce": ("all_reduce",), "sequence_parallel": ("reduce_scatter",)}

#: A kernel's block holds a whole row in registers.
MAX_HIDDEN = 16384


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
    mode: ``"one_shot"``, ``"all_reduce"`` or ``"sequence_parallel"``; ``vpa.norm_plan`` says which is the quickest.
    rounding: ``"once"``, ``"unrounded_residual"`` or ``"gemma"``, see ``vpa.rmsnorm``.
    backend: as for ``vpa.get_top_tokens``. GPU work is enqueued on CuPy's current stream.

    The results are new arrays of the caller's library; arguments are not written. With ``one_shot``, and over host
    memory with any mode, both have the bits that ``vpa.rmsnorm`` says (a NaN where it says NaN). Raises ``TypeError``
    or ``ValueError`` on every rank where one rank's arguments do not fit or ranks' differ; that takes an exchange over
    the host. Inside a capture of a CUDA graph it is refused: see ``prepare_allreduce_rmsnorm``.
    """
    taken, steps = _agreed("allreduce_rmsnorm", partial, residual, weight, eps, comm, mode, rounding, backend)
    steps()
    return taken.give_back(steps.normed), taken.give_back(steps.new_residual)


def prepare_allreduce_rmsnorm(
    partial: Any,
    residual: Any,
    weight: Any,
    eps: float,
    comm: Any,
    *,
    mode: str = "one_shot",
    rounding: str = "once",
    backend: str | None = None,
) -> PreparedNorm:
    """``allreduce_rmsnorm`` with its checks, its memory and its exchange over the host made once, here.

    Arguments and errors are those of ``allreduce_rmsnorm``; every rank calls it. What it gives is called without
    arguments, as often as wanted: see ``PreparedNorm``. Inside a capture it is refused: memory must outlive the graph.
    """
    function = "prepare_allreduce_rmsnorm"
    taken, steps = _agreed(function, partial, residual, weight, eps, comm, mode, rounding, backend)
    return PreparedNorm(taken, steps, comm)


class PreparedNorm:
    """A call over fixed memory, made by ``prepare_allreduce_rmsnorm``: ``prepared()`` is (normed, new_residual).

    normed, new_residual: [B, H] of the library of the partial sums; every call overwrites them and returns them.

    A call reads what ``partial``, ``residual`` and ``weight`` hold then (change them in place, with any strides), and
    checks nothing; every rank makes it. GPU work is enqueued on CuPy's current stream, which waits for no stream of
    another library's. It may be captured into a CUDA graph where the communicator is ``capturable``, or has one rank,
    once it was called outside: the first call loads kernels and sets up the communicator. Keep the object as long as
    the graph, and drop the graph before the communicator is closed.
    """

    def __init__(self, taken: arrays.Given, steps: Prepared, comm: Any) -> None:
        self.normed, self.new_residual = taken.give_back(steps.normed), taken.give_back(steps.new_residual)
        self._steps, self._comm, self._on_host, self._called = steps, comm, arrays.is_host(taken.array), False

    def __call__(self) -> tuple[Any, Any]:
        if not self._on_host and arrays.is_capturing():
            if self._comm.size > 1:
                check_capturable(self._comm)
            if not self._called:
                raise RuntimeError(
                    "the first call cannot be captured, since it loads kernels and sets up the communicator: call it "
                    "once before the capture"
                )
        self._steps()
        self._called = True
        return self.normed, self.new_residual


def _agreed(
    function: str,
    partial: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    comm: Any,
    mode: str,
    rounding: str,
    backend: str | None,
) -> tuple[arrays.Given, Prepared]:
    """The partial sums as taken, and the steps: checked, made, and agreed upon by all ranks, as of ``function``."""
    check_communicator(comm)
    taken, facts, steps, error = None, {}, None, None
    try:
        taken = arrays.given(partial, "partial")
        call, module = _checked(taken.array, residual, weight, eps, mode, rounding, backend)
        _check_comm(comm, mode, taken.array)
        facts = {"function": function, **call.facts(), "arrays": arrays.namespace(taken.array).__name__}
        steps = prepare(module, comm, taken.array, call)  # memory may be short, a kernel not compile, on one rank alone
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    agree(comm, facts, error)
    return taken, steps


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


@np.errstate(all="ignore")  # infinities, NaNs and subnormals are numbers like others
def rms_norm(x: Any, gain: Any, eps: float) -> Any:
    """RMSNorm of the rows of ``x`` [rows, n] with ``gain`` [n]: rounded once, to the gain's dtype; NumPy or CuPy.

    ``TypeError`` or ``ValueError`` for arrays that do not fit, and for an ``eps`` that ``allreduce_rmsnorm`` refuses.
    """
    check_floats("gain", gain, 1)
    check_floats("x", x, 2, like=gain)
    if not len(gain) or x.shape[1:] != gain.shape:
        raise ValueError(f"gain is {list(gain.shape)}, x {list(x.shape)}; [n] and [rows, n] with n >= 1 are accepted")
    single, dtype = _eps(eps), gain.dtype
    if x.dtype != dtype:
        x, gain = (array.astype(np.float32, copy=False) for array in (x, gain))
    normed = arrays.namespace(x).empty(x.shape, f"u{x.itemsize}").view(x.dtype)  # not every library makes bf16
    if len(x):
        module = backends.select(None, x)
        module.residual_rmsnorm(rows_side_by_side(x)[None], None, rows_side_by_side(gain), single, "once", normed, None)
    return normed.astype(dtype, copy=False)


@np.errstate(all="ignore")
def sum_bound(parts: Sequence[np.ndarray], residual: np.ndarray | None = None) -> np.ndarray:
    """How far new_residual may be from the rules' where the sum is another's, fp64 of the arrays' shape.

    parts: all ranks' partial sums, NumPy arrays. For a sum that adds them in any order and rounds each addition, as
    IEEE rounds, to fp32 or to the dtype, as NCCL may. Then a rounding multiplies by 1 + d, where |d| is at most the
    unit roundoff u of what is rounded to (sums of subnormal size are exact), so that a number counts at the end with a
    factor that is within (1 + u)^k - 1 of 1 behind k of them. Those are, for a rank's number: in the rules ``ranks -
    1`` of fp32 and one of the dtype, in the other sum ``ranks - 1`` of each; and with a residual, whose addition all
    numbers pass, one more of each on both sides. For fp32 those of the dtype are none.

    0 for one rank, and for two: their sum is the same in either order. inf where a sum on the way may overflow, as
    nothing is said there; 0 where a number is NaN or infinite and none may: then both are the same.
    """
    parts = list(parts)
    terms = _terms(parts, residual)
    if len(parts) <= 2:
        return np.zeros(parts[0].shape)
    dtype, held = parts[0].dtype, residual is not None
    limits = ml_dtypes.finfo(dtype)
    narrow = 0.0 if dtype == np.float32 else float(limits.eps) / 2

    def growth(additions: int, roundings: int) -> float:
        return math.expm1(additions * math.log1p(2.0**-24) + roundings * math.log1p(narrow))

    additions = len(parts) - 1 + held
    rules, other, last = growth(additions, 1 + held), growth(additions, additions), growth(1, 1)
    wide = [term.astype(np.float64) for term in terms]
    sizes = [np.where(np.isfinite(term), np.abs(term), 0) for term in wide]
    of_parts, of_residual = sum(sizes[: len(parts)]), sum(sizes[len(parts) :])
    bound = (rules + other) * of_parts + 2 * last * of_residual
    bound *= 1 + 2.0**-40  # what fp64 rounds itself, here and in the difference of two results
    bound[~np.isfinite(wide).all(axis=0)] = 0
    bound[(1 + other) * (of_parts + of_residual) > float(limits.max)] = np.inf
    bound[np.isnan(wide).any(axis=0)] = 0
    return bound


def _terms(parts: list[np.ndarray], residual: np.ndarray | None) -> list[np.ndarray]:
    """What is added; ``TypeError`` or ``ValueError`` unless all are NumPy arrays of one dtype and shape."""
    if not parts:
        raise ValueError("parts is empty; an array for each rank is accepted")
    named = [(f"parts[{rank}]", part) for rank, part in enumerate(parts)]
    named += [] if residual is None else [("residual", residual)]
    for name, term in named:
        if not isinstance(term, np.ndarray) or term.dtype not in LOGITS_DTYPES.values():
            got = term.dtype if isinstance(term, np.ndarray) else f"a {type(term).__name__}"
            raise TypeError(f"{name} is {got}; NumPy arrays of {' or '.join(LOGITS_DTYPES)} are accepted")
        if _kind(term) != _kind(parts[0]):
            raise ValueError(f"parts[0] is {_kind(parts[0])}, {name} is {_kind(term)}; one dtype and shape is accepted")
    return [term for _, term in named]


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
    single = _eps(eps)
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
            "this cannot be captured, since its memory would not outlive the call; before the capture make "
            "prepared = vpa.prepare_allreduce_rmsnorm(...) and call it, then capture prepared()"
        )
    return Call(shape, partial.dtype, residual, weight, single, mode, rounding), module


def _eps(eps: Any) -> np.float32:
    if isinstance(eps, (bool, np.bool_)) or not isinstance(eps, numbers.Real):
        raise TypeError(f"eps is {eps!r}; a real number is accepted")
    with np.errstate(all="ignore"):
        single = np.float32(min(eps, 2.0**128))  # which fp32 has no number for, nor an integer that float() refuses
    if not (eps >= 0 and math.isfinite(single)):
        raise ValueError(f"eps is {eps!r}; a finite number from 0 on, which fp32 holds, is accepted")
    return single


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
