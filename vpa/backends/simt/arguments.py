"""Checks a launch's arguments against the kernel's parameters and packs them as the compiled kernel reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import abi
from .errors import ArgumentError
from .memory import Span

_KINDS = {"i": "integer", "u": "unsigned integer", "f": "floating-point number", "s": "struct", "p": "pointer"}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: `type` as the compiler spells it, `size` in bytes, `kind` and `pointee_kind` as letters
    ('i' signed, 'u' unsigned or bool, 'f' floating point, 's' struct, 'p' pointer, 'v' void)."""

    name: str
    type: str
    size: int
    align: int
    kind: str
    pointee_kind: str
    pointee_size: int


def parameters(entry: abi.KernelEntry) -> tuple[Parameter, ...]:
    names = entry.names.decode().split(",") if entry.names else []
    result = []
    for i in range(entry.count):
        p = entry.parameters[i]
        text = p.text.decode("utf-8", "replace")
        # "const char* simt_type_text() [with T = int]" (g++), "... [T = int]" (clang)
        spelled = text[text.rindex("T = ") + 4 : text.rindex("]")] if "T = " in text else "?"
        name = names[i] if len(names) == entry.count and names[i] else f"#{i}"
        result.append(
            Parameter(name, spelled, p.size, p.align, p.kind.decode(), p.pointee_kind.decode(), p.pointee_size)
        )
    return tuple(result)


@dataclass(frozen=True)
class Packed:
    """`values`: each argument's bytes (for a pointer: None, its span is at the same index). `spans`: the arrays."""

    values: tuple[bytes | None, ...]
    spans: tuple[Span | None, ...]

    def pointers(
        self, addresses: Sequence[int | None], kernel_parameters: Sequence[Parameter]
    ) -> tuple[ctypes.Array, list]:
        """The void*[] that the trampoline takes; the second value keeps the arguments' memory alive."""
        table = (ctypes.c_void_p * max(1, len(self.values)))()
        keep = []
        for i, (value, parameter) in enumerate(zip(self.values, kernel_parameters, strict=True)):
            if value is None:
                value = (addresses[i] or 0).to_bytes(8, "little")
            buffer = ctypes.create_string_buffer(len(value) + parameter.align)
            start = -ctypes.addressof(buffer) % parameter.align
            ctypes.memmove(ctypes.addressof(buffer) + start, value, len(value))
            table[i] = ctypes.addressof(buffer) + start
            keep.append(buffer)
        return table, keep


def pack(kernel: str, kernel_parameters: Sequence[Parameter], args: Sequence) -> Packed:
    """Raises ArgumentError, naming the argument, what it is and what the kernel takes."""
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(
            f"kernel {kernel!r}: args must be a tuple or a list, not {type(args).__name__}", kernel=kernel
        )
    if len(args) != len(kernel_parameters):
        takes = ", ".join(f"{p.type} {p.name}" for p in kernel_parameters)
        raise ArgumentError(
            f"kernel {kernel!r} takes {len(kernel_parameters)} arguments ({takes}), got {len(args)}", kernel=kernel
        )
    values, spans = [], []
    for i, (parameter, value) in enumerate(zip(kernel_parameters, args, strict=True)):

        def refuse(got: str, hint: str = "", i: int = i, parameter: Parameter = parameter) -> ArgumentError:
            what = f"kernel {kernel!r}: argument {i} ({parameter.name}) is {got}, but the parameter is {parameter.type}"
            size = "" if parameter.kind == "p" else f" ({_KINDS[parameter.kind]}, {parameter.size} bytes)"
            return ArgumentError(what + size + (f"; {hint}" if hint else ""), kernel=kernel)

        if parameter.kind == "p":
            spans.append(_span(parameter, value, refuse))
            values.append(None)
        else:
            values.append(_scalar(parameter, value, refuse))
            spans.append(None)
    return Packed(tuple(values), tuple(spans))


def _span(parameter: Parameter, value, refuse) -> Span | None:
    if value is None:
        return None
    extent = None
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, np.ndarray) for v in value):
        value, extent = value
    if not isinstance(value, np.ndarray):
        raise refuse(_kind_of(value), "a pointer takes a NumPy array, a pair (array, extent), or None")
    if value.dtype.hasobject or not value.dtype.isnative:
        raise refuse(f"an array of {value.dtype}", "only arrays of plain, native-endian elements have a meaning there")
    kind, size = _dtype_kind(value.dtype), value.dtype.itemsize
    # Unsigned words are how kernels spell memory of any type; a pointer to int or to float means just that.
    if (
        parameter.pointee_kind == kind
        and kind in "if"
        and parameter.pointee_size > 1
        and size != parameter.pointee_size
    ):
        raise refuse(f"an array of {value.dtype} ({size} bytes an element)", "pass a view of the dtype that is meant")
    span = Span(parameter.name, value, value if extent is None else extent)
    if extent is not None and not span.inside():
        raise refuse("a pair whose array does not lie inside its extent")
    return span


def _scalar(parameter: Parameter, value, refuse) -> bytes:
    if value is None:
        raise refuse("None", "None is a null pointer")
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise refuse(f"an array of shape {value.shape}", "by value goes a NumPy scalar or an array of one element")
        value = value.reshape(())[()] if value.dtype.names is None else np.ascontiguousarray(value).reshape(())
    if not isinstance(value, (np.generic, np.ndarray)):
        raise refuse(_kind_of(value), "pass a NumPy scalar such as numpy.int32(n): a Python number has no width")
    dtype, data = value.dtype, value.tobytes()
    kind = _dtype_kind(dtype)
    expected = "i" if parameter.kind in "iu" else parameter.kind
    if len(data) != parameter.size or (kind != expected and expected != "s"):
        raise refuse(f"{dtype} ({len(data)} bytes)")
    return data


def _dtype_kind(dtype: np.dtype) -> str:
    """'i', 'f' or 's': structures and anything that is no number; ml_dtypes' floats have NumPy's kind 'V'."""
    if dtype.names is not None or dtype.subdtype is not None or dtype.type is np.void:
        return "s"
    return {"i": "i", "u": "i", "b": "i", "f": "f", "V": "f"}.get(dtype.kind, "s")


def _kind_of(value) -> str:
    if isinstance(value, (bool, int, float)):
        return f"the Python {type(value).__name__} {value!r}"
    return f"a {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")
