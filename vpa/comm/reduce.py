"""What a sum over ranks asks of its two arrays."""

from __future__ import annotations

from typing import Any

from vpa.arrays import is_host
from vpa.comm.gather import check_arrays
from vpa.order import LOGITS_DTYPES


def check_all_reduce(send: Any, recv: Any, size: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``recv`` can take the sum of every rank's ``send``."""
    _check("all-reduce", "an all-reduce", send, recv, size, parts=1)


def check_reduce_scatter(send: Any, recv: Any, size: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``recv`` can take one of the ``size`` equal parts of the sum."""
    _check("reduce-scatter", "a reduce-scatter", send, recv, size, parts=size)


def _check(what: str, with_article: str, send: Any, recv: Any, size: int, parts: int) -> None:
    """parts: equal ones that the sum is cut in, of which ``recv`` takes one."""
    check_arrays(with_article, send, recv)
    if send.dtype not in LOGITS_DTYPES.values():
        raise TypeError(f"{what} of {send.dtype}; {', '.join(LOGITS_DTYPES)} are summed")
    takes = send.size // parts if send.size % parts == 0 else None
    if is_host(send) != is_host(recv) or send.dtype != recv.dtype or recv.size != takes:
        accepted = f"send divides by {size} ranks" if takes is None else f"recv takes {takes} elements of {send.dtype}"
        raise ValueError(
            f"{what} over {size} ranks of {send.dtype}{list(send.shape)} into {recv.dtype}{list(recv.shape)}; "
            f"{accepted}, of the library of send"
        )
