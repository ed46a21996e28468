"""What an array argument may be: NumPy, CuPy, or any library's array that speaks DLPack; and the checks on it.

A function of the public surface turns its argument into a NumPy or CuPy array without copying, works on that, and gives
its result back in the caller's library. No array library is imported here before an array of it arrives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vpa.dlpack import from_dlpack
from vpa.order import LOGITS_DTYPES, MAX_PAIRS_VOCAB_SIZE

#: Layouts of candidates: name -> (numbers a candidate takes, their dtype).
LAYOUTS: dict[str, tuple[int, np.dtype]] = {
    "packed": (1, np.dtype(np.uint64)),
    "pairs": (2, np.dtype(np.float32)),
}


@dataclass(frozen=True)
class Given:
    """A caller's array as ``array`` (NumPy or CuPy, no copy), and how to hand a result back in the caller's library.

    ``give_back`` also makes the other library's current stream wait for CuPy's.
    """

    array: Any
    give_back: Callable[[Any], Any]


def is_host(array: Any) -> bool:
    """Whether a NumPy or CuPy array is NumPy's."""
    return isinstance(array, np.ndarray)


def namespace(array: Any) -> ModuleType:
    """``numpy`` or ``cupy``, whichever the array belongs to."""
    return np if is_host(array) else sys.modules["cupy"]


def given(argument: Any, name: str) -> Given:
    """Take ``argument`` as a NumPy or CuPy array; ``TypeError`` if it is neither and does not speak DLPack."""
    if isinstance(argument, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; fill it (.filled(...)) or take its .data: a mask would be ignored")
    if isinstance(argument, np.ndarray):
        return Given(np.asarray(argument), lambda result: result)  # a memmap or matrix as a plain array over its memory
    if _is_cupy(argument):
        return Given(argument, lambda result: result)
    if not hasattr(argument, "__dlpack__") or not hasattr(argument, "__dlpack_device__"):
        raise TypeError(
            f"{name} is a {type(argument).__module__}.{type(argument).__qualname__}; a NumPy or CuPy array, or an "
            f"array with __dlpack__ (torch, jax, ...) is accepted"
        )
    try:
        array, library = from_dlpack(argument), _library(argument)
    except Exception as error:  # each library has its own; the other ranks are told of a TypeError
        reason = str(error) or type(error).__name__
        raise TypeError(f"{name} cannot be taken through DLPack: {reason}") from error

    def give_back(result: Any) -> Any:
        given_back = library.from_dlpack(result)
        if result.dtype.name not in str(getattr(given_back, "dtype", result.dtype.name)):
            raise TypeError(
                f"{library.__name__} made {given_back.dtype} of a {result.dtype} result, which does not hold it; "
                f"let it have 64-bit integers (jax: jax_enable_x64)"
            )
        return given_back

    return Given(array, give_back)


def check_logits(array: Any, width: int) -> None:
    """Raise unless ``array`` is [rows, width] of a logits dtype, aligned to it, with strides of whole elements.

    A CuPy array has to be on the current GPU: a kernel would be launched there, not where the array is.
    """
    check_logits_dtype(array.dtype)
    check_device(array, "logits")
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(
            f"logits have shape {array.shape}; this shard takes [rows, {width}]: all local columns, padding too"
        )
    if not is_aligned(array):
        raise ValueError(
            f"logits start at or step by a fraction of a {array.dtype} (strides of {array.strides} bytes); "
            f"copy them first"
        )


def check_logits_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype of logits, from a dtype of any library or a name; ``TypeError`` if logits cannot have it."""
    name = str(dtype).rpartition(".")[2]  # torch.bfloat16 is no dtype of NumPy's, and its name is
    if name in LOGITS_DTYPES:
        return LOGITS_DTYPES[name]
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found not in LOGITS_DTYPES.values():
        hint = "; view it as ml_dtypes.bfloat16 if that is what the words hold" if found == np.uint16 else ""
        raise TypeError(f"logits are {found or dtype}; {', '.join(LOGITS_DTYPES)} are accepted{hint}")
    return found


def check_layout(layout: str, vocab_size: int | None = None) -> None:
    """Raise unless ``layout`` is known and exact for all ids of the vocabulary."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; {' and '.join(map(repr, LAYOUTS))} are accepted")
    if layout == "pairs" and vocab_size is not None and vocab_size > MAX_PAIRS_VOCAB_SIZE:
        raise ValueError(
            f"layout 'pairs' holds ids as fp32, exact below 2^24; vocab_size is {vocab_size}: use layout='packed'"
        )


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype, like: Any, name: str = "out") -> None:
    """Raise unless ``out`` can take a result: shape, dtype, C-contiguous, writeable, of the library of ``like``."""
    if is_host(out) != is_host(like):
        raise TypeError(f"{name} is a {namespace(out).__name__} array, the input a {namespace(like).__name__} array")
    check_device(out, name)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        kind = "" if out.flags.c_contiguous else "non-contiguous "
        raise ValueError(
            f"{name} is {kind}{out.dtype}{list(out.shape)}; a C-contiguous {dtype}{list(shape)} is accepted"
        )
    if is_host(out) and not out.flags.writeable:
        raise ValueError(
            f"{name} is read-only, or its library's DLPack does not say that it is not; a NumPy array that can be "
            f"written is accepted"
        )
    if not is_aligned(out):
        raise ValueError(f"{name} starts at a fraction of a {out.dtype}")


