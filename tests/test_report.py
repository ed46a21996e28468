"""Tables from records, and records from files."""

from __future__ import annotations

import json

import pytest

from vpa import record, report


def row(rows: int, arm: str, median: float | None, wrong: int | None = 0, **more) -> dict:
    samples = [] if median is None else [median - 1, median, median + 1]
    return {
        "rows": rows, "dtype": "bfloat16", "input": "random", "vocab": 131072, "tp": 4, "columns": 32768,
        "gather": "excluded", "mode": "captured", "cache": "hot", "arm": arm, "external": False, "kernels": None,
        "wrong": wrong, "skipped": "", "samples_us": samples, "median_us": median, **more,
    }  # fmt: skip


ROWS = [
    row(1, "get_top_tokens", None, 0),
    row(8, "get_top_tokens", None, 2),
    row(1, "existing (torch)", 20.0),
    row(1, "fused", 5.0, kernels=2.0),
    row(1, "floor: plain read", 1.5, None),
    row(64, "existing (torch)", 200.0),
    row(64, "fused", 50.0, 3),
    row(64, "floor: plain read", 1.5, None),
]


def test_checks_are_summed_over_batch_sizes():
    assert report.check_table(ROWS)[1:] == [["random", "bfloat16", "131072", "4", "1 8", "2"]]


def test_times_have_wrong_rows_spread_and_ratio():
    table = report.time_table(ROWS)
    assert table[0][-5:] == ["kernels", "wrong", "median us", "p10-p90 us", "ratio"]
    assert [line[-5:] for line in table[1:]] == [
        ["", "0", "20.00", "19.20-20.80", "1.00"],
        ["2", "0", "5.00", "4.20-5.80", "0.25"],
        ["", "-", "1.50", "0.70-2.30", ""],
        ["", "0", "200", "199-201", "1.00"],
        ["", "3", "50.00", "49.20-50.80", "0.25"],
        ["", "-", "1.50", "0.70-2.30", ""],
    ]


def test_a_pivot_has_a_line_for_each_batch_size():
    ((title, table),) = report.pivot_tables(ROWS).items()
    assert title == "bfloat16 [rows, 32768], tp 4, random, captured, hot cache, gather excluded"
    assert table == [
        ["rows", "existing (torch), us", "fused, us", "floor: plain read, us", "fused / existing (torch)", "wrong"],
        ["1", "20.00", "5.00", "1.50", "0.25", "0"],
        ["64", "200", "50.00", "1.50", "0.25", "3"],
    ]
    assert report.markdown(table).splitlines()[1] == "| ---: | ---: | ---: | ---: | ---: | ---: |"


def test_text_tables_align():
    lines = report.text([["arm", "us"], ["a", "5"], ["bcd", "1000"]]).splitlines()
    assert lines == ["arm    us", "a       5", "bcd  1000"]


def test_a_record_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "record.json"
    record.write(str(path), "headline", record.environment(), ROWS)
    content = record.read(path)
    assert content["rows"] == ROWS and content["experiment"] == "headline"
    assert "[19.0, 20.0, 21.0]" in path.read_text()


def test_reports_of_records(tmp_path, capsys):
    path = tmp_path / "record.json"
    record.write(str(path), "headline", record.environment(), ROWS)
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| 1 | 20.00 | 5.00 | 1.50 | 0.25 | 0 |" in printed and "revision" in printed


def test_reports_of_some_arms_and_one_mode(tmp_path, capsys):
    path = tmp_path / "record.json"
    eager = [row(1, "existing (torch)", 99.0, mode="eager"), row(1, "fused", 33.0, mode="eager")]
    record.write(str(path), "headline", record.environment(), ROWS + eager)
    assert report.main([str(path), "--arms", "existing (torch),fused", "--mode", "captured"]) == 0
    printed = capsys.readouterr().out
    assert "| 64 | 200 | 50.00 | 0.25 | 3 |" in printed
    assert "plain read" not in printed and "99.0" not in printed
    assert report.main([str(path), "--arms", "fused,nothing"]) == 2
    assert "has no arm nothing; it has existing (torch), fused" in capsys.readouterr().err


def test_an_arm_that_was_skipped_says_why():
    lines = []
    report.print_rows([*ROWS, row(1, "existing", None, None, skipped="no such thing")], lines.append)
    assert lines[-1] == "without existing: no such thing\n"


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"schema": 99})])
def test_what_is_no_record_is_refused(text, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(text)
    assert report.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err
