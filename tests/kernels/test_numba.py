"""The Numba twins without a GPU: compiled to PTX for three generations, and run by Numba's simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed; it is in the extra `dev`")


def run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_twins_compile_to_ptx(capability):
    pytest.importorskip("cuda.bindings.nvvm", reason="the extra `cu13` of numba-cuda is not installed")
    assert "27 kernels" in run("numba_ptx.py", *map(str, capability))


def test_twins_run_in_the_simulator():
    assert "simulated" in run("numba_simulator.py", NUMBA_ENABLE_CUDASIM="1")


def test_the_norms_twin_runs_in_the_simulator():
    assert "simulated" in run("numba_norm_simulator.py", NUMBA_ENABLE_CUDASIM="1")
