"""The scan: one rank's logits, read once, become its candidates."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vpa import arrays, backends
from vpa.plan import SPLITS
from vpa.transform import Transform, check_transform
from vpa.vocab import VocabShard, positive


def local_argmax_candidates(
    logits: Any,
    shard: VocabShard,
    *,
    layout: str = "packed",
    splits: int = SPLITS,
    out: Any = None,
    backend: str | None = None,
    transform: Transform | None = None,
) -> Any:
    """The best candidate of each split of each row of a rank's logits.

    logits: [B, shard.width], bf16, fp16 or fp32, any strides of whole elements; padding columns are not read.
    layout: ``"packed"`` gives uint64 [B, splits], ``"pairs"`` fp32 [B, 2 * splits] (value, id, value, id, ...), for
        vocabularies of at most 2^24 ids. See ``vpa.order`` for both forms.
    splits: how many candidates a row gives; their number changes no token.
    out: a C-contiguous array for the result, of the library of ``logits``, apart from it; fresh memory by default.
    backend: ``"numpy"``, ``"raw"``, ``"numba"``, ``"simt"``; None follows the array. A GPU backend uses CuPy's current
        stream.
    transform: scale and soft-cap, applied to the logits as they are scanned: what is ranked are its results, rounded to
        the logits' dtype.

    Returns ``out``, or a new array of the library of ``logits``. Raises ``TypeError`` and ``ValueError`` for arguments
    that do not fit, saying what was got and what is accepted.
    """
    taken = arrays.given(logits, "logits")
    module = check(taken.array, shard, layout, backend, transform)
    splits = positive("splits", splits)
    shape = candidates_shape(len(taken.array), layout, splits)
    dtype = arrays.LAYOUTS[layout][1]
    target = arrays.target(out, shape, dtype, taken)
    logits, left = transformed(module, taken.array, transform)
    module.local_argmax_candidates(logits, shard, layout, splits, target.array, *left)
    return arrays.returned(target, out)


def transformed(module: ModuleType, logits: Any, transform: Transform | None) -> tuple[Any, tuple[Transform, ...]]:
    """What a backend is given to scan: logits, and the transform if there is one that the backend applies itself.

    For a backend without ``TRANSFORMS`` the transform is applied here, by one more pass that gives the same bits.
    """
    if transform is None or transform.is_identity:
        return logits, ()
    if getattr(module, "TRANSFORMS", False):
        return logits, (transform,)
    return apply_transform(transform, logits), ()


def apply_transform(transform: Transform, logits: Any) -> Any:
    """Transformed logits as a new array of the shape, dtype and library of ``logits``; a NaN may have other bits."""
    return backends.select(None, logits).apply_transform(transform, logits)


def check(
    logits: Any, shard: VocabShard, layout: str, backend: str | None, transform: Transform | None = None
) -> ModuleType:
    """Raise unless a scan can be run with these arguments; return the backend's module."""
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard is a {type(shard).__name__}; a vpa.VocabShard is accepted")
    arrays.check_layout(layout, shard.vocab_size)
    arrays.check_logits(logits, shard.width)
    check_transform(transform)
    return backends.select(backend, logits)


def candidates_shape(rows: int, layout: str, splits: int) -> tuple[int, int]:
    """The shape of one rank's candidates."""
    return rows, splits * arrays.LAYOUTS[layout][0]
