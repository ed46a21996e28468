"""Backend ``raw``: the CUDA/HIP source in ``kernels/`` on CuPy arrays, compiled by ``cupy.RawModule``."""

from __future__ import annotations

import functools
from typing import Any

import cupy

from vpa import kernels
from vpa.backends import launches


def run(launch: launches.Launch) -> None:
    """Launch on the current device and stream; a kernel's first launch on a device compiles or loads it."""
    function = _function(cupy.cuda.runtime.getDevice(), launch.kernel, tuple(launch.defines.items()))
    function((launch.grid,), (launch.block,), launch.args)


local_argmax_candidates = functools.partial(launches.local_argmax_candidates, run)
pick_from_candidates = functools.partial(launches.pick_from_candidates, run)


@functools.cache
def _function(device: int, kernel: str, defines: tuple[tuple[str, int], ...]) -> Any:
    text = kernels.source(kernel, **dict(defines)).text
    module = cupy.RawModule(code=text, options=("-std=c++17",), backend="nvrtc")
    return module.get_function(kernel)
