"""What a sum over ranks asks of its two arrays."""

from __future__ import annotations

from typing import Any

from vpa.arrays import is_host
from vpa.order import LOGITS_DTYPES


def check_all_reduce(send: Any, recv: Any, size: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``recv`` can take the sum of every rank's ``send``."""
    _check("all-reduce", send, recv, size, send.size)


def check_reduce_scatter(send: Any, recv: Any, size: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``recv`` can take one of the ``size`` equal parts of the sum."""
    _check("reduce-scatter", send, recv, size, send.size // size if send.size % size == 0 else None)


def _check(what: str, send: Any, recv: Any, size: int, takes: int | None) -> None:
    if send.dtype not in LOGITS_DTYPES.values():
        raise TypeError(f"{what} of {send.dtype}; {', '.join(LOGITS_DTYPES)} are summed")
    if not (send.flags.c_contiguous and recv.flags.c_contiguous):
        raise ValueError(f"{_article(what)} takes C-contiguous arrays; copy them first")
    if is_host(send) != is_host(recv) or send.dtype != recv.dtype or recv.size != takes:
        accepted = f"send divides by {size} ranks" if takes is None else f"recv takes {takes} elements of {send.dtype}"
        raise ValueError(
            f"{what} over {size} ranks of {send.dtype}{list(send.shape)} into {recv.dtype}{list(recv.shape)}; "
            f"{accepted}, of the library of send"
        )


def _article(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"
