"""The rules of a layer's end in NumPy: the sum over ranks, the residual, RMSNorm, and where each step is rounded.

With ``x_r`` [B, H] of each rank and a residual [B, H], both of dtype T (bf16, fp16 or fp32), and a weight [H] of T or
fp32; all arithmetic is fp32's, to nearest, ties to even, and nothing is flushed to zero:

    step         "once"                          "unrounded_residual"                       "gemma"
    sum          x_0 + x_1 + ... in the order of ranks, rounded to T at the end: in all three
    + residual   one addition, rounded to T: h   one addition: h; new_residual is h in T    as "once"
    variance     the mean of the squares of h: in all three
    normed       h * s * w, rounded to T         h * s in the weight's dtype; * w, in T     h * s * (1 + w), in T

with ``s = 1 / sqrt(variance + eps)``, each operation rounded. Without a residual the sum itself is h and new_residual.

The squares have an order too, so that every backend gives the same bits: ``normed`` is equal wherever fp32 arithmetic
is IEEE's, and a row's result depends on that row alone. See ``mean_of_squares``. A NaN's bits are nobody's promise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Where the steps round.
ROUNDINGS = ("once", "unrounded_residual", "gemma")

#: Squares are added in groups of 16 bytes of T, and groups in chunks of 32: a thread's load, and a warp.
GROUP_BYTES = 16
CHUNK_GROUPS = 32

#: Numbers of a row that are handled at a time for as many rows as that gives: temporaries stay in cache.
_BLOCK = 1 << 17


@np.errstate(all="ignore")  # infinities, NaNs and subnormals are numbers like others
def sum_over_ranks(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of the ranks' arrays, of their shape and dtype: in fp32, in the order of ranks, rounded once.

    It starts from the first rank's numbers, so that a sum of -0 alone is -0.
    """
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part.astype(np.float32, copy=False)
    return total.astype(parts[0].dtype, copy=False)


@np.errstate(all="ignore")
def alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one dtype and shape are equal by the rules: in their bits, or NaN opposite NaN."""
    words = f"u{a.itemsize}"
    return (np.ascontiguousarray(a).view(words) == np.ascontiguousarray(b).view(words)) | ((a != a) & (b != b))


@np.errstate(all="ignore")
def residual_rmsnorm(
    partials: np.ndarray,
    residual: np.ndarray | None,
    weight: np.ndarray | None,
    eps: float,
    rounding: str,
    normed: np.ndarray | None,
    new_residual: np.ndarray | None,
) -> None:
    """Write ``normed`` and ``new_residual`` [B, H] of ``partials`` [ranks, B, H]; one that is None is not made.

    All but the weight, which ``normed`` alone needs, have one dtype. ``eps`` counts as fp32.
    """
    rows, hidden = partials.shape[1:]
    step = max(_BLOCK // hidden, 1)
    for row in range(0, rows, step):
        block = slice(row, row + step)
        h, kept = _with_residual(partials[:, block], None if residual is None else residual[block], rounding)
        if new_residual is not None:
            new_residual[block] = kept
        if normed is not None:
            normed[block] = _normed(h, weight, np.float32(eps), rounding, partials.dtype)


@np.errstate(all="ignore")
def mean_of_squares(h: np.ndarray, group: int) -> np.ndarray:
    """The mean of the squares of each row of ``h``, fp32 [B, H], as fp32 [B].

    Groups of ``group`` neighbours are added up, then the sums of 32 groups, a chunk, then those of all chunks; what a
    row lacks counts as zeros. Each time the second half is added to the first, until one number is left: a tree, whose
    error is that of its depth, not of the number of its leaves. The sum is multiplied by 1 / H, rounded to fp32.
    """
    rows, hidden = h.shape
    in_chunk = CHUNK_GROUPS * group
    chunks = 1 << (-(-hidden // in_chunk) - 1).bit_length()
    squares = np.zeros((rows, chunks * in_chunk), np.float32)
    np.square(h, out=squares[:, :hidden])
    total = squares.reshape(rows, chunks, CHUNK_GROUPS, group)
    for _ in range(3):
        while total.shape[-1] > 1:
            half = total.shape[-1] // 2
            total = total[..., :half] + total[..., half:]
        total = total[..., 0]
    return total * np.float32(1 / hidden)


@np.errstate(all="ignore")
def _with_residual(partials: np.ndarray, residual: np.ndarray | None, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """What is normed, fp32, and the new residual, both [B, H]."""
    total = sum_over_ranks(partials)
    h = total.astype(np.float32, copy=False)
    if residual is not None:
        h = h + residual.astype(np.float32, copy=False)
    kept = h.astype(total.dtype, copy=False)
    return (h if rounding == "unrounded_residual" else kept.astype(np.float32, copy=False)), kept


@np.errstate(all="ignore")
def _normed(h: np.ndarray, weight: np.ndarray, eps: np.float32, rounding: str, dtype: np.dtype) -> np.ndarray:
    variance = mean_of_squares(h, GROUP_BYTES // dtype.itemsize)
    scaled = h * (np.float32(1) / np.sqrt(variance + eps))[:, None]
    gain = weight.astype(np.float32, copy=False)
    if rounding == "gemma":
        gain = np.float32(1) + gain
    elif rounding == "unrounded_residual":
        scaled = scaled.astype(weight.dtype).astype(np.float32, copy=False)
    return (scaled * gain).astype(dtype, copy=False)
