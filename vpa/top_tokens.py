"""Scan, gather, pick in one call: ``get_top_tokens``, and ``TopTokens``, which plans once and can be captured."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays, backends
from vpa.comm import agree, check_communicator
from vpa.scan import SPLITS, candidates_shape, check
from vpa.vocab import VocabShard, positive


def get_top_tokens(
    logits: Any, shard: VocabShard, comm: Any, *, layout: str = "packed", backend: str | None = None
) -> Any:
    """The greedy token of each row of logits whose vocabulary is split over ranks; every rank calls and gets the same.

    logits: this rank's [B, shard.width], bf16, fp16 or fp32; any strides, any library that speaks DLPack.
    comm: a communicator of ``shard.tp_size`` ranks, ``vpa.comm.solo()`` for one.
    layout, backend: as for ``local_argmax_candidates``.

    Returns int64 [B] of the caller's library: per row the id that ``argmax`` over the whole vocabulary gives, by the
    order of ``vpa.order``. Raises ``TypeError`` or ``ValueError`` on every rank where one rank's arguments do not fit,
    or the ranks' rows, dtypes or layouts differ; that takes an exchange over the host, which ``TopTokens`` saves.
    """
    check_communicator(comm)
    taken, module, error = None, None, None
    try:
        taken = arrays.given(logits, "logits")
        module = check(taken.array, shard, layout, backend)
        _check_comm(shard, comm, taken.array)
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts = {} if error else _facts("get_top_tokens", shard, layout, taken.array.dtype, rows=len(taken.array))
    agree(comm, facts, error)
    buffers = _Buffers.fresh(taken.array, len(taken.array), shard.tp_size, layout)
    tokens = arrays.namespace(taken.array).empty(len(taken.array), np.int64)
    _enqueue(module, taken.array, shard, comm, layout, buffers, tokens)
    return taken.give_back(tokens)


class TopTokens:
    """``get_top_tokens`` with its checks and memory settled once. Every rank builds it, and then makes the same calls.

    max_rows: the most rows of a call. dtype: the logits', or its name. Other arguments as for ``get_top_tokens``.

    A call takes logits [B <= max_rows, shard.width] and returns int64 [B] in fresh memory, or in ``out``. Ranks that
    call with different B get a ``ValueError`` over host memory; over NCCL, where nothing is exchanged over the host,
    they are ended by the communicator's time limit.

    Raises on every rank if one rank's arguments do not fit or the ranks' differ.
    """

    def __init__(
        self,
        shard: VocabShard,
        comm: Any,
        *,
        max_rows: int,
        dtype: Any,
        layout: str = "packed",
        backend: str | None = None,
    ) -> None:
        check_communicator(comm)
        self.shard, self.comm, self.layout, self.backend = shard, comm, layout, backend
        error = None
        try:
            if not isinstance(shard, VocabShard):
                raise TypeError(f"shard is a {type(shard).__name__}; a vpa.VocabShard is accepted")
            self.dtype = arrays.check_logits_dtype(dtype)
            self.max_rows = positive("max_rows", max_rows)
            arrays.check_layout(layout, shard.vocab_size)
            backends.check_backend(backend)
            _check_comm(shard, comm)
        except Exception as failure:
            error = failure
        facts = {} if error else _facts("TopTokens", shard, layout, self.dtype, max_rows=self.max_rows)
        agree(comm, facts, error)
        self._buffers: dict[str, _Buffers] = {}
        self._lock = threading.Lock()  # around a call: its buffers are the object's
        self._last: tuple[Any, Any] | None = None  # (thread and stream, event) of the last call on a GPU

    def __call__(self, logits: Any, *, out: Any = None) -> Any:
        """The tokens of ``logits`` [B, width]: int64 [B], in ``out`` if given. Enqueued on CuPy's current stream."""
        taken, module, error = None, None, None
        try:
            taken = arrays.given(logits, "logits")
            module = self._check(taken.array)
            self._check_capturing(taken.array, out)
            target = arrays.target(out, (len(taken.array),), np.dtype(np.int64), taken)
        except Exception as failure:
            error = failure
        if not getattr(self.comm, "capturable", False):  # then it passes through the host anyway
            agree(self.comm, {} if error else {"function": "TopTokens()", "rows": len(taken.array)}, error)
        elif error is not None:
            raise error
        with self._lock:
            buffers = self._planned(taken.array)

            def enqueue() -> None:
                _enqueue(module, taken.array, self.shard, self.comm, self.layout, buffers, target.array)

            if arrays.is_host(taken.array):
                enqueue()
            else:
                self._in_stream_order(enqueue)
        return arrays.returned(target, out)

    def capture(self, logits: Any) -> CapturedTopTokens:
        """Capture the call on ``logits`` [B, width], a GPU array, into one CUDA graph. Every rank calls it, B alike.

        Warms up first: kernels are compiled and the communicator has carried one gather before the capture begins.
        ``ValueError`` for host arrays, and for a communicator whose collectives pass through the host.
        """
        array, module, error = None, None, None
        try:
            array = arrays.given(logits, "logits").array
            module = self._check(array)
            if arrays.is_host(array):
                raise ValueError("a CUDA graph is captured from GPU arrays; got a NumPy array")
            _check_capturable(self.comm)
        except Exception as failure:
            error = failure
        agree(self.comm, {} if error else {"function": "TopTokens.capture", "rows": len(array)}, error)
        buffers = _Buffers.fresh(array, len(array), self.shard.tp_size, self.layout)
        tokens = arrays.namespace(array).empty(len(array), np.int64)
        captured = CapturedTopTokens(
            self.comm,
            lambda: _enqueue(module, array, self.shard, self.comm, self.layout, buffers, tokens),
            (array, buffers, tokens),
            tokens,
        )
        return captured

    def _check(self, logits: Any) -> ModuleType:
        module = check(logits, self.shard, self.layout, self.backend)
        if logits.dtype != self.dtype or len(logits) > self.max_rows:
            raise ValueError(
                f"got {len(logits)} rows of {logits.dtype}; "
                f"this object was built for at most {self.max_rows} of {self.dtype}"
            )
        _check_comm(self.shard, self.comm, logits)
        return module

    def _check_capturing(self, logits: Any, out: Any) -> None:
        """Raise if the caller captures the current stream and this call cannot be part of that."""
        if arrays.is_host(logits) or not arrays.is_capturing():
            return
        _check_capturable(self.comm)
        if "cupy" not in self._buffers:
            raise RuntimeError("the first call cannot be captured: call once before the capture, or use capture()")
        if out is None:
            raise ValueError("inside a capture of your own the result's memory must outlive the call: pass out=")

    def _planned(self, logits: Any) -> _Buffers:
        """The buffers for a call, from those made for ``max_rows`` at the first call with this array library."""
        name = arrays.namespace(logits).__name__
        if name not in self._buffers:
            self._buffers[name] = _Buffers.fresh(logits, self.max_rows, self.shard.tp_size, self.layout)
        return self._buffers[name].of(len(logits), self.max_rows)

    def _in_stream_order(self, enqueue: Any) -> None:
        """Run ``enqueue`` behind the last call's work, which may lie on another stream and uses the same buffers."""
        import cupy

        stream, capturing = cupy.cuda.get_current_stream(), arrays.is_capturing()
        place = (threading.get_ident(), stream.ptr)  # each thread may have a default stream of its own
        if self._last is not None and not capturing and self._last[0] != place:
            stream.wait_event(self._last[1])
        enqueue()
        if not capturing:
            event = self._last[1] if self._last is not None else cupy.cuda.Event(disable_timing=True)
            event.record(stream)
            self._last = (place, event)


