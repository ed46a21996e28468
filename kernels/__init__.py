"""GPU kernels as source text: which files make which kernel, and the one string that a compiler gets."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from dataclasses import dataclass

#: Kernel name -> the files that make it, in order. Every ``.cu`` holds the one ``extern "C"`` entry of that name.
CATALOGUE: dict[str, tuple[str, ...]] = {
    "local_argmax_candidates": (
        "portable.cuh",
        "order.cuh",
        "rounding.cuh",
        "transform.cuh",
        "split.cuh",
        "scan.cuh",
        "requests.cuh",
        "blocks.cuh",
        "local_argmax.cu",
    ),
    "local_argmax_columns": (
        "portable.cuh",
        "order.cuh",
        "rounding.cuh",
        "transform.cuh",
        "split.cuh",
        "local_argmax_columns.cu",
    ),
    "head_candidates": ("portable.cuh", "order.cuh", "rounding.cuh", "transform.cuh", "split.cuh", "head.cu"),
    "pick_from_candidates": ("portable.cuh", "order.cuh", "pick.cuh", "pick.cu"),
    "transform_logits": ("portable.cuh", "order.cuh", "rounding.cuh", "transform.cuh", "transform.cu"),
    "residual_rmsnorm": ("portable.cuh", "order.cuh", "rounding.cuh", "float32.cuh", "rmsnorm.cu"),
    "greedy_verify": ("portable.cuh", "order.cuh", "pick.cuh", "philox.cuh", "requests.cuh", "verify.cu"),
    "empty": ("empty.cu",),
    "plain_read": ("portable.cuh", "plain_read.cu"),
    "plain_move": ("portable.cuh", "plain_move.cu"),
}


@dataclass(frozen=True)
class Source:
    """One kernel, ready to compile: its entry's name, the whole text, and the text's SHA-256 in hex."""

    name: str
    text: str
    digest: str


@functools.cache
def source(name: str, **defines: int) -> Source:
    """Splice the files of kernel ``name`` into one string, with ``#define VPA_<NAME> <value>`` for each of ``defines``.

    Headers are spliced, not included: CuPy's cache key covers the string alone. ``#line`` keeps a compiler's messages
    speaking of the files that a reader knows. Raises ``KeyError`` for a name that is not in ``CATALOGUE``.
    """
    parts = [f"#define VPA_{key.upper()} {int(value)}\n" for key, value in sorted(defines.items())]
    for file in CATALOGUE[name]:
        parts.append(f'#line 1 "{file}"\n{read(file)}\n')
    text = "".join(parts)
    return Source(name, text, hashlib.sha256(text.encode()).hexdigest())


@functools.cache
def digest() -> str:
    """The SHA-256 in hex of the text of all kernels, CUDA's and Numba's: another one as soon as any of them changes."""
    folder = importlib.resources.files(__name__)
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith((".cu", ".cuh", ".py")))
    total = hashlib.sha256()
    for name in names:
        if name != "__init__.py":
            text = read(name).encode()
            total.update(f"{name} {len(text)}\n".encode() + text)
    return total.hexdigest()


@functools.cache
def read(file: str) -> str:
    """The text of one file of this folder."""
    return importlib.resources.files(__name__).joinpath(file).read_text(encoding="utf-8")