def check_vector(array: Any, name: str, length: int, dtype: Any, like: Any) -> None:
    """Raise unless ``array`` is ``dtype``[length], C-contiguous, of the library of ``like`` and on the current GPU."""
    dtype = np.dtype(dtype)
    if is_host(array) != is_host(like):
        raise TypeError(
            f"{name} is a {namespace(array).__name__} array, logits are a {namespace(like).__name__} array; copy one "
            f"of them"
        )
    check_device(array, name)
    if array.dtype != dtype:
        raise TypeError(f"{name} is {array.dtype}; {dtype} is accepted")
    if array.shape != (length,):
        raise ValueError(f"{name} has shape {array.shape}; [{length}] is accepted")
    if not array.flags.c_contiguous or not is_aligned(array):
        raise ValueError(f"{name} has gaps between its elements, or starts at a fraction of one; copy it first")


def check_apart(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if an output lies in the memory of an input or of another output: it would be written there.

    What counts are the bytes from an array's first element to its last, gaps included: to find out whether two strided
    arrays share an element may take very long, and this is asked at each call.
    """
    taken = [(name, *_bytes_of(array)) for name, array in outputs.items()]
    others = [(name, *_bytes_of(array)) for name, array in inputs.items() if array is not None]
    for place, (name, begin, end) in enumerate(taken):
        for other, first, last in (*taken[place + 1 :], *others):
            if begin < last and first < end and begin < end and first < last:
                raise ValueError(f"{name} shares memory with {other}, which would be overwritten; give each its own")


def copy_of(array: Any) -> Any:
    """A copy of a NumPy or CuPy array, made when this returns: whatever stream reads it has the whole of it."""
    copy = array.copy()
    if not is_host(copy):
        namespace(copy).cuda.get_current_stream().synchronize()
    return copy


def target(out: Any, shape: tuple[int, ...], dtype: np.dtype, like: Given, name: str = "out") -> Given:
    """Where a result goes: the caller's ``out``, checked, or fresh memory of the library of ``like``, its input."""
    if out is None:
        return Given(namespace(like.array).empty(shape, dtype), like.give_back)
    taken = given(out, name)
    if is_host(taken.array) and not taken.array.flags.writeable:
        taken = Given(_writeable(out, taken.array), taken.give_back)
    check_out(taken.array, shape, dtype, like.array, name)
    check_apart({name: taken.array}, {"the input": like.array})
    return taken


def returned(target: Given, out: Any) -> Any:
    """What a function returns after writing ``target``: the caller's own ``out``, or the fresh array in its library."""
    result = target.give_back(target.array)
    return result if out is None else out


def is_capturing() -> bool:
    """Whether CuPy's current stream is being captured into a graph. On HIP, where CuPy cannot tell, it says no."""
    import cupy

    try:
        return bool(cupy.cuda.get_current_stream().is_capturing())
    except RuntimeError:
        if cupy.cuda.runtime.is_hip:
            return False
        raise


def kind_of(array: Any) -> tuple[Any, ...]:
    """What launches packed for one array need of another: it may differ in contents and, by 16 bytes, in its place."""
    if is_host(array):
        return "numpy", array.shape, array.strides, array.dtype, array.ctypes.data % 16
    current = namespace(array).cuda.runtime.getDevice()
    return current, array.device.id, array.shape, array.strides, array.dtype, array.data.ptr % 16


def multiprocessors() -> int:
    """Multiprocessors of CuPy's current GPU; 0 where CuPy is not in use or sees none."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return 0
    try:
        return _multiprocessors(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(sys.modules["cupy"].cuda.Device(device).attributes["MultiProcessorCount"])


def check_device(array: Any, name: str) -> None:
    """Raise ``ValueError`` for a CuPy array that is not on the current GPU."""
    if is_host(array):
        return
    current = namespace(array).cuda.runtime.getDevice()
    if array.device.id != current:
        raise ValueError(
            f"{name} is on GPU {array.device.id}, the current GPU is {current}; call it inside `with array.device:`"
        )


def is_aligned(array: Any) -> bool:
    """Whether the array starts at, and steps by, whole elements."""
    itemsize = array.dtype.itemsize
    return _address(array) % itemsize == 0 and not any(stride % itemsize for stride in array.strides)


def _address(array: Any) -> int:
    return array.ctypes.data if is_host(array) else array.data.ptr


def _bytes_of(array: Any) -> tuple[int, int]:
    """Where the memory of an array's elements begins and ends; the same place twice where it has none."""
    begin = end = _address(array)
    if not array.size:
        return begin, begin
    if array.flags.c_contiguous:
        return begin, begin + array.nbytes
    for count, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            begin += (count - 1) * stride
        else:
            end += (count - 1) * stride
    return begin, end + array.itemsize


def _is_cupy(argument: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(argument, cupy.ndarray)


def _library(argument: Any) -> Any:
    """The module with ``from_dlpack`` that ``argument`` comes from."""
    if hasattr(argument, "__array_namespace__"):
        return argument.__array_namespace__()
    for kind in type(argument).__mro__:  # a subclass may come from a package of its own
        module = sys.modules[kind.__module__.partition(".")[0]]
        if hasattr(module, "from_dlpack"):
            return module
    raise TypeError(f"no module of {type(argument).__qualname__} has from_dlpack, to give a result back")


def _writeable(argument: Any, array: np.ndarray) -> np.ndarray:
    """The same memory as ``array`` through ``__array__``, if that is how the caller's library lets it be written.

    The first form of DLPack does not say whether memory may be written, so NumPy takes it as read-only.
    """
    if not hasattr(argument, "__array__"):
        return array
    try:
        direct = np.asarray(argument)
    except Exception:  # then it stays as DLPack gave it
        return array
    shared = direct.size == 0 or direct.ctypes.data == array.ctypes.data  # a copy would be written for nobody
    return direct if shared else array
