"""Tables from records, and records from files."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
from records import comparison, row

from vpa import predict, record, report
from vpa.bench.break_even import AGAIN, FULL, LOCAL

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


def test_a_batch_size_without_the_fused_arm_has_no_ratio():
    ((_, table),) = report.pivot_tables([*ROWS, row(128, "existing (torch)", 400.0)]).items()
    assert table[-1] == ["128", "400", "", "", "", "0"]


def test_text_tables_align():
    lines = report.text([["arm", "us"], ["a", "5"], ["bcd", "1000"]]).splitlines()
    assert lines == ["arm    us", "a       5", "bcd  1000"]


def test_a_record_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "record.json"
    record.write(str(path), "headline", record.environment(), ROWS)
    content = record.read(path)
    assert content["rows"] == ROWS and content["experiment"] == "headline"
    assert "[19.0, 20.0, 21.0]" in path.read_text()


def test_rows_of_older_records_have_no_parts(tmp_path, capsys):
    path = tmp_path / "record.json"
    record.write(str(path), "headline", record.environment(), ROWS)
    content = json.loads(path.read_text())
    for old in content["rows"]:
        del old["part"], old["strides"], old["bytes_moved"], old["acceptance_length"], old["sampling_requests"]
    path.write_text(json.dumps(content))
    assert record.read(path)["rows"] == ROWS
    assert report.main([str(path), "--summary"]) == 2
    assert "has no times of parts, as compare takes them; it has headline" in capsys.readouterr().err


def lengths(*each) -> list[str]:
    """The last cells of the table of checks of requests, (number, mean length, how many sample)."""
    rows = [
        row(size, "sharded (candidate)", None, part="K 3", acceptance_length=length, sampling_requests=sampling)
        for size, length, sampling in each
    ]
    return [line[-1] for line in report.verification_table(rows)]


def test_mean_lengths_are_weighted_by_the_requests_that_sample():
    assert lengths((4, 2.0, 1), (8, 3.0, 3)) == ["mean length", "2.75"]
    assert lengths((4, None, 0), (8, 3.0, 3)) == ["mean length", "3.00"]
    assert lengths((4, None, 0)) == lengths((0, None, None)) == ["mean length", ""]


def test_mean_lengths_of_older_records():
    """They have 0 where nobody samples, and say of no size how many do."""
    assert lengths((1, 0.0, None), (2, 2.0, None), (6, 3.0, None)) == ["mean length", "2.75"]
    assert lengths((1, 0.0, None)) == ["mean length", ""]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "fused,nothing"], "has no arm 'nothing'; it has existing (torch), fused, floor: plain read"),
        (["--arms", ""], "has no arm ''; it has existing (torch), fused"),
        (["--mode", "eager", "--arms", "fused"], "has no eager times; it has captured hot"),
        (["--cache", "cold"], "has no cold times; it has captured hot"),
        (["--dtype", "float16"], "has no float16 times; it has captured hot bfloat16"),
        (["--input", "ties", "--mode", "captured"], "has no captured ties times; it has captured hot random"),
        (["--mode", "captured", "--cache", "cold"], "has no captured cold times; it has captured hot"),
    ],
)
def test_what_a_record_lacks_is_said_with_what_it_has(arguments, message, tmp_path, capsys):
    path = tmp_path / "record.json"
    record.write(str(path), "headline", record.environment(), ROWS)
    assert report.main([str(path), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1 and captured.out == ""


def studied(sizes=(1, 4, 64), samples: int = 5) -> list[dict]:
    """Timed rows as ``break-even`` gives them, and its checks."""
    more = {"gather": "included", "hidden_size": 64, "bytes_moved": 9, "vocab": 1000}
    rows = [row(size, arm, None, **more) for size in sizes for arm in (FULL, LOCAL)]
    for size in sizes:
        for arm, start, slope in ((FULL, 20.0, 1.0), (LOCAL, 30.0, 0.1), (AGAIN, 30.01, 0.1)):
            times = [round(start + slope * size + 0.01 * number, 3) for number in range(samples)]
            rows.append({**row(size, arm, times[samples // 2], **more), "samples_us": times})
    return rows


def markdown_tables(printed: str) -> list[list[list[str]]]:
    """The cells of the tables in a text, without the line below their heads."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", printed, re.MULTILINE)
    lines = [[line[2:-2].split(" | ") for line in block.splitlines()] for block in blocks]
    return [[line for number, line in enumerate(block) if number != 1] for block in lines]


