"""What tests of the norm compare with: the rules in fp64, inputs that find faults, and distances in ulps."""

from __future__ import annotations

import numpy as np
from oracle import DTYPES

from vpa.rmsnorm import alike

#: Three numbers whose sum is 1 in one order and 0 in others, by dtype: fp32 holds 2^24 + 1 no more than bf16 2^24.
SWALLOWED = {"bfloat16": (2.0**24, 1.0), "float16": (2.0**15, 2.0**-10), "float32": (2.0**24, 1.0)}


def ordered(array: np.ndarray) -> np.ndarray:
    """Integers that ascend with the numbers of an array, one step for each number; -0 and +0 are one."""
    bits = array.view(f"u{array.itemsize}").astype(np.int64)
    sign = 1 << (8 * array.itemsize - 1)
    return np.where(bits >= sign, sign - bits, bits)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many numbers lie between those of two arrays; NaN has to stand opposite NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    nan = np.isnan(a.astype(np.float64))
    assert np.array_equal(nan, np.isnan(b.astype(np.float64))), "NaN stands elsewhere"
    return np.where(nan, 0, np.abs(ordered(a) - ordered(b)))


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """The largest of the distances."""
    return int(distances(a, b).max(initial=0))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, or NaN opposite NaN, everywhere."""
    assert a.dtype == b.dtype and a.shape == b.shape
    return bool(alike(a, b).all())


def rounded(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """fp64 numbers in a dtype, by way of fp32's odd rounding: once, as ml_dtypes would by way of fp32 twice."""
    single = value.astype(np.float32)
    off = (single.astype(np.float64) != value) & np.isfinite(single) & (single.view(np.uint32) % 2 == 0)
    toward = np.where(single.astype(np.float64) < value, np.float32(np.inf), np.float32(-np.inf))
    single = np.where(off, np.nextafter(single, toward), single)
    return (single if dtype.itemsize == 2 else value.astype(np.float32)).astype(dtype)


@np.errstate(over="ignore", invalid="ignore")
def exact_sum(parts: list[np.ndarray]) -> np.ndarray:
    """The sum of ranks, number by number in plain Python: fp32 additions in rank order, rounded once."""
    first = parts[0]
    total = [np.float32(number) for number in first.ravel().tolist()]
    for part in parts[1:]:
        total = [a + np.float32(b) for a, b in zip(total, part.ravel().tolist(), strict=True)]
    return np.array(total, np.float32).astype(first.dtype).reshape(first.shape)


def exact_norm(h: np.ndarray, weight: np.ndarray, eps: float, rounding: str, dtype: np.dtype) -> list[np.ndarray]:
    """What ``normed`` may be next to, in fp64, from what is normed: one array, or, where the first of two roundings is
    so near a tie that fp32 may take either way, two."""
    wide, gain = h.astype(np.float64), weight.astype(np.float64)
    with np.errstate(all="ignore"):
        squares = (wide**2).mean(axis=1, keepdims=True)
        squares = np.where(squares > np.finfo(np.float32).max, np.inf, squares)
        scaled = wide / np.sqrt(squares + float(np.float32(eps)))
        if rounding == "gemma":
            return [rounded(scaled * (1 + gain), dtype)]
        if rounding == "once" or weight.dtype == np.float32:
            return [rounded(scaled * gain, dtype)]
        both = [rounded(scaled * (1 + sign * 2.0**-20), weight.dtype).astype(np.float64) for sign in (-1, 1)]
        return [rounded(one * gain, dtype) for one in both]


def inputs(dtype: str, tp: int, rows: int, hidden: int, seed: int = 0, kind: str = "random") -> tuple:
    """(partials, residual, weight) of a kind: random; or with one of the others planted here and there."""
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((tp, rows, hidden)).astype(np.float32)
    residual = rng.standard_normal((rows, hidden)).astype(np.float32)
    weight = (1 + 0.4 * rng.standard_normal(hidden)).astype(np.float32)
    columns = np.arange(0, hidden, 3)
    if kind == "order":
        large, small = SWALLOWED[dtype]
        parts[:, :, columns] = 0
        for rank, number in enumerate(([large, small, -large] + [0] * tp)[:tp]):
            parts[rank][:, columns] = number
        residual[:, columns] = 0
    elif kind == "zeros":
        parts[...] = np.where(rng.integers(0, 2, parts.shape), np.float32(0), np.float32(-0.0))
        residual[...] = np.where(rng.integers(0, 2, residual.shape), np.float32(0), np.float32(-0.0))
    elif kind == "subnormal":
        smallest = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[dtype]
        parts, residual = (np.rint(5 * array).astype(np.float32) * np.float32(smallest) for array in (parts, residual))
    elif kind == "large":
        top = {"bfloat16": 2.0**70, "float16": 2.0**14, "float32": 2.0**70}[dtype]
        parts *= np.float32(top)
    elif kind == "nan":
        parts[-1, 0, 0], residual[rows // 2, hidden // 2] = np.nan, np.nan
    elif kind == "infinite":
        parts[0, 0, hidden - 1], parts[-1, rows - 1, 0] = np.inf, -np.inf
        residual[rows // 2, hidden // 2] = np.inf
        if min(rows - 1, tp, hidden) > 1:
            parts[0, 1, 1], parts[1, 1, 1] = np.inf, -np.inf  # NaN as a sum
    with np.errstate(over="ignore"):
        return tuple(array.astype(DTYPES[dtype]) for array in (parts, residual, weight))


KINDS = ("random", "order", "zeros", "subnormal", "large", "nan", "infinite")
