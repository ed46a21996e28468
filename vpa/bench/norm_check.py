"""What a call of the norm has to have given: the rules' bits; where another sum was taken, what follows from that."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from vpa import rmsnorm
from vpa.norm import sum_bound

#: Roundings of fp32 that a number of ``normed`` depends on at most: a square and 14 additions, the mean's two and eps,
#: of which a square root leaves half; the root, its reciprocal, and two products.
_FP32_ROUNDINGS = 13


@dataclass(frozen=True)
class Rules:
    """The rules' results for partial sums [ranks, B, H], residual (or None) and weight on the host, and how results
    compare with them."""

    parts: np.ndarray
    residual: np.ndarray | None
    weight: np.ndarray
    eps: float
    rounding: str

    @functools.cached_property
    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """(normed, new_residual)"""
        return self._normed(self.parts, self.residual)

    def wrong(self, normed: np.ndarray, kept: np.ndarray, same_sum: bool) -> np.ndarray:
        """1 for each row of (normed, new_residual) that is not as it has to be, else 0: int64 [B].

        same_sum: whether the sum over ranks is the rules', and so is every bit, but of a NaN. Else new_residual has to
        keep to ``sum_bound``, and ``normed`` has to be the norm of the new_residual that there is, by the rules: bit
        for bit, since that is what is normed; with "unrounded_residual" behind an addition in 16 bits what was normed
        is not known, but rounds to that, so ``normed`` has to be within what that rounding and its own can make.
        """
        if same_sum:
            right = rmsnorm.alike(normed, self.results[0]) & rmsnorm.alike(kept, self.results[1])
        else:
            right = self._kept_is_near(kept) & self._is_norm_of(normed, kept)
        return (~right).any(axis=1).astype(np.int64)

    @np.errstate(all="ignore")
    def _kept_is_near(self, kept: np.ndarray) -> np.ndarray:
        off = np.abs(kept.astype(np.float64) - self.results[1].astype(np.float64))  # NaN is near nothing
        return (off <= self._bound) | np.isinf(self._bound) | rmsnorm.alike(kept, self.results[1])

    @functools.cached_property
    def _bound(self) -> np.ndarray:
        return sum_bound(list(self.parts), self.residual)

    @np.errstate(all="ignore")
    def _is_norm_of(self, normed: np.ndarray, kept: np.ndarray) -> np.ndarray:
        expected = self._normed(kept[None], None)[0]
        same = rmsnorm.alike(normed, expected)
        if self.rounding != "unrounded_residual" or self.residual is None or kept.dtype == np.float32:
            return same
        of_kept, of_weight = ml_dtypes.finfo(kept.dtype), ml_dtypes.finfo(self.weight.dtype)

        def apart(roundoff: float) -> float:
            """The logarithm of how far two numbers may part by a rounding of each."""
            return math.log1p(roundoff) - math.log1p(-roundoff)

        # What was normed and its root mean square each lie within a rounding of kept's; then both are rounded twice.
        factors = 2 * apart(float(of_kept.eps) / 2) + apart(float(of_weight.eps) / 2)
        part = math.expm1(factors + _FP32_ROUNDINGS * apart(2.0**-24))
        wide, gain = expected.astype(np.float64), np.abs(self.weight.astype(np.float64))
        least = [float(limits.smallest_subnormal) for limits in (of_kept, of_weight)]
        most = part * np.abs(wide) + (1 + part) * least[1] * gain + 2 * least[0]
        near = np.abs(normed.astype(np.float64) - wide) <= most
        # Beyond the dtype, or where fp32 does not hold the squares, the rounded numbers say nothing of the others.
        unknown = (np.square(kept.astype(np.float64)).sum(axis=1) >= 2.0**126) & ~np.isnan(wide).any(axis=1)
        unknown |= np.isinf(kept.astype(np.float64)).any(axis=1)
        return same | near | unknown[:, None]

    def _normed(self, parts: np.ndarray, residual: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        found = np.empty_like(parts[0]), np.empty_like(parts[0])
        rmsnorm.residual_rmsnorm(parts, residual, self.weight, self.eps, self.rounding, *found)
        return found
