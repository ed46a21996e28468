"""Floors: what no arm can beat. An empty kernel, a plain read of the same bytes, the bare collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vpa.arrays import is_host, namespace


def empty_kernel() -> Callable[[], None]:
    """A launch of a kernel that does nothing."""
    from vpa.backends.launcher import Prepared
    from vpa.backends.launches import Launch

    return Prepared(Launch("empty", {}, 1, 32, ()))


def plain_read(logits: Any) -> Callable[[], Any]:
    """One read of an array: on a GPU at the rate of its memory, on the host by NumPy's bitwise or."""
    logits = namespace(logits).ascontiguousarray(logits)
    if is_host(logits):
        words = logits.reshape(-1).view(np.uint16 if logits.itemsize == 2 else np.uint32)
        return lambda: np.bitwise_or.reduce(words)
    import cupy

    from vpa.backends.launcher import Prepared
    from vpa.backends.launches import Launch

    loads, threads = logits.nbytes // 16, 256
    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    fill = 8 * multiprocessors  # blocks that fill the device
    per_thread = 1 if loads < fill * threads else 4
    blocks = min(max(-(-loads // (threads * per_thread)), 1), fill)
    sink = cupy.empty(blocks * threads, np.uint32)
    prepared = Prepared(
        Launch(
            "plain_read", {"threads": threads, "loads": per_thread}, blocks, threads, (logits, np.int64(loads), sink)
        )
    )
    return lambda: prepared(logits, sink)  # which also keeps both
