"""What is done to logits between head and argmax: soft-cap, then scale, each step rounded to the logits' dtype.

    soft-cap c:  x -> tanh(x / c) * c        scale s:  x -> x * s

The divide, the tanh and both multiplies are done in fp32, and each result is rounded to the dtype (to nearest, ties to
even), as an engine does that keeps its logits in one dtype. So they create ties, in 16 bits many, and the argmax is
that of the results: ``scale < 0`` mirrors the order, ``scale == 0`` makes all finite logits equal, and infinities NaN.

Libraries differ in tanh. Here it is a fixed sequence of fp64 additions, multiplications and divisions, rounded to fp32
once: the same bits wherever these are IEEE's, in NumPy or in a kernel.
"""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Transform:
    """Soft-cap and scale of logits, as fp32 numbers. scale: of any sign, or 0. soft_cap: above 0, or None.

    Raises ``TypeError`` for what is no real number, ``ValueError`` for one that fp32 does not hold.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _single("scale", self.scale))
        if self.soft_cap is not None:
            object.__setattr__(self, "soft_cap", _single("soft_cap", self.soft_cap))
            if self.soft_cap <= 0:
                raise ValueError(f"soft_cap is {self.soft_cap}; a number above 0 is accepted, or None for no soft-cap")

    @property
    def is_identity(self) -> bool:
        """Whether it leaves every logit as it is."""
        return self.soft_cap is None and self.scale == 1.0


def check_transform(transform: Any) -> None:
    """Raise ``TypeError`` unless ``transform`` is a ``Transform`` or None."""
    if transform is not None and not isinstance(transform, Transform):
        raise TypeError(f"transform is a {type(transform).__name__}; a vpa.Transform or None is accepted")


def apply(transform: Transform, logits: np.ndarray) -> np.ndarray:
    """The transformed logits as a new NumPy array of the same shape and dtype; a NaN may have other bits.

    A 16-bit logit is looked up in a table of all 65536 results: one pass, whatever the transform. GPU backends have the
    steps in ``kernels/transform.cuh``.
    """
    if logits.dtype.itemsize == 2:
        return np.take(_table(transform, logits.dtype), logits.view(np.uint16)).view(logits.dtype)
    return _steps(transform, logits)


@np.errstate(all="ignore")  # infinities and NaNs are logits like others
def _steps(transform: Transform, logits: np.ndarray) -> np.ndarray:
    dtype = logits.dtype
    if transform.soft_cap is not None:
        cap = np.float32(transform.soft_cap)
        logits = (logits.astype(np.float32) / cap).astype(dtype)
        logits = tanh(logits.astype(np.float32)).astype(dtype)
        logits = (logits.astype(np.float32) * cap).astype(dtype)
    if transform.scale != 1.0:
        logits = (logits.astype(np.float32) * np.float32(transform.scale)).astype(dtype)
    return logits


@functools.lru_cache(maxsize=64)
def _table(transform: Transform, dtype: np.dtype) -> np.ndarray:
    """The result's word for every word of a 16-bit dtype, uint16 [65536]."""
    table = _steps(transform, np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)).view(np.uint16)
    table.flags.writeable = False
    return table


#: ln 2 as two fp64 numbers: the first has 32 bits, so its products with integers below 2^21 are exact.
LN2_HIGH = float.fromhex("0x1.62e42feep-1")
LN2_LOW = 1.9082149292705877e-10

PER_LN2 = 1.4426950408889634

#: exp(x) - 1 = x + x^2 * (1/2 + x/3! + x^2/4! + ...): up to x^13, within 2e-17 of it for |x| <= ln(2) / 2.
EXPM1_COEFFICIENTS = tuple(1 / math.factorial(power) for power in range(2, 14))

#: tanh of half of this is 1 in fp32.
MOST = 40.0


@np.errstate(all="ignore")  # a signalling NaN becomes a quiet one
def tanh(values: np.ndarray) -> np.ndarray:
    """tanh of fp32 values, any shape, as fp32: E / (E + 2) with E = exp(2|x|) - 1, in fp64; sign and NaN are kept."""
    twice = np.minimum(2.0 * np.abs(values.astype(np.float64)), MOST)
    power = np.rint(twice * PER_LN2)
    rest = (twice - power * LN2_HIGH) - power * LN2_LOW
    series = np.full_like(rest, EXPM1_COEFFICIENTS[-1])
    for coefficient in reversed(EXPM1_COEFFICIENTS[:-1]):
        series *= rest
        series += coefficient
    series *= rest * rest
    series += rest  # exp(rest) - 1
    whole = np.ldexp(1.0, np.nan_to_num(power).astype(np.int32))
    series *= whole
    series += whole - 1.0  # exp(twice) - 1
    return np.copysign((series / (series + 2.0)).astype(np.float32), values)


def _single(name: str, value: Any) -> float:
    """A setting as the fp32 number nearest to it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; a real number is accepted")
    with np.errstate(all="ignore"):
        single = float(np.float32(value))
    if not math.isfinite(single) or (single == 0 and value != 0):
        raise ValueError(f"{name} is {value!r}; a finite number that fp32 holds is accepted")
    return single
