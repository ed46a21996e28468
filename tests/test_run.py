"""The command line: exit codes, one voice, records, and the end of a job when one rank fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import mpirun
from safetensors.numpy import save_file

from vpa import record, report, run
from vpa.bench import settings as bench_settings
from vpa.bench.families import FAMILIES

SMALL = ["--rows", "1,3", "--vocab", "1000", "--backend", "numpy"]


@pytest.fixture(autouse=True)
def not_in_a_job(monkeypatch):
    for name in run._RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def npy(header: str) -> bytes:
    """A .npy file with this header and no data."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.fixture
def head(tmp_path) -> Path:
    """A small head in a file, with other tensors beside it."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-2, 3, (1000, 24)).astype(np.float32)
    path = tmp_path / "model.safetensors"
    save_file(
        {
            "lm_head.weight": weight,
            "norm": np.ones(24, np.float32),
            "half": weight.astype(np.float16),
            "whole": rng.integers(0, 5, (10, 24)),
        },
        path,
    )
    return path


def test_a_run_on_the_cpu_beside_a_gpu_is_a_record_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_gpu", lambda: {"name": "imagined", "multiprocessors": 132})
    path = tmp_path / "out.json"
    assert run.main([*SMALL, "--backend", "numpy", "--check-only", "--json", str(path)]) == 0
    env = record.read(path)["environment"]
    assert [rank["gpu"] for rank in env["ranks"]] == [None] and record.device(env) == env["ranks"][0]["cpu"]
    assert record.device(record.environment()) == "imagined"


def test_check_only_prints_a_line_for_each_input_and_dtype(capsys):
    assert run.main([*SMALL, "--check-only", "--tp", "8"]) == 0
    printed = capsys.readouterr().out
    assert "one process emulates 8 ranks" in printed
    assert "vocabulary 1000 padded to 1024 (pad_to 64), 128 columns a rank" in printed
    assert printed.rstrip().endswith("all tokens right")
    for family in FAMILIES:
        for dtype in ("bfloat16", "float16", "float32"):
            assert any(line.split()[:2] == [family, dtype] for line in printed.splitlines())


def test_times_stand_beside_the_wrong_rows(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert run.main([*SMALL, "--dtype", "fp16", "--json", str(path)]) == 0
    content = record.read(path)
    timed = [row for row in content["rows"] if row["samples_us"]]
    arms = {row["arm"] for row in timed}
    assert {"existing (numpy)", "fused", "fused (again)", "floor: plain read"} <= arms
    for row in timed:
        assert len(row["samples_us"]) == bench_settings.experiments()["headline"]["cpu"]["rounds"]
        assert row["median_us"] == pytest.approx(np.median(row["samples_us"]), abs=1e-3)
        assert (row["wrong"] is None) == row["arm"].startswith("floor") and not row["wrong"]
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "median us" in line)
    assert "wrong" in header and "ratio" in header


def test_a_record_says_what_was_run_and_where(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    assert run.main([*SMALL, "--check-only", "--dtype", "fp32", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert list(content) == ["schema", "experiment", "command", "environment", "rows"]
    assert content["experiment"] == "headline" and content["schema"] == record.SCHEMA
    assert {"packages", "git", "ranks", "transport", "reason", "python"} <= set(content["environment"])
    assert {row["seed"] for row in content["rows"]} == {0}
    for row in content["rows"]:
        assert (row["wrong"], row["samples_us"], row["median_us"], row["arm"]) == (0, [], None, "get_top_tokens")
        assert (row["vocab"], row["tp"], row["dtype"]) == (1000, 4, "float32") and row["rows"] in (1, 3)


def test_a_record_is_never_written_over(tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text("mine")
    assert run.main([*SMALL, "--check-only", "--json", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "never written over" in capsys.readouterr().err


def test_a_record_whose_file_came_to_be_meanwhile_is_not_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "check_new", lambda path: None)
    (tmp_path / "out.json").write_text("mine")
    assert run.main([*SMALL, "--check-only", "--json", "out.json"]) == 0
    assert (tmp_path / "out.json").read_text() == "mine"
    (other,) = [path for path in tmp_path.glob("*.json") if path.name != "out.json"]
    assert record.read(other)["rows"] and other.name in capsys.readouterr().err


def test_a_wrong_token_is_exit_code_1(monkeypatch, capsys):
    """A pick that is off by one for one row of one batch size."""
    from vpa.backends import numpy_

    right = numpy_.pick_from_candidates

    def wrong(gathered, num_rows, out):
        right(gathered, num_rows, out)
        if num_rows == 3:
            out[1] += 1

    monkeypatch.setattr(numpy_, "pick_from_candidates", wrong)
    assert run.main([*SMALL, "--check-only", "--dtype", "bf16"]) == 1
    printed = capsys.readouterr().out
    assert f"{len(FAMILIES)} wrong rows" in printed
    assert all(line.split()[-1] == "1" for line in printed.splitlines() if line.startswith(tuple(FAMILIES)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "no experiment 'nonsense'; there are break-even, compare, draft, head, headline"),
        (["/no/such.toml"], "experiment file /no/such.toml: "),
        (["--rows", "1,two"], "--rows is '1,two'; integers with commas"),
        (["--rows", "-1"], "rows has -1; integers from 0 to 1073741824"),
        (["--vocab", "many"], "argument --vocab: invalid int value: 'many'"),
        (["--vocab", "0"], "vocab is 0; an integer from 1 to 4294967295"),
        (["--vocab", str(2**32)], "vocab is 4294967296; an integer from 1 to 4294967295"),
        (["--vocab", str(2**31 - 1), "--rows", "1"], "are up to 2147483903 logits; at most 1073741824 are accepted"),
        (["--rows", "1,1000000000000"], "rows has 1000000000000; integers from 0 to 1073741824"),
        (["--rows", "9000"], "9000 rows of vocabulary 131072, padded for 4 ranks, are up to"),
        (["--rows", "20000", "--vocab", "1", "--tp", "1024"], "padded for 1024 ranks, are up to"),
        (["--tp", "1000000000"], "tp is 1000000000; an integer from 1 to 1024"),
        (["--dtype", "fp64"], "dtypes has 'fp64'; bf16, fp16, fp32"),
        (["--tp", "0"], "tp is 0"),
        (["--layout", "triples"], "argument --layout: invalid choice"),
        (["--backend", "cuda"], "argument --backend: invalid choice"),
        (["--json", "/no/such/folder/x.json"], "--json: no folder /no/such/folder"),
        (["--hidden", "x.npy"], "--hidden goes with --lm-head"),
        (["--hidden", ""], "hidden is ''; a text of at least one character"),
        (["--lm-head", ""], "lm_head is ''; a text of at least one character"),
        (["--lm-head", "/no/such.safetensors"], "--lm-head: cannot read /no/such.safetensors: No such file"),
        (["--layout", "pairs", "--vocab", "16777217"], "layout 'pairs' holds ids as fp32"),
        (["--family", "deepseek"], "headline: drafters (--family) goes with draft; this is headline"),
        (["compare", "--draft-tokens", "3"], "compare: draft_tokens (--draft-tokens) goes with draft"),
        (["draft", "--draft-tokens", "2,3"], "draft_tokens (--draft-tokens) is 2,3; of draft one number, at least 1"),
        (["verify", "--draft-tokens", "-1"], "draft_tokens has -1; integers from 0 to 1024 are accepted"),
        (["verify", "--draft-tokens", "x"], "--draft-tokens is 'x'; integers with commas between are accepted"),
        (["verify", "--rows", "3000", "--draft-tokens", "0,9"], "30000 rows of vocabulary 50257, padded for 4 ranks"),
        (["draft", "--family", "eagle"], "drafters has 'eagle'; nemotron-h, deepseek, deepseek-v3.2 are accepted"),
        (["--hidden-sizes", "768"], "headline: hidden_sizes (--hidden-sizes) goes with norm; this is headline"),
        (["norm", "--hidden-sizes", "768,16385"], "hidden_sizes has 16385; integers from 1 to 16384 are accepted"),
        (["norm", "--hidden-sizes", "x"], "--hidden-sizes is 'x'; integers with commas between"),
        (["norm", "--rows", "100000", "--hidden-sizes", "8192"], "100000 rows of hidden size 8192 on 4 ranks are"),
        (["norm", "--vocab", "2000000"], "a head of 2000000 ids and hidden size 768 has 1536000000 numbers; at most"),
        (["verify", "--layout", "pairs"], "verify has packed candidates, and hidden states of its own"),
        (["verify", "--rows", "3000", "--draft-tokens", "9"], "30000 rows of vocabulary 50257, padded for 4 ranks"),
        (["draft", "--vocab", "8388608"], "hidden size 256 has 2147483648 numbers; at most 1073741824 are accepted"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert run.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = 'headline'", "question, rows, vocab, dtypes, families, tp, calls, rounds missing"),
        ("nonsense", "experiment file"),
        ("colour = 'red'", "no setting 'colour'; there are kind, question, rows,"),
        ("experiment = 'mine'", "no setting 'experiment'; there are kind,"),
        ("[cpu]\nexperiment = 'mine'", "no setting 'experiment'; there are kind,"),
        ("seed = 0x" + "f" * 5000, "experiment file"),
        ("rounds = 1000000000", "rounds is 1000000000; an integer from 1 to 10000"),
        (
            "kind = 'timing'",
            "kind is 'timing'; headline, numpy_backend, compare, draft, head, norm, verify, break_even are",
        ),
        ("backend = 'cuda'", "backend is 'cuda'; numpy, raw"),
        ("rows = 5", "rows is 5; a list of integers from 0 to 1073741824"),
        ("rows = []", "rows is []; a list of"),
        ("dtypes = 'fp32'", "dtypes is 'fp32'; a list of bf16"),
        ("seed = 'x'", "seed is 'x'; an integer"),
        ("calls = true", "calls is True; an integer from 1 to 10000"),
        ("question = 1", "question is 1; a text"),
        ("comm = 'ucx'", "comm is 'ucx'; auto, nccl, mpi, emulated"),
        ("check_only = 1", "check_only is 1; true or false"),
        ("drafters = ['eagle']", "drafters has 'eagle'; nemotron-h, deepseek, deepseek-v3.2 are accepted"),
        ("draft_tokens = 1025", "draft_tokens has 1025; integers from 0 to 1024"),
        ("draft_tokens = '3'", "draft_tokens is '3'; a list of integers from 0 to 1024"),
        ("kind = 'draft'\ndraft_tokens = 0", "draft_tokens (--draft-tokens) is 0; of draft one number, at least 1, is"),
        ("kind = 'draft'", "question, rows, vocab, dtypes, drafters, tp, calls, rounds missing"),
        (
            "kind = 'draft'\nfamilies = ['ties']",
            "families goes with headline, numpy_backend, compare, verify; this is draft",
        ),
        ("cpu = 3", "cpu is 3; a table of settings"),
        ("[cpu]\nrows = 3", "rows is 3; a list"),
        ("layout = {}", "layout is {}; packed, pairs"),
    ],
)
def test_experiment_files_that_do_not_fit(text, message, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert run.main([str(path)]) == 2
    assert message in capsys.readouterr().err


MINE = (
    "question = 'Does mine run?'\nkind = 'headline'\nrows = [2]\nvocab = 300\ndtypes = ['fp32']\n"
    "families = ['ties']\ntp = 2\ncalls = 1\nrounds = 3\n"
)


def test_an_experiment_of_ones_own(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert run.main([str(path), "--check-only"]) == 0
    assert "mine: Does mine run?" in capsys.readouterr().out


def test_a_file_may_name_a_head_and_how_to_communicate(tmp_path, head, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(MINE + f"lm_head = '{head}'\n")
    assert run.main([str(path), "--check-only"]) == 0
    assert "vocabulary 1000" in capsys.readouterr().out
    path.write_text(MINE + "lm_head = '/no/such.safetensors'\n")
    assert run.main([str(path), "--check-only"]) == 2


def test_the_numpy_backends_benchmark(capsys):
    assert run.main(["numpy-backend", "--rows", "2", "--vocab", "3000", "--dtype", "fp16"]) == 0
    printed = capsys.readouterr().out
    assert "numpy argmax" in printed and printed.rstrip().endswith("all tokens right")


def test_comparing_runs_on_a_cpu(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert run.main(["compare", "--rows", "1,8,3,0", "--vocab", "3001", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "contiguous, tp 4, random, host, hot cache, gather excluded, summary:" in printed
    assert printed.rstrip().endswith("all tokens right")
    rows = record.read(path)["rows"]
    assert all(row["samples_us"] and row["wrong"] == (None if row["arm"].startswith("floor") else 0) for row in rows)
    assert {(row["arm"], row["part"]) for row in rows} == {
        *((arm, part) for arm in ("numpy", "existing (numpy)") for part in ("pair", "local", "finish")),
        ("numpy (again)", "pair"),
        ("TopTokens", "local"),
        ("floor: plain read", ""),
        ("floor: copy", ""),
    }
    points = {(row["rows"], row["dtype"], row["strides"], row["input"]) for row in rows}
    main = ("bfloat16", "contiguous", "random")
    assert points == {
        *((size, *main) for size in (1, 8, 3)),
        *((size, "bfloat16", strides, "random") for size in (1, 8) for strides in ("column-major", "row gap")),
        *((size, dtype, "contiguous", "random") for size in (1, 8) for dtype in ("float16", "float32")),
        *((8, "bfloat16", "contiguous", family) for family in FAMILIES if family != "random"),
    }


def test_comparing_only_checks_where_that_is_asked_for(capsys, tmp_path, monkeypatch):
    arguments = ["compare", "--rows", "8", "--vocab", "300", "--dtype", "fp32", "--check-only"]
    assert run.main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    rows = record.read(tmp_path / "out.json")["rows"]
    assert not any(row["samples_us"] or row["arm"].startswith("floor") for row in rows)
    capsys.readouterr()
    from vpa.backends import numpy_

    right = numpy_.local_argmax_candidates
    monkeypatch.setattr(numpy_, "local_argmax_candidates", lambda *arguments: None)
    assert run.main(arguments) == 1  # nothing was written: what was there before must not pass for it
    monkeypatch.setattr(numpy_, "local_argmax_candidates", right)
    assert "all tokens right" not in capsys.readouterr().out


def test_comparing_with_one_rank_or_empty_ones_or_a_head(head, capsys):
    small = ["compare", "--rows", "8", "--dtype", "fp16"]
    assert run.main([*small, "--tp", "1", "--vocab", "300"]) == 0
    assert "floor: copy" not in capsys.readouterr().out
    assert run.main([*small, "--tp", "4", "--vocab", "65"]) == 0
    assert "without existing (numpy): it adds one number" in capsys.readouterr().out
    assert run.main([*small, "--lm-head", str(head)]) == 0
    printed = capsys.readouterr().out
    assert "tp 4, head, host" in printed and "zeros" not in printed


def test_drafting(capsys, tmp_path):
    path = tmp_path / "out.json"
    small = ["draft", "--rows", "2,0", "--vocab", "500", "--draft-tokens", "2", "--dtype", "bf16,fp32"]
    assert run.main([*small, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "family" in printed and "wrong at 1" in printed and "bytes moved" in printed
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| wrong at 1 |" in printed and "nemotron-h, host, hot cache" in printed
    rows = record.read(path)["rows"]
    checks = [row for row in rows if not row["samples_us"]]
    families, arms = ("nemotron-h", "deepseek", "deepseek-v3.2"), ("full gather", "local argmax")
    assert {(row["input"], row["dtype"], row["rows"], row["arm"], row["part"], row["wrong"]) for row in checks} == {
        (family, dtype, size, arm, f"position {position}", 0)
        for family in families
        for dtype in ("bfloat16", "float32")
        for size in (2, 0)
        for arm in arms
        for position in (0, 1)
    }
    timed = {(row["input"], row["arm"]): row for row in rows if row["samples_us"]}
    assert timed.keys() == {(family, arm) for family in families for arm in (*arms, "floor: no head")}
    for (_, arm), row in timed.items():
        moved = {"full gather": 4 * 2 * 128 * 2, "local argmax": 4 * 2 * 8 * 8}.get(arm)
        assert (row["bytes_moved"], row["wrong"]) == (moved, None if arm.startswith("floor") else 0)
        assert (row["dtype"], row["rows"], row["calls"], row["mode"]) == ("bfloat16", 2, 2, "host")


def test_drafting_counts_wrong_tokens_of_one_arm(monkeypatch, capsys):
    from vpa.bench import draft

    monkeypatch.setattr(draft.LogitsProcessor, "get_top_tokens", lambda self, head, hidden: np.full(len(hidden), 3))
    assert run.main(["draft", "--rows", "2", "--vocab", "500", "--family", "deepseek", "--check-only"]) == 1
    lines = {
        tuple(line.split()[5:7]): line.split()[7:] for line in capsys.readouterr().out.splitlines() if "bfloat" in line
    }
    assert lines["full", "gather"] == ["0"] * 3 and lines["local", "argmax"] == ["2"] * 3


def test_drafting_with_a_real_head(head, tmp_path, capsys):
    np.save(tmp_path / "hidden.npy", np.random.default_rng(0).standard_normal((3, 24)).astype(np.float32))
    arguments = ["draft", "--lm-head", str(head), "--family", "nemotron-h", "--check-only"]
    assert run.main([*arguments, "--rows", "1,4"]) == 0
    assert "vocabulary 1000" in capsys.readouterr().out
    assert run.main([*arguments, "--hidden", str(tmp_path / "hidden.npy"), "--tp", "1"]) == 0


SMALL_NORM = ["norm", "--vocab", "500", "--hidden-sizes", "96,33"]


def test_the_norm(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert run.main([*SMALL_NORM, "--rows", "2,0", "--dtype", "bf16,fp32", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "floor: plain move" in printed and printed.rstrip().endswith("all tokens right")
    rows = record.read(path)["rows"]
    checked = {(row["input"], row["arm"], row["dtype"], row["rows"]) for row in rows if not row["samples_us"]}
    assert len(checked) == 2 * (9 + 2) * 2 * 2 and not any(row["wrong"] for row in rows)
    timed = {(row["input"], row["arm"]): row for row in rows if row["samples_us"]}
    assert {row["dtype"] for row in timed.values()} == {"bfloat16"}
    assert (
        timed["norm 96", "fused"]["bytes_moved"]
        == timed["norm 96", "floor: plain move"]["bytes_moved"]
        == 7 * 2 * 96 * 2
    )
    assert timed["norm 33", "unfused"]["bytes_moved"] == 10 * 2 * 33 * 2
    assert timed["norm 33", "fused"]["columns"] == 33 and timed["tail 33", "local argmax"]["columns"] != 33
    assert {arm for stage, arm in timed if stage == "tail 96"} == {"full gather", "local argmax", "floor: no head"}


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("vpa.rmsnorm.mean_of_squares", lambda h, group: np.ones(len(h), np.float32)),
        ("vpa.bench.norm.full_argmax", lambda logits: np.zeros(len(logits), np.int64)),
        ("vpa.logits.LogitsProcessor.get_top_tokens", lambda self, head, hidden: np.zeros(len(hidden), np.int64)),
    ],
    ids=["norm", "full", "local"],
)
def test_the_norm_counts_what_is_wrong(where, fault, monkeypatch, capsys):
    if where == "vpa.rmsnorm.mean_of_squares":  # of the arms alone: the reference was made before
        from vpa.bench import norm

        right = norm._Inputs.normed

        def normed(self, *settings):
            for rules in self.rules.values():
                rules.results  # noqa: B018
            with monkeypatch.context() as patch:
                patch.setattr(where, fault)
                return right(self, *settings)

        monkeypatch.setattr(norm._Inputs, "normed", normed)
    else:
        monkeypatch.setattr(where, fault)
    assert run.main([*SMALL_NORM, "--rows", "3", "--check-only"]) == 1
    assert "wrong rows" in capsys.readouterr().out


def test_the_norm_before_a_real_head(head, tmp_path, capsys):
    np.save(tmp_path / "hidden.npy", np.random.default_rng(0).standard_normal((2, 24)))
    arguments = ["norm", "--lm-head", str(head), "--check-only"]
    assert run.main([*arguments, "--hidden", str(tmp_path / "hidden.npy")]) == 0
    assert "norm 24" in capsys.readouterr().out
    assert run.main([*arguments, "--rows", "1", "--hidden-sizes", "96"]) == 2
    assert "--hidden-sizes goes without a head; this one's is 24" in capsys.readouterr().err


def test_verifying(capsys, tmp_path):
    path = tmp_path / "out.json"
    small = ["verify", "--rows", "3,0", "--vocab", "500", "--draft-tokens", "2"]
    assert run.main([*small, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "mean length" in printed and "bytes moved" in printed and printed.rstrip().endswith("all tokens right")
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "sharded (candidate) / full path (numpy)" in printed and "| mean length |" in printed
    rows = record.read(path)["rows"]
    checks = [row for row in rows if not row["samples_us"]]
    assert {(row["input"], row["rows"], row["arm"], row["part"], row["wrong"]) for row in checks} == {
        (f"{family}, {kind}", size, arm, "K 2", 0)
        for family in ("random", "ties", "nan")
        for kind in ("greedy", "synthetic", "mixed")
        for size, arms in (
            (3, ("sharded (candidate)", "sharded (blocks)", "full path (numpy)")),
            (0, ("sharded (candidate)", "sharded (blocks)")),
        )
        for arm in arms
    }
    moved = {row["arm"]: row["bytes_moved"] for row in rows if row["samples_us"]}
    assert moved == {
        "full path (numpy)": 4 * 9 * 128 * 2,
        "sharded (candidate)": 4 * 9 * 8 * 8,
        "sharded (candidate, again)": 4 * 9 * 8 * 8,
        "sharded (blocks)": 4 * 3 * (2 + 1) * 8,
        "floor: plain read": None,
    }
    assert all(1 <= row["acceptance_length"] <= 3 for row in rows if row["wrong"] == 0 and row["rows"])


def test_verifying_sweeps_numbers_of_drafts(capsys, tmp_path):
    path = tmp_path / "out.json"
    small = ["verify", "--rows", "2,1", "--vocab", "300", "--draft-tokens", "0,1,5", "--json", str(path)]
    assert run.main(small) == 0
    capsys.readouterr()
    rows = record.read(path)["rows"]
    checks, times = ([row for row in rows if bool(row["samples_us"]) is timed] for timed in (False, True))
    sweep = {(f"K {count}", size) for count in (0, 1, 5) for size in (1, 2)}
    assert {(row["part"], row["rows"]) for row in checks} == sweep
    assert {(row["input"].removeprefix("random, "), row["rows"]) for row in times} == sweep
    for row in checks:
        sampling, length = row["sampling_requests"], row["acceptance_length"]
        assert sampling <= row["rows"] and (length is None) == (sampling == 0)
        assert length is None or 1 <= length <= int(row["part"].removeprefix("K ")) + 1
    assert {row["bytes_moved"] for row in times if row["arm"] == "sharded (candidate)" and row["rows"] == 2} == {
        4 * 2 * (count + 1) * 8 * 8 for count in (0, 1, 5)
    }
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "random, mixed | bfloat16 | 300 | 4 | 5 | 2 1 |" in printed and "random, K 5" in printed


def test_the_mean_length_is_of_requests_that_sample(capsys):
    """Nobody samples in one of the sizes, and two of three in another: (2 + 1 + 1) / 3."""
    assert run.main(["verify", "--check-only", "--vocab", "500", "--rows", "1,2,3", "--seed", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("random, mixed")]
    assert len(lines) == 3 and {line[-1] for line in lines} == {"1.33"}


def test_verifying_counts_requests_with_a_wrong_outcome(monkeypatch, capsys):
    from vpa.backends import numpy_verify

    right = numpy_verify.accept

    def wrong(*arguments, **keywords):
        tokens, sampled, rejected = right(*arguments, **keywords)
        sampled[0] += 1
        return tokens, sampled, rejected

    monkeypatch.setattr(numpy_verify, "accept", wrong)
    assert run.main(["verify", "--rows", "2", "--vocab", "300", "--check-only"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "bfloat16" in line]
    assert {tuple(line[7:9]): line[9] for line in lines} == {
        ("sharded", "(candidate)"): "1",
        ("sharded", "(blocks)"): "1",
        ("full", "path"): "(numpy)",
    }
    assert all(line[10] == "0" for line in lines if line[7] == "full")


def test_verifying_sees_a_rule_that_is_broken_in_every_arm(monkeypatch, capsys):
    """The oracle is not the rules that arms and backends share."""
    from vpa import acceptance
    from vpa.backends import numpy_verify
    from vpa.bench import verify, verify_cases

    def without_bonus(argmax, **keywords):
        tokens, sampled, rejected = acceptance.accept(argmax, **keywords)
        tokens[(rejected == 0) & (sampled > 0), -1] = 0
        return tokens, sampled, rejected

    for module in (numpy_verify, verify, verify_cases):
        monkeypatch.setattr(module, "accept", without_bonus, raising=False)
    assert run.main(["verify", "--rows", "5", "--vocab", "300", "--check-only"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "greedy" in line and "bfloat16" in line]
    assert len(lines) == 9 and all(int(line[-2]) > 0 for line in lines if line[0] == "random,")


def test_the_oracle_of_many_requests_is_quick():
    from vpa.bench.verify_cases import KINDS, make_case

    best = np.random.default_rng(0).integers(0, 1000, 1024 * 4)
    start = time.monotonic()
    for kind in KINDS:
        make_case(kind, 0, best, 3, 1000)
    assert time.monotonic() - start < 3


def test_verifying_with_a_real_head(head, capsys):
    assert run.main(["verify", "--lm-head", str(head), "--rows", "1,4", "--check-only", "--tp", "8"]) == 0
    assert "head, mixed" in capsys.readouterr().out


def test_a_batch_script_of_slurm_is_no_job_step(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert run._launched_rank() is None
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    assert run._launched_rank() == 0


def test_list_and_env(capsys):
    assert run.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(bench_settings.experiments())
    assert run.main(["env"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == [
        "vpa",
        "python",
        "packages",
        "cpu",
        "gpu",
        "nccl",
        "mpi",
    ]


def test_only_rank_0_speaks_of_bad_usage(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "1")
    assert run.main(["nonsense"]) == 2
    assert capsys.readouterr().err == ""


class TestHead:
    def test_from_its_own_rows(self, head, capsys):
        assert run.main(["--lm-head", str(head), "--rows", "1,5", "--check-only"]) == 0
        printed = capsys.readouterr().out
        assert "head lm_head.weight" in printed and "vocabulary 1000 padded to 1024" in printed
        assert [line.split()[:2] for line in printed.splitlines() if line.startswith("head ")] == [
            ["head", dtype] for dtype in ("bfloat16", "float16", "float32")
        ]

    def test_with_hidden_states(self, head, tmp_path, capsys):
        hidden = np.random.default_rng(1).integers(-1, 2, (7, 24)).astype(np.float16)
        np.save(tmp_path / "hidden.npy", hidden)
        path = tmp_path / "out.json"
        arguments = ["--lm-head", f"{head}:half", "--hidden", str(tmp_path / "hidden.npy"), "--tp", "3", "--check-only"]
        assert run.main([*arguments, "--json", str(path)]) == 0
        assert {row["rows"] for row in record.read(path)["rows"]} == {7}
        assert run.main([*arguments, "--rows", "8"]) == 2
        assert "--rows up to 8, but --hidden has 7 rows" in capsys.readouterr().err

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_products_beyond_a_dtype_are_infinities_or_nans(self, head, tmp_path):
        hidden = np.full((2, 24), 3e38, np.float32) * np.array([[1], [1e-34]], np.float32)
        np.save(tmp_path / "hidden.npy", hidden.astype(np.float64))
        arguments = ["--lm-head", str(head), "--hidden", str(tmp_path / "hidden.npy"), "--check-only"]
        assert [run.main(arguments) for _ in range(2)] == [0, 0]

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            ("nothing", "has no tensor 'nothing'; it has half, lm_head.weight, norm, whole"),
            ("norm", "'norm' of .* has shape \\[24\\]; a head is \\[vocabulary, hidden\\]"),
            ("whole", "'whole' of .* is I64; BF16, F16, F32 are accepted"),
        ],
    )
    def test_tensors_that_are_no_head(self, head, tensor, message, capsys):
        import re

        assert run.main(["--lm-head", f"{head}:{tensor}"]) == 2
        printed = capsys.readouterr().err
        assert re.search(message, printed) and len(printed.splitlines()) == 1

    def test_files_that_are_no_head(self, head, tmp_path, capsys):
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(b"not a header at all")
        assert run.main(["--lm-head", str(broken)]) == 2
        unnamed = tmp_path / "unnamed.safetensors"
        save_file({name: np.zeros((4, 4), np.float32) for name in ("a", "b")}, unnamed)
        assert run.main(["--lm-head", str(unnamed)]) == 2
        assert run.main(["--lm-head", str(head), "--vocab", "500"]) == 2
        printed = capsys.readouterr().err.splitlines()
        assert "cannot read" in printed[0]
        assert f"name one: {unnamed}:TENSOR, of a, b" in printed[1]
        assert "--vocab is 500; the head has 1000 rows" in printed[2]

    @pytest.mark.parametrize(
        "hidden",
        [
            np.zeros((3, 25), np.float32),
            np.zeros(24, np.float32),
            np.zeros((3, 24), np.int64),
            np.full((3, 24), 1e39),
            "no array",
            "",
            "several",
            b"PK\x03\x04",
            npy("{"),
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 24)}")[:-30] + b"\xff" * 30,
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 24)}"),
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 24)}"),
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 24)}"),
            npy("{'descr': ('<f4', 3, 5, 7), 'fortran_order': False, 'shape': (3, 24)}"),
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 24), 1is: 2}"),
        ],
        ids=lambda hidden: type(hidden).__name__,
    )
    @pytest.mark.filterwarnings("error::RuntimeWarning", "error::SyntaxWarning")
    def test_hidden_states_that_do_not_fit(self, head, hidden, tmp_path, capsys):
        path = tmp_path / "hidden.npy"
        if isinstance(hidden, np.ndarray):
            np.save(path, hidden)
        elif hidden == "several":
            path = tmp_path / "hidden.npz"
            np.savez(path, a=np.zeros((3, 24)), b=np.zeros(3))
        else:
            path.write_bytes(hidden.encode() if isinstance(hidden, str) else hidden)
        assert run.main(["--lm-head", str(head), "--hidden", str(path)]) == 2
        printed = capsys.readouterr().err
        assert "--hidden: " in printed and len(printed.splitlines()) == 1


@pytest.mark.gpu
class TestOnAGpu:
    """The measuring code itself: graphs, temporaries, cold rings, floors, and the existing path in CuPy and torch."""

    def test_the_headline(self, tmp_path):
        path = tmp_path / "out.json"
        assert run.main(["--rows", "40,64", "--dtype", "fp32", "--json", str(path)]) == 0
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        assert {(row["mode"], row["cache"]) for row in timed} == {
            ("captured", "hot"),
            ("captured", "cold"),
            ("eager", "hot"),
        }
        for row in timed:
            assert not row["wrong"]
            if row["mode"] == "captured" and row["arm"] == "fused":
                assert row["kernels"] in (None, 2)
        assert {"existing (cupy)", "fused", "floor: plain read", "floor: empty kernel"} <= {row["arm"] for row in timed}

    def test_comparing(self, tmp_path):
        path = tmp_path / "out.json"
        assert run.main(["compare", "--rows", "8", "--dtype", "bf16", "--json", str(path)]) == 0
        rows = record.read(path)["rows"]
        timed = [row for row in rows if row["samples_us"]]
        assert {(row["mode"], row["cache"]) for row in timed} == {
            ("captured", "hot"),
            ("captured", "cold"),
            ("eager", "hot"),
            ("host", "hot"),
        }
        assert {"raw", "existing (cupy)", "floor: copy", "numpy"} <= {row["arm"] for row in timed}
        assert not any(row["wrong"] for row in timed if not row["external"])
        assert not any(row["wrong"] for row in timed if row["input"] == "random"), "peers are right on numbers"

    @pytest.mark.parametrize("name", ["raw", "numba"])
    def test_verifying(self, tmp_path, name):
        path = tmp_path / "out.json"
        small = ["verify", "--rows", "1,24", "--vocab", "40000", "--backend", name]
        assert run.main([*small, "--json", str(path)]) == 0
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        assert {row["mode"] for row in timed} == {"captured", "eager"}
        assert {"full path (cupy)", "full path (our scan)", "sharded (candidate)"} <= {row["arm"] for row in timed}
        for row in timed:
            assert not row["wrong"]
            if row["mode"] == "captured" and row["arm"].startswith("sharded"):
                assert row["kernels"] in (None, 2)

    def test_every_family_and_dtype_on_every_backend(self):
        for name in ("raw", "numba"):
            assert run.main(["--rows", "1,3", "--vocab", "3000", "--backend", name, "--check-only"]) == 0

    @pytest.mark.parametrize("backend", ["raw", "numba"])
    def test_the_norm(self, tmp_path, backend):
        path = tmp_path / "out.json"
        small = ["--rows", "1,64", "--vocab", "4096", "--hidden-sizes", "7168,1025", "--backend", backend]
        assert run.main(["norm", *small, "--json", str(path)]) == 0
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        found = {(row["mode"], row["cache"]) for row in timed if row["input"] == "norm 7168"}
        assert found == {("captured", "hot"), ("captured", "cold"), ("eager", "hot")}
        kernels = {"fused": 1, "unfused": 3}
        for row in timed:
            if row["mode"] == "captured" and row["arm"] in kernels:
                assert row["kernels"] in (None, kernels[row["arm"]])

    @pytest.mark.mpi
    def test_over_nccl(self, ranks):
        done = ranks(
            1, ["-m", "vpa.run", "--comm", "nccl", "--rows", "64", "--vocab", "40000", "--dtype", "bf16"], timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert "1 rank, NCCL" in done.stdout

    @pytest.mark.mpi
    def test_drafts_over_nccl(self, ranks, tmp_path):
        """Whole loops as graphs that hold the gathers, of both arms and of a fused product."""
        path = tmp_path / "out.json"
        small = ["--comm", "nccl", "--rows", "3", "--vocab", "500", "--draft-tokens", "2"]
        done = ranks(1, ["-m", "vpa.run", "draft", *small, "--json", path], timeout=100)
        assert done.returncode == 0, done.stderr
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        assert {row["mode"] for row in timed} == {"captured", "eager"}
        assert {"full gather", "local argmax", "fused product"} <= {row["arm"] for row in timed}


@pytest.mark.mpi
class TestJobs:
    def test_four_ranks_check_everything(self, ranks, tmp_path):
        path = tmp_path / "out.json"
        done = ranks(4, ["-m", "vpa.run", "--check-only", "--backend", "numpy", "--json", path], timeout=60)
        assert done.returncode == 0, done.stderr
        rows = record.read(path)["rows"]
        assert len(rows) == len(FAMILIES) * 3 * 3 and all(row["wrong"] == 0 for row in rows)
        assert len(record.read(path)["environment"]["ranks"]) == 4

    def test_times_with_and_without_the_gather(self, ranks, tmp_path):
        path = tmp_path / "out.json"
        done = ranks(2, ["-m", "vpa.run", *SMALL, "--json", path], timeout=60)
        assert done.returncode == 0, done.stderr
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        assert {row["gather"] for row in timed} == {"excluded", "included"}
        assert "floor: bare gather" in {row["arm"] for row in timed}

    def test_four_ranks_draft(self, ranks):
        start = time.monotonic()
        done = ranks(4, ["-m", "vpa.run", "draft", "--check-only"], timeout=60)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - start < 30
        assert "4 ranks, host memory" in done.stdout and "local argmax" in done.stdout

    def test_four_ranks_norm(self, ranks):
        start = time.monotonic()
        done = ranks(4, ["-m", "vpa.run", "norm", "--check-only"], timeout=60)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - start < 30
        assert "4 ranks, host memory" in done.stdout and "norm 1025" in done.stdout

    def test_two_ranks_time_the_norm_in_every_mode(self, ranks, tmp_path):
        path = tmp_path / "out.json"
        done = ranks(2, ["-m", "vpa.run", *SMALL_NORM, "--rows", "3", "--dtype", "fp16", "--json", path], timeout=60)
        assert done.returncode == 0, done.stderr
        timed = [row for row in record.read(path)["rows"] if row["samples_us"] and row["gather"] == "included"]
        included = {row["arm"]: row["bytes_moved"] for row in timed if row["input"] == "norm 96"}
        tail = {row["arm"]: row["bytes_moved"] for row in timed if row["input"] == "tail 96"}
        size = 3 * 96 * 2
        assert included == {
            "one_shot": size,
            "all_reduce": size,
            "sequence_parallel": 2 * size // 3 * 4,  # three rows are filled up to four
            "floor: bare gather": size,
        }
        assert tail["floor: no head"] == size and tail["full gather"] == size + 3 * 256 * 2  # of 512 columns

    def test_four_ranks_verify(self, ranks):
        start = time.monotonic()
        done = ranks(4, ["-m", "vpa.run", "verify", "--check-only"], timeout=60)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - start < 30
        assert "defaults are smaller: rows 1 24, vocab 50257" in done.stdout and "sharded (blocks)" in done.stdout

    def test_two_ranks_time_verifications(self, ranks, tmp_path):
        path = tmp_path / "out.json"
        done = ranks(2, ["-m", "vpa.run", "verify", "--rows", "2", "--vocab", "500", "--json", path], timeout=60)
        assert done.returncode == 0, done.stderr
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        assert {row["gather"] for row in timed} == {"excluded", "included"}
        assert "floor: bare gather" in {row["arm"] for row in timed}

    def test_two_ranks_time_drafts(self, ranks, tmp_path):
        path = tmp_path / "out.json"
        small = ["--rows", "2", "--vocab", "500", "--family", "deepseek", "--draft-tokens", "2"]
        done = ranks(2, ["-m", "vpa.run", "draft", *small, "--json", path], timeout=60)
        assert done.returncode == 0, done.stderr
        assert {row["gather"] for row in record.read(path)["rows"] if row["samples_us"]} == {"included"}

    def test_the_numpy_backends_benchmark_over_ranks(self, ranks):
        done = ranks(4, ["-m", "vpa.run", "numpy-backend", "--vocab", "65", "--rows", "2"], timeout=60)
        assert done.returncode == 0 and "without fused: a rank has no column" in done.stdout, done.stderr
        done = ranks(2, ["-m", "vpa.run", "numpy-backend", "--vocab", "650", "--rows", "2"], timeout=60)
        assert done.returncode == 0 and "numpy argmax" in done.stdout, done.stderr

    @pytest.mark.parametrize("wrong", [0, 1])
    def test_a_file_that_one_rank_lacks_is_said_once_and_ends_all(self, head, wrong):
        paths = [str(head), str(head)]
        paths[wrong] = "/no/such.safetensors"
        done = self.each_its_own(["-m", "vpa.run", "--check-only", "--rows", "1", "--lm-head", path] for path in paths)
        assert done.returncode == 2
        said = "--lm-head: cannot read /no/such.safetensors"
        assert done.stderr.count("vpa.run: ") == 1
        assert f"vpa.run: {'rank 1: ' if wrong else ''}{said}" in done.stderr

    def test_a_rank_that_fails_before_mpi_starts_ends_the_job(self, head):
        faulty = "import vpa.run\ndef fail(*_): raise KeyError('early')\nvpa.run.open_head = fail\n"
        start = "import sys, vpa.run\nsys.exit(vpa.run.main(['--check-only', '--rows', '1']))"
        done = self.each_its_own((["-c", start], ["-c", faulty + start]))
        assert done.returncode != 0
        assert "KeyError: 'early'" in done.stderr and "rank 1 failed, so the job ends" in done.stderr

    @pytest.mark.parametrize("wrong", [0, 1])
    def test_a_command_line_that_is_wrong_on_one_rank_ends_all(self, wrong):
        programs = [["-m", "vpa.run", "--check-only", "--rows", "1"] for _ in range(2)]
        programs[wrong][-1] = "x"
        done = self.each_its_own(programs)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("vpa.run: ") == 1
        assert f"vpa.run: {'rank 1: ' if wrong else ''}--rows is 'x'" in done.stderr

    def test_command_lines_that_differ_are_refused(self):
        done = self.each_its_own(["-m", "vpa.run", "--check-only", "--rows", "1", "--seed", seed] for seed in "12")
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("vpa.run: ") == 1
        assert "different seed: rank 0 has 1, rank 1 has 2" in done.stderr

    @staticmethod
    def each_its_own(programs) -> subprocess.CompletedProcess:
        """One rank for each list of arguments to Python."""
        command = [mpirun()]
        for number, arguments in enumerate(programs):
            command += [*([":"] if number else []), "-n", "1", sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def test_bad_usage_is_said_once(self, ranks):
        for arguments in (["nonsense"], ["--tp", "3"], ["--comm", "emulated"], ["compare"]):
            done = ranks(2, ["-m", "vpa.run", *arguments], timeout=60)
            assert done.returncode == 2
            assert done.stderr.count("vpa.run: ") == 1, done.stderr

    @pytest.mark.parametrize("command", ["env", "list", "--help"])
    def test_what_needs_no_ranks_ends_on_all_of_them(self, ranks, command):
        done = ranks(3, ["-m", "vpa.run", command], timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("headline") <= 3 and done.stdout

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_a_head_over_ranks(self, ranks, head, count):
        done = ranks(count, ["-m", "vpa.run", "--lm-head", head, "--rows", "1,4", "--check-only"], timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith("all tokens right")
        assert (f"{count} ranks, " if count > 1 else "1 rank, ") in done.stdout

    @pytest.mark.parametrize(
        ("where", "fault", "code", "shown"),
        [
            ("vpa.comm.from_mpi", "raise KeyError('early')", 1, "KeyError: 'early'"),
            ("vpa.comm.from_mpi", "sys.exit(3)", 3, "SystemExit: 3"),
            ("vpa.pick_from_candidates", "pass", 0, ""),
            ("vpa.backends.numpy_.pick_from_candidates", "raise KeyError('late')", 1, "KeyError: 'late'"),
            ("vpa.backends.numpy_.local_argmax_candidates", "sys.exit(3)", 3, "SystemExit: 3"),
            ("vpa.backends.numpy_.pick_from_candidates", "sys.exit(0)", 1, "SystemExit: 0"),
            ("vpa.backends.numpy_.pick_from_candidates", "os.kill(os.getpid(), 9)", 9, ""),
        ],
    )
    def test_one_rank_that_fails_ends_the_job_at_once(self, ranks, where, fault, code, shown):
        program = f"""
import os, sys, vpa, vpa.run, vpa.backends.numpy_
from mpi4py import MPI
right = {where}
def faulty(*arguments, **keywords):
    if MPI.COMM_WORLD.rank == 2:
        {fault}
    return right(*arguments, **keywords)
{where} = faulty
sys.exit(vpa.run.main(["--check-only", "--rows", "3", "--vocab", "1000", "--backend", "numpy"]))
"""
        start = time.monotonic()
        done = ranks(4, ["-c", program], timeout=60)
        assert time.monotonic() - start < 30
        assert (done.returncode == 0) == (code == 0), done.stderr
        if code == 3:
            assert done.returncode == 3
        if shown:
            assert shown in done.stderr and "rank 2 failed, so the job ends" in done.stderr
            assert "Traceback" in done.stderr
