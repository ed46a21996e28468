"""The launchers: what they start, with which options, how they end, and that a dry run leaves every record."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vpa import record
from vpa.bench import settings as bench_settings

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "mpi_runs/launch"

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="no bash")


def start(script: Path, *arguments: object, timeout: float = 120, **env: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "SLURM_"))}
    return subprocess.run(
        ["bash", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**inherited, **env},
    )


def program(path: Path, text: str) -> None:
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def elsewhere(tmp_path: Path, script: str) -> Path:
    """The script in a checkout without an environment of its own: it takes what is on PATH."""
    target = tmp_path / "mpi_runs/launch" / script
    target.parent.mkdir(parents=True)
    shutil.copy(LAUNCH / script, target)
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/python3", "echo python3")
    return target


@pytest.mark.mpi
def test_a_dry_run_leaves_a_record_of_every_experiment(tmp_path):
    done = start(LAUNCH / "multi_gpu.sh", tmp_path, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    records = {path.stem: record.read(path) for path in tmp_path.glob("*.json")}
    experiments = {content["experiment"] for content in records.values()}
    assert experiments >= set(bench_settings.experiments()) - {"numpy-backend"}
    assert {len(content["environment"]["ranks"]) for name, content in records.items() if name != "compare"} == {4}
    assert all(content["environment"]["variables"]["NCCL_NVLS_ENABLE"] == "0" for content in records.values())
    assert all(f"{name}: all tokens right" in done.stdout for name in records)
    assert any(row["samples_us"] for row in records["break_even_16x500_tp4"]["rows"])
    again = start(LAUNCH / "multi_gpu.sh", tmp_path, "--dry-run", "--only", "head")
    assert again.returncode == 1 and "never written over" in again.stdout


@pytest.mark.mpi
def test_ranks_and_experiments_are_those_asked_for(tmp_path):
    done = start(LAUNCH / "multi_gpu.sh", tmp_path, "--dry-run", "--tp", "1 2", "--only", "head draft")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in tmp_path.glob("*.json")} == {"head_tp1", "head_tp2", "draft_tp1", "draft_tp2"}


def test_what_finds_no_time_is_told(tmp_path):
    done = start(LAUNCH / "multi_gpu.sh", tmp_path, "--dry-run", "--seconds", "0", "--only", "head")
    assert done.returncode == 1 and "head_tp4: not begun, time is up" in done.stdout


def test_a_run_that_hangs_is_ended_by_its_limit(tmp_path):
    script = elsewhere(tmp_path, "multi_gpu.sh")
    program(tmp_path / "bin/mpirun", "sleep 60")
    (tmp_path / "out").mkdir()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = start(script, tmp_path / "out", "--dry-run", "--seconds", "6", "--only", "head draft", timeout=30, PATH=path)
    assert done.returncode == 1 and "head_tp4: ended after 6 s" in done.stdout
    assert "draft_tp4: not begun, time is up" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["a", "b"], ["a", "--tp"], ["--frobnicate", "a"], ["a", "--seconds", "x"],
        *(["a", "--dry-run", "--only", "head", "--tp", tps] for tps in ("xy", "0 ", "2 -1", "2,4", "  ", "*.sh")),
    ],
)  # fmt: skip
def test_bad_usage_says_what_there_is(arguments, tmp_path):
    done = start(LAUNCH / "multi_gpu.sh", *(str(tmp_path / one) if len(one) == 1 else one for one in arguments))
    assert done.returncode == 2 and "multi_gpu.sh FOLDER" in done.stderr and done.stdout == ""


def test_without_gpus_there_is_only_the_dry_run(tmp_path):
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/nvidia-smi", "exit 9")
    done = start(LAUNCH / "multi_gpu.sh", tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 2 and "0 GPUs; 2 are needed, or --dry-run" in done.stderr


def test_slurm_steps_get_the_arguments_and_see_all_gpus(tmp_path):
    program(tmp_path / "srun", 'printf "%s\\n" "$@"')
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = start(LAUNCH / "slurm.sh", "break-even", "--json", "a b.json", PATH=path, SLURM_SUBMIT_DIR=str(ROOT))
    words = done.stdout.splitlines()
    assert words[-6:] == [".venv/bin/python", "-m", "vpa.run", "break-even", "--json", "a b.json"]
    assert "--gpu-bind=none" in words and "--kill-on-bad-exit=1" in words


@pytest.mark.mpi
def test_a_host_file_starts_its_ranks(tmp_path):
    (tmp_path / "hosts").write_text("# this machine\nlocalhost\n\n")
    done = start(LAUNCH / "hostfile.sh", tmp_path / "hosts", 2, "break-even", "--check-only", "--rows", "1")
    if "unrecognized argument" in done.stderr:
        pytest.skip("a launcher that is neither Hydra nor Open MPI's")
    assert done.returncode == 0 and "2 ranks, host memory" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "mpirun (Open MPI) 5.0.3",
            "--hostfile HOSTS --map-by ppr:3:node --bind-to none -n 6 -x NCCL_DEBUG PYTHON -m vpa.run draft",
        ),
        ("HYDRA build details:", "-f HOSTS -ppn 3 -n 6 PYTHON -m vpa.run draft"),
    ],
)
def test_each_launcher_is_told_in_its_own_words(version, expected, tmp_path):
    script = elsewhere(tmp_path, "hostfile.sh")
    program(tmp_path / "bin/mpirun", f'[ "$1" = --version ] && echo "{version}" && exit; echo "$@"')
    (tmp_path / "hosts").write_text("a\n# b\nc\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = start(script, tmp_path / "hosts", 3, "draft", PATH=path, NCCL_DEBUG="WARN")
    expected = expected.replace("HOSTS", str(tmp_path / "hosts")).replace("PYTHON", str(tmp_path / "bin/python3"))
    assert done.stdout.strip() == expected, done.stderr


def test_host_files_that_do_not_fit(tmp_path):
    (tmp_path / "hosts").write_text("# none\n")
    for arguments, message in (
        ([tmp_path / "hosts", 2, "draft"], "names no machine"),
        ([tmp_path / "hosts", "two", "draft"], "RANKS_PER_HOST is two"),
        ([tmp_path / "hosts", "00", "draft"], "RANKS_PER_HOST is 00"),
        ([tmp_path / "nothing", 2, "draft"], "hostfile.sh HOSTS RANKS_PER_HOST"),
        ([tmp_path / "hosts", 2], "hostfile.sh HOSTS RANKS_PER_HOST"),
    ):
        done = start(LAUNCH / "hostfile.sh", *arguments)
        assert done.returncode == 2 and message in done.stderr
