"""Matrix products as a drafter's parts take them: accumulated in fp32, the bias added there, rounded once.

On a GPU cuBLAS does them, in a way that a CUDA graph can hold: see ``vpa.backends.cublas``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vpa import arrays, backends
from vpa.order import LOGITS_DTYPES


@dataclass(frozen=True, eq=False)
class Linear:
    """``x -> x @ weight.T + bias``. weight: [outputs, inputs], bf16, fp16 or fp32; bias: [outputs], or None.

    ``TypeError`` or ``ValueError`` for arrays of other shapes and dtypes, or of two libraries.
    """

    weight: Any
    bias: Any = None
    wide_bias: Any = field(init=False, repr=False)  # the bias in fp32, in which it is added
    _wide: Any = field(init=False, repr=False)  # the weight in fp32: NumPy has no fast product of 16-bit numbers

    @np.errstate(all="ignore")  # infinities, NaNs and subnormals are numbers like others
    def __post_init__(self) -> None:
        check_floats("weight", self.weight, 2)
        if self.bias is not None:
            check_floats("bias", self.bias, 1, like=self.weight)
            if self.bias.shape != self.weight.shape[:1]:
                raise ValueError(f"bias has {len(self.bias)} numbers, the weight {len(self.weight)} rows; one for each")
        wide = self.weight.astype(np.float32, copy=False) if arrays.is_host(self.weight) else None
        object.__setattr__(self, "_wide", wide)
        bias = self.bias
        if bias is not None:
            bias = arrays.namespace(bias).ascontiguousarray(bias.astype(np.float32, copy=False))
        object.__setattr__(self, "wide_bias", bias)

    @property
    def dtype(self) -> np.dtype:
        return self.weight.dtype

    def check(self, x: Any) -> None:
        """Raise ``TypeError`` or ``ValueError`` for an ``x`` that does not fit, or arrays of another GPU."""
        check_floats("hidden", x, 2, like=self.weight)
        if x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"hidden is [{len(x)}, {x.shape[1]}]; the weight takes [rows, {self.weight.shape[1]}]")
        for name, array in (("hidden", x), ("weight", self.weight), ("bias", self.bias)):
            if array is None:
                continue
            arrays.check_device(array, name)
            if not arrays.is_aligned(array):
                raise ValueError(f"{name} starts at, or steps by, a fraction of an element; copy it first")

    @np.errstate(all="ignore")
    def __call__(self, x: Any) -> Any:
        """[rows, inputs], of any of the dtypes, to [rows, outputs] of the weight's, to which ``x`` is rounded first.

        ``TypeError`` or ``ValueError`` for an ``x`` that does not fit.
        """
        self.check(x)
        x = x.astype(self.dtype, copy=False)
        if self.bias is None and self._wide is None:
            return backends.product(x, self.weight, self.dtype)
        if self._wide is None:
            product = backends.product(x, self.weight, np.dtype(np.float32))
        else:
            product = x.astype(np.float32, copy=False) @ self._wide.T
        if self.bias is not None:
            product += self.wide_bias
        return product.astype(self.dtype, copy=False)


def check_floats(name: str, array: Any, dimensions: int, like: Any = None) -> None:
    """Raise unless ``array`` is NumPy's or CuPy's (that of ``like``), bf16, fp16 or fp32, of so many dimensions."""
    if not hasattr(array, "dtype") or not hasattr(array, "strides"):
        raise TypeError(f"{name} is a {type(array).__name__}; a NumPy or CuPy array is accepted")
    if like is not None and arrays.is_host(array) != arrays.is_host(like):
        raise TypeError(
            f"{name} is a {arrays.namespace(array).__name__} array, the weight a {arrays.namespace(like).__name__} "
            f"array; copy one of them"
        )
    if array.dtype not in LOGITS_DTYPES.values():
        raise TypeError(f"{name} is {array.dtype}; {', '.join(LOGITS_DTYPES)} are accepted")
    if array.ndim != dimensions:
        raise ValueError(f"{name} has shape {array.shape}; {dimensions} dimensions are accepted")
