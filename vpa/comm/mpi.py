"""The communicator over host memory: MPI all-gathers, each under a time limit; GPU arrays pass through the host."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from vpa.arrays import is_host
from vpa.comm.gather import check_gather

#: Bytes of an exchanged value that travel in the first, fixed-size gather; longer ones need a second.
_SLOT = 512


class CommTimeout(RuntimeError):
    """A collective did not end within the communicator's time limit. The job cannot go on: ranks wait elsewhere."""


class Mpi:
    """All ranks of an MPI communicator, gathering through host memory. Made by ``vpa.comm.from_mpi``."""

    transport = "mpi"
    carries = ("numpy", "cupy")
    capturable = False

    def __init__(self, mpi_comm: Any, *, device: int | None, reason: str, timeout: float) -> None:
        self._mpi = mpi_comm
        self._staging: dict[str, Any] = {}
        self._open = True
        self.device = device
        self.reason = reason
        self.timeout = timeout
        self.rank = mpi_comm.Get_rank()
        self.size = mpi_comm.Get_size()

    def all_gather(self, send: Any, recv: Any) -> None:
        """Gather every rank's ``send``, in rank order, into ``recv``: C-contiguous, ``size`` times as many elements.

        CuPy arrays: all work on their device is waited for first, whichever stream produces ``send``, and ``recv`` is
        complete on return. Raises ``CommTimeout`` if the other ranks do not come.
        """
        check_gather(send, recv, self.size)
        if is_host(send):
            self._gather(send, recv)
            return
        with send.device:
            _synchronize()
            host_send, host_recv = self._staged("send", send), self._staged("recv", recv)
            send.get(out=host_send)
            self._gather(host_send, host_recv)
            recv.set(host_recv)
            _synchronize()  # the staging memory is used again by the next call

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; any value that pickle takes."""
        data = pickle.dumps(value)
        slot = np.zeros(_SLOT, np.uint8)
        slot[:8].view(np.int64)[0] = len(data)
        head = data[: _SLOT - 8]
        slot[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
        slots = np.empty((self.size, _SLOT), np.uint8)
        self._gather(slot, slots)
        lengths = slots[:, :8].copy().view(np.int64)[:, 0]
        texts = slots[:, 8:]
        if lengths.max() > _SLOT - 8:
            padded = np.zeros(lengths.max(), np.uint8)
            padded[: len(data)] = np.frombuffer(data, np.uint8)
            texts = np.empty((self.size, lengths.max()), np.uint8)
            self._gather(padded, texts)
        return [pickle.loads(text[:length].tobytes()) for text, length in zip(texts, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._wait(self._mpi.Ibarrier(), "a barrier")

    def abort(self, message: str) -> None:
        """Say why on stderr and end the whole job, every rank of it, with exit code 1."""
        abort(message)

    def close(self) -> None:
        """Give the communicator back; every rank calls it. A second call does nothing."""
        if self._open:
            self._open = False
            self._staging.clear()
            self._mpi.Free()

    def __enter__(self) -> Mpi:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # with an exception under way the other ranks may be anywhere, and freeing is collective
            self.close()

    def _gather(self, send: np.ndarray, recv: np.ndarray) -> None:
        if send.size:
            self._wait(self._mpi.Iallgather(_bytes(send), _bytes(recv)), f"an all-gather of {send.nbytes} bytes")

    def _wait(self, request: Any, what: str) -> None:
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            if waited > self.timeout:
                self._open = False  # freeing waits for the others too, and so does MPI_Finalize: end the job instead
                atexit.register(abort, f"rank {self.rank} ends the job, after {what} that timed out")
                raise CommTimeout(
                    f"rank {self.rank} waited {waited:.0f} s for {what}: "
                    f"another rank failed, or does not make this call"
                )
            time.sleep(0 if waited < 1e-3 else 5e-5)  # ranks may outnumber cores: let the others run

    def _staged(self, name: str, like: Any) -> Any:
        import cupyx

        buffer = self._staging.get(name)
        if buffer is None or buffer.nbytes < like.nbytes:
            buffer = self._staging[name] = cupyx.empty_pinned(like.nbytes, np.uint8)
        return buffer[: like.nbytes].view(like.dtype).reshape(like.shape)


def abort(message: str, code: int = 1) -> None:
    """Say why on stderr and end every rank of the job with this exit code."""
    from mpi4py import MPI

    sys.stdout.flush()
    print(f"vpa: {message}", file=sys.stderr, flush=True)
    time.sleep(0.2)  # launchers drop what they have not forwarded yet
    MPI.COMM_WORLD.Abort(code)


@contextlib.contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """End the job with ``message`` unless the body is left within ``seconds``; for calls that cannot be given up."""
    timer = threading.Timer(seconds, abort, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _synchronize() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
