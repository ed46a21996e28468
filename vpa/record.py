"""Records of runs: what was run, where, and every row with its raw samples, as JSON that is written once."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vpa.comm.device import nccl_version

SCHEMA = 1

_PACKAGES = ("vpa", "numpy", "ml_dtypes", "mpi4py", "mpich", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda",
             "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torch", "triton")  # fmt: skip


def environment(comm: Any = None) -> dict[str, Any]:
    """Versions, devices, ranks and revision. With a communicator, of all its ranks: every rank calls it."""
    here = {"host": platform.node(), "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "gpu": _gpu()}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": _packages(),
        "git": _git(),
        "ranks": [here] if comm is None else comm.exchange(here),
        "transport": None if comm is None else comm.transport,
        "reason": None if comm is None else comm.reason,
        "nccl": nccl_version(),
    }


def check_new(path: str) -> None:
    """Raise ``ValueError`` if ``path`` exists or its folder does not: a record is never written over another."""
    if os.path.lexists(path):
        raise ValueError(f"{path} exists; a record is never written over: give another path")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"no folder {folder} to write {os.path.basename(path)} in")


def write(path: str, experiment: str, env: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Write a record to a new file and return its path: another one, in the current folder, if ``path`` cannot be made.

    A file that has come to be there since ``check_new`` is not written over, and what was measured is not lost.
    """
    record = {
        "schema": SCHEMA,
        "experiment": experiment,
        "command": command(len(env["ranks"])),
        "environment": env,
        "rows": list(rows),
    }
    text = _compact(json.dumps(record, indent=1)) + "\n"
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
        return path
    except OSError:
        with tempfile.NamedTemporaryFile("w", prefix="vpa_", suffix=".json", dir=".", delete=False) as file:
            file.write(text)
        return file.name


def read(path: str | Path) -> dict[str, Any]:
    """A record from its file; ``ValueError`` where it is not one of this schema."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read record {path}: {error}") from error
    if not isinstance(record, dict) or type(record.get("schema")) is not int or record["schema"] != SCHEMA:
        raise ValueError(f"{path} is no record of schema {SCHEMA}")
    missing = sorted({"experiment", "command", "environment", "rows"} - set(record))
    if missing or not isinstance(record["rows"], list):
        raise ValueError(f"{path} is no whole record: {', '.join(missing) or 'rows'} missing")
    return record


def command(ranks: int = 1) -> str:
    """The command line of this run, as a user would type it."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    start = f"python -m {module.name}" if module is not None else f"python {sys.argv[0]}"
    launcher = [f"mpirun -n {ranks}"] if ranks > 1 else []
    return " ".join([*launcher, start, *sys.argv[1:]])


def _compact(text: str) -> str:
    """Lists of numbers on one line each: a record is read by people too."""
    lines, inside = [], False
    for line in text.splitlines():
        stripped = line.strip()
        if inside:
            lines[-1] += stripped + (" " if stripped.endswith(",") else "")
            inside = not stripped.startswith("]")
        else:
            lines.append(line)
            inside = stripped.endswith("[") and "samples" in stripped
    return "\n".join(line.rstrip() for line in lines)


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any] | None:
    """The revision of the source and whether it was changed; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        # Tracked there: a checkout around an installation is none of ours.
        _output(["git", "-C", str(folder), "ls-files", "--error-unmatch", "record.py"])
        revision = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
        dirty = bool(_output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": revision, "dirty": dirty}


def _output(words: list[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, Any] | None:
    """The current device, its memory, clocks and driver; None without one."""
    try:
        import cupy

        device = cupy.cuda.Device()
        properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    except Exception:  # no CuPy, no driver, no device: all mean none
        return None
    return {
        "name": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "l2_bytes": properties["l2CacheSize"],
        "memory_bytes": properties["totalGlobalMem"],
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "smi": _smi(),
    }


def _smi() -> str | None:
    """What nvidia-smi says of driver and clocks, now."""
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    try:
        return f"{query}: " + _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]).replace(
            "\n", "; "
        )
    except (OSError, subprocess.SubprocessError):
        return None
