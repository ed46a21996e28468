"""What tests compare with: NumPy's argmax on the host, the rules in plain Python, and arrays laid out in many ways."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def full_argmax(logits: np.ndarray) -> np.ndarray:
    """Host NumPy's argmax of each row: the first NaN if there is one, else the first of the largest values."""
    with np.errstate(invalid="ignore"):
        return logits.astype(np.float32).argmax(axis=1)


def precedes(a: tuple[float, int], b: tuple[float, int]) -> bool:
    """Whether candidate (value, id) ``a`` comes before ``b``: the rules, word for word."""
    if math.isnan(a[0]) != math.isnan(b[0]):
        return math.isnan(a[0])
    if not math.isnan(a[0]) and a[0] != b[0]:
        return a[0] > b[0]
    return a[1] < b[1]


def float_of_bits(bits: int) -> float:
    """The fp32 number with these bits, as a Python float."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


#: name -> (row stride, column stride) in elements, from the numbers of rows and columns.
LAYOUTS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "contiguous": lambda rows, columns: (columns, 1),
    "padded_rows": lambda rows, columns: (columns + 24, 1),
    "odd_rows": lambda rows, columns: (columns + 1 + columns % 2, 1),
    "column_major": lambda rows, columns: (1, rows),
    "every_second_column": lambda rows, columns: (2 * columns, 2),
    "reversed_rows": lambda rows, columns: (-columns, 1),
    "reversed_columns": lambda rows, columns: (columns, -1),
    "interleaved_rows": lambda rows, columns: (3, 3 * rows + 1),
}

#: What the gaps between elements hold: the largest finite pattern, so that reading a gap changes the token.
_GAP = {2: 0x7F7F, 4: 0x7F7FFFFF}


def laid_out(host: np.ndarray, layout: str, xp: ModuleType = np, shift: int = 0) -> Any:
    """A copy of ``host`` [rows, columns] in ``xp``: strides of ``layout``, ``shift`` elements into its buffer."""
    rows, columns = host.shape
    itemsize = host.dtype.itemsize
    steps = LAYOUTS[layout](rows, columns)
    reach = [(count - 1) * step for count, step in zip((rows, columns), steps, strict=True)] if host.size else [0, 0]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    words = np.dtype(f"u{itemsize}")
    buffer = xp.full(shift + high - low + 1, _GAP[itemsize], words)
    flat = buffer[shift - low :]
    strides = tuple(step * itemsize for step in steps)
    if xp is np:
        view = np.lib.stride_tricks.as_strided(flat, host.shape, strides)
    else:
        view = xp.ndarray(host.shape, words, flat.data, strides=strides)
    view[...] = xp.asarray(np.ascontiguousarray(host).view(words))
    return view.view(host.dtype)


def to_host(array: Any) -> np.ndarray:
    """A NumPy copy of a NumPy or CuPy array."""
    return array if isinstance(array, np.ndarray) else array.get()
