"""Which mode of the norm moves least, by bytes, ranks and transport: a pure function of what all ranks have alike.

Two ranks joined by NVLink were **measured** (``python -m vpa.run norm``, ``mpi_runs/results/norm_h200_nvlink_2.json``).
For more ranks the choice is **computed**, from the bytes below and rates that are that record's. They are too kind to
``one_shot``: for two ranks they say 2.4 MB, ten times what was measured, since NCCL gathers slower than it reduces.

For partial sums of S bytes a rank (rows * hidden size * bytes of an element) and tp ranks:

    mode                received over links     steps of a ring    written and read in memory
    one_shot            (tp - 1) S              tp - 1             2 tp S + 3 S
    all_reduce          2 (tp - 1) / tp S       2 (tp - 1)         2 S + 3 S
    sequence_parallel   3 (tp - 1) / tp S       3 (tp - 1)         5 S / tp + 2 S

So ``one_shot`` has the fewest steps and, from 3 ranks on, the most bytes: it is for few rows. ``sequence_parallel``
never moves less where every rank wants whole results, as here: it is for engines that keep rows apart anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from vpa.vocab import positive


@dataclass(frozen=True)
class Rates:
    """link, memory: bytes a second that a GPU receives, and reads and writes. step: seconds of one step of a ring."""

    link: float
    memory: float
    step: float


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

    rates: of another machine; by default what was measured counts, and elsewhere ``RATES``. ``ValueError`` for a
    transport that is not known.
    """
    tp = positive("tp", tp)
    if transport not in ("solo", "mpi", "nccl"):
        raise ValueError(f"transport is {transport!r}; solo, mpi, nccl are accepted")
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
    saved = (tp - 1) * rates.step
    added = (received_bytes("one_shot", 1, tp) - received_bytes("all_reduce", 1, tp)) / rates.link
    added += 2 * (tp - 1) / rates.memory
    return int(saved / added)


def received_bytes(mode: str, size: int, tp: int, transport: str = "nccl") -> float:
    """Bytes that a rank receives for partial sums of ``size`` bytes: by rings, or over host memory, where a sum over
    ranks is a gather of all that is summed."""
    others = tp - 1
    summed = others if transport == "mpi" else others / tp
    return size * {"one_shot": others, "all_reduce": summed + (0 if transport == "mpi" else others / tp),
                   "sequence_parallel": summed + 2 * others / tp}[mode]  # fmt: skip
