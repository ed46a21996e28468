"""The break-even study: both arms checked and timed, shapes, sources, bytes, and what its report says."""

from __future__ import annotations

import time

import numpy as np
import pytest

from vpa import record, report, run
from vpa.bench import break_even
from vpa.bench.break_even import AGAIN, FULL, GATHER_CANDIDATES, GATHER_LOGITS, LOCAL, PRODUCT
from vpa.shapes import SHAPES, shape_of

SMALL = ["break-even", "--rows", "2,8", "--vocab", "500"]


@pytest.fixture(autouse=True)
def not_in_a_job(monkeypatch):
    for name in run._RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_both_arms_are_checked_and_timed(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert run.main([*SMALL, "--dtype", "bf16,fp32", "--json", str(path)]) == 0
    rows = record.read(path)["rows"]
    checks = {(row["arm"], row["rows"], row["dtype"], row["wrong"]) for row in rows if not row["samples_us"]}
    assert checks == {
        (arm, size, dtype, 0) for arm in (FULL, LOCAL) for size in (2, 8) for dtype in ("bfloat16", "float32")
    }
    timed = {(row["arm"], row["rows"]): row for row in rows if row["samples_us"]}
    assert timed.keys() == {(arm, size) for arm in (FULL, LOCAL, AGAIN, PRODUCT) for size in (2, 8)}
    moved = {FULL: 4 * 128 * 2, LOCAL: 4 * 8 * 8, AGAIN: 4 * 8 * 8}
    for (arm, size), row in timed.items():
        assert (row["input"], row["hidden_size"], row["dtype"], row["gather"]) == (
            "256x500",
            256,
            "bfloat16",
            "excluded",
        )
        assert len(row["samples_us"]) == 5 and row["wrong"] == (None if arm == PRODUCT else 0)
        assert row["bytes_moved"] == (size * moved[arm] if arm in moved else None)
    printed = capsys.readouterr().out
    assert "saved, us" in printed and "crossover: " in printed and "No gather was timed" in printed
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "what the local argmax saves:" in printed and "| 8 |" in printed and "crossover: " in printed


def test_from_logits_there_is_no_product(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["break-even", "--from", "logits", "--rows", "3", "--shape", "7x300,7x65", "--tp", "3"]
    assert run.main([*arguments, "--json", str(path)]) == 0
    rows = record.read(path)["rows"]
    assert {(row["input"], row["vocab"], row["hidden_size"]) for row in rows} == {
        ("7x300 logits", 300, None),
        ("7x65 logits", 65, None),
    }
    assert PRODUCT not in {row["arm"] for row in rows}
    assert "vocabulary 300 padded to 384 (pad_to 192)" in capsys.readouterr().out


def test_registered_shapes_without_a_hidden_size_start_from_logits(capsys):
    assert run.main(["break-even", "--shape", "minimax-m3", "--from", "logits", "--rows", "1", "--check-only"]) == 0
    assert "minimax-m3 logits" in capsys.readouterr().out


@pytest.mark.parametrize("arm", [FULL, LOCAL])
def test_wrong_tokens_of_either_arm_are_exit_code_1(arm, monkeypatch, capsys):
    if arm == LOCAL:
        monkeypatch.setattr(
            break_even.LogitsProcessor, "get_top_tokens", lambda self, head, hidden: np.zeros(len(hidden))
        )
    else:
        monkeypatch.setattr(break_even, "full_argmax", lambda logits: np.zeros(len(logits)))
    assert run.main([*SMALL, "--check-only"]) == 1
    assert "10 wrong rows" in capsys.readouterr().out


@pytest.mark.parametrize("arm", [FULL, LOCAL])
def test_what_is_timed_is_checked_too(arm, monkeypatch):
    """An arm that is right when it is checked, and wrong with the head that is timed."""
    right = break_even.LogitsProcessor.get_top_tokens if arm == LOCAL else break_even.LogitsProcessor.compute_logits

    def wrong(self, head, hidden):
        given = isinstance(head[0], break_even.GivenLogits)
        return right(self, head, hidden) if given else right(self, head, -hidden)

    monkeypatch.setattr(break_even.LogitsProcessor, right.__name__, wrong)
    assert run.main(SMALL) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama"], "shapes has 'llama'; glm-5.2, deepseek-v3,"),
        (["--shape", "0x5"], "shapes has '0x5'"),
        (["--shape", "4096x99999999999"], "shapes has '4096x99999999999'"),
        (["--shape", "minimax-m3"], "shape minimax-m3 has no hidden size here; give HIDDENx200064, or --from logits"),
        (["--shape", "16384x100000"], "a head of shape 16384x100000 has 1638400000 numbers"),
        (["--shape", "8x30", "--vocab", "30"], "--vocab 30 and --shape 8x30; give one"),
        (["--from", "tokens"], "argument --from: invalid choice"),
        (["--lm-head", "x.safetensors", "--from", "logits"], "--lm-head gives shape and product"),
        (["--lm-head", "x.safetensors", "--shape", "8x30"], "--lm-head gives shape and product"),
    ],
)
def test_bad_usage(arguments, message, capsys):
    assert run.main(["break-even", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and len(captured.err.splitlines()) == 1


def test_other_experiments_refuse_its_options(capsys):
    assert run.main(["headline", "--shape", "glm-5.2"]) == 2
    assert run.main(["headline", "--from", "logits"]) == 2
    printed = capsys.readouterr().err
    assert "shapes (--shape) goes with break_even" in printed and "source (--from) goes with break_even" in printed


def test_shapes():
    assert shape_of("deepseek-v3") is SHAPES["deepseek-v3"]
    assert (shape_of("12x345").hidden_size, shape_of("12x345").vocab_size) == (12, 345)
    for name, shape in SHAPES.items():
        assert name == shape.name and shape.source and shape.vocab_size > 100_000
    for text in ("", "x", "1x", "x1", "-1x5", "5x-1", "16385x5", "1x4294967296", "²x5"):
        with pytest.raises(ValueError, match="shape"):
            shape_of(text)


@pytest.mark.mpi
class TestJobs:
    def test_four_ranks_check_within_thirty_seconds(self, ranks):
        start = time.monotonic()
        done = ranks(4, ["-m", "vpa.run", "break-even", "--check-only"], timeout=60)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - start < 30
        assert "4 ranks, host memory" in done.stdout

    @pytest.mark.parametrize("source", ["head", "logits"])
    def test_two_ranks_time_real_gathers(self, ranks, tmp_path, source):
        path = tmp_path / "out.json"
        done = ranks(2, ["-m", "vpa.run", *SMALL, "--from", source, "--json", path], timeout=60)
        assert done.returncode == 0, done.stderr
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        assert {row["gather"] for row in timed} == {"included"}
        moved = {row["arm"]: row["bytes_moved"] for row in timed if row["rows"] == 8}
        assert moved[GATHER_LOGITS] == moved[FULL] == 2 * 8 * 256 * 2
        assert moved[GATHER_CANDIDATES] == moved[LOCAL] == 2 * 8 * 8 * 8
        assert "crossover: " in done.stdout and "No gather" not in done.stdout


@pytest.mark.gpu
class TestOnAGpu:
    def test_captured_and_eager(self, tmp_path):
        path = tmp_path / "out.json"
        arguments = ["--rows", "1,64,300", "--shape", "512x40000", "--json", str(path)]
        assert run.main(["break-even", *arguments]) == 0
        timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
        assert {row["mode"] for row in timed} == {"captured", "eager"}
        assert not any(row["wrong"] for row in timed)
        assert {row["calls"] for row in timed} == {100, 25}

    @pytest.mark.mpi
    def test_over_nccl(self, ranks):
        small = ["--rows", "8", "--shape", "512x40000"]
        done = ranks(1, ["-m", "vpa.run", "break-even", "--comm", "nccl", *small], timeout=100)
        assert done.returncode == 0, done.stderr
        assert "1 rank, NCCL" in done.stdout
