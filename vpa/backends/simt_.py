"""Backend ``simt``: the source of the ``raw`` backend, run and checked on the CPU, on NumPy arrays.

Every launch runs in checked mode: a race, an access out of bounds or a divergent barrier is an exception with the
kernel's line. See ``vpa.backends.simt`` for what that proves, and what it cannot.
"""

from __future__ import annotations

import functools

from vpa import kernels
from vpa.backends import launches, norm_launches
from vpa.backends.simt import Kernel, RawModule

#: ``local_argmax_candidates`` takes a ``transform``.
TRANSFORMS = True


def run(launch: launches.Launch) -> None:
    """Run a launch to its end; the first of a kernel compiles it, or takes it from the user's cache folder."""
    _kernel(launch.kernel, tuple(launch.defines.items()))((launch.grid,), (launch.block,), launch.args)


local_argmax_candidates = functools.partial(launches.local_argmax_candidates, run)
pick_from_candidates = functools.partial(launches.pick_from_candidates, run)
residual_rmsnorm = functools.partial(norm_launches.residual_rmsnorm, run, lambda: True)


@functools.cache
def _kernel(kernel: str, defines: tuple[tuple[str, int], ...]) -> Kernel:
    return RawModule(kernels.source(kernel, **dict(defines)).text, name=f"{kernel}.cu").get_function(kernel)
