"""How a compiled kernel gets onto a stream: arguments packed once, and where the GPU can, overlapping its neighbours.

With programmatic dependent launch (compute capability 9.0, CUDA 12.3) a kernel is brought onto the device while the one
before it still runs, and waits there: see ``overlap_with_neighbours`` in ``kernels/portable.cuh``. CuPy has no call for
it, so the driver's is called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import cupy

from vpa import kernels
from vpa.backends.launches import Launch

_OVERLAP_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_OVERLAP_DRIVER = 12030  # the first to capture such launches into a graph


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Prepared:
    """A launch that can be made again: compiled, its arguments packed. Made on the current device, for that device.

    Calling it enqueues the launch on CuPy's current stream. Arrays given then, all of them or none, take the places of
    the arrays in ``launch.args``, in order; they must be alike but for their addresses. One thread at a time calls it.
    """

    def __init__(self, launch: Launch, overlap: bool = True) -> None:
        device = cupy.cuda.runtime.getDevice()
        self._function = _function(device, launch.kernel, tuple(launch.defines.items()))
        self._values = [_value(argument) for argument in launch.args]
        self._pointers = [
            value for value, argument in zip(self._values, launch.args, strict=True) if _is_array(argument)
        ]
        self._arguments = (ctypes.c_void_p * max(len(self._values), 1))(*map(ctypes.addressof, self._values))
        self._sizes = (launch.grid, 1, 1, launch.block, 1, 1, 0)
        self._config, self._launch = None, None
        if overlap and _can_overlap(device):
            attribute = _Attribute(_OVERLAP_ATTRIBUTE)
            attribute.value[0] = 1
            self._config = _Config(*self._sizes, None, ctypes.pointer(attribute), 1)
            handle, config = ctypes.c_void_p(self._function.ptr), ctypes.byref(self._config)
            self._launch = functools.partial(_driver().cuLaunchKernelEx, config, handle, self._arguments, None)

    def __call__(self, *arrays: Any) -> None:
        _bind()
        for pointer, array in zip(self._pointers, arrays, strict=False):
            pointer.value = array.data.ptr
        stream = cupy.cuda.get_current_stream().ptr
        if self._config is None:
            address = ctypes.addressof(self._arguments)
            cupy.cuda.driver.launchKernel(self._function.ptr, *self._sizes, stream, address, 0)
            return
        self._config.stream = stream
        status = self._launch()
        if status:
            raise cupy.cuda.driver.CUDADriverError(status)


_bound = threading.local()


def _bind() -> None:
    """Make the current device's context the calling thread's: the driver's own calls do not, the runtime's do."""
    device = cupy.cuda.runtime.getDevice()
    if getattr(_bound, "device", None) != device:
        cupy.cuda.runtime.memGetInfo()
        _bound.device = device


def _value(argument: Any) -> Any:
    """An argument as the bytes that a kernel is given, at an address of their own."""
    if _is_array(argument):
        return ctypes.c_uint64(argument.data.ptr)
    data = argument.tobytes()
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


def _is_array(argument: Any) -> bool:
    """Whether a kernel is given an argument's address: NumPy's scalars and structures are given by value."""
    return isinstance(argument, cupy.ndarray)


@functools.cache
def _function(device: int, kernel: str, defines: tuple[tuple[str, int], ...]) -> Any:
    """A kernel as the driver knows it, compiled or loaded for the current device, ``device``."""
    text = kernels.source(kernel, **dict(defines)).text
    module = cupy.RawModule(code=text, options=("-std=c++17",), backend="nvrtc")
    return module.get_function(kernel).kernel


@functools.cache
def _can_overlap(device: int) -> bool:
    old = cupy.cuda.runtime.driverGetVersion() < _OVERLAP_DRIVER
    return is_hopper_or_newer(device) and not old and _driver() is not None


def is_hopper_or_newer(device: int) -> bool:
    """Whether a GPU is NVIDIA's of compute capability 9.0 or above: with clusters, and launches that overlap."""
    return not cupy.cuda.runtime.is_hip and int(cupy.cuda.Device(device).compute_capability) >= 90


def has_clusters() -> bool:
    """Whether the current GPU has clusters of blocks."""
    return is_hopper_or_newer(cupy.cuda.runtime.getDevice())


def has_tensor_cores() -> bool:
    """Whether the current GPU has NVIDIA's tensor cores as compute capability 8.0 knows them."""
    device = cupy.cuda.runtime.getDevice()
    return not cupy.cuda.runtime.is_hip and int(cupy.cuda.Device(device).compute_capability) >= 80


@functools.cache
def _driver() -> Any:
    """The driver's library with the argument types of the one function used; None where it has no such function."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch = library.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    launch.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library
