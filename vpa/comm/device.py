"""Which GPU a rank uses, and whether all ranks' GPUs allow NCCL: decided from facts that every rank has alike."""

from __future__ import annotations

import functools
import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: NCCL from here on lets ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
SHARED_GPU_NCCL = 23003

TRANSPORTS = ("auto", "nccl", "mpi")


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows of its GPU, told to all ranks before any choice is made.

    device: ordinal of the GPU the rank uses, None without one; gpu: an id of that GPU, unique in the job.
    no_gpu: why there is none. nccl: its version as NCCL counts (23007 for 2.30.7), None where CuPy has no NCCL.
    shared_gpu: whether NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
    """

    host: str
    device: int | None = None
    gpu: str | None = None
    no_gpu: str = ""
    nccl: int | None = None
    shared_gpu: bool = False


def pick_device(local_rank: int, visible: int) -> int:
    """The ordinal of a rank's GPU: its own where it sees enough, the only one it sees, else shared in turn."""
    return local_rank % visible


def launched_local_rank(default: int) -> int:
    """This process's rank on its host as its launcher tells it; ``default`` where it does not."""
    for variable in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "PALS_LOCAL_RANKID"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return default


def visible_gpus() -> tuple[int, str]:
    """How many GPUs this process sees, and, if none, why."""
    try:
        import cupy
    except ImportError as error:
        return 0, f"CuPy is not installed ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return 0, f"CuPy finds no GPU ({str(error).partition(':')[0]})"
    return count, "" if count else "no GPU is visible"


def gather_facts(host: str, local_rank: int) -> RankFacts:
    """This rank's facts. Binds the rank's GPU: it becomes CuPy's current device."""
    visible, why_none = visible_gpus()
    if not visible:
        return RankFacts(host, no_gpu=why_none)
    import cupy

    device = pick_device(local_rank, visible)
    cupy.cuda.Device(device).use()
    gpu = f"{host} {cupy.cuda.runtime.deviceGetPCIBusId(device)}"
    shared_gpu = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return RankFacts(host, device, gpu, nccl=nccl_version(), shared_gpu=shared_gpu)


def choose_transport(requested: str, facts: Sequence[RankFacts]) -> tuple[str, str]:
    """The transport, ``"nccl"`` or ``"mpi"``, and why, given what was asked for and all ranks' facts in rank order.

    ``auto`` takes NCCL where it works and host memory elsewhere. Raises ``ValueError`` where ``nccl`` was asked for and
    cannot work, before NCCL is started: NCCL's own message for two ranks on a GPU names neither.
    """
    if requested not in TRANSPORTS:
        raise ValueError(f"transport is {requested!r}; {', '.join(TRANSPORTS)} are accepted")
    if requested == "mpi":
        return "mpi", "asked for"
    obstacle = _nccl_obstacle(facts)
    if not obstacle:
        gpus = len({rank.gpu for rank in facts})
        shared = (
            "" if gpus == len(facts) else f", {len(facts)} ranks sharing {gpus} (times are co-located, not of links)"
        )
        return "nccl", f"every rank has a GPU{shared}"
    if requested == "nccl":
        raise ValueError(f"transport 'nccl' cannot be used: {obstacle}; use transport 'mpi' or 'auto' for host memory")
    return "mpi", obstacle


def spread(facts: Sequence[RankFacts]) -> tuple[int, int]:
    """How many hosts the ranks are on, and how many GPUs they use, each counted once however many ranks share it."""
    return len({rank.host for rank in facts}), len({rank.gpu for rank in facts if rank.gpu is not None})


def _nccl_obstacle(facts: Sequence[RankFacts]) -> str:
    """Why NCCL cannot join these ranks; empty if it can."""
    for rank, fact in enumerate(facts):
        if fact.device is None:
            return f"rank {rank} on {fact.host} has no GPU: {fact.no_gpu}"
    for rank, fact in enumerate(facts):
        if fact.nccl is None:
            return f"CuPy on rank {rank} on {fact.host} has no NCCL"
    first: dict[str | None, int] = {}
    for rank, fact in enumerate(facts):
        other = first.setdefault(fact.gpu, rank)
        if other != rank and not all(f.shared_gpu and (f.nccl or 0) >= SHARED_GPU_NCCL for f in facts):
            return (
                f"ranks {other} and {rank} share GPU {fact.device} of {fact.host}, which needs NCCL 2.30.3 "
                f"(here {dotted(fact.nccl)}) and NCCL_MULTI_RANK_GPU_ENABLE=1"
            )
    return ""


@functools.cache
def device_name(ordinal: int | None) -> str:
    """The name of a GPU; of the CPU for None."""
    if ordinal is None:
        return cpu_name()
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode()


def cpu_name() -> str:
    """The CPU's model, or what the system has to say of it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def nccl_version() -> int | None:
    """NCCL's or RCCL's version as it counts itself (23007 for 2.30.7); None where CuPy has none to load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where the library is missing: here that is an answer
            from cupy.cuda import nccl

            return int(nccl.get_version())
    except (ImportError, AttributeError):
        return None


def dotted(version: int | None) -> str:
    """NCCL's version as people write it: 2.30.7 for 23007."""
    version = version or 0
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
