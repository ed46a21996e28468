"""The shape of a launch: what no GPU would take, and the order in which blocks start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import abi
from .errors import Index, LaunchError


def dimensions(what: str, value: Sequence[int]) -> Index:
    values = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(values) <= 3 or not all(isinstance(v, (int, np.integer)) and v >= 1 for v in values):
        raise LaunchError(
            f"{what} must be 1 to 3 positive ints, got {value!r} (a launch of nothing is the caller's to skip)"
        )
    x, y, z = [*map(int, values), 1, 1][:3]
    return x, y, z


def size(dims: Index) -> int:
    return dims[0] * dims[1] * dims[2]


def problem(
    grid: Index, block: Index, cluster: Index, max_threads: int, static: int, dynamic: object, warp_size: int
) -> str:
    """Why no GPU would take the launch; empty if one would. `max_threads`: of `__launch_bounds__`, 0 without. `static`,
    `dynamic`: bytes of shared memory."""
    threads = size(block)
    if grid[0] >= 2**31 or max(grid[1:]) > 65535 or max(block) > 1024 or block[2] > 64 or threads > 1024:
        return "a grid has at most (2^31-1, 65535, 65535) blocks, a block (1024, 1024, 64) and 1024 threads"
    if size(grid) * threads >= 2**32:
        return "more than 2^32 threads"
    if max_threads and threads > max_threads:
        return f"its __launch_bounds__ promise at most {max_threads} threads a block"
    if not 1 <= size(cluster) <= abi.MAX_CLUSTER:
        return f"its __cluster_dims__ are {cluster}, a cluster has 1 to {abi.MAX_CLUSTER} blocks"
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        return f"its __cluster_dims__ are {cluster}, and the grid is no multiple of them"
    if not isinstance(dynamic, (int, np.integer)) or isinstance(dynamic, bool) or dynamic < 0:
        return f"shared_mem must be a number of bytes, an int, got {dynamic!r}"
    if static > abi.STATIC_SHARED_LIMIT[warp_size]:
        limit = abi.STATIC_SHARED_LIMIT[warp_size] // 1024
        return f"it declares {static} bytes of static shared memory, the most is {limit} KiB"
    if static + dynamic > abi.SHARED_LIMIT:
        return (
            f"it has {static} bytes of static shared memory and {dynamic} of dynamic, "
            f"the most is {abi.SHARED_LIMIT // 1024} KiB in all"
        )
    return ""


def order(block_order: str | tuple[str, int], grid: Index, cluster: Index) -> np.ndarray | None:
    """Linear block numbers as they start, the blocks of a cluster one after another; None: ascending."""
    numbers = np.arange(size(grid), dtype=np.uint64) if size(cluster) > 1 or block_order != "forward" else None
    if size(cluster) > 1:
        (x, y, z), (i, j, k) = grid, cluster
        numbers = numbers.reshape(z // k, k, y // j, j, x // i, i).transpose(0, 2, 4, 1, 3, 5).ravel()
    if block_order == "forward":
        return numbers
    if block_order == "reverse":
        return np.ascontiguousarray(numbers[::-1])
    if isinstance(block_order, tuple) and len(block_order) == 2 and block_order[0] == "shuffle":
        random = np.random.default_rng(block_order[1])
        clusters = random.permutation(numbers.reshape(-1, size(cluster)))
        return random.permuted(clusters, axis=1).ravel()
    raise ValueError(f'block_order must be "forward", "reverse" or ("shuffle", seed), got {block_order!r}')
