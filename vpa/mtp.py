"""One multi-token-prediction step without its attention: embedding, norms, projection, gated MLP; seeded or loaded.

What a drafter computes before its head, small enough to read and real enough that every part decides the token:

    x = projection([norm(embedding of the last token), norm(hidden of the last step)])
    for each block:  x = x + down(silu(gate(n)) * up(n)),  n = norm(x)          -> the pre-norm hidden state

Attention is left out: it needs a cache of keys and values, and has no part in how a token is picked. Each product, norm
and sum is accumulated in fp32 and rounded once to the weights' dtype. A layer is whole on every rank, so that ranks
compute the same hidden states; only the head is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa import arrays, weights
from vpa.linear import Linear, check_floats
from vpa.norm import rms_norm

#: Names of a layer's weights in a file, behind a prefix: those of DeepSeek-V3's checkpoints, where the MLP is dense.
NAMES = {
    "token_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "projection": "eh_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "final_norm": "shared_head.norm.weight",
}


@dataclass(frozen=True, eq=False)
class Block:
    """Norm, gated MLP, residual. norm: [hidden]; gate, up: [intermediate, hidden]; down: [hidden, intermediate]."""

    norm: Any
    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Any, eps: float) -> Any:
        """The residual stream [rows, hidden] behind this block."""
        normed, xp = rms_norm(x, self.norm, eps), arrays.namespace(x)
        with np.errstate(all="ignore"):
            gate = self.gate(normed).astype(np.float32, copy=False)
            gated = (gate / (1 + xp.exp(-gate)) * self.up(normed).astype(np.float32, copy=False)).astype(x.dtype)
            total = x.astype(np.float32, copy=False) + self.down(gated).astype(np.float32, copy=False)
            return total.astype(x.dtype, copy=False)


@dataclass(frozen=True, eq=False)
class MTPLayer:
    """The weights of one step, all of one dtype and library.

    token_norm, hidden_norm, final_norm: gains [hidden]. projection: [hidden, 2 * hidden]. The final norm is applied by
    whom it belongs to, the drafter: inside its step, or before its head. ``ValueError`` for shapes that do not fit.
    """

    token_norm: Any
    hidden_norm: Any
    projection: Linear
    blocks: tuple[Block, ...]
    final_norm: Any
    eps: float = 1e-6

    def __post_init__(self) -> None:
        size, like = self.hidden_size, self.projection.weight
        shaped = {"projection": (self.projection.weight, (size, 2 * size))}
        shaped.update({name: (getattr(self, name), (size,)) for name in ("token_norm", "hidden_norm", "final_norm")})
        for number, block in enumerate(self.blocks):
            inner = len(block.gate.weight)
            shaped[f"blocks[{number}].norm"] = block.norm, (size,)
            for name, shape in (("gate", (inner, size)), ("up", (inner, size)), ("down", (size, inner))):
                shaped[f"blocks[{number}].{name}"] = getattr(block, name).weight, shape
        for name, (array, shape) in shaped.items():
            check_floats(name, array, len(shape), like)
            if array.shape != shape or array.dtype != like.dtype:
                raise ValueError(
                    f"{name} is {array.dtype}{list(array.shape)}; with a projection of {like.dtype}{list(like.shape)} "
                    f"it is {like.dtype}{list(shape)}"
                )

    @property
    def hidden_size(self) -> int:
        return len(self.projection.weight)

    def __call__(self, embedding: Any, hidden: Any) -> Any:
        """The pre-norm hidden state [rows, hidden] from the embedding of the last token and the last hidden state."""
        parts = [rms_norm(embedding, self.token_norm, self.eps), rms_norm(hidden, self.hidden_norm, self.eps)]
        # Not joined by concatenate: CuPy's copies addresses from the host, which a CUDA graph would not keep.
        rows, size = embedding.shape
        joined = arrays.namespace(embedding).empty((rows, 2 * size), f"u{parts[0].itemsize}")
        joined[:, :size], joined[:, size:] = (part.view(joined.dtype) for part in parts)
        x = self.projection(joined.view(parts[0].dtype))
        for block in self.blocks:
            x = block(x, self.eps)
        return x

    def normed(self, pre_norm: Any) -> Any:
        """The post-norm hidden state: the final norm of ``__call__``'s result."""
        return rms_norm(pre_norm, self.final_norm, self.eps)

    @classmethod
    def seeded(
        cls,
        seed: int,
        *,
        hidden_size: int,
        intermediate_size: int,
        blocks: int = 1,
        dtype: Any = "bfloat16",
        library: Any = np,
    ) -> MTPLayer:
        """A layer of seeded weights. Gains are far from uniform: a norm that is left out changes tokens."""
        dtype = arrays.check_logits_dtype(dtype)

        def matrix(part: int, outputs: int, inputs: int) -> Linear:
            sized = {"dtype": dtype, "scale": inputs**-0.5}
            return Linear(library.asarray(weights.seeded_rows(mixed(seed, part), 0, outputs, inputs, **sized)))

        def gain(part: int) -> Any:
            bell = weights.seeded_rows(mixed(seed, part), 0, 1, hidden_size)[0]
            return library.asarray((1 + np.float32(0.4) * bell).astype(dtype))

        def block(first: int) -> Block:
            inner, outer = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
            return Block(gain(first), matrix(first + 1, *inner), matrix(first + 2, *inner), matrix(first + 3, *outer))

        made = tuple(block(4 + 4 * number) for number in range(blocks))
        return cls(gain(0), gain(1), matrix(2, hidden_size, 2 * hidden_size), made, gain(3))

    @classmethod
    def load(
        cls,
        path: str,
        prefix: str = "",
        names: Mapping[str, str] = NAMES,
        *,
        eps: float = 1e-6,
        dtype: Any = None,
        library: Any = np,
    ) -> MTPLayer:
        """A layer of one block from a safetensors file. names: of the weights there, behind ``prefix``.

        dtype: to round all to; each keeps its own by default. ``ValueError`` in one line where one is missing or does
        not fit.
        """
        missing = sorted(NAMES.keys() - names.keys())
        if missing:
            raise ValueError(f"names has no {', '.join(missing)}; a tensor's name for each of {', '.join(NAMES)}")
        read = {field: weights.read_tensor(path, prefix + names[field]) for field in NAMES}
        if dtype is not None:
            with np.errstate(all="ignore"):
                read = {field: array.astype(arrays.check_logits_dtype(dtype)) for field, array in read.items()}
        placed = {field: library.asarray(array) for field, array in read.items()}
        block = Block(placed["mlp_norm"], *(Linear(placed[field]) for field in ("gate", "up", "down")))
        norms = placed["token_norm"], placed["hidden_norm"]
        return cls(*norms, Linear(placed["projection"]), (block,), placed["final_norm"], eps)


def mixed(seed: int, *parts: int) -> int:
    """A seed of its own for a part of something seeded: 64 bits."""
    return int(np.random.SeedSequence([seed % 2**64, *parts]).generate_state(1, np.uint64)[0])


def seeded_embedding(seed: int, vocab_size: int, hidden_size: int, dtype: Any = "bfloat16", library: Any = np) -> Any:
    """An embedding [vocab_size, hidden_size] of variance 1."""
    dtype = arrays.check_logits_dtype(dtype)
    return library.asarray(weights.seeded_rows(seed, 0, vocab_size, hidden_size, dtype=dtype))
