"""README and docs/results.md: tables are what the commands print from committed records, and what is named exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vpa import predict, record, report

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
PAGES = {"README.md": TEXT, "docs/results.md": (ROOT / "docs/results.md").read_text()}
COMMAND = re.compile(r"^\s*(?:\.venv/bin/)?python -m vpa\.(report|predict) (mpi_runs/\S+[^\n]*)$", re.MULTILINE)
REPORTS = [(page, *command) for page, text in PAGES.items() for command in COMMAND.findall(text)]
MODULES = {"report": report, "predict": predict}

#: What a report says in numbers: lines of its tables, and the sentence on a crossover.
NUMBERS = ("|", "crossover: ")


def test_every_table_has_its_command():
    for page, text in PAGES.items():
        tables = re.findall(r"^\| ---: \|", text, re.MULTILINE)
        assert tables and len(COMMAND.findall(text)) <= len(tables), page
        assert {one for one, *_ in REPORTS} == set(PAGES)


@pytest.mark.parametrize(("page", "module", "arguments"), REPORTS)
def test_tables_are_what_the_command_prints(page, module, arguments, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert MODULES[module].main(shlex.split(arguments, comments=True)) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(NUMBERS)]
    shown = [line for line in PAGES[page].splitlines() if line.startswith(NUMBERS)]
    assert printed and "\n".join(printed) in "\n".join(shown)


def test_the_cost_model_errs_as_it_is_said_to(capsys):
    """Medians and the largest error over points that a fit had not seen, of the two records over NVLink."""
    names = [ROOT / f"mpi_runs/results/break_even_{shape}_h200_nvlink_2.json" for shape in ("glm-5.2", "deepseek-v3")]
    assert predict.main(list(map(str, names))) == 0
    kinds = "batch size|shape"
    lines = re.findall(rf"^\| one (?:{kinds}) \| saved.*? \| \d+ \| (.*?) \| (.*?) \|", capsys.readouterr().out, re.M)
    medians, largest = zip(*((float(median), float(most)) for median, most in lines), strict=True)
    words = "by {:.0f} to {:.0f} % of the full gather's time in the median and by up to {:.0f} %"
    assert len(lines) == 2
    assert words.format(min(medians), max(medians), max(largest)) in " ".join(TEXT.split())


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
