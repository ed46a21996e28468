"""The variants of each kernel that launches ask for, over dtypes, layouts, walks, widths and numbers of ranges."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from vpa import VocabShard
from vpa.backends import head_launches, launches, norm_launches, verify_launches
from vpa.contribution import Contribution
from vpa.order import LOGITS_DTYPES
from vpa.requests import Requests
from vpa.transform import Transform

Variant = tuple[str, tuple[tuple[str, int], ...]]


@functools.cache
def variants() -> tuple[Variant, ...]:
    """(kernel, defines) of every kernel, each once. A change of the launch table is followed by itself."""
    found: dict[Variant, None] = {}
    for launch in [*_scans(), *_picks(), *_heads(), *_norms(), *_verifications(), *_floors()]:
        found[(launch.kernel, tuple(sorted(launch.defines.items())))] = None
    return tuple(found)


def takes_cluster(variant: Variant) -> bool:
    """Whether a variant is made for clusters alone, which not every GPU has."""
    return ("cluster", 1) in variant[1]


def takes_nvidia(variant: Variant) -> bool:
    """Whether a variant is made for instructions that only NVIDIA has."""
    return takes_cluster(variant) or dict(variant[1]).get("tensor", 0) == 1


def name_of(variant: Variant) -> str:
    """A variant as a test's name."""
    kernel, defines = variant
    return "-".join([kernel, *(f"{name}{value}" for name, value in defines)])


def _scans():
    shards = [VocabShard.even(width, 1)[0] for width in (500, 32768, 262144)]
    shards.append(VocabShard(0, 1, 1026, 544, ((0, 512, 0), (512, 16, 1010))))
    for dtype in LOGITS_DTYPES.values():
        for shard in shards:
            logits = np.zeros((1, shard.width), dtype)
            strided = np.zeros((1, 2 * shard.width), dtype)[:, ::2]
            for view, layout in itertools.product((logits, strided), ("packed", "pairs")):
                yield launches.scan(view, shard, layout, 8, None)
            yield launches.tokens(logits, shard, None)
        yield launches.scan_by_rows(np.empty((1, 32768), dtype), shards[1], "packed", 8, None, cluster=True)
        for shard, rows, layout in ((shards[1], 8, "packed"), (shards[1], 9, "pairs"), (shards[-1], 8, "pairs")):
            yield launches.scan(np.empty((rows, shard.width), dtype, order="F"), shard, layout, 8, None)
        yield launches.scan(np.empty((1024, 500), dtype, order="F"), shards[0], "packed", 8, None)
        yield launches.scan(np.zeros((1, 32768), dtype), shards[1], "packed", 8, None, Transform(scale=-0.5))
        capped = Transform(scale=2, soft_cap=30)
        for width, shard in ((500, shards[0]), (262144, shards[2])):  # held in registers, and walked
            yield launches.scan(np.zeros((1, width), dtype), shard, "packed", 8, None, capped)
        yield launches.tokens(np.zeros((1, 32768), dtype), shards[1], None, capped)
        yield launches.scan(np.zeros((1, 65536), dtype)[:, ::2], shards[1], "packed", 8, None, capped)
        yield launches.scan(np.empty((9, 32768), dtype, order="F"), shards[1], "packed", 8, None, capped)


def _picks():
    for rows, shape, dtype in ((1, (4, 8), "u8"), (4, (16, 16), "f4"), (2, (2, 3), "u8"), (4, (4 * 64, 16), "u8")):
        yield launches.pick(np.zeros(shape, dtype), rows, None)

    yield launches.pick(np.zeros((1, 264), "u8"), 1, np.zeros(1, "u8"))


