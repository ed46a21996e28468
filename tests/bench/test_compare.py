"""The comparison: its points, the layouts of memory that it makes, and an arm of one's own."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DTYPES, full_argmax

import vpa
from vpa import VocabShard
from vpa.bench import arms, compare, experiment, settings
from vpa.bench.job import Job
from vpa.bench.settings import Settings

SETTINGS = settings.settle("compare", settings.load("compare")[1], {}, gpu=True)


def small(**more) -> Settings:
    return settings.settle("compare", settings.load("compare")[1], {"rows": [8], "vocab": 500, **more}, gpu=False)


def job(tp: int = 2, vocab: int = 500) -> Job:
    return Job(vpa.comm.solo(), VocabShard.even(vocab, tp), np, "numpy")


def test_the_points_on_a_gpu():
    found = list(compare.points_of(SETTINGS, gpu=True, head=False))
    assert [(family, dtype) for family, dtype, _ in found[:3]] == [
        ("random", "bfloat16"), ("random", "float16"), ("random", "float32"),
    ]  # fmt: skip
    main = found[0][2]
    assert len(set(main)) == len(main) == 13 + 2 * 4 + 4 + 5 + 3
    assert sum(len(points) for _, _, points in found) == len(main) + 2 * 4 + 6 * 2
    assert {point.mode for point in main} == {"captured", "eager", "host"}
    assert {family for family, *_ in compare.points_of(SETTINGS, gpu=True, head=True)} == {"random"}


def test_samples_of_large_batches_are_smaller():
    at = compare.Point
    assert compare._samples(SETTINGS, at(512, "captured"), 1) == (20, 20)
    assert compare._samples(SETTINGS, at(1024, "captured"), 1) == (5, 10)
    assert compare._samples(SETTINGS, at(8, "captured", cache="cold"), 350) == (350, 10)
    assert compare._samples(SETTINGS, at(8, "host"), 1) == (3, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_hold_the_same_logits(dtype):
    logits = np.arange(-6, 6).reshape(3, 4).astype(DTYPES[dtype])
    size = logits.itemsize
    strides = {name: compare.laid_out(logits, name).strides for name in compare.STRIDES}
    gap = (4 + compare.GAP) * size
    assert strides == {"contiguous": (4 * size, size), "column-major": (size, 3 * size), "row gap": (gap, size)}
    for name in compare.STRIDES:
        laid = compare.laid_out(logits, name)
        assert laid.dtype == logits.dtype and np.array_equal(laid, logits)
    gapped = compare.laid_out(logits, "row gap")
    memory = gapped.base
    while memory.base is not None:
        memory = memory.base
    assert (gapped.__array_interface__["data"][0] - memory.__array_interface__["data"][0]) == size
    assert np.isnan(memory.view(logits.dtype).astype(np.float32)).sum() == memory.size - logits.size


@pytest.mark.parametrize(
    "shard", [VocabShard.even(70, 3)[1], VocabShard(0, 1, 70, 40, ((3, 10, 50), (20, 15, 2)))], ids=["even", "ranges"]
)
def test_the_oracle_of_one_shard(shard):
    logits = np.random.default_rng(1).integers(-3, 3, (200, shard.width)).astype(np.float32)
    rest = [(first, count) for _, count, first in shard.ranges]
    missing = sorted(set(range(70)) - {token for first, count in rest for token in range(first, first + count)})
    other = VocabShard(0, 1, 70, len(missing), tuple((i, 1, token) for i, token in enumerate(missing)))
    ids = shard.ids()
    whole = np.full((200, 70), -np.inf, np.float32)
    whole[:, ids[ids >= 0]] = logits[:, ids >= 0]
    made = Job(vpa.comm.solo(), (shard, other), np, "numpy")
    assert np.array_equal(made.shard_argmax(logits), full_argmax(whole))


def test_an_arm_is_added_in_one_line(monkeypatch):
    from vpa.backends import numpy_

    monkeypatch.setitem(
        compare.ARMS["numpy"],
        "numpy (mine)",
        lambda job, logits, layout: arms.fused(numpy_, layout, "numpy", lambda rows: rows + 1, "numpy (mine)"),
    )
    rows = list(compare.run(small(), job(), None, lambda doing: None))
    parts = {row["part"] for row in rows if row["arm"] == "numpy (mine)"}
    assert parts == {"pair", "local", "finish"} and not any(row["wrong"] for row in rows)


def argmax_of_numpy(**more) -> arms.Arm:
    def local(logits, shard, out):
        out[...] = logits.astype(np.float32).argmax(axis=1)

    return arms.Arm("a peer", arms._columns, local, None, "numpy", one_range=True, **more)


def test_a_peer_may_be_wrong_or_fail_and_ours_may_not(monkeypatch):
    def peer(**faulty):
        return lambda *_: arms.Arm(**{**vars(argmax_of_numpy()), **faulty})

    def rows_of(make) -> list[experiment.Row]:
        monkeypatch.setitem(compare.ARMS["numpy"], "a peer", make)
        rows = list(compare.run(small(), job(), None, lambda doing: None))
        return [row for row in rows if row["arm"] == "a peer"]

    def fails(*arguments):
        raise NotImplementedError("not for bf16\nat all")

    def missing(*arguments):
        raise ImportError("No module named 'peer'")

    right = rows_of(lambda *_: argmax_of_numpy())
    assert {(row["part"], row["wrong"]) for row in right} == {("local", 0)}
    wrong = rows_of(peer(local=lambda logits, shard, out: out.fill(-1), external=True))
    assert {(row["part"], row["wrong"], row["external"]) for row in wrong} == {("local", 8, True)}
    failed = rows_of(peer(local=fails, external=True))
    assert {(row["skipped"], row["wrong"]) for row in failed} == {("NotImplementedError: not for bf16", None)}
    assert {row["skipped"] for row in rows_of(missing)} == {"No module named 'peer'"}
    assert {row["skipped"] for row in rows_of(lambda *_: "no clusters here")} == {"no clusters here"}
    with pytest.raises(NotImplementedError):
        rows_of(peer(local=fails))
