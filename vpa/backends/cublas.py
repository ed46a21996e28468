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
_PLAIN, _TRANSPOSED = 0, 1  # CUBLAS_OP_N, CUBLAS_OP_T
_NO_REDUCED_PRECISION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION

#: What cuBLAS recommends for compute capability 9.0; more than it recommends elsewhere.
WORKSPACE_BYTES = 32 << 20


def product(x: Any, weight: Any, dtype: Any) -> Any:
    """``x @ weight.T`` as a fresh array [rows, outputs], fp32 sums rounded once to ``dtype``, on the current stream.

    x: [rows, inputs], weight: [outputs, inputs], CuPy arrays of one dtype: bf16, fp16 or fp32. Either may be transposed
    in memory; other strides than those of a matrix cost a copy. dtype: theirs, or fp32.
    """
    out = cupy.empty((len(x), len(weight)), dtype)
    if 0 in (*x.shape, len(weight)):
        out.view(f"u{out.itemsize}")[...] = 0
        return out
    (x, x_step, x_across), (weight, weight_step, weight_across) = _matrix(x), _matrix(weight)
    library, stream, workspace = _library(), cupy.cuda.get_current_stream().ptr, cupy.cuda.alloc(WORKSPACE_BYTES)
    one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
    with _lock:
        handle = _handle(cupy.cuda.runtime.getDevice())
        _check(library.cublasSetStream_v2(handle, stream))
        _check(library.cublasSetWorkspace_v2(handle, workspace.ptr, WORKSPACE_BYTES))
        # Column-major to cuBLAS: out.T [outputs, rows] = weight @ x.T.
        _check(
            library.cublasGemmEx(
                handle, _PLAIN if weight_across else _TRANSPOSED, _TRANSPOSED if x_across else _PLAIN,
                len(weight), *x.shape, one,
                weight.data.ptr, _TYPES[weight.dtype], weight_step, x.data.ptr, _TYPES[x.dtype], x_step, zero,
                out.data.ptr, _TYPES[out.dtype], len(weight), _COMPUTE_32F, _DEFAULT,
            )
        )  # fmt: skip
    return out


def _matrix(array: Any) -> tuple[Any, int, bool]:
    """A matrix as BLAS takes it: the array, or a copy; elements from a row to the next, or from a column to the next;
    and whether it is the latter, rows lying side by side."""
    (rows, columns), size = array.shape, array.itemsize
    down, across = (stride // size for stride in array.strides)
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        return array, max(down, columns) if rows > 1 else columns, False
    if (down == 1 or rows == 1) and (across >= rows or columns == 1):
        return array, max(across, rows) if columns > 1 else rows, True
    copied = cupy.ascontiguousarray(array.view(_words(array))).view(array.dtype)
    return copied, columns, False


def _words(array: Any) -> str:
    return f"u{array.itemsize}"  # not every version of CuPy copies bf16


#: Around the calls that set a handle up and use it: one handle for a device serves all threads.
_lock = threading.Lock()


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    """cuBLAS's handle for ``device``, the current one. Sums over parts of the inputs stay in fp32 too."""
    handle = ctypes.c_void_p()
    _check(_library().cublasCreate_v2(ctypes.byref(handle)))
    _check(_library().cublasSetMathMode(handle, _NO_REDUCED_PRECISION))
    return handle


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
    library.cublasSetMathMode.argtypes = (pointer, number)
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
