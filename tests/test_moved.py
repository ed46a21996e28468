"""Two records against each other: what moved beyond noise is flagged, and nothing else."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from records import row

from vpa import moved, record, report


def noisy(rows: int, arm: str, median: float, seed: int, spread: float = 0.02, **more) -> dict:
    samples = median * (1 + spread * np.random.default_rng([seed, rows, len(arm)]).normal(size=20))
    return {**row(rows, arm, median, **more), "samples_us": samples.tolist(), "median_us": float(np.median(samples))}


def record_of(path, rows: list[dict], **more) -> str:
    env = {**record.environment(), **more}
    return record.write(str(path), "headline", env, rows)


def test_a_time_that_did_not_move_is_not_flagged_and_one_that_did_is():
    before = [noisy(rows, arm, 10.0, 0) for rows in (1, 8) for arm in ("fused", "existing (torch)")]
    after = [noisy(rows, arm, 10.0, 1) for rows in (1, 8) for arm in ("fused", "existing (torch)")]
    found, *only = moved.changes(before, after)
    assert [one.moved for one in found] == [""] * 4 and only == [0, 0]
    after[0] = noisy(1, "fused", 11.0, 1)
    after[3] = noisy(8, "existing (torch)", 8.0, 1)
    found, *_ = moved.changes(before, after)
    assert [one.moved for one in found] == [moved.SLOWER, "", "", moved.FASTER]
    assert [line[:1] + line[6:7] for line in moved.table(found)[1:]] == [["8", "existing (torch)"], ["1", "fused"]]
    assert moved.words(found, 0, 0) == "4 times compared: 1 slower, 1 faster, the rest within noise"


def test_few_false_alarms():
    """Of 300 times that differ by noise alone, the interval alone flags about one in twenty."""
    before = [noisy(rows, "fused", 10.0, 0) for rows in range(1, 301)]
    after = [noisy(rows, "fused", 10.0, 1) for rows in range(1, 301)]
    found, *_ = moved.changes(before, after)
    assert sum(bool(one.moved) for one in found) < 30


def test_the_same_arm_again_says_what_noise_is():
    before = [noisy(1, "fused", 10.0, 0), noisy(1, "fused (again)", 11.5, 0), noisy(8, "fused", 10.0, 0)]
    after = [noisy(1, "fused", 11.0, 1), noisy(1, "fused (again)", 11.0, 1), noisy(8, "fused", 11.0, 1)]
    found, *_ = moved.changes(before, after)
    assert [one.moved for one in found] == ["", "", moved.SLOWER]
    assert found[0].noise == found[1].noise > 0.1 and found[2].noise == 0


def test_a_variant_s_control_is_found_too():
    before = [noisy(1, "sharded (candidate)", 10.0, 0), noisy(1, "sharded (candidate, again)", 11.5, 0)]
    found, *_ = moved.changes(before, [noisy(1, "sharded (candidate)", 11.0, 1)])
    assert found[0].noise > 0.1 and not found[0].moved


@pytest.mark.parametrize("key", ["rows", "mode", "cache", "gather", "backend", "tp", "part", "arm", "hidden_size"])
def test_rows_of_different_things_are_not_compared(key):
    before = noisy(1, "fused", 10.0, 0)
    found, *only = moved.changes([before], [{**before, key: 9 if key in ("rows", "tp", "hidden_size") else "another"}])
    assert (found, only) == ([], [1, 1])


def test_the_command(tmp_path, capsys):
    paths = [
        record_of(tmp_path / f"{seed}.json", [noisy(1, "fused", 10.0 + seed, seed), row(1, "x", None)])
        for seed in (0, 2)
    ]
    assert report.main(["--compare", *paths]) == 0
    printed = capsys.readouterr().out
    assert "| 1 | random | bfloat16 | excluded | captured | hot | fused |" in printed and "| slower |" in printed
    assert "1 times compared: 1 slower, 0 faster" in printed and "devices differ" not in printed
    assert report.main(["--compare", *paths, "--mode", "eager"]) == 2
    assert report.main(["--compare", *paths, "--mode", "captured"]) == 0
    assert "| slower |" in capsys.readouterr().out
    assert report.main(["--compare", paths[0], paths[0]]) == 0
    printed = capsys.readouterr().out
    assert "|" not in printed.replace("| 4 |", "") and "0 slower, 0 faster" in printed


GPU = {**record.environment()["ranks"][0], "gpu": {"name": "imagined"}}
OVER_NCCL = {"ranks": [GPU, GPU], "transport": "nccl", "reason": "every rank has a GPU", "nccl": 22809, "variables": {}}
SHARED = "every rank has a GPU, 2 ranks sharing 1 (times are co-located, not of links)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": [{**GPU, "gpu": {"name": "another"}}] * 2}, "The devices differ, imagined and another: what moved"),
        ({"transport": "mpi"}, "The transports differ, nccl and mpi: what moved"),
        ({"reason": SHARED}, "The uses of GPUs differ, no GPU shared and co-located ranks that share one: what moved"),
        ({"ranks": [GPU, {**GPU, "host": "another"}]}, "The numbers of hosts differ, 1 and 2: what moved"),
        ({"nccl": 23007}, "The NCCL versions differ, 2.28.9 and 2.30.7: what moved"),
        ({"nccl": 23007, "reason": SHARED}, "share one; the NCCL versions differ, 2.28.9 and 2.30.7: what moved"),
        ({"variables": {"NCCL_MAX_CTAS": "1"}}, "The variables differ, none and NCCL_MAX_CTAS=1: what moved"),
        ({"variables": {"NCCL_VERSION": "2.28.3-1"}}, ""),
        ({}, ""),
    ],
)
def test_what_differs_beside_the_code_is_told(change, words, tmp_path, capsys):
    paths = [
        record_of(tmp_path / "a.json", [noisy(1, "fused", 10.0, 0)], **OVER_NCCL),
        record_of(tmp_path / "b.json", [noisy(1, "fused", 12.0, 0)], **{**OVER_NCCL, **change}),
    ]
    assert report.main(["--compare", *paths]) == 0
    printed = capsys.readouterr().out
    assert words in printed and printed.count(" differ, ") == (len(change) if words else 0)
    if words:
        assert printed.index("is not the code's alone.") < printed.index("| 1 | random |")


def test_arms_are_chosen_and_keep_the_noise_of_all(tmp_path, capsys):
    before = [noisy(1, "fused", 10.0, 0), noisy(1, "fused (again)", 11.5, 0), noisy(1, "existing (torch)", 10.0, 0)]
    after = [noisy(1, "fused", 11.0, 1), noisy(1, "fused (again)", 11.0, 1), noisy(1, "existing (torch)", 20.0, 1)]
    paths = [record_of(tmp_path / f"{name}.json", rows) for name, rows in (("a", before), ("b", after))]
    assert report.main(["--compare", "--arms", "fused", *paths]) == 0
    assert "1 times compared: 0 slower, 0 faster" in capsys.readouterr().out
    assert report.main(["--compare", "--arms", "existing (torch)", *paths]) == 0
    assert "1 times compared: 1 slower, 0 faster" in capsys.readouterr().out
    assert report.main(["--compare", *paths, "--csv", str(tmp_path / "out")]) == 0
    (written,) = (tmp_path / "out").iterdir()
    assert capsys.readouterr().out == f"{written}\n" and written.name == "a_b_moved.csv"
    found, *_ = moved.changes(before, after)
    assert list(csv.reader(written.open(newline=""))) == moved.table(found)


def test_what_cannot_be_compared(tmp_path, capsys):
    paths = [record_of(tmp_path / f"{arm}.json", [noisy(1, arm, 10.0, 0)]) for arm in ("a", "b")]
    for arguments, message in (
        (paths[:1], "takes two records, before and after; got 1"),
        ([*paths, paths[0]], "got 3"),
        (paths, "no times of the same thing; they are of headline and headline"),
        ([paths[0], "/no/such.json"], "cannot read record /no/such.json"),
        ([*paths, "--input", "glm-5.3"], f"{paths[0]} has no glm-5.3 times; it has captured hot random"),
        ([*paths, "--arms", "a"], f"{paths[1]} has no arm 'a'; it has b"),
        ([*paths, "--summary"], "--summary is of records by themselves"),
        ([*paths, "--figures", "x"], "--figures is of records by themselves"),
    ):
        assert report.main(["--compare", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and len(captured.err.splitlines()) == 1 and captured.out == ""
