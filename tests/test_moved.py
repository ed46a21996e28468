"""Two records against each other: what moved beyond noise is flagged, and nothing else."""

from __future__ import annotations

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


@pytest.mark.parametrize("key", ["rows", "mode", "cache", "gather", "backend", "tp", "part", "arm"])
def test_rows_of_different_things_are_not_compared(key):
    before = noisy(1, "fused", 10.0, 0)
    found, *only = moved.changes([before], [{**before, key: 9 if key in ("rows", "tp") else "another"}])
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


def test_other_devices_are_told(tmp_path, capsys):
    rank = {**record.environment()["ranks"][0], "gpu": {"name": "imagined"}}
    paths = [
        record_of(tmp_path / "a.json", [noisy(1, "fused", 10.0, 0)]),
        record_of(tmp_path / "b.json", [noisy(1, "fused", 10.0, 0)], ranks=[rank]),
    ]
    assert report.main(["--compare", *paths]) == 0
    assert "The devices differ" in capsys.readouterr().out


def test_what_cannot_be_compared(tmp_path, capsys):
    paths = [record_of(tmp_path / f"{arm}.json", [noisy(1, arm, 10.0, 0)]) for arm in ("a", "b")]
    for arguments, message in (
        (paths[:1], "takes two records, before and after; got 1"),
        ([*paths, paths[0]], "got 3"),
        (paths, "no times of the same thing; they are of headline and headline"),
        ([paths[0], "/no/such.json"], "cannot read record /no/such.json"),
    ):
        assert report.main(["--compare", *arguments]) == 2
        assert message in capsys.readouterr().err
