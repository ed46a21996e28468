"""What requests bring to a verification beside logits: their rows, drafts and lengths, as checked arrays."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa import arrays
from vpa.vocab import integer

#: A block of the finishing kernel holds the argmax of each of a request's rows.
MAX_DRAFT_TOKENS = 1024

#: Name -> its dtype, and whether it has an element for each row of logits, else for each request.
_VECTORS = {
    "draft_ids": (np.int64, True),
    "positions": (np.int64, True),
    "seq_lens": (np.int32, False),
    "prefill_lens": (np.int32, False),
    "seeds": (np.int64, False),
}


#: The arrays of requests, as public functions name them.
ARRAYS = ("draft_ids", "cu_num_rows", "positions", "seq_lens", "prefill_lens", "seeds")


@dataclass(frozen=True)
class Requests:
    """Arrays of NumPy or CuPy, whichever the logits are of.

    num_draft_tokens: the most drafts K of a request. cu_num_rows: int32 [R + 1], request ``r`` owns rows
    ``cu_num_rows[r] .. cu_num_rows[r + 1] - 1``, K + 1 at most; rows beyond the last are nobody's. draft_ids,
    positions: int64 [N]; seq_lens, prefill_lens: int32 [R]; seeds: int64 [R]; acceptance: float32 [K], or None.
    """

    num_draft_tokens: int
    draft_ids: Any
    cu_num_rows: Any
    positions: Any
    seq_lens: Any
    prefill_lens: Any
    seeds: Any
    acceptance: Any = None

    @classmethod
    def given(
        cls,
        logits: Any,
        num_draft_tokens: Any,
        acceptance: Any = None,
        *,
        draft_ids: Any,
        cu_num_rows: Any,
        positions: Any,
        seq_lens: Any,
        prefill_lens: Any,
        seeds: Any,
    ) -> Requests:
        """A caller's arguments, for ``logits`` [N, ...], NumPy's or CuPy's.

        Arrays have to be where the logits are; ``acceptance`` may be on the host, and is copied. ``TypeError`` or
        ``ValueError`` for those that do not fit. What arrays on the host hold is checked too; a GPU is not waited for.
        """
        count = draft_tokens(num_draft_tokens)
        arguments = {
            "draft_ids": draft_ids, "cu_num_rows": cu_num_rows, "positions": positions, "seq_lens": seq_lens,
            "prefill_lens": prefill_lens, "seeds": seeds,
        }  # fmt: skip
        taken = {name: arrays.given(argument, name).array for name, argument in arguments.items()}
        offsets, rows = taken["cu_num_rows"], len(logits)
        if offsets.ndim != 1 or not len(offsets):
            raise ValueError(f"cu_num_rows has shape {offsets.shape}; [requests + 1] is accepted")
        arrays.check_vector(offsets, "cu_num_rows", len(offsets), np.int32, logits)
        for name, (dtype, of_rows) in _VECTORS.items():
            arrays.check_vector(taken[name], name, rows if of_rows else len(offsets) - 1, dtype, logits)
        if arrays.is_host(logits):
            _check_offsets(offsets, rows, count)
        return cls(count, **taken, acceptance=rates(acceptance, count, logits))

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self.cu_num_rows) - 1

    def arrays(self) -> dict[str, Any]:
        """All arrays by their names; acceptance may be None."""
        return {name: getattr(self, name) for name in (*ARRAYS, "acceptance")}

    def facts(self) -> dict[str, Any]:
        """What ranks must have alike: sizes, and checksums of arrays on the host. A GPU is not waited for."""
        sizes = {"requests": self.count, "num_draft_tokens": self.num_draft_tokens}
        sizes["acceptance"] = "given" if self.acceptance is not None else "None"
        return {**sizes, **checksums(**self.arrays())}


def check_names(function: str, given: Collection[str]) -> None:
    """Raise ``TypeError`` unless ``given`` names each array of requests, and nothing else; it names ``function``.

    Public calls ask this themselves where an error of one rank has to reach the others: Python would raise before.
    """
    accepted = ", ".join(ARRAYS)
    for name in given:
        if name not in ARRAYS:
            raise TypeError(f"{function} got an unexpected keyword argument {name!r}; of requests it takes {accepted}")
    missing = [name for name in ARRAYS if name not in given]
    if missing:
        raise TypeError(f"{function} is called without {', '.join(missing)}; of requests it takes {accepted}")


def checksums(**held: Any) -> dict[str, int]:
    """What tells ranks that their arrays differ: of those on the host. None, and arrays on a GPU, are left out."""
    return {
        f"contents of {name} (checksum)": zlib.crc32(array.tobytes())
        for name, array in held.items()
        if array is not None and arrays.is_host(array)
    }


def draft_tokens(argument: Any) -> int:
    """``num_draft_tokens`` of a caller; ``TypeError`` or ``ValueError`` if it is none."""
    count = integer("num_draft_tokens", argument)
    if not 0 <= count <= MAX_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens is {count}; 0 to {MAX_DRAFT_TOKENS} are accepted")
    return count


def rates(acceptance: Any, count: int, like: Any) -> Any:
    """Rates of synthetic acceptance, float32 [count] in [0, 1], where ``like`` is: copied to its GPU from the host."""
    if acceptance is None:
        return None
    array = arrays.given(acceptance, "acceptance").array
    arrays.check_vector(array, "acceptance", count, np.float32, array)
    if arrays.is_host(array):
        if not np.all((array >= 0) & (array <= 1)):
            raise ValueError(f"acceptance is {array.tolist()}; numbers from 0 to 1 are accepted")
        return array if arrays.is_host(like) else arrays.namespace(like).asarray(array)
    arrays.check_vector(array, "acceptance", count, np.float32, like)
    return array


def _check_offsets(offsets: np.ndarray, rows: int, count: int) -> None:
    """Raise unless the offsets give each row to one request, and none more than it has drafts for."""
    owned = np.diff(offsets.astype(np.int64))
    if offsets[0] != 0 or offsets[-1] > rows or (owned < 0).any():
        raise ValueError(
            f"cu_num_rows is {np.array2string(offsets, threshold=20)}; numbers from 0 on, none below the one before, "
            f"none above {rows}, the rows of logits, are accepted"
        )
    if (owned > count + 1).any():
        request = int(np.argmax(owned > count + 1))
        raise ValueError(
            f"request {request} owns {owned[request]} rows; with num_draft_tokens {count} it is at most {count + 1}: a "
            f"row for each draft, and one more"
        )
