"""Floors: what no arm can beat. An empty kernel, a plain read of the same bytes, the bare collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vpa import plan
from vpa.arrays import is_host, multiprocessors, namespace


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

    loads, threads = logits.nbytes // 16, plan.THREADS
    spread = plan.BLOCKS_PER_MULTIPROCESSOR * multiprocessors()
    for per_thread in (1, 2, plan.LOADS):  # as a scan's plan: few bytes are spread thin
        blocks = max(-(-loads // (threads * per_thread)), 1)
        if blocks <= spread:
            break
    sink = cupy.empty(blocks * threads // 32, np.uint32)
    defines = {"threads": threads, "loads": per_thread}
    prepared = Prepared(Launch("plain_read", defines, blocks, threads, (logits, np.int64(loads), sink)))
    return lambda: prepared(logits, sink)  # which also keeps both


def plain_move(arrays: Any, writes: int) -> Callable[[], Any]:
    """One read of ``arrays`` [reads, ...], C-contiguous, of at least 16 bytes each, and as many bytes of one written
    ``writes`` times: on a GPU at the rate of its memory, on the host by NumPy."""
    reads, loads = len(arrays), arrays[0].nbytes // 16
    library = namespace(arrays)
    out = library.empty((writes, loads * 4), np.uint32)
    if is_host(arrays):
        words = arrays.reshape(reads, -1).view(np.uint16)[:, : 8 * loads]

        def move() -> None:
            out[...] = np.bitwise_or.reduce(words, axis=0).view(np.uint32)

        return move
    from vpa.backends.launcher import Prepared
    from vpa.backends.launches import Launch

    threads = plan.THREADS
    few = -(-loads // threads) <= plan.BLOCKS_PER_MULTIPROCESSOR * multiprocessors()
    per_thread = 1 if few else 2
    defines = {"reads": reads, "writes": writes, "threads": threads, "loads": per_thread}
    blocks = -(-loads // (threads * per_thread))
    prepared = Prepared(Launch("plain_move", defines, blocks, threads, (arrays, np.int64(loads), out)))
    return lambda: prepared(arrays, out)  # which also keeps both
