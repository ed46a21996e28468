"""The gather: communicators that carry candidates between ranks. All have the same few methods.

``rank``, ``size``, ``device``; ``transport`` and ``reason``, which one it is and why; ``carries``, whose arrays it
gathers; ``capturable``, whether its collectives may be captured into a CUDA graph; ``hosts`` and ``gpus``, how many
machines its ranks are on and how many GPUs they use, one that ranks share counted once; ``all_gather(send, recv)``;
``all_reduce(send, recv)`` and ``reduce_scatter(send, recv)``, sums over ranks, which the norm alone asks for;
``exchange(value)``, every rank's small Python value, over the host; ``barrier()``; ``close()``. All are context
managers. A communicator of your own needs ``rank``, ``size``, ``all_gather`` and ``close``; without ``exchange``
nothing checks that ranks call alike, without ``hosts`` and ``gpus`` a switch of ``vpa.calibrate`` does not know where
ranks are. Ours also have ``exchange_as(name, value)``: ranks that part are told so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from vpa.arrays import namespace
from vpa.comm.mpi import CommTimeout
from vpa.comm.solo import Solo

__all__ = ["CommTimeout", "agree", "describe", "from_mpi", "solo"]


def solo() -> Solo:
    """A communicator of one rank."""
    return Solo()


def from_mpi(transport: str = "auto", *, mpi_comm: Any = None, timeout: float = 120.0) -> Any:
    """The communicator over all ranks of ``mpi_comm`` (``MPI.COMM_WORLD`` by default). Every rank calls it.

    transport: ``"nccl"``, ``"mpi"`` (host memory), or ``"auto"``: NCCL where every rank has a GPU of its own (or NCCL
        is at least 2.30.3 and NCCL_MULTI_RANK_GPU_ENABLE=1 is set), else host memory. Which one and why is logged in
        one line by rank 0, and is in ``transport`` and ``reason``.
    timeout: seconds after which a collective that does not end is an error, and for which the start of MPI, if this is
        its first use, waits for ranks that never come.

    Binds each rank to a GPU by its rank on the host: it becomes CuPy's current device. In a part of the job
    (``mpi_comm``) that rank is what the launcher says. Raises ``ValueError`` on every rank where the transport cannot
    be used, ``RuntimeError`` where MPI or NCCL does not start.
    """
    from vpa.comm import device, mpi

    if not isinstance(timeout, (int, float)) or not 0 < timeout <= 1e6:
        raise ValueError(f"timeout is {timeout!r}; seconds, more than 0 and at most 1e6, are accepted")
    library = mpi.start_mpi(timeout)
    if mpi_comm is not None and (not isinstance(mpi_comm, library.Intracomm) or mpi_comm == library.COMM_NULL):
        raise TypeError(f"mpi_comm is {mpi_comm!r}; an mpi4py.MPI.Intracomm that is not COMM_NULL is accepted")
    world = library.COMM_WORLD if mpi_comm is None else mpi_comm
    waited = f"rank {world.Get_rank()} waited {timeout:.0f} s for the others to set up a communicator"
    with mpi.time_limit(timeout, f"{waited}: one failed, or did not call"):
        if mpi_comm is None:
            on_host = world.Split_type(library.COMM_TYPE_SHARED)
            local_rank = on_host.Get_rank()
            on_host.Free()
        else:  # a part of the job: the other ranks of the host, who have GPUs too, do not come here
            local_rank = device.launched_local_rank(world.Get_rank())
        mine = device.gather_facts(library.Get_processor_name(), local_rank)
        told = world.allgather((repr(transport), mine))
        requests = sorted({requested for requested, _ in told})
        if len(requests) > 1:
            raise ValueError(f"ranks ask for different transports: {', '.join(requests)}")
        everyone = [facts for _, facts in told]
        chosen, reason = device.choose_transport(transport, everyone)
        hosts, gpus = device.spread(everyone)
        communicator: Any = mpi.Mpi(
            world.Dup(), device=mine.device, reason=reason, timeout=timeout, hosts=hosts, gpus=gpus
        )
        if chosen == "nccl":
            from vpa.comm.nccl import Nccl

            communicator = Nccl(communicator)
    if communicator.rank == 0:
        logging.getLogger("vpa").info(describe(communicator))
    return communicator


def describe(comm: Any) -> str:
    """One line on a communicator: how many ranks, which transport, why."""
    names = {"mpi": "host memory over MPI", "nccl": "NCCL", "solo": "no communication"}
    transport = getattr(comm, "transport", type(comm).__name__)
    reason = getattr(comm, "reason", "")
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
    return f"{ranks}, {names.get(transport, transport)}" + (f": {reason}" if reason else "")


def check_communicator(comm: Any) -> None:
    """Raise ``TypeError`` for what is no communicator: on every rank alike, as nothing could be told to the others."""
    missing = [name for name in ("rank", "size", "all_gather", "close") if not hasattr(comm, name)]
    if missing:
        raise TypeError(
            f"comm is a {type(comm).__name__} without {', '.join(missing)}; "
            f"vpa.comm.solo() or vpa.comm.from_mpi() is accepted"
        )


def check_carries(comm: Any, array: Any, name: str) -> None:
    """Raise unless the communicator carries arrays of this library, and from the GPU that the array is on."""
    library = namespace(array).__name__
    if library not in getattr(comm, "carries", (library,)):
        raise TypeError(
            f"transport {comm.transport!r} carries {' and '.join(comm.carries)} arrays; got a {library} array: "
            f"use vpa.comm.from_mpi('mpi')"
        )
    device = getattr(comm, "device", None)
    if library == "cupy" and device is not None and array.device.id != device:
        verb = "are" if name.endswith("s") else "is"
        raise ValueError(f"{name} {verb} on GPU {array.device.id}; this rank's communicator is on GPU {device}")


def agree(comm: Any, facts: Mapping[str, Any], error: Exception | None = None, own: Any = None) -> list[Any] | None:
    """Raise on every rank unless all ranks have the same ``facts`` and none has an ``error``; every rank's ``own``.

    A rank that found its own arguments wrong passes what it would raise as ``error``; it raises that, and the others
    raise the same kind, naming the rank. A communicator without ``exchange`` is trusted, and then the result is None.
    """
    if comm.size == 1 or not hasattr(comm, "exchange"):
        if error is not None:
            raise error
        return [own] if comm.size == 1 else None
    told = None if error is None else (type(error).__name__, f"{type(error).__name__}: {error}")
    # By a name, where that can be: a rank that exchanges something of its own here is told so, and so are the others.
    exchange = (
        functools.partial(comm.exchange_as, "check of arguments") if hasattr(comm, "exchange_as") else comm.exchange
    )
    answers = exchange((told, dict(facts), own))
    if error is not None:
        raise error
    for rank, (failure, _, _) in enumerate(answers):
        if failure is not None:
            kind, text = failure
            raise _KINDS.get(kind, RuntimeError)(f"rank {rank} raised {text}")
    for name in dict.fromkeys(name for _, theirs, _ in answers for name in theirs):
        values = [theirs.get(name) for _, theirs, _ in answers]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise ValueError(f"ranks call with different {name}: {listed}; all ranks make the same call")
    return [theirs for _, _, theirs in answers]


_KINDS = {"TypeError": TypeError, "ValueError": ValueError}
