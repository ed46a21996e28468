"""README: its tables are what its commands print from committed records, and what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vpa import record, report

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
REPORTS = re.findall(r"^\s*(?:\.venv/bin/)?python -m vpa\.report (mpi_runs/\S+[^\n]*)$", TEXT, re.MULTILINE)


def test_there_are_reports():
    assert REPORTS


@pytest.mark.parametrize("arguments", REPORTS)
def test_tables_are_what_the_command_prints(arguments, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert report.main(shlex.split(arguments, comments=True)) == 0
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert tables and "\n".join(tables) in "\n".join(line for line in TEXT.splitlines() if line.startswith("|"))


def test_links_and_paths_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_every_kept_record_is_readable_and_clean():
    for path in sorted((ROOT / "mpi_runs/results").glob("*.json")):
        content = record.read(path)
        assert content["environment"]["git"] is not None and not content["environment"]["git"]["dirty"], path.name
        assert all(not row["wrong"] or row["external"] for row in content["rows"]), path.name
        assert not any(re.search(",(?! )", row["arm"]) for row in content["rows"]), "--arms takes arms apart there"


@pytest.mark.parametrize(
    ("dtypes", "rows", "words"),
    [
        (["float16"], [1], "in fp16 {} for 1 row"),
        (["float16"], [8, 64], "{} for 8 or 64; in bf16 and fp32"),
        (["bfloat16", "float32"], [1], "in bf16 and fp32 {} for 1 row"),
        (["bfloat16", "float32"], [8], "{} for 8,"),
        (["bfloat16", "float32"], [64], "{} for 64 ("),
    ],
)
def test_the_numpy_backend_takes_the_share_that_its_record_says(dtypes, rows, words):
    content = record.read(ROOT / "mpi_runs/results/numpy_backend_epyc.json")
    medians = {
        (row["arm"], row["input"], row["dtype"], row["rows"]): row["median_us"]
        for row in content["rows"]
        if row["dtype"] in dtypes and row["rows"] in rows and row["samples_us"]
    }
    shares = [time / medians[("numpy argmax", *rest)] for (arm, *rest), time in medians.items() if arm == "fused"]
    assert words.format(f"{min(shares):.1f} to {max(shares):.1f}") in " ".join(TEXT.split())
