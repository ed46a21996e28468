"""Which backend does the work on an array.

Every backend module scans and picks by the same functions, on checked arguments; some do more.

    numpy   NumPy arrays; the specification
    raw     CuPy arrays; the CUDA/HIP source in kernels/, compiled by cupy.RawModule
    numba   CuPy arrays; the Numba CUDA twins in kernels/
    simt    NumPy arrays; the source of raw, run and checked on the CPU
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from vpa.arrays import is_host

_MODULES = {
    "numpy": "vpa.backends.numpy_",
    "raw": "vpa.backends.raw",
    "numba": "vpa.backends.numba_",
    "simt": "vpa.backends.simt_",
}

#: Backends that work on NumPy arrays.
HOST = ("numpy", "simt")

BACKENDS: tuple[str, ...] = tuple(_MODULES)


def check_backend(backend: str | None) -> None:
    """Raise ``ValueError`` unless ``backend`` is None or a known name."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; {', '.join(BACKENDS)} and None (it follows the array) are accepted")


def select(backend: str | None, array: Any) -> ModuleType:
    """The module of ``backend``; with None, ``numpy`` for a NumPy array and ``raw`` for a CuPy array.

    Raises ``TypeError`` where the backend does not work on that library's arrays: nothing is copied in silence.
    """
    check_backend(backend)
    host = is_host(array)
    if backend is None:
        backend = "numpy" if host else "raw"
    elif (backend in HOST) != host:
        accepted, got = ("NumPy", "CuPy") if backend in HOST else ("CuPy", "NumPy")
        raise TypeError(
            f"backend {backend!r} works on {accepted} arrays, got {got}; copy the array, or pass backend=None"
        )
    return importlib.import_module(_MODULES[backend])


def product(x: Any, weight: Any, dtype: Any) -> Any:
    """``x @ weight.T`` of CuPy arrays [rows, inputs], [outputs, inputs] of one dtype, fp32 sums rounded to ``dtype``.

    A CUDA graph can hold it on NVIDIA's GPUs; AMD's go through CuPy, which captures none.
    """
    import cupy

    if cupy.cuda.runtime.is_hip:
        wide = x.astype("f4") @ weight.astype("f4").T if x.dtype != dtype else x @ weight.T
        return wide.astype(dtype, copy=False)
    return importlib.import_module("vpa.backends.cublas").product(x, weight, dtype)


def verification(backend: str | None, array: Any) -> ModuleType:
    """The module that verifies drafts with the backend that ``select`` gives, and the errors of that."""
    name = next(name for name, module in _MODULES.items() if module == select(backend, array).__name__)
    return importlib.import_module(f"vpa.backends.{name}_verify")
