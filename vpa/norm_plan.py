"""Which mode of the norm takes the least time, by bytes, ranks and transport: of what all ranks have alike alone.

Two ranks joined by NVLink were **measured** (``python -m vpa.run norm``, ``mpi_runs/results/norm_h200_nvlink_2.json``).
For more ranks the choice is **computed**, from the bytes below and rates that are that record's. They are too kind to
``one_shot``: for two ranks they say 2.4 MB, ten times what was measured, since NCCL gathers slower than it reduces.

For partial sums of S bytes a rank (rows * hidden size * bytes of an element) and tp ranks:

    mode                received over links     steps of a ring    written and read in memory
    one_shot            (tp - 1) S              tp - 1             2 tp S + 3 S
    all_reduce          2 (tp - 1) / tp S       2 (tp - 1)         2 S + 3 S
    sequence_parallel   3 (tp - 1) / tp S       3 (tp - 1)         5 S / tp + 2 S

In ``sequence_parallel`` S is of rows that divide by tp: up to there they are filled up. So ``one_shot`` has the fewest
steps and, from 3 ranks on, the most bytes: it is for few rows. ``sequence_parallel`` never moves less where every rank
wants whole results, as here: it is for engines that keep rows apart anyway.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from vpa.vocab import integer, positive

TRANSPORTS = ("solo", "mpi", "nccl")


@dataclass(frozen=True)
class Rates:
    """link, memory: bytes a second that a GPU receives, and reads and writes. step: seconds of one step of a ring."""

    link: float
    memory: float
    step: float

    def __post_init__(self) -> None:
        for name, value in (("link", self.link), ("memory", self.memory), ("step", self.step)):
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} is {value!r}; a real number is accepted")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}; a finite number above 0 is accepted")


#: Of two H200 joined by NVLink, over NCCL without NVLS. link: the bare gather of [4096, 7168] bf16. memory: the plain
#: move of that record. step: what ``all_reduce`` takes longer than ``one_shot`` for one row, which is its second step.
RATES = Rates(link=230e9, memory=4.0e12, step=1.2e-6)

#: Ranks, and bytes a rank up to which ``one_shot`` was the quicker one: the largest measured, 16 rows of 7168 bf16,
#: took 9.65 us against 10.22; the next, 786432 bytes, 15.08 us against 13.89.
MEASURED_LIMITS = {2: 229376}


@dataclass(frozen=True)
class Choice:
    """A mode, and why."""

    mode: str
    reason: str


def choose(rows: int, hidden: int, itemsize: int, tp: int, transport: str, rates: Rates | None = None) -> Choice:
    """The mode for ``rows`` rows over a communicator's ``transport`` (``comm.transport``), by time alone.

    Over NCCL ``one_shot`` alone has the bits of ``vpa.rmsnorm``: who needs them takes it, whatever it costs.

    rates: of another machine; by default what was measured counts, and elsewhere ``RATES``. ``TypeError`` or
    ``ValueError`` for what does not fit.
    """
    rows, hidden, itemsize = _from_0("rows", rows), positive("hidden", hidden), positive("itemsize", itemsize)
    tp = positive("tp", tp)
    _check_transport(transport)
    _check_rates(rates)
    if tp == 1 or transport == "solo":
        return Choice("one_shot", "one rank: nothing travels")
    if transport == "mpi":
        return Choice("one_shot", "host memory: every collective is an all-gather, and one_shot makes one")
    measured = rates is None and tp in MEASURED_LIMITS
    limit = MEASURED_LIMITS[tp] if measured else one_shot_limit(tp, rates or RATES)
    size, how = rows * hidden * itemsize, "measured" if measured else "computed"
    if size <= limit:
        return Choice("one_shot", f"{size} bytes a rank, at most {limit}: fewer steps outweigh more bytes ({how})")
    return Choice("all_reduce", f"{size} bytes a rank, above {limit}: more steps cost less than its bytes ({how})")


def one_shot_limit(tp: int, rates: Rates = RATES) -> int:
    """Bytes a rank up to which ``one_shot`` takes no longer than ``all_reduce`` by the table above, tp >= 2 ranks."""
    _check_rates(rates)
    if positive("tp", tp) == 1:
        raise ValueError("tp is 1; it is at least 2, as one rank has nobody to receive from")
    saved = (tp - 1) * rates.step
    added = (received_bytes("one_shot", 1, tp) - received_bytes("all_reduce", 1, tp)) / rates.link
    added += 2 * (tp - 1) / rates.memory
    return int(saved / added)


def received_bytes(mode: str, size: int, tp: int, transport: str = "nccl", *, rows: int | None = None) -> float:
    """Bytes that a rank receives for partial sums of ``size`` bytes: by rings, or over host memory, where a sum over
    ranks is a gather of all that is summed.

    rows: of those partial sums, which ``sequence_parallel`` fills up to a multiple of ``tp``; None if they are one.
    """
    size, tp = _from_0("size", size), positive("tp", tp)
    _check_transport(transport)
    others = tp - 1
    summed = others if transport == "mpi" else others / tp
    parts = {"one_shot": others, "all_reduce": summed + (0 if transport == "mpi" else others / tp),
             "sequence_parallel": summed + 2 * others / tp}  # fmt: skip
    if mode not in parts:
        raise ValueError(f"mode is {mode!r}; {', '.join(parts)} are accepted")
    if mode == "sequence_parallel" and rows is not None and _from_0("rows", rows):
        return size * (-(-rows // tp) * tp / rows) * parts[mode]
    return size * parts[mode]


def _from_0(name: str, value: object) -> int:
    number = integer(name, value)
    if number < 0:
        raise ValueError(f"{name} is {number}; it is at least 0")
    return number


def _check_transport(transport: object) -> None:
    if not isinstance(transport, str) or transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; {', '.join(TRANSPORTS)} are accepted")


def _check_rates(rates: object) -> None:
    if rates is not None and not isinstance(rates, Rates):
        raise TypeError(f"rates is a {type(rates).__name__}; a vpa.norm_plan.Rates is accepted")
