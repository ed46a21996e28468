"""Another library's array as NumPy's or CuPy's over the same memory, by DLPack; bf16 too, which NumPy cannot read."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from vpa.order import LOGITS_DTYPES

_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
_BFLOAT = 4  # kDLBfloat
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

#: torch's lazy views, which not every version refuses to export: the question whether an array is one, and the remedy.
_LAZY = {"is_neg": "resolve_neg", "is_conj": "resolve_conj"}


def from_dlpack(argument: Any) -> Any:
    """A NumPy or CuPy array over the memory of one with ``__dlpack__``; an error of its library where it refuses."""
    _check_plain(argument)
    if argument.__dlpack_device__()[0] not in _HOST:
        import cupy

        return cupy.from_dlpack(argument)
    try:
        return np.from_dlpack(argument)
    except (BufferError, RuntimeError, TypeError):
        return _bfloat16(argument)  # the one dtype of ours that NumPy's own reader lacks


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; the first form, DLManagedTensor, begins with the tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def _tensor_of(capsule: Any) -> tuple[_DLTensor, bool]:
    """What a DLPack capsule of either form holds, and whether it says that the memory may be written."""
    is_valid, pointer_of = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.restype, is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    if not is_valid(capsule, b"dltensor_versioned"):
        return _DLTensor.from_address(pointer_of(capsule, b"dltensor")), False
    managed = _Versioned.from_address(pointer_of(capsule, b"dltensor_versioned"))
    if managed.major > 1:
        raise BufferError(f"it is of DLPack {managed.major}.{managed.minor}; 1 is accepted")
    return managed.tensor, not managed.flags & _READ_ONLY


def _bfloat16(argument: Any) -> np.ndarray:
    """A host bf16 array as NumPy's with dtype ``ml_dtypes.bfloat16``, sharing memory; ``BufferError`` for other dtypes.

    The capsule is kept, unconsumed, as long as the array lives: its own destructor then frees what it holds.
    """
    try:
        capsule = argument.__dlpack__(max_version=(1, 0))
    except (BufferError, TypeError):  # a library that has the first form alone
        capsule = argument.__dlpack__()
    tensor, writeable = _tensor_of(capsule)
    if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
        raise BufferError(
            f"its DLPack type (code {tensor.code}, {tensor.bits} bits) is none of {', '.join(LOGITS_DTYPES)}"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(2 * step for step in tensor.strides[: tensor.ndim])
    else:
        strides = tuple(2 * math.prod(shape[axis + 1 :]) for axis in range(tensor.ndim))
    if 0 in shape:
        return np.empty(shape, LOGITS_DTYPES["bfloat16"])
    if any(step < 0 for step in strides):
        raise BufferError("negative strides")
    extent = sum((count - 1) * step for count, step in zip(shape, strides, strict=True)) + 2
    memory = (ctypes.c_char * extent).from_address((tensor.data or 0) + tensor.byte_offset)
    memory.capsule = capsule
    array = np.ndarray(shape, LOGITS_DTYPES["bfloat16"], memory, strides=strides)
    array.flags.writeable = writeable
    return array


def _check_plain(argument: Any) -> None:
    """Raise ``TypeError`` for a lazy view: DLPack would share memory that holds other values."""
    for question, remedy in _LAZY.items():
        ask = getattr(argument, question, None)
        if callable(ask) and ask():
            raise TypeError(f"{question}() is true, so its memory holds other values; call .{remedy}() first")
