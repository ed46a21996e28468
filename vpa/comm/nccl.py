"""The communicator over NCCL or RCCL: GPU arrays, the caller's stream, capturable, under a host-side time limit."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

import cupy
from cupy.cuda import nccl

from vpa.arrays import is_capturing
from vpa.comm.gather import check_gather
from vpa.comm.mpi import Mpi, time_limit
from vpa.comm.reduce import check_all_reduce, check_reduce_scatter
from vpa.comm.watch import Watch
from vpa.order import LOGITS_DTYPES

_NOT_READY = 600  # cudaErrorNotReady; hipErrorNotReady

#: NCCL's numbers of the dtypes that are summed; a NCCL before 2.10 has none for bf16.
_SUMMED = {
    LOGITS_DTYPES[name]: getattr(nccl, code, None)
    for name, code in (("bfloat16", "NCCL_BFLOAT16"), ("float16", "NCCL_FLOAT16"), ("float32", "NCCL_FLOAT32"))
}


class Nccl:
    """One GPU per rank (ranks may share one where NCCL allows it). Made by ``vpa.comm.from_mpi``.

    Collectives are enqueued on CuPy's current stream and return at once. A call that does not end within ``timeout``
    seconds, since another rank did not make it or made it with another size, ends the job with a message: NCCL would
    wait for ever.
    """

    transport = "nccl"
    carries = ("cupy",)
    capturable = True

    def __init__(self, host: Mpi) -> None:
        self._host = host
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.rank, self.size, self.device = host.rank, host.size, host.device
        self.reason, self.timeout = host.reason, host.timeout
        self.hosts, self.gpus = host.hosts, host.gpus
        self._watch = Watch(cupy.cuda.Event(disable_timing=True), _pending, self.timeout, self._expired)
        self._nccl = _create(host)
        atexit.register(_abort_at_exit, weakref.ref(self))

    def all_gather(self, send: Any, recv: Any) -> None:
        """Gather every rank's ``send``, in rank order, into ``recv``: C-contiguous, ``size`` times as many elements."""
        self._enqueue(check_gather, "allGather", send, recv, lambda: (send.nbytes, nccl.NCCL_UINT8))

    def all_reduce(self, send: Any, recv: Any) -> None:
        """The sum of every rank's ``send`` in ``recv``: C-contiguous, of one shape; bf16, fp16 or fp32.

        NCCL adds in an order of its own and may round every addition to the dtype; see ``vpa.norm.sum_bound``. It gives
        every rank the same bits.
        """
        self._enqueue(check_all_reduce, "allReduce", send, recv, lambda: (send.size, _summed(send), nccl.NCCL_SUM))

    def reduce_scatter(self, send: Any, recv: Any) -> None:
        """This rank's part of that sum in ``recv``, a ``size``-th of the elements: part r, counted on, is rank r's."""
        self._enqueue(
            check_reduce_scatter, "reduceScatter", send, recv, lambda: (recv.size, _summed(send), nccl.NCCL_SUM)
        )

    def _enqueue(
        self, check: Callable[[Any, Any, int], None], name: str, send: Any, recv: Any, what: Callable[[], tuple]
    ) -> None:
        """Enqueue NCCL's collective of this name on CuPy's current stream, under the time limit."""
        if not isinstance(send, cupy.ndarray):
            raise TypeError(f"transport 'nccl' takes CuPy arrays, got {type(send).__name__}")
        self._check_open()
        check(send, recv, self.size)
        if send.size == 0:
            return
        stream = cupy.cuda.get_current_stream()
        getattr(self._nccl, name)(send.data.ptr, recv.data.ptr, *what(), stream.ptr)
        if not is_capturing():
            self.watch(stream)

    def watch(self, stream: Any) -> None:
        """Put all that was enqueued on ``stream`` so far under the time limit; for replays of captured collectives."""
        self._watch.mark(stream)

    def adopt(self, captured: Any) -> None:
        """Let ``close`` call ``captured.close()`` first: its graph has to go before the communicator."""
        self._graphs.add(captured)

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; any value that pickle takes. Goes over MPI."""
        return self._host.exchange(value)

    def exchange_as(self, name: str, value: Any) -> list[Any]:
        """``exchange`` under a name; ranks that exchange under different names are all told so."""
        return self._host.exchange_as(name, value)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._host.barrier()

    def abort(self, message: str) -> None:
        """Say why on stderr and end the whole job, every rank of it, with exit code 1."""
        self._watch.stop()
        self._host.abort(message)

    def close(self) -> None:
        """Drop captured graphs, wait for the device, give the communicator back; every rank calls it."""
        if self._nccl is None:
            return
        for captured in list(self._graphs):
            captured.close()
        cupy.cuda.runtime.deviceSynchronize()  # under the watch: it waits for collectives
        communicator, self._nccl = self._nccl, None
        with time_limit(self.timeout, f"rank {self.rank} waited for the others to close the NCCL communicator"):
            communicator.destroy()
        self._watch.stop()
        self._host.close()

    def __enter__(self) -> Nccl:
        self._check_open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._drop()

    def _check_open(self) -> None:
        if self._nccl is None:
            raise RuntimeError("this communicator is closed; make another with vpa.comm.from_mpi()")

    def _drop(self) -> None:
        """Leave without the other ranks: after an exception, or at exit. ``destroy`` would wait for them."""
        self._watch.stop()
        communicator, self._nccl = self._nccl, None
        if communicator is not None:
            for captured in list(self._graphs):
                captured.close()
            communicator.abort()

    def _expired(self) -> None:
        message = (
            f"rank {self.rank} waited {self.timeout:.0f} s for a collective on the GPU: another rank failed, did not "
            f"make the call, or made it with another number of rows. The NCCL communicator is aborted and the job ends"
        )
        communicator, self._nccl = self._nccl, None
        if communicator is None:
            return  # closed or dropped meanwhile
        threading.Thread(target=communicator.abort, daemon=True).start()  # may itself wait for a stuck kernel
        self._host.abort(message)


def _summed(array: Any) -> int:
    """NCCL's number of an array's dtype."""
    code = _SUMMED[array.dtype]
    if code is None:
        raise TypeError(f"this CuPy knows no {array.dtype} of NCCL; sum over vpa.comm.from_mpi('mpi'), or gather")
    return code


def _pending(event: Any) -> bool:
    """Whether an event has not been reached. ``event.done`` would take an error, which says nothing, for "not yet"."""
    try:
        return cupy.cuda.runtime.eventQuery(event.ptr) == _NOT_READY
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status == _NOT_READY


def _create(host: Mpi) -> Any:
    """The NCCL communicator; a failure on any rank becomes the same ``RuntimeError`` on all."""
    unique_id, error = None, None
    if host.rank == 0:
        try:
            unique_id = nccl.get_unique_id()
        except Exception as failure:  # whatever it is, the others wait for word of it
            error = f"{type(failure).__name__}: {failure}"
    unique_id, error = host.exchange((unique_id, error))[0]
    communicator = None
    if error is None:
        try:
            communicator = nccl.NcclCommunicator(host.size, unique_id, host.rank)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    errors = host.exchange(error)
    for rank, text in enumerate(errors):
        if text is not None:
            if communicator is not None:
                communicator.abort()
            raise RuntimeError(f"NCCL did not start on rank {rank}: {text}; NCCL_DEBUG=INFO says more")
    return communicator


def _abort_at_exit(reference: weakref.ref[Nccl]) -> None:
    communicator = reference()
    if communicator is not None:
        communicator._drop()