class CapturedTopTokens:
    """One call of ``TopTokens`` as a CUDA graph over fixed memory; made by ``TopTokens.capture``.

    ``tokens``: int64 [B], a CuPy array that every ``replay`` overwrites. The graph reads the logits that were captured,
    which it keeps alive: change them in place.
    """

    def __init__(self, comm: Any, enqueue: Any, keep: tuple[Any, ...], tokens: Any) -> None:
        import cupy

        self.tokens = tokens
        self._comm, self._keep = comm, keep
        caller, stream = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(caller.record())
        with stream:
            enqueue()
            stream.synchronize()
            stream.begin_capture()
            try:
                enqueue()
            finally:
                self._graph = stream.end_capture()
        if hasattr(comm, "adopt"):
            comm.adopt(self)

    def replay(self) -> Any:
        """Launch the graph on CuPy's current stream; returns ``tokens``, complete when the stream has come this far."""
        if self._graph is None:
            raise RuntimeError("this graph was closed, with its communicator or by close()")
        import cupy

        stream = cupy.cuda.get_current_stream()
        self._graph.launch(stream)
        if hasattr(self._comm, "watch"):
            self._comm.watch(stream)
        return self.tokens

    def close(self) -> None:
        """Drop the graph. Its communicator does this when it is closed."""
        self._graph = None


