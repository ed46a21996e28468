"""What any all-gather asks of its two arrays."""

from __future__ import annotations

from typing import Any

from vpa.arrays import is_host


def check_gather(send: Any, recv: Any, size: int) -> None:
    """Raise ``ValueError`` unless ``recv`` can take the all-gather of ``send`` over ``size`` ranks."""
    if not (send.flags.c_contiguous and recv.flags.c_contiguous):
        raise ValueError("an all-gather takes C-contiguous arrays; copy them first")
    if is_host(send) != is_host(recv) or send.dtype != recv.dtype or recv.size != size * send.size:
        raise ValueError(
            f"all-gather over {size} ranks of {send.dtype}{list(send.shape)} into {recv.dtype}{list(recv.shape)}; "
            f"recv takes {size * send.size} elements of {send.dtype}, of the library of send"
        )
