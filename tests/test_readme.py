"""README: its tables are what its commands print from committed records, and what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vpa import report

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
    from vpa import record

    for path in sorted((ROOT / "mpi_runs/results").glob("*.json")):
        content = record.read(path)
        assert content["environment"]["git"] is not None and not content["environment"]["git"]["dirty"], path.name
        assert all(not row["wrong"] or row["peer"] for row in content["rows"]), path.name