@pytest.mark.parametrize(
    ("rows", "options", "names"),
    [
        (ROWS, [], ["bfloat16_rows_32768_tp_4_random_captured_hot_cache_gather_excluded", "checks"]),
        (ROWS, ["--arms", "fused"], ["bfloat16_rows_32768_tp_4_random_captured_hot_cache_gather_excluded"]),
        (ROWS[:2], [], ["checks"]),
        (studied(), [], [r".*_included", r".*_included_what_the_local_argmax_saves", "checks"]),
        (studied(), ["--summary", "--mode", "captured"], [".*_what_the_local_argmax_saves"]),
        (comparison(), ["--dtype", "float32", "--summary"], ["float32_rows_32768_contiguous_.*_summary"]),
        (comparison(), [], ["bfloat16_.*_summary", "bfloat16_.*_excluded", "float32_.*_excluded"]),
        ([row(1, "x", None, part="K 3"), row(1, "x", None, part="position 1")], [], ["positions", "verifications"]),
    ],
)  # fmt: skip
def test_csv_files_have_the_cells_that_markdown_has(rows, options, names, tmp_path, capsys):
    path = tmp_path / "some record.json"
    record.write(str(path), "headline", record.environment(), rows)
    assert report.main([str(path), *options]) == 0
    printed = markdown_tables(capsys.readouterr().out)
    assert report.main([str(path), *options, "--csv", str(tmp_path / "new" / "folder")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(written) == sorted((tmp_path / "new" / "folder").iterdir())
    for file, name in zip(written, names, strict=True):
        assert re.fullmatch(f"some record_{name}.csv", file.name)
    assert [list(csv.reader(file.open(newline=""))) for file in written] == printed


def test_csv_files_of_equal_titles_are_numbered(tmp_path, capsys):
    """Two heads, of one width, have one heading: each has a table of its own, and so a file."""
    path = tmp_path / "x.json"
    rows = [*studied(), *({**one, "vocab": 1001} for one in studied())]
    record.write(str(path), "break-even", record.environment(), rows)
    assert report.main([str(path), "--summary", "--csv", str(tmp_path / "out")]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert len(names) == 2 and names[1] == names[0].replace(".csv", "_2.csv")


def test_csv_files_that_cannot_be_written_are_one_line(tmp_path, capsys):
    path = tmp_path / "x.json"
    record.write(str(path), "headline", record.environment(), ROWS)
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    record.write(str(tmp_path / "other/x.json"), "headline", record.environment(), ROWS)
    for arguments, message in (
        ([path, "--csv", tmp_path / "file"], "--csv: "),
        ([path, tmp_path / "other/x.json", "--csv", tmp_path], "several records are called x, as their files would be"),
    ):
        assert report.main(list(map(str, arguments))) == 2
        captured = capsys.readouterr()
        assert message in captured.err and len(captured.err.splitlines()) == 1 and captured.out == ""


@pytest.mark.parametrize("main", [report.main, predict.main])
def test_arms_without_partners_in_their_pairs_are_one_line(main, tmp_path, capsys):
    path = tmp_path / "x.json"
    rows = studied()
    rows[-1].update(samples_us=[31.0, 31.0], median_us=31.0)
    record.write(str(path), "break-even", record.environment(), rows)
    for more in ([], ["--figures", str(tmp_path)]) if main is report.main else ([],):
        assert main([str(path), *more]) == 2
        captured = capsys.readouterr()
        assert "rows[12] and rows[14], timed in pairs, have 5 and 2 samples" in captured.err
        assert len(captured.err.splitlines()) == 1 and captured.out == ""


def test_what_a_study_refuses_is_one_line(tmp_path, capsys):
    path = tmp_path / "x.json"
    record.write(str(path), "break-even", record.environment(), studied(sizes=(0, 1)))
    assert report.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"vpa.report: {path}: batch sizes are [0, 1]; at least one integer, from 1 on, is accepted\n"
    assert captured.out == ""


def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path):
    path = tmp_path / "x.json"
    record.write(str(path), "compare", record.environment(), comparison(sizes=tuple(range(1, 400))))
    program = f"{shlex.quote(sys.executable)} -m vpa.report {shlex.quote(str(path))} | head -n 1"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 and done.stderr == ""


def test_the_nccl_that_ran_is_named_and_a_containers_label_is_not(tmp_path, capsys):
    path = tmp_path / "x.json"
    label = {"NCCL_VERSION": "2.28.3-1", "NCCL_DEBUG": "WARN"}
    for transport, words in (("nccl", True), ("mpi", False)):
        env = {**record.environment(), "variables": label, "nccl": 22809, "transport": transport, "reason": "so"}
        path.unlink(missing_ok=True)
        record.write(str(path), "headline", env, ROWS)
        assert report.main([str(path)]) == 0
        printed = capsys.readouterr().out
        assert ("NCCL 2.28.9" in printed) == words and "NCCL_DEBUG=WARN" in printed and "2.28.3" not in printed


def test_a_record_without_times_has_no_mode(tmp_path, capsys):
    path = tmp_path / "record.json"
    record.write(str(path), "headline", record.environment(), ROWS[:2])
    assert report.main([str(path)]) == 0
    assert report.main([str(path), "--mode", "eager"]) == 2
    assert "has no eager times; it has none" in capsys.readouterr().err


def test_an_arm_that_was_skipped_says_why():
    lines = []
    report.print_rows([*ROWS, row(1, "existing", None, None, skipped="no such thing")], lines.append)
    assert lines[-1] == "without existing: no such thing\n"


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"schema": 99}), "[" * 100_000, '{"schema": 1' + "0" * 5000])
def test_what_is_no_record_is_refused(text, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(text)
    assert report.main([str(path)]) == 2
    captured = capsys.readouterr().err
    assert str(path) in captured and len(captured.splitlines()) == 1


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["rows"], {}, "the record.rows is {}; a list is accepted"),
        (["environment"], [], "the record.environment is []; an object"),
        (["environment", "ranks"], [], "environment has no rank"),
        (["environment", "ranks"], [3], "ranks[0] is 3; an object"),
        (["environment", "ranks", 0, "gpu"], {}, "ranks[0].gpu has no name"),
        (["environment", "ranks", 0, "cpu"], None, "ranks[0].cpu is None; a text"),
        (["environment", "packages", "vpa"], 1, "packages.vpa is 1; a text"),
        (["environment", "git"], {"revision": 1}, "git.revision is 1; a text"),
        (["environment", "variables"], 3, "variables is 3; an object"),
        (["rows", 0], None, "rows[0] is None; an object"),
        (["rows", 0, "wrong"], True, "rows[0].wrong is True; an integer or null"),
        (["rows", 0, "wrong"], None, "rows[0] is a check without a number of wrong rows"),
        (["rows", 2, "arm"], ["fused"], "rows[2].arm is ['fused']; a text"),
        (["rows", 2, "samples_us"], "1 2", "rows[2].samples_us is '1 2'; a list"),
        (["rows", 2, "samples_us", 1], "1", "rows[2].samples_us is '1'; a number"),
        (["rows", 2, "samples_us", 1], float("nan"), "rows[2].samples_us is nan; a number"),
        (["rows", 2, "median_us"], None, "rows[2] has samples and a median_us of None; it is above 0"),
        (["rows", 2, "median_us"], 0, "rows[2] has samples and a median_us of 0; it is above 0"),
        (["rows", 2, "median_us"], 21.0, "rows[2].median_us is 21.0; the median of its samples is 20"),
        (["rows", 2, "rows"], -3, "rows[2].rows is -3; it is at least 0"),
        (["rows", 0, "wrong"], -1, "rows[0].wrong is -1; it is at least 0"),
        (["rows", 2, "tp"], 0, "rows[2].tp is 0; it is at least 1"),
        (["rows", 2, "hidden_size"], 0, "rows[2].hidden_size is 0; it is at least 1"),
        (["rows", 2, "dtype"], "float12", "rows[2].dtype is 'float12'; bfloat16, float16, float32 are accepted"),
        (["rows", 2, "kernels"], 10**400, "rows[2].kernels is 1000"),
        (["rows", 2, "cache"], ..., "rows[2] has no cache"),
        (["rows", 2, "part"], 1, "rows[2].part is 1; a text"),
    ],
)
def test_a_record_of_other_kinds_is_refused(where, value, message, tmp_path, capsys):
    path = tmp_path / "record.json"
    record.write(str(path), "headline", {**record.environment(), "packages": {"vpa": "0"}}, ROWS)
    content = json.loads(path.read_text())
    *above, last = where
    part = content
    for key in above:
        part = part[key]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    path.write_text(json.dumps(content))
    assert report.main([str(path)]) == 2
    captured = capsys.readouterr().err
    assert f"{path} is no whole record: {message}" in captured and len(captured.splitlines()) == 1


