"""The communicator over host memory: MPI all-gathers, each under a time limit; GPU arrays pass through the host.

Sums over ranks are all-gathers too, added up by every rank: MPI knows no bf16, and promises no order of additions.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.arrays import is_host
from vpa.comm.gather import check_gather
from vpa.comm.reduce import check_all_reduce, check_reduce_scatter
from vpa.rmsnorm import sum_over_ranks

#: Every call begins with an all-gather of this many bytes: what the call is, how long its data, and the first of them.
_SLOT = 1024
_HEAD = 72  # of those: 64 for the words, 8 for the length


#: Requests and buffers of calls that were left unfinished: MPI may write them as long as this process lives.
_ABANDONED: list[Any] = []


class CommTimeout(RuntimeError):
    """A collective did not end within the communicator's time limit. The job cannot go on: ranks wait elsewhere."""


class Mpi:
    """All ranks of an MPI communicator, gathering through host memory. Made by ``vpa.comm.from_mpi``.

    Ranks that make different calls, or gather or sum arrays of different sizes or dtypes, all get a ``ValueError`` that
    lists the calls; the next calls work. One thread at a time may use it.
    """

    transport = "mpi"
    carries = ("numpy", "cupy")
    capturable = False

    def __init__(
        self, mpi_comm: Any, *, device: int | None, reason: str, timeout: float, hosts: int, gpus: int
    ) -> None:
        self._mpi = mpi_comm
        self._staging: dict[str, Any] = {}
        self._closed = ""
        self.device = device
        self.reason = reason
        self.timeout = timeout
        self.hosts, self.gpus = hosts, gpus
        self.rank = mpi_comm.Get_rank()
        self.size = mpi_comm.Get_size()

    def all_gather(self, send: Any, recv: Any) -> None:
        """Gather every rank's ``send``, in rank order, into ``recv``: C-contiguous, ``size`` times as many elements.

        CuPy arrays: all work on their device is waited for first, whichever stream produces ``send``, and ``recv`` is
        complete on return. Raises ``CommTimeout`` if the other ranks do not come.
        """
        check_gather(send, recv, self.size)
        self._on_host(self._gather, send, recv)

    def all_reduce(self, send: Any, recv: Any) -> None:
        """The sum of every rank's ``send`` in ``recv``: C-contiguous, of one shape; bf16, fp16 or fp32.

        In fp32, in the order of ranks, rounded once: the same bits on every rank. CuPy arrays and errors as for
        ``all_gather``.
        """
        check_all_reduce(send, recv, self.size)
        self._on_host(self._all_reduce, send, recv)

    def reduce_scatter(self, send: Any, recv: Any) -> None:
        """This rank's part of that sum in ``recv``, a ``size``-th of the elements: part r, counted on, is rank r's."""
        check_reduce_scatter(send, recv, self.size)
        self._on_host(self._reduce_scatter, send, recv)

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; any value that pickle takes: another is an error on every rank."""
        return self.exchange_as("exchange", value)

    def exchange_as(self, name: str, value: Any) -> list[Any]:
        """``exchange`` under a name of at most 64 bytes; ranks that exchange under different names are all told so."""
        error = None
        try:
            data = pickle.dumps(value)
        except Exception as failure:  # told to the others, who wait for the value
            error, data = failure, pickle.dumps(_Unsent(f"{type(failure).__name__}: {failure}"))
        values = [pickle.loads(theirs) for theirs in self._call(name, data, alike=False)]
        if error is not None:
            raise error
        for rank, theirs in enumerate(values):
            if isinstance(theirs, _Unsent):
                raise ValueError(f"rank {rank} cannot send its value: {theirs.why}")
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._call("barrier", b"")

    def abort(self, message: str) -> None:
        """Say why on stderr and end the whole job, every rank of it, with exit code 1."""
        abort(message)

    def close(self) -> None:
        """Give the communicator back; every rank calls it. A second call does nothing."""
        if not self._closed:
            self._closed = "closed"
            self._staging.clear()
            self._mpi.Free()

    def __enter__(self) -> Mpi:
        self._check_open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # with an exception under way the other ranks may be anywhere, and freeing is collective
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this communicator is {self._closed}; make another with vpa.comm.from_mpi()")

    def _on_host(self, collective: Callable[[np.ndarray, np.ndarray], None], send: Any, recv: Any) -> None:
        """Run a collective of host arrays, on copies in staging memory where they are a GPU's."""
        if is_host(send):
            collective(send, recv)
            return
        with send.device:
            _synchronize()
            host_send, host_recv = self._staged("send", send), self._staged("recv", recv)
            send.get(out=host_send)
            collective(host_send, host_recv)
            recv.set(host_recv)
            _synchronize()  # the staging memory is used again by the next call

    def _gather(self, send: np.ndarray, recv: np.ndarray) -> None:
        lines = recv.reshape(self.size, -1).view(np.uint8)
        for line, part in zip(lines, self._parts("all_gather", send), strict=True):
            line[...] = part.view(np.uint8)

    def _all_reduce(self, send: np.ndarray, recv: np.ndarray) -> None:
        recv.reshape(-1)[...] = sum_over_ranks(self._parts("all_reduce", send))

    def _reduce_scatter(self, send: np.ndarray, recv: np.ndarray) -> None:
        own = slice(self.rank * recv.size, (self.rank + 1) * recv.size)
        recv.reshape(-1)[...] = sum_over_ranks([part[own] for part in self._parts("reduce_scatter", send)])

    def _parts(self, name: str, send: np.ndarray) -> list[np.ndarray]:
        """Every rank's elements in rank order, one-dimensional, in a collective of this name."""
        parts = self._call(name, send.reshape(-1).view(np.uint8).data, dtype=str(send.dtype))
        return [np.frombuffer(part, np.uint8).view(send.dtype) for part in parts]

    def _call(
        self, name: str, data: bytes | memoryview, alike: bool = True, dtype: str = ""
    ) -> list[bytes | memoryview]:
        """All ranks' ``data``, in rank order. Ranks must call with one ``name`` and ``dtype``, if ``alike`` one length.

        What each rank calls travels in front of its data in one all-gather of a fixed size. So ranks that part are
        found out by all, and none reads another call's bytes: MPI itself would match the two calls and say nothing.
        """
        self._check_open()
        length = len(data)
        what = f"{name} of {length} bytes" if alike and length else name
        if dtype:  # as many bytes of another dtype are other numbers
            what += f" of {dtype}"
        slot = np.zeros(_SLOT, np.uint8)
        _put(slot, what.encode()[:64])
        slot[64:_HEAD].view(np.int64)[0] = length
        _put(slot[_HEAD:], bytes(data[: _SLOT - _HEAD]))
        slots = np.empty((self.size, _SLOT), np.uint8)
        self._gather_bytes(slot, slots, what)

        calls = [bytes(line[:64]).rstrip(b"\0").decode() for line in slots]
        if len(set(calls)) > 1:
            listed = ", ".join(f"rank {rank} {call}" for rank, call in enumerate(calls))
            raise ValueError(f"ranks make different calls: {listed}; all ranks make the same calls in one order")
        lengths = slots[:, 64:_HEAD].copy().view(np.int64)[:, 0]
        longest = int(lengths.max())
        lines = slots[:, _HEAD:]
        if longest > _SLOT - _HEAD:
            padded = np.zeros(longest, np.uint8)
            _put(padded, data)
            lines = np.empty((self.size, longest), np.uint8)
            self._gather_bytes(padded, lines, what)
        return [line[:size].data for line, size in zip(lines, lengths, strict=True)]

    def _gather_bytes(self, send: np.ndarray, recv: np.ndarray, what: str) -> None:
        """One all-gather of MPI's, under the time limit. However it is left early, the communicator is lost."""
        request = None
        try:
            request = self._mpi.Iallgather(send, recv)
            start = time.monotonic()
            while not request.Test():
                waited = time.monotonic() - start
                if waited > self.timeout:
                    raise CommTimeout(
                        f"rank {self.rank} waited {waited:.0f} s for {what}: "
                        f"another rank failed, or does not make this call"
                    )
                time.sleep(0 if waited < 1e-3 else 5e-5)  # ranks may outnumber cores: let the others run
        except BaseException as error:  # the time limit, an interrupt by the user, an error of MPI's
            # The call may still complete and write its buffers. Freeing the communicator would wait for the others,
            # and so would MPI_Finalize: end the job when this process ends.
            _ABANDONED.append((self._mpi, request, send, recv))
            how = "timed out" if isinstance(error, CommTimeout) else f"was ended by {type(error).__name__}"
            self._closed = f"lost: {what} {how}"
            atexit.register(abort, f"rank {self.rank} ends the job, after {what} that {how}")
            raise

    def _staged(self, name: str, like: Any) -> Any:
        import cupyx

        buffer = self._staging.get(name)
        if buffer is None or buffer.nbytes < like.nbytes:
            buffer = self._staging[name] = cupyx.empty_pinned(like.nbytes, np.uint8)
        return buffer[: like.nbytes].view(like.dtype).reshape(like.shape)


