"""What an object that is called many times keeps between calls: its memory, packed steps, and their order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vpa import arrays
from vpa.comm import check_carries
from vpa.vocab import VocabShard

#: Kinds of calls that an object keeps packed: batch sizes, mostly. More than anyone captures graphs for.
_KINDS_KEPT = 4096


@dataclass(frozen=True)
class Buffers:
    """Memory between the stages: this rank's candidates, and all ranks' (the same memory where there is one rank)."""

    candidates: Any
    gathered: Any

    @classmethod
    def fresh(cls, like: Any, most: int, tp_size: int, layout: str) -> Buffers:
        """For up to ``most`` candidates a rank, in the library of ``like``."""
        library, (numbers, dtype) = arrays.namespace(like), arrays.LAYOUTS[layout]
        candidates = library.empty(most * numbers, dtype)
        return cls(candidates, candidates if tp_size == 1 else library.empty(tp_size * most * numbers, dtype))


class Workspace:
    """Steps for each kind of call, made at its first, and the memory that they share, on the host and on each GPU.

    ``lock`` is held around a call, since the memory is shared.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffers: dict[Any, Buffers] = {}  # for host memory and for each GPU
        self._steps: dict[Any, Any] = {}
        self._last: dict[int, tuple[Any, Any]] = {}  # GPU -> (thread and stream, event) of the last call there

    def knows(self, kind: Any) -> bool:
        """Whether a call of this kind was made before."""
        return kind in self._steps

    def steps(self, kind: Any, make: Callable[[], Any]) -> Any:
        """The steps of a kind of call; ``make()`` packs them at the first."""
        steps = self._steps.get(kind)
        if steps is None:
            steps = make()
            if len(self._steps) >= _KINDS_KEPT:
                del self._steps[next(iter(self._steps))]  # the first that was made
            self._steps[kind] = steps
        return steps

    def buffers(self, like: Any, make: Callable[[], Buffers]) -> Buffers:
        """The memory beside ``like``, on its GPU or on the host, the same for all calls; ``make()`` allocates it."""
        place = "host" if arrays.is_host(like) else like.device.id
        if place not in self._buffers:
            self._buffers[place] = make()
        return self._buffers[place]

    def enqueue(self, like: Any, work: Callable[[], None], capturing: bool) -> None:
        """Do ``work``, on a GPU behind the last call's, which may lie on another stream and uses the same buffers."""
        if arrays.is_host(like) or capturing:
            work()
            return
        import cupy

        stream, device = cupy.cuda.get_current_stream(), like.device.id
        place = (threading.get_ident(), stream.ptr)  # each thread may have a default stream of its own
        last, event = self._last.get(device, (None, None))
        if event is None:
            event = cupy.cuda.Event(disable_timing=True)
        elif last != place:
            stream.wait_event(event)
        try:
            work()
        finally:  # a step that fails has others before it
            event.record(stream)
            self._last[device] = (place, event)


def check_warm(known: bool) -> None:
    """Raise ``RuntimeError`` if a call cannot be part of a capture that the caller has under way, since none of its
    kind was made before."""
    if not known:
        raise RuntimeError(
            "the first call with logits of this shape and these strides cannot be captured, since it compiles "
            "kernels: call once before the capture, or use capture()"
        )


def check_outlives(out: Any) -> None:
    """Raise ``ValueError`` if a call in a capture of the caller's own would write its results to fresh memory."""
    if out is None:
        raise ValueError("inside a capture of your own the result's memory must outlive the call: pass out=")


def check_comm(shard: VocabShard, comm: Any, logits: Any = None) -> None:
    """Raise unless a communicator is of the shard's ranks and, with logits, carries arrays such as these."""
    if (shard.rank, shard.tp_size) != (comm.rank, comm.size):
        raise ValueError(
            f"the shard is rank {shard.rank} of {shard.tp_size}, the communicator rank {comm.rank} of {comm.size}; "
            f"they have to match"
        )
    if logits is not None:
        check_carries(comm, logits, "logits")
