"""Every kernel run and checked on the CPU: three orders of blocks, warps of 32 and 64; without a barrier, it fails."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from oracle import DTYPES, LAYOUTS, laid_out

from vpa import VocabShard, kernels, shard_vocab
from vpa.backends import head_launches, launches, norm_launches, numpy_, verify_launches
from vpa.backends.simt import DivergenceError, OutOfBoundsError, RaceError, RawModule, UninitializedError
from vpa.bench.families import make_shard
from vpa.contribution import Contribution
from vpa.requests import Requests
from vpa.scan import candidates_shape

ORDERS = ("forward", "reverse", ("shuffle", 7))
WARPS = (32, 64)

SHARDS = {
    "narrow": VocabShard.even(5, 1)[0],
    "one_iteration": VocabShard.even(3000, 1)[0],
    "several_iterations": VocabShard.even(40001, 1)[0],
    "two_ranges": shard_vocab(1010, 2, added_vocab_size=16)[0],
    "ranges_out_of_order": VocabShard(0, 1, 5000, 700, ((3, 250, 4000), (260, 1, 17), (300, 399, 100))),
    "empty": shard_vocab(65, 8)[6],
}


def run(launch: launches.Launch, warp_size: int = 32, order="forward", text: str | None = None) -> None:
    """Run a launch of a kernel, or of a changed text of it."""
    source = kernels.source(launch.kernel, **launch.defines)
    module = RawModule(text or source.text, name=f"{launch.kernel}.cu", warp_size=warp_size)
    kernel = module.get_function(launch.kernel)
    kernel((launch.grid,), (launch.block,), launch.args, block_order=order)


def numpy_candidates(host: np.ndarray, shard: VocabShard, layout: str) -> np.ndarray:
    shape = candidates_shape(len(host), layout, 8)
    candidates = np.empty(shape, np.uint64 if layout == "packed" else np.float32)
    numpy_.local_argmax_candidates(host, shard, layout, 8, candidates)
    return candidates


def scan_launch(
    shard: VocabShard, dtype: str, memory: str, layout: str, rows: int = 3, shift: int = 1
) -> tuple[launches.Launch, np.ndarray]:
    """A launch of the scan over read-only logits, and the candidates that it has to write, by the numpy backend."""
    host = make_shard("ties", 1, rows, shard, DTYPES[dtype])
    logits = laid_out(host, memory, shift=shift)
    logits.flags.writeable = False
    expected = numpy_candidates(host, shard, layout)
    out = np.zeros_like(expected)
    return launches.scan(logits, shard, layout, 8, out), expected


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard", SHARDS)
def test_scan(shard, dtype, warp_size):
    for memory, layout, order in itertools.product(LAYOUTS, ("packed", "pairs"), ORDERS):
        launch, expected = scan_launch(SHARDS[shard], dtype, memory, layout)
        run(launch, warp_size, order)
        assert launch.args[-1].tobytes() == expected.tobytes(), (memory, layout, order)


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard", SHARDS)
def test_scan_by_columns(shard, dtype, warp_size):
    for rows, memory, layout, shift in (
        (9, "column_major", "packed", 1),
        (17, "interleaved_rows", "pairs", 1),
        (24, "column_major", "packed", 0),
    ):
        launch, expected = scan_launch(SHARDS[shard], dtype, memory, layout, rows, shift)
        assert launch.kernel == "local_argmax_columns"
        assert launch.defines["wide"] == int(rows == 24)
        for order in ORDERS:
            run(launch, warp_size, order)
            assert launch.args[-1].tobytes() == expected.tobytes(), (memory, layout, order)


@pytest.mark.parametrize("rows", [1024, 4096])
def test_scan_of_many_rows_by_columns(rows):
    launch, expected = scan_launch(SHARDS["narrow"], "bfloat16", "column_major", "packed", rows, shift=0)
    assert launch.defines["wide"] and launch.defines["lanes"] > 1
    run(launch)
    assert launch.args[-1].tobytes() == expected.tobytes()


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_in_one_kernel(dtype, warp_size):
    for name, memory in itertools.product(SHARDS, ("contiguous", "odd_rows")):
        shard = SHARDS[name]
        host = make_shard("ties", 1, 3, shard, DTYPES[dtype])
        candidates = numpy_candidates(host, shard, "packed")
        ids, expected = np.zeros(3, np.int64), np.empty(3, np.int64)
        numpy_.pick_from_candidates(candidates, 3, expected)
        for order in ORDERS:
            run(launches.tokens(laid_out(host, memory), shard, ids), warp_size, order)
            assert np.array_equal(ids, expected), (name, memory, order)


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHARDS)
def test_scan_in_a_cluster(name, dtype, warp_size):
    shard = SHARDS[name]
    host = make_shard("ties", 1, 3, shard, DTYPES[dtype])
    expected = numpy_candidates(host, shard, "packed").max(axis=1, keepdims=True)
    for blocks, order in itertools.product((1, 3, 8), ORDERS):
        out = np.zeros((3, 1), np.uint64)
        run(launches.scan_by_rows(host, shard, "packed", blocks, out, cluster=True), warp_size, order)
        assert np.array_equal(out, expected), (blocks, order)


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("layout", ["packed", "pairs"])
def test_pick(layout, warp_size):
    shard = VocabShard.even(3000, 1)[0]
    for (rows, ranks), order in itertools.product(((1, 1), (3, 4), (9, 8)), ORDERS):
        shape = candidates_shape(rows * ranks, layout, 8)
        gathered = np.empty(shape, np.uint64 if layout == "packed" else np.float32)
        numpy_.local_argmax_candidates(
            make_shard("random", 2, rows * ranks, shard, DTYPES["float16"]), shard, layout, 8, gathered
        )
        gathered.flags.writeable = False
        ids, expected = np.zeros(rows, np.int64), np.empty(rows, np.int64)
        numpy_.pick_from_candidates(gathered, rows, expected)
        run(launches.pick(gathered, rows, ids), warp_size, order)
        assert np.array_equal(ids, expected), (rows, ranks, order)


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize("order", ORDERS)
def test_floors(order, warp_size):
    run(launches.Launch("empty", {}, 3, 32, ()), warp_size, order)
    data = np.random.default_rng(0).integers(0, 2**16, (500, 4), dtype=np.uint32)
    data.flags.writeable = False
    sink = np.zeros(2 * 64 // 32, np.uint32)
    args = (data, np.int64(len(data)), sink)
    run(launches.Launch("plain_read", {"threads": 64, "loads": 4}, 2, 64, args), warp_size, order)
    mixed = np.bitwise_xor.reduce(data, axis=1)
    read = np.minimum(np.arange(512), 499).reshape(2, 4, 64)  # block, load, thread; past the end the last one again
    of_thread = np.bitwise_or.reduce(mixed[read], axis=1)
    assert np.array_equal(sink, of_thread.reshape(4, 32).max(axis=1))


BARRIER = re.compile(r"__syncthreads\(\);|\bcluster_barrier\(\);|\bcluster_wait\(\);")


#: Barriers between instructions that only NVIDIA has, by kernel and number: racecheck of compute-sanitizer sees them.
NOT_ON_THE_CPU = {("head_candidates", 0)}


def barriers() -> list[tuple[str, int, str]]:
    """(kernel, number, spelling) of every barrier in a kernel's own file or a header that it is made of."""
    return [
        (name, number, spelling)
        for name in kernels.CATALOGUE
        for number, spelling in enumerate(BARRIER.findall(kernels.source(name).text))
        if (name, number) not in NOT_ON_THE_CPU
    ]