def test_a_record_names_the_variables_that_ranks_are_started_with(tmp_path, monkeypatch, capsys):
    class Comm:
        transport, reason = "mpi", "two ranks"

        def exchange(self, mine):
            host, variables = mine
            return [mine, (host, {**variables, "NCCL_MAX_CTAS": "2"})]

    for name in [name for name in os.environ if name.startswith("NCCL_") or name == "LD_PRELOAD"]:
        monkeypatch.delenv(name)
    assert record.environment()["variables"] == {}
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("SECRET", "x")
    env = record.environment(Comm())
    assert env["variables"] == {"LD_PRELOAD": "", "NCCL_DEBUG": "WARN", "NCCL_MAX_CTAS": [None, "2"]}
    path = tmp_path / "record.json"
    record.write(str(path), "headline", env, ROWS)
    assert report.main([str(path)]) == 0 and "NCCL_DEBUG=WARN" in capsys.readouterr().out
    old = json.loads(path.read_text())
    del old["environment"]["variables"]
    path.write_text(json.dumps(old))
    assert report.main([str(path)]) == 0 and "NCCL_DEBUG" not in capsys.readouterr().out


def test_the_command_line_is_kept_as_a_shell_takes_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--hidden", "my states.npy", "--rows", "1,8"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", types.SimpleNamespace(name="vpa.run"))
    assert record.command(2) == "mpirun -n 2 python -m vpa.run --hidden 'my states.npy' --rows 1,8"
    assert shlex.split(record.command()) == ["python", "-m", "vpa.run", *sys.argv[1:]]


def test_how_gpus_are_joined_is_read_from_their_matrix():
    """As nvidia-smi prints it: names underlined, a column for each GPU and network adapter, then affinities."""
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPHB\t0-31\t0\nGPU1\tNV18\t X \tSYS\t0-31\t0\nNIC0\tPHB\tSYS\t X \n\n"
        "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )
    assert record.links_of(matrix) == {"GPU0": ["X", "NV18"], "GPU1": ["NV18", "X"]}
    assert record.links_of("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == {"GPU0": ["X"]}
    assert record.links_of("no devices were found") == {}
