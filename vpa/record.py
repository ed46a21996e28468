"""Records of runs: what was run, where, and every row with its raw samples, as JSON that is written once."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import reprlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vpa.bench.break_even import AGAIN, FULL, LOCAL
from vpa.comm.device import cpu_name, dotted, nccl_version
from vpa.order import LOGITS_DTYPES

SCHEMA = 1

#: What says that two rows are of the same thing.
SAME = ("rows", "dtype", "input", "vocab", "hidden_size", "tp", "columns", "layout", "backend", "gather", "mode",
        "cache", "arm", "part", "strides")  # fmt: skip

_PACKAGES = ("vpa", "numpy", "ml_dtypes", "mpi4py", "mpich", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda",
             "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torch", "triton")  # fmt: skip


_NONE = type(None)
_NUMBER = (int, float)

#: Kinds of JSON values, in words.
_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false", dict: "an object", list: "a list",
          _NONE: "null"}  # fmt: skip

#: What a record holds, part by part: key -> the kinds of its value. A part may hold more.
_RECORD = {"experiment": (str,), "command": (str,), "environment": (dict,), "rows": (list,)}
_ENVIRONMENT = {
    "python": (str,), "system": (str,), "packages": (dict,), "git": (dict, _NONE), "ranks": (list,),
    "transport": (str, _NONE), "reason": (str, _NONE), "nccl": (int, _NONE),
}  # fmt: skip
_GIT = {"revision": (str,), "dirty": (bool,)}
_RANK = {"host": (str,), "cpu": (str,), "cores": (int,), "gpu": (dict, _NONE)}
_GPU = {"name": (str,)}
_ROW = {
    "rows": (int,), "dtype": (str,), "input": (str,), "seed": (int,), "vocab": (int,), "tp": (int,), "columns": (int,),
    "layout": (str,), "backend": (str,), "gather": (str,), "mode": (str,), "cache": (str,), "arm": (str,),
    "external": (bool,), "kernels": (*_NUMBER, _NONE), "wrong": (int, _NONE), "skipped": (str,), "calls": (int,),
    "samples_us": (list,), "median_us": (*_NUMBER, _NONE),
}  # fmt: skip

#: What rows of older records lack: its kinds, and its value there.
_ROW_SINCE: dict[str, tuple[tuple[type, ...], Any]] = {
    "part": ((str,), ""), "strides": ((str,), ""), "bytes_moved": ((int, _NONE), None),
    "acceptance_length": ((*_NUMBER, _NONE), None), "sampling_requests": ((int, _NONE), None),
    "hidden_size": ((int, _NONE), None),
}  # fmt: skip

#: The least that numbers of a row are, where they are not null.
_LEAST = {
    "rows": 0, "vocab": 1, "tp": 1, "columns": 0, "calls": 0, "kernels": 0, "wrong": 0, "median_us": 0,
    "bytes_moved": 0, "acceptance_length": 0, "hidden_size": 1,
}  # fmt: skip

#: Samples and their median are kept to a thousandth of a microsecond, each rounded on its own.
_ROUNDED_US = 1.1e-3


def environment(comm: Any = None, on_gpu: bool = True) -> dict[str, Any]:
    """Versions, devices, ranks and revision. With a communicator, of all its ranks: every rank calls it.

    on_gpu: whether the work was a GPU's, if there is one; a run on the CPU beside a GPU is a record of the CPU.
    """
    gpu = _gpu() if on_gpu else None
    here = {"host": platform.node(), "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpu": gpu}
    variables = {name: text for name, text in os.environ.items() if name.startswith("NCCL_") or name == "LD_PRELOAD"}
    everyone = [(here, variables)] if comm is None else comm.exchange((here, variables))
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": _packages(),
        "git": _git(),
        "ranks": [theirs for theirs, _ in everyone],
        "variables": _shared([theirs for _, theirs in everyone]),
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
    """A record from its file; ``ValueError`` in one line where it is not a whole one of this schema."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read record {path}: {error}") from error
    if not isinstance(record, dict) or type(record.get("schema")) is not int or record["schema"] != SCHEMA:
        raise ValueError(f"{path} is no record of schema {SCHEMA}")
    try:
        _check(record)
    except ValueError as error:
        raise ValueError(f"{path} is no whole record: {error}") from error
    return record


def device(env: dict[str, Any]) -> str:
    """What the ranks ran on: the first rank's GPU, or its CPU."""
    gpus = [rank["gpu"]["name"] for rank in env["ranks"] if rank["gpu"]]
    return gpus[0] if gpus else env["ranks"][0]["cpu"]


def co_located(env: dict[str, Any]) -> bool:
    """Whether ranks shared a GPU: then times are not of links, and a rank's work waits for the others'."""
    return "co-located" in (env["reason"] or "")


def nccl(env: dict[str, Any]) -> str | None:
    """The NCCL that carried the gathers, as 2.28.9; None where something else did."""
    return dotted(env["nccl"]) if env["transport"] == "nccl" and env["nccl"] else None


