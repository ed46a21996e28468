"""Matrix products by cuBLAS that a CUDA graph can hold: CuPy refuses its own on a stream that is being captured.

The library is the one that CuPy has loaded. Each call brings a workspace from CuPy's current allocator, so that the
calls of a graph share no memory with other work: a graph whose temporaries come from a pool of its own is safe.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import cupy

from vpa.order import LOGITS_DTYPES

_TYPES = {LOGITS_DTYPES["bfloat16"]: 14, LOGITS_DTYPES["float16"]: 2, LOGITS_DTYPES["float32"]: 0}  # CUDA_R_16BF, ...
_COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F: fp32 sums; for fp32 no TF32
_DEFAULT = -1  # CUBLAS_GEMM_DEFAULT
_NO, _TRANSPOSED = 0, 1  # CUBLAS_OP_N, CUBLAS_OP_T

#: What cuBLAS recommends for compute capability 9.0; more than it recommends elsewhere.
WORKSPACE_BYTES = 32 << 20


def product(x: Any, weight: Any, dtype: Any) -> Any:
    """``x @ weight.T`` as a fresh array [rows, outputs], fp32 sums rounded once to ``dtype``, on the current stream.

    x: [rows, inputs], weight: [outputs, inputs], CuPy arrays of one dtype: bf16, fp16 or fp32. dtype: theirs, or fp32.
    """
    x, weight = _rows_apart(x), _rows_apart(weight)
    out = cupy.empty((len(x), len(weight)), dtype)
    if 0 in (*x.shape, len(weight)):
        out.view(f"u{out.itemsize}")[...] = 0
        return out
    library, handle = _library(), _handle()
    stream, workspace = cupy.cuda.get_current_stream().ptr, cupy.cuda.alloc(WORKSPACE_BYTES)
    _check(library.cublasSetStream_v2(handle, stream))
    _check(library.cublasSetWorkspace_v2(handle, workspace.ptr, WORKSPACE_BYTES))
    one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
    # Column-major to cuBLAS: out.T [outputs, rows] = weight @ x.T.
    _check(
        library.cublasGemmEx(
            handle, _TRANSPOSED, _NO, len(weight), *x.shape, one,
            weight.data.ptr, _TYPES[weight.dtype], weight.strides[0] // weight.itemsize,
            x.data.ptr, _TYPES[x.dtype], x.strides[0] // x.itemsize, zero,
            out.data.ptr, _TYPES[out.dtype], len(weight), _COMPUTE_32F, _DEFAULT,
        )
    )  # fmt: skip
    return out


def _rows_apart(array: Any) -> Any:
    """An array whose columns lie side by side and whose rows do not overlap: the same one, or a copy."""
    apart = array.strides[0] >= array.shape[1] * array.itemsize or len(array) == 1
    if apart and array.strides[1] == array.itemsize and array.strides[0] % array.itemsize == 0:
        return array if len(array) > 1 else array.reshape(1, -1)
    words = array.view(f"u{array.itemsize}") if array.flags.c_contiguous else array
    return cupy.ascontiguousarray(words).view(array.dtype)


_handles = threading.local()


def _handle() -> ctypes.c_void_p:
    """cuBLAS's handle of the calling thread for the current device."""
    made = _handles.__dict__.setdefault("of_device", {})
    device = cupy.cuda.runtime.getDevice()
    if device not in made:
        handle = ctypes.c_void_p()
        _check(_library().cublasCreate_v2(ctypes.byref(handle)))
        made[device] = handle
    return made[device]


@functools.cache
def _library() -> Any:
    """The library with the argument types of the functions used. ``RuntimeError`` where there is none."""
    import cupy.cublas

    name = f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"{name} cannot be loaded: {error}; products on a GPU need CUDA's cuBLAS") from None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cublasCreate_v2.argtypes = (pointer,)
    library.cublasSetStream_v2.argtypes = (pointer, pointer)
    library.cublasSetWorkspace_v2.argtypes = (pointer, pointer, ctypes.c_size_t)
    library.cublasGemmEx.argtypes = (
        pointer, number, number, number, number, number, pointer, pointer, number, number, pointer, number, number,
        pointer, pointer, number, number, number, number,
    )  # fmt: skip
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed with status {status}")
