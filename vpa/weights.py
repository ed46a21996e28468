"""A rank's rows of a language model's head in a safetensors file: it reads its part of the vocabulary only."""

from __future__ import annotations

from dataclasses import dataclass

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


def _open(path: str):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown or "none"