def variables(env: dict[str, Any]) -> dict[str, Any]:
    """The variables that act on a run; NCCL_VERSION is a label that containers carry, and NCCL does not read it."""
    return {name: value for name, value in env.get("variables", {}).items() if name != "NCCL_VERSION"}


def command(ranks: int = 1) -> str:
    """The command line of this run, as a user would type it."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    start = ["-m", module.name] if module is not None else sys.argv[:1]
    return shlex.join([*launcher, "python", *start, *sys.argv[1:]])


def _check(record: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless a report can be made of the record. Adds what an older one lacks."""
    _check_part("the record", record, _RECORD)
    env = record["environment"]
    _check_part("environment", env, _ENVIRONMENT)
    _check_part("packages", env["packages"], dict.fromkeys(env["packages"], (str,)))
    _check_part("variables", env.get("variables", {}), {})
    if env["git"] is not None:
        _check_part("git", env["git"], _GIT)
    if not env["ranks"]:
        raise ValueError("environment has no rank")
    for number, rank in enumerate(env["ranks"]):
        _check_part(f"ranks[{number}]", rank, _RANK)
        if rank["gpu"] is not None:
            _check_part(f"ranks[{number}].gpu", rank["gpu"], _GPU)
    for number, row in enumerate(record["rows"]):
        name = f"rows[{number}]"
        _check_part(name, row, _ROW)
        for key, (kinds, value) in _ROW_SINCE.items():
            _check_part(name, {key: row.setdefault(key, value)}, {key: kinds})
        for sample in row["samples_us"]:
            _check_part(name, {"samples_us": sample}, {"samples_us": _NUMBER})
        _check_row(name, row)
    _check_pairs(record["rows"])


def _check_row(name: str, row: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless the values of a row, each of its kind, fit each other."""
    for key, least in _LEAST.items():
        if row[key] is not None and row[key] < least:
            raise ValueError(f"{name}.{key} is {row[key]}; it is at least {least}")
    if row["dtype"] not in LOGITS_DTYPES:
        raise ValueError(f"{name}.dtype is {row['dtype']!r}; {', '.join(LOGITS_DTYPES)} are accepted")
    samples, median = row["samples_us"], row["median_us"]
    if samples and not (median or 0) > 0:
        raise ValueError(f"{name} has samples and a median_us of {median}; it is above 0")
    if samples and abs(statistics.median(samples) - median) > _ROUNDED_US:
        raise ValueError(f"{name}.median_us is {median}; the median of its samples is {statistics.median(samples):g}")
    if not samples and not row["skipped"] and row["wrong"] is None:
        raise ValueError(f"{name} is a check without a number of wrong rows")


def _check_pairs(rows: Sequence[dict[str, Any]]) -> None:
    """Raise ``ValueError`` unless the arms of break-even that were timed in pairs have as many samples each."""
    first: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows):
        if row["samples_us"] and row["arm"] in (FULL, LOCAL, AGAIN):
            other = first.setdefault(tuple(row[key] for key in SAME if key != "arm"), number)
            counts = [len(rows[one]["samples_us"]) for one in (other, number)]
            if counts[0] != counts[1]:
                raise ValueError(
                    f"rows[{other}] and rows[{number}], timed in pairs, have {counts[0]} and {counts[1]} samples; as "
                    f"many of each are accepted"
                )


def _check_part(name: str, part: Any, kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Raise ``ValueError`` unless ``part`` is an object that has each key, with a finite value of one of its kinds."""
    if not isinstance(part, dict):
        raise ValueError(f"{name} is {reprlib.repr(part)}; an object is accepted")
    for key, accepted in kinds.items():
        if key not in part:
            raise ValueError(f"{name} has no {key}")
        value = part[key]
        finite = not isinstance(value, (int, float)) or abs(value) <= sys.float_info.max  # NaN is not
        if type(value) not in accepted or not finite:
            words = " or ".join(_KINDS[kind] for kind in accepted if kind is not int or float not in accepted)
            raise ValueError(f"{name}.{key} is {reprlib.repr(value)}; {words} is accepted")


def _shared(everyone: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Variables of all ranks: the value that they have alike, or else a list of each rank's, null where it is unset."""
    each = {name: [theirs.get(name) for theirs in everyone] for name in sorted(set().union(*everyone))}
    return {name: values[0] if len(set(values)) == 1 else values for name, values in each.items()}


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
        "links": _links(),
    }


def _links() -> dict[str, list[str]] | None:
    """How the GPUs of this machine are joined: each one's row of nvidia-smi's matrix, as NV18 for 18 NVLinks."""
    try:
        return links_of(_output(["nvidia-smi", "topo", "-m"]))
    except (OSError, subprocess.SubprocessError):
        return None


def links_of(matrix: str) -> dict[str, list[str]]:
    """The rows of GPUs in what ``nvidia-smi topo -m`` prints, their columns of GPUs alone."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]
    return {words[0]: words[1 : len(rows) + 1] for words in rows}


def _smi() -> str | None:
    """What nvidia-smi says of driver and clocks, now."""
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    try:
        return f"{query}: " + _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]).replace(
            "\n", "; "
        )
    except (OSError, subprocess.SubprocessError):
        return None