def start_mpi(seconds: float = 120.0) -> Any:
    """The module ``mpi4py.MPI``. The first import of it starts MPI, which waits for every rank that was launched.

    That wait holds the interpreter, so no thread of Python's could end it: where a rank never comes, ``faulthandler``
    ends this process after ``seconds``, and says where it was. A timer of ``faulthandler`` that the caller has set is
    replaced by the first import. Raises ``RuntimeError`` where no MPI can be loaded.
    """
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        return _import_mpi_and_wait_for_every_rank_to_do_so()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpi4py cannot load an MPI library ({error}); load the site's MPI, or pip install 'vpa[mpich]'"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def _import_mpi_and_wait_for_every_rank_to_do_so() -> Any:  # its name is what a user reads after "Timeout"
    from mpi4py import MPI

    return MPI


def abort(message: str, code: int = 1) -> None:
    """Say why on stderr and end every rank of the job with this exit code; does not return."""
    sys.stdout.flush()
    print(f"vpa: {message}", file=sys.stderr, flush=True)
    time.sleep(0.2)  # launchers drop what they have not forwarded yet
    start_mpi().COMM_WORLD.Abort(code)
    os._exit(code)  # some MPIs return: what Python does at its end would say it all again, and wait for other ranks


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


@dataclass(frozen=True)
class _Unsent:
    """Stands for a value of ``exchange`` that its rank could not send."""

    why: str


def _put(target: np.ndarray, data: bytes | memoryview) -> None:
    target[: len(data)] = np.frombuffer(data, np.uint8)


def _synchronize() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
