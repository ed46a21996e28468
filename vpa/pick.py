"""The pick: the candidates that all ranks gathered become one id per row."""

from __future__ import annotations

from typing import Any

import numpy as np

from vpa import arrays, backends
from vpa.vocab import integer


def pick_from_candidates(gathered: Any, num_rows: int, *, out: Any = None, backend: str | None = None) -> Any:
    """The id of the best candidate of each row.

    gathered: a dim-0 all-gather of the ranks' candidates: row b of rank r is line ``r * num_rows + b``. uint64
        [tp * num_rows, n] for the packed layout, fp32 [tp * num_rows, 2 * n] for pairs; any tp and n.
    out: an int64 [num_rows] array for the result, of the library of ``gathered``, apart from it; fresh by default.
    backend: as for ``local_argmax_candidates``.

    Returns int64 [num_rows], equal on all ranks that hold the same ``gathered``; -1 for a row without any candidate,
    which only empty shards on all ranks leave. Raises ``TypeError`` and ``ValueError`` for arguments that do not fit.
    """
    taken = arrays.given(gathered, "gathered")
    candidates = taken.array
    num_rows = integer("num_rows", num_rows)
    _check(candidates, num_rows)
    module = backends.select(backend, candidates)
    target = arrays.target(out, (num_rows,), np.dtype(np.int64), taken)
    if num_rows:
        contiguous = arrays.namespace(candidates).ascontiguousarray(candidates)
        module.pick_from_candidates(contiguous, num_rows, target.array)
    return arrays.returned(target, out)


def _check(candidates: Any, num_rows: int) -> None:
    arrays.check_device(candidates, "gathered")
    layouts = ", ".join(f"{dtype} ({name})" for name, (_, dtype) in arrays.LAYOUTS.items())
    numbers = {dtype: count for count, dtype in arrays.LAYOUTS.values()}.get(candidates.dtype)
    if numbers is None:
        raise TypeError(f"gathered is {candidates.dtype}; {layouts} are accepted")
    if num_rows < 0:
        raise ValueError(f"num_rows is {num_rows}; it is at least 0")
    lines_fit = candidates.ndim == 2 and (len(candidates) % num_rows == 0 if num_rows else len(candidates) == 0)
    if not lines_fit or candidates.shape[1] % numbers or (num_rows and candidates.size == 0):
        per_candidate = f"{numbers} * candidates" if numbers > 1 else "candidates"
        raise ValueError(
            f"gathered has shape {candidates.shape}; "
            f"with num_rows {num_rows} it is [ranks * {num_rows}, {per_candidate}]"
        )