def _heads():
    shards = [VocabShard.even(500, 1)[0], VocabShard(0, 1, 1026, 544, ((0, 512, 0), (512, 16, 1010)))]
    capped = Transform(scale=2, soft_cap=30)
    for dtype in LOGITS_DTYPES.values():
        for shard, rows, bias, transform in (
            (shards[0], 1, None, None),
            (shards[0], 8, None, None),
            (shards[1], 16, np.zeros(544, dtype), capped),
        ):
            hidden, weight = np.zeros((rows, 7168), dtype), np.zeros((shard.width, 7168), dtype)
            for tensor in {False, dtype.itemsize == 2}:
                shape = head_launches.head_shape(rows, 7168, shard.num_valid, tensor, 132)
                yield head_launches.head(hidden, weight, shard, bias, None, transform, shape, tensor)
        yield head_launches.transform_logits(np.zeros((2, 500), dtype), None, capped)


def _norms():
    for dtype in LOGITS_DTYPES.values():
        for ranks, hidden, rounding, weight_dtype, residual in (
            (4, 7168, "once", dtype, True),
            (1, 769, "unrounded_residual", np.float32, False),
            (8, 16384, "unrounded_residual", np.float32, True),
            (17, 96, "gemma", dtype, True),
        ):
            rows = np.empty((2, hidden), dtype)
            weight, held = np.empty(hidden, weight_dtype), rows if residual else None
            arrays = (np.empty((ranks, 2, hidden), dtype), held, weight, 0, rounding, rows, rows)
            for clusters in (False, True):
                yield norm_launches.norm(*arrays, clusters=clusters)
    yield norm_launches.norm(np.empty((4, 2, hidden), dtype), None, None, 0, "once", None, rows, clusters=True)  # a sum
    yield norm_launches.norm(np.empty((1, 2, hidden), dtype), None, weight, 0, "once", rows, None)  # a norm


def _verifications():
    shards = (VocabShard.even(200064, 4)[1], VocabShard(0, 1, 1026, 544, ((0, 512, 0), (512, 16, 1010))))
    candidates, blocks = Contribution("candidate", 3, 13, 13), Contribution("blocks", 3, 7, 50)
    offsets = np.array([0, 4], np.int32)
    for dtype in LOGITS_DTYPES.values():
        for shard, nan in zip(shards, ("ignore", "first"), strict=True):
            logits = np.empty((4, shard.width), dtype)
            yield verify_launches.scan(logits, shard, blocks, nan, offsets, None)
            yield verify_launches.scan(logits, shard, candidates, "ignore", offsets, None)
        strided = np.empty((4, 2 * shards[0].width), dtype)[:, ::2]
        yield verify_launches.scan(strided, shards[0], blocks, "ignore", offsets, None)
        by_columns = np.empty((9, shards[0].width), dtype, order="F")
        yield verify_launches.scan(by_columns, shards[0], candidates, "ignore", offsets, None)
    alone = np.empty((1, shards[0].width), np.float16)
    yield verify_launches.scan(alone, shards[0], Contribution("blocks", 0, 7, 50), "first", offsets, None)
    for contribution, synthetic in ((candidates, False), (blocks, True)):
        yield _finish(contribution, synthetic)
    yield _finish(Contribution("blocks", 128, 25, 196), False)
    yield _finish(Contribution("candidate", 0, 64, 64), True)
    yield _finish(Contribution("blocks", 0, 7, 50), False)


def _finish(contribution: Contribution, synthetic: bool) -> launches.Launch:
    count = contribution.num_draft_tokens
    rows, numbers = np.zeros(count + 1, np.int64), np.zeros(1, np.int32)
    acceptance = np.ones(count, np.float32) if synthetic else None
    offsets = np.array([0, count + 1], np.int32)
    requests = Requests(count, rows, offsets, rows, numbers, numbers, np.zeros(1, np.int64), acceptance)
    lines, width = contribution.shape(count + 1, 1)
    outputs = (np.empty((1, count + 1), np.int64), numbers, numbers)
    return verify_launches.finish(np.empty((4 * lines, width), np.uint64), contribution, requests, 1000, outputs)


def _floors():
    yield launches.Launch("empty", {}, 1, 32, ())
    for loads in (1, 4):
        yield launches.Launch("plain_read", {"threads": 256, "loads": loads}, 1, 256, ())
        moves = {"reads": 5, "writes": 2, "threads": 256, "loads": loads // 2 or 1}
        yield launches.Launch("plain_move", moves, 1, 256, ())
