"""Markers, and the backends that tests run over; those that need a device are skipped with the reason."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def no_gpu() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {error}"
    return "" if count else "no GPU is visible"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and no_gpu():
            item.add_marker(pytest.mark.skip(reason=no_gpu()))
        if item.get_closest_marker("mpi") and not mpirun():
            item.add_marker(pytest.mark.skip(reason="no mpirun on PATH or beside this Python"))


class Backend:
    """A backend's name and the array library it works on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_slow = name == "simt"  # every access is checked: tests take fewer rows, of the same kinds

    @property
    def xp(self) -> ModuleType:
        if self.name in ("raw", "numba"):
            import cupy

            return cupy
        return np


BACKENDS = [
    pytest.param("numpy"),
    pytest.param("simt"),
    pytest.param("raw", marks=pytest.mark.gpu),
    pytest.param("numba", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


@functools.cache
def mpirun() -> str:
    """The launcher: the one beside this Python if MPI came from PyPI, else the site's."""
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""


@pytest.fixture(scope="session")
def ranks():
    """Run a Python program on several ranks: ``ranks(4, [script or -m, ...], timeout=60) -> CompletedProcess``."""

    def run(count: int, arguments: list[str], timeout: float = 120, cwd: Path | None = None, env: dict | None = None):
        command = [mpirun(), "-n", str(count), sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd or ROOT, env=env)

    return run
