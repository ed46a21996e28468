"""Backend ``raw``: the CUDA/HIP source in ``kernels/`` on CuPy arrays, compiled by ``cupy.RawModule``."""

from __future__ import annotations

import functools
from typing import Any

import cupy

from vpa import kernels
from vpa.backends import launches
from vpa.vocab import VocabShard


def local_argmax_candidates(logits: Any, shard: VocabShard, layout: str, splits: int, out: Any) -> None:
    """Write the best candidate of each split of each row of ``logits`` [rows, width] to ``out`` (``layout``)."""
    if len(logits):
        run(launches.scan(logits, shard, layout, splits, out))


def pick_from_candidates(gathered: Any, num_rows: int, out: Any) -> None:
    """Write the id of the best of each row's candidates to ``out`` int64 [num_rows]; -1 where there is none."""
    if num_rows:
        run(launches.pick(gathered, num_rows, out))


def run(launch: launches.Launch) -> None:
    """Launch on the current device and stream; a kernel's first launch on a device compiles or loads it."""
    function = _function(cupy.cuda.runtime.getDevice(), launch.kernel, tuple(launch.defines.items()))
    function((launch.grid,), (launch.block,), launch.args)


@functools.cache
def _function(device: int, kernel: str, defines: tuple[tuple[str, int], ...]) -> Any:
    text = kernels.source(kernel, **dict(defines)).text
    module = cupy.RawModule(code=text, options=("-std=c++17",), backend="nvrtc")
    return module.get_function(kernel)
