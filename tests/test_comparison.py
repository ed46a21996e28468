"""Tables and figures of a comparison, from a made-up record of one on a GPU."""

from __future__ import annotations

import builtins
import itertools
import sys

import numpy as np
import pytest
from records import comparison as made_up
from records import row

from vpa import comparison, figures, record, report


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "compare.json"
    record.write(str(path), "compare", record.environment(), [*made_up(), row(8, "raw", 9.5, part="pair", input="nan")])
    return path


def test_the_summary_has_times_and_ratios_for_each_batch_size():
    ((title, table),) = comparison.tables(made_up(), summary_only=True).items()
    assert title == "bfloat16 [rows, 32768], contiguous, tp 4, random, captured, hot cache, gather excluded, summary"
    assert table[:2] == [
        ["rows", "raw, us", "existing (torch), us", "triton (by lane), us", "raw local, us",
         "triton (by lane) local, us", "plain read, us", "raw / existing (torch)", "raw / triton (by lane)",
         "raw local / triton (by lane) local", "raw local / plain read", "wrong"],
        ["1", "4.48", "23.67", "7.90", "3.15", "5.20", "1.22", "0.19", "0.57", "0.61", "2.59", "0"],
    ]  # fmt: skip
    assert [line[0] for line in table[1:]] == ["1", "8", "64"]


def test_the_summary_leaves_out_what_was_not_measured_and_counts_our_wrong_rows():
    rows = [
        row(1, "numpy", 30.0, 2, part="pair"),
        row(1, "existing (numpy)", 60.0, part="pair"),
        row(8, "numpy", 40.0, part="pair"),
        row(8, "triton (by lane)", 50.0, 5, part="local", external=True),
    ]
    assert comparison.summary(rows) == [
        [
            "rows",
            "numpy, us",
            "existing (numpy), us",
            "triton (by lane) local, us",
            "numpy / existing (numpy)",
            "wrong",
        ],
        ["1", "30.00", "60.00", "", "0.50", "2"],
        ["8", "40.00", "", "50.00", "", "0"],
    ]


def test_an_arm_table_has_a_line_for_each_part():
    rows = [
        row(8, "raw", 5.0, part="pair", kernels=2.0),
        row(1, "raw", 4.0, part="pair", kernels=3.0),
        row(8, "raw", 3.0, 1, part="local", kernels=1.0),
        row(1, "floor: copy", 1.0, None),
    ]
    assert comparison.arm_table(rows) == [
        ["arm", "part", "kernels", "wrong", "1, us", "8, us"],
        ["raw", "pair", "2-3", "0", "4.00", "5.00"],
        ["raw", "local", "1", "1", "", "3.00"],
        ["floor: copy", "", "", "-", "1.00", ""],
    ]


def test_reports_of_a_comparison(path, capsys):
    assert report.main([str(path)]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":")]
    assert [title.partition(" ")[0] for title in titles] == ["bfloat16", "bfloat16", "float32", "bfloat16"]
    assert "summary" in titles[0] and "nan" in titles[3]
    assert report.main([str(path), "--summary", "--dtype", "float32", "--arms", "raw,triton (by lane)"]) == 0
    printed = capsys.readouterr().out
    assert "float32 [rows, 32768]" in printed and "| rows | raw, us | triton (by lane), us | raw local, us |" in printed
    assert report.main([str(path), "--input", "nan"]) == 0
    assert "| 8 | 9.50 | 0 |" in capsys.readouterr().out
    assert report.main([str(path), "--strides", "column-major"]) == 2
    assert "has no column-major times; it has captured hot contiguous" in capsys.readouterr().err


def test_figures_are_written_and_the_same_each_time(path, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    contents = []
    for folder in (tmp_path / "one" / "deep", tmp_path / "two"):
        assert report.main([str(path), "--figures", str(folder)]) == 0
        written = capsys.readouterr().out.split()
        names = [f"compare_{name}.{kind}" for name, kind in itertools.product(("times", "numba"), ("png", "svg"))]
        assert written == [str(folder / name) for name in names]
        contents.append([(folder / name).read_bytes() for name in names])
    assert contents[0] == contents[1]
    for content, start in zip(contents[0], (b"\x89PNG", b"<?xml") * 2, strict=True):
        assert content.startswith(start) and len(content) > 10_000


def test_figures_of_one_backend_or_one_batch_size(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row for row in made_up(sizes=(4,)) if row["arm"] != "numba"]
    assert [path.name for path in figures.write(tmp_path, "x", "a GPU", rows)] == ["x_times.png", "x_times.svg"]


def test_figures_that_cannot_be_made_are_one_line(path, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    assert report.main([str(path), "--figures", str(tmp_path / "file")]) == 2
    assert report.main([str(path), "--figures", str(tmp_path), "--arms", "raw (again)"]) == 2
    original = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "matplotlib")
    assert report.main([str(path), "--figures", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 3 and captured.out == ""
    assert "--figures: " in lines[0] and "has no whole or local times to draw" in lines[1]
    assert lines[2] == "vpa.report: --figures: figures need matplotlib, the extra 'plots': No module named 'matplotlib'"


def test_labels_are_moved_apart_as_little_as_needed():
    assert figures.spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert figures.spread([0.5, 0.5, 0.55], 0.1) == pytest.approx([0.4167, 0.5167, 0.6167], abs=1e-4)
    heights = figures.spread(sorted(np.random.default_rng(0).random(12)), 0.06)
    assert (np.diff(heights) > 0.06 - 1e-9).all()
