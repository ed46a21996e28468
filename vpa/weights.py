"""Weights: a rank's rows of a head, and small tensors, in a safetensors file; and seeded ones in their place.

A rank reads, or makes, its part of the vocabulary only.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.vocab import VocabShard

#: Names that heads go by; the first that a file has is taken where none is given.
HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight", "embeddings.word_embeddings.weight", "wte.weight")

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class HeadFile:
    """A head's weight in a file: tensor ``tensor`` [vocab_size, hidden_size] of ``dtype`` in ``path``."""

    path: str
    tensor: str
    vocab_size: int
    hidden_size: int
    dtype: str


def find_head(where: str) -> HeadFile:
    """The head that ``FILE.safetensors`` or ``FILE.safetensors:TENSOR`` names; only the file's header is read.

    Raises ``ValueError`` in one line where the file or tensor is missing, or the tensor is not [rows, columns] of bf16,
    fp16 or fp32.
    """
    path, colon, tensor = where.partition(".safetensors:")
    path = f"{path}.safetensors" if colon else where
    with _open(path) as file:
        names = sorted(file.keys())
        if not tensor:
            matrices = [name for name in names if len(file.get_slice(name).get_shape()) == 2]
            known = [name for name in HEAD_NAMES if name in matrices]
            if not matrices:
                raise ValueError(f"{path} has no tensor [vocabulary, hidden]; it has {_some(names)}")
            if not known and len(matrices) != 1:
                raise ValueError(f"{path} has no tensor of a usual name; name one: {path}:TENSOR, of {_some(matrices)}")
            tensor = (known or matrices)[0]
        if tensor not in names:
            raise ValueError(f"{path} has no tensor {tensor!r}; it has {_some(names)}")
        entry = file.get_slice(tensor)
        shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"tensor {tensor!r} of {path} has shape {list(shape)}; a head is [vocabulary, hidden]")
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {tensor!r} of {path} is {dtype}; {', '.join(_DTYPES)} are accepted")
    return HeadFile(path, tensor, *shape, _DTYPES[dtype])


def read_rows(head: HeadFile, first: int, count: int) -> np.ndarray:
    """Rows ``first .. first + count - 1`` of the tensor, [count, hidden_size]; nothing else is read."""
    with _open(head.path) as file:
        return file.get_slice(head.tensor)[first : first + count]


def read_shard(head: HeadFile, shard: VocabShard) -> np.ndarray:
    """The rows of a shard's ids, [shard.width, hidden_size]; padding rows are zero, as engines leave them."""
    weight = np.zeros((shard.width, head.hidden_size), read_rows(head, 0, 0).dtype)
    for start, count, first_id in shard.ranges:
        weight[start : start + count] = read_rows(head, first_id, count)
    return weight


def read_vector(path: str, tensor: str, shard: VocabShard) -> np.ndarray:
    """The numbers of a shard's ids in a tensor [vocab_size], as [shard.width]; those of padding are zero.

    Raises ``ValueError`` in one line where the tensor is missing, or not of one number for each id.
    """
    with _open(path) as file:
        names = sorted(file.keys())
        if tensor not in names:
            raise ValueError(f"{path} has no tensor {tensor!r}; it has {_some(names)}")
        entry = file.get_slice(tensor)
        if tuple(entry.get_shape()) != (shard.vocab_size,) or entry.get_dtype() not in _DTYPES:
            raise ValueError(
                f"tensor {tensor!r} of {path} is {entry.get_dtype()}{list(entry.get_shape())}; "
                f"[{shard.vocab_size}] of {', '.join(_DTYPES)} is accepted"
            )
        vector = np.zeros(shard.width, entry[:0].dtype)
        for start, count, first_id in shard.ranges:
            vector[start : start + count] = entry[first_id : first_id + count]
    return vector


def read_tensor(path: str, tensor: str) -> np.ndarray:
    """A whole tensor; ``ValueError`` in one line where it is missing or not of bf16, fp16 or fp32."""
    with _open(path) as file:
        names = sorted(file.keys())
        if tensor not in names:
            raise ValueError(f"{path} has no tensor {tensor!r}; it has {_some(names)}")
        dtype = file.get_slice(tensor).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {tensor!r} of {path} is {dtype}; {', '.join(_DTYPES)} are accepted")
        return file.get_tensor(tensor)


def seeded_rows(
    seed: int, first: int, count: int, width: int, *, dtype: Any = np.float32, scale: float = 1.0
) -> np.ndarray:
    """Rows ``first .. first + count - 1`` of a seeded matrix, [count, width], bell-shaped with variance 1.

    A row is a function of seed and number alone: however rows are shared out, the matrix is the same. Numbers are
    sums of the four 16-bit fields of Philox's words (Salmon et al., SC 2011), in fp32; those are multiplied by
    ``scale`` and rounded to ``dtype``. Blocks of rows are made side by side, on the CPU cores that the process may use.
    """
    counters = -(-width // 4)  # of four words each
    rows = np.empty((count, width), dtype)
    step = max(_SEEDED_WORDS // (4 * counters or 1), 1)

    def fill(done: int) -> None:
        part = rows[done : done + step]
        generator = np.random.Philox(key=seed % 2**64).advance((first + done) * counters)
        words = generator.random_raw(len(part) * counters * 4).reshape(len(part), -1)[:, :width]
        total = np.zeros(part.shape, np.int32)
        for field in range(4):
            total += (words >> np.uint64(16 * field)).astype(np.uint16)
        numbers = (total - 131070).astype(np.float32) * np.float32(3**0.5 * 2.0**-16)
        part[...] = (numbers * np.float32(scale)).astype(dtype)

    with ThreadPoolExecutor(_cores()) as pool:  # NumPy's loops run without the interpreter's lock
        list(pool.map(fill, range(0, count, step)))
    return rows


#: Random words made at once.
_SEEDED_WORDS = 1 << 20


def _cores() -> int:
    """CPU cores that this process may use; where the system does not say, those that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open(path: str):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown or "none"