@dataclass(frozen=True)
class _Buffers:
    """Memory between the stages: this rank's candidates, and all ranks' (the same memory where there is one rank)."""

    candidates: Any
    gathered: Any

    @classmethod
    def fresh(cls, like: Any, rows: int, tp_size: int, layout: str) -> _Buffers:
        library, dtype = arrays.namespace(like), arrays.LAYOUTS[layout][1]
        lines, numbers = candidates_shape(rows, layout, SPLITS)
        candidates = library.empty((lines, numbers), dtype)
        return cls(candidates, candidates if tp_size == 1 else library.empty((tp_size * lines, numbers), dtype))

    def of(self, rows: int, max_rows: int) -> _Buffers:
        """The buffers for ``rows`` of ``max_rows`` rows: leading parts of the same memory, contiguous."""
        tp_size = len(self.gathered) // max_rows
        return _Buffers(self.candidates[:rows], self.gathered[: tp_size * rows])


def _enqueue(
    module: ModuleType, logits: Any, shard: VocabShard, comm: Any, layout: str, buffers: _Buffers, tokens: Any
) -> None:
    """The three steps, on checked arguments."""
    rows = len(logits)
    if rows == 0:
        return
    module.local_argmax_candidates(logits, shard, layout, SPLITS, buffers.candidates)
    if shard.tp_size > 1:
        comm.all_gather(buffers.candidates, buffers.gathered)
    module.pick_from_candidates(buffers.gathered, rows, tokens)


def _facts(function: str, shard: VocabShard, layout: str, dtype: Any, **more: int) -> dict[str, Any]:
    """What ranks must have alike, in words that a message can use."""
    return {
        "function": function,
        **more,
        "dtype": str(dtype),
        "layout": layout,
        "tp_size": shard.tp_size,
        "vocab_size": shard.vocab_size,
    }


def _check_capturable(comm: Any) -> None:
    if not getattr(comm, "capturable", False):
        raise ValueError(
            f"collectives over transport {getattr(comm, 'transport', '?')!r} cannot be captured; "
            f"use vpa.comm.from_mpi('nccl'), or call without capturing"
        )


def _check_comm(shard: VocabShard, comm: Any, logits: Any = None) -> None:
    if (shard.rank, shard.tp_size) != (comm.rank, comm.size):
        raise ValueError(
            f"the shard is rank {shard.rank} of {shard.tp_size}, the communicator rank {comm.rank} of {comm.size}; "
            f"they have to match"
        )
    if logits is None:
        return
    library = arrays.namespace(logits).__name__
    if library not in getattr(comm, "carries", (library,)):
        raise TypeError(
            f"transport {comm.transport!r} carries {' and '.join(comm.carries)} arrays; got a {library} array: "
            f"use vpa.comm.from_mpi('mpi')"
        )
    device = getattr(comm, "device", None)
    if library == "cupy" and device is not None and logits.device.id != device:
        raise ValueError(f"logits are on GPU {logits.device.id}; this rank's communicator is on GPU {device}")