def cluster_launch() -> launches.Launch:
    host = make_shard("ties", 1, 2, SHARDS["one_iteration"], DTYPES["float32"])
    out = np.zeros((2, 1), np.uint64)
    return launches.scan_by_rows(host, SHARDS["one_iteration"], "packed", 4, out, cluster=True)


def head_launch() -> launches.Launch:
    hidden, weight = np.ones((3, 40), np.float32), np.ones((100, 40), np.float32)
    shard, out = VocabShard.even(100, 1)[0], np.zeros((3, 2), np.uint64)
    shape = head_launches.HeadShape(4, 1, 1, 2)
    return head_launches.head(hidden, weight, shard, None, out, None, shape, False)


def norm_launch() -> launches.Launch:
    rows = np.ones((2, 600), np.float32)
    return norm_launches.norm(rows[None], None, rows[0], 1e-6, "once", np.empty_like(rows), np.empty_like(rows))


def shared_norm_launch() -> launches.Launch:
    rows = np.ones((2, 3072), np.float32)
    outputs = np.empty_like(rows), np.empty_like(rows)
    return norm_launches.norm(rows[None], None, rows[0], 1e-6, "once", *outputs, clusters=True)


def finish_launch(form: str) -> launches.Launch:
    """The finish of a verification of two requests of three rows, over two ranks."""
    rows, numbers = np.zeros(6, np.int64), np.ones(2, np.int32)
    requests = Requests(2, rows, np.array([0, 3, 6], np.int32), rows + 5, numbers, numbers, rows[:2])
    contribution = Contribution(form, 2, 3, 3)
    lines, width = contribution.shape(6, 2)
    outputs = (np.zeros((2, 3), np.int64), np.zeros(2, np.int32), np.zeros(2, np.int32))
    return verify_launches.finish(np.ones((2 * lines, width), np.uint64), contribution, requests, 9, outputs)


