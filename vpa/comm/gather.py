"""What any collective asks of its two arrays, and an all-gather besides."""

from __future__ import annotations

from typing import Any

from vpa.arrays import is_host


def check_arrays(what: str, send: Any, recv: Any) -> None:
    """Raise ``TypeError`` for what is no NumPy or CuPy array, ``ValueError`` for one that is not C-contiguous."""
    for name, array in (("send", send), ("recv", recv)):
        if not hasattr(array, "dtype") or not hasattr(array, "flags"):
            raise TypeError(f"{name} is a {type(array).__name__}; {what} takes NumPy or CuPy arrays")
    if not (send.flags.c_contiguous and recv.flags.c_contiguous):
        raise ValueError(f"{what} takes C-contiguous arrays; copy them first")


def check_gather(send: Any, recv: Any, size: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``recv`` can take the all-gather of ``send`` over ``size`` ranks."""
    check_arrays("an all-gather", send, recv)
    if is_host(send) != is_host(recv) or send.dtype != recv.dtype or recv.size != size * send.size:
        raise ValueError(
            f"all-gather over {size} ranks of {send.dtype}{list(send.shape)} into {recv.dtype}{list(recv.shape)}; "
            f"recv takes {size * send.size} elements of {send.dtype}, of the library of send"
        )