#: For each kernel with a barrier, and its spelling, a launch that needs it.
NEEDS_BARRIERS = {
    ("local_argmax_candidates", "__syncthreads();"): lambda: scan_launch(
        SHARDS["one_iteration"], "bfloat16", "contiguous", "packed"
    )[0],
    ("local_argmax_candidates", "cluster_barrier();"): cluster_launch,
    ("local_argmax_columns", "__syncthreads();"): lambda: scan_launch(  # a split with columns of three ranges
        SHARDS["ranges_out_of_order"], "float16", "column_major", "packed", rows=9
    )[0],
    ("head_candidates", "__syncthreads();"): head_launch,
    ("residual_rmsnorm", "__syncthreads();"): norm_launch,
    ("residual_rmsnorm", "cluster_barrier();"): shared_norm_launch,
    ("residual_rmsnorm", "cluster_wait();"): shared_norm_launch,
    ("greedy_verify", "__syncthreads();"): lambda: finish_launch("candidate"),
}


def test_every_barrier_is_removed_once():
    assert {(name, spelling) for name, _, spelling in barriers()} == set(NEEDS_BARRIERS)
    for name in kernels.CATALOGUE:
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", kernels.source(name).text, flags=re.DOTALL)
        spelled = re.findall(r"__sync\w*[^;]*;?|\bbar(?:rier(?!\.cluster))?\.\w[^;]*;?", code)
        assert all(BARRIER.fullmatch(call) for call in spelled), spelled


@pytest.mark.parametrize("warp_size", WARPS)
@pytest.mark.parametrize(("name", "number", "spelling"), barriers())
def test_a_kernel_without_one_of_its_barriers_is_found_out(name, number, spelling, warp_size):
    launch = NEEDS_BARRIERS[name, spelling]()
    text = kernels.source(name, **launch.defines).text
    run(launch, warp_size, text=text)
    low, high = [found.span() for found in BARRIER.finditer(text)][number]
    with pytest.raises((RaceError, UninitializedError, DivergenceError)):
        run(launch, warp_size, text=text[:low] + ";" + text[high:])


def test_a_read_of_padding_is_found_out():
    """The scan of a shard whose padding lies outside the array that it is given."""
    shard = VocabShard(0, 1, 900, 900, ((0, 900, 0),))
    launch, _ = scan_launch(shard, "float32", "contiguous", "packed")
    text = kernels.source(launch.kernel, **launch.defines).text
    wrong = text.replace("ranges.count[r]) - skip", "ranges.count[r]) - skip + 1")
    assert wrong != text
    with pytest.raises(OutOfBoundsError):
        run(launch, text=wrong)
