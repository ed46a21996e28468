"""Jobs of ranks with GPUs: NCCL and host memory, captured and eager, and how each ends when a rank fails."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import pytest

from vpa import predict, record

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

HERE = Path(__file__).resolve().parent.parent

START = """
import sys, time, numpy as np, cupy, vpa
comm = vpa.comm.from_mpi(sys.argv[1], timeout=5)
shard = vpa.VocabShard.even(1001, comm.size)[comm.rank]
def logits(rows):
    return cupy.zeros((rows, shard.width), cupy.float32)
"""


def nccl_for(count: int) -> str:
    """Why ``count`` ranks cannot join through NCCL here; empty if they can."""
    import cupy

    from vpa.comm.device import SHARED_GPU_NCCL, nccl_version

    if cupy.cuda.runtime.getDeviceCount() >= count:
        return ""
    if (nccl_version() or 0) >= SHARED_GPU_NCCL and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    return f"{count} ranks need as many GPUs, or NCCL 2.30.3 with NCCL_MULTI_RANK_GPU_ENABLE=1"


def need_nccl(count: int) -> None:
    if reason := nccl_for(count):
        pytest.skip(reason)


@pytest.mark.parametrize("backend", ["raw", "numba"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_nccl_ranks_agree_with_the_whole_product(ranks, count, backend):
    need_nccl(count)
    done = ranks(count, [HERE / "ranks" / "top_tokens.py", "nccl", backend], timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"agree: {count} rank" in done.stdout and "NCCL" in done.stdout


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gpu_arrays_pass_through_host_memory(ranks, count):
    done = ranks(count, [HERE / "ranks" / "top_tokens.py", "mpi", "raw"], timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["raw", "numba"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_verification_over_nccl_ranks(ranks, count, backend):
    need_nccl(count)
    done = ranks(count, [HERE / "ranks" / "verify.py", "nccl", backend], timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"agree: {count} rank" in done.stdout and "NCCL" in done.stdout


@pytest.mark.parametrize("count", [1, 2])
def test_verification_of_gpu_arrays_through_host_memory(ranks, count):
    done = ranks(count, [HERE / "ranks" / "verify.py", "mpi", "raw"], timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_copy_to_the_host_waits_for_its_producer(ranks):
    """A candidate from a long kernel on a stream of its own, handed to the host path from another: 1000 times."""
    body = """
    slow = cupy.RawKernel(r'''extern "C" __global__ void slow(unsigned long long* out, unsigned long long value) {
        const long long start = clock64();
        while (clock64() - start < 60000) { }
        out[threadIdx.x] = value + threadIdx.x;
    }''', "slow")
    stream = cupy.cuda.Stream(non_blocking=True)
    send, recv = cupy.zeros((4, 8), np.uint64), cupy.zeros((4 * comm.size, 8), np.uint64)
    cupy.cuda.runtime.deviceSynchronize()
    for i in range(1000):
        with stream:
            slow((1,), (32,), (send, np.uint64(1000 * i + 100 * comm.rank)))
        comm.all_gather(send, recv)
        expected = np.concatenate([1000 * i + 100 * r + np.arange(32) for r in range(comm.size)])
        assert np.array_equal(recv.get().ravel(), expected), i
    comm.close()
    """
    done = ranks(2, ["-c", START + textwrap.dedent(body), "mpi"], timeout=120)
    assert done.returncode == 0, done.stderr


def test_capturing_over_host_memory_is_refused_on_all_ranks(ranks):
    body = """
    try:
        vpa.TopTokens(shard, comm, max_rows=3, dtype="float32").capture(logits(3))
    except ValueError as error:
        assert "transport 'mpi' cannot be captured; use vpa.comm.from_mpi('nccl')" in str(error), error
        print("refused")
    comm.close()
    """
    done = ranks(2, ["-c", START + textwrap.dedent(body), "mpi"], timeout=60)
    assert done.returncode == 0 and done.stdout.count("refused") == 2, done.stderr


def test_numpy_arrays_are_refused_by_nccl_on_all_ranks(ranks):
    body = """
    try:
        vpa.get_top_tokens(np.zeros((3, shard.width), np.float32), shard, comm)
    except TypeError as error:
        assert "carries cupy arrays; got a numpy array" in str(error), error
        print("refused")
    comm.close()
    """
    done = ranks(1, ["-c", START + textwrap.dedent(body), "nccl"], timeout=60)
    assert done.returncode == 0 and done.stdout.count("refused") == 1, done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "top(logits(3 if comm.rank else 2))",
        "captured = top.capture(logits(2)); [captured.replay() for _ in range(2 - comm.rank)]",
        "top(logits(2)); comm.rank or top(logits(2))",
    ],
    ids=["another_batch_size", "a_replay_less", "a_call_less"],
)
def test_nccl_ranks_that_part_are_ended_by_the_time_limit(ranks, body):
    need_nccl(2)
    start = time.monotonic()
    program = START + "top = vpa.TopTokens(shard, comm, max_rows=4, dtype='float32')\n" + body + "\ntime.sleep(60)\n"
    done = ranks(2, ["-c", program, "nccl"], timeout=50)
    assert done.returncode != 0 and time.monotonic() - start < 40
    assert "waited 5 s for a collective on the GPU" in done.stderr
    assert "The NCCL communicator is aborted and the job ends" in done.stderr


@pytest.mark.parametrize("end", ["comm.close()", "sys.exit(0)", "captured.close()"])
def test_jobs_with_captured_collectives_end_at_once(ranks, end):
    """With the communicator closed, with nothing closed, and with the graph alone closed."""
    need_nccl(2)
    body = """
    captured = vpa.TopTokens(shard, comm, max_rows=4, dtype="float32").capture(logits(4))
    assert captured.replay().tolist() == [0] * 4
    """
    start = time.monotonic()
    done = ranks(2, ["-c", START + textwrap.dedent(body) + end, "nccl"], timeout=50)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 30


def test_nccl_that_does_not_start_on_rank_0_is_the_same_error_on_all(ranks):
    need_nccl(2)
    body = """
import vpa
from cupy.cuda import nccl
from mpi4py import MPI
def fail():
    raise OSError("no network interface")
if MPI.COMM_WORLD.rank == 0:
    nccl.get_unique_id = fail
try:
    vpa.comm.from_mpi("nccl", timeout=20)
except RuntimeError as error:
    print(error)
"""
    done = ranks(2, ["-c", body], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("NCCL did not start on rank 0: OSError: no network interface") == 2


def test_the_break_even_study_over_nccl(ranks, tmp_path):
    need_nccl(2)
    path = tmp_path / "out.json"
    small = ["--rows", "1,64,256", "--shape", "512x40000", "--json", path]
    done = ranks(2, ["-m", "vpa.run", "break-even", "--comm", "nccl", *small], timeout=200)
    assert done.returncode == 0, done.stderr
    timed = [row for row in record.read(path)["rows"] if row["samples_us"]]
    assert {(row["mode"], row["gather"]) for row in timed} == {("captured", "included"), ("eager", "included")}
    assert not any(row["wrong"] for row in timed)
    assert {"floor: gather of logits", "floor: gather of candidates"} <= {row["arm"] for row in timed}
    assert [predict.main([str(path), "--mode", mode, "--tp", "2,16"]) for mode in ("captured", "eager")] == [0, 0]


def test_a_switch_is_calibrated_and_consulted_over_nccl(ranks):
    """Captured calls have entries of their own; a capture goes the way that its entry says, warmed up by a call."""
    need_nccl(2)
    body = """
    import dataclasses, cupy, numpy as np, vpa
    comm = vpa.comm.from_mpi("nccl", timeout=60)
    table = vpa.calibrate(comm, [(64, 5000)], rows=(1, 8))
    assert [entry.captured for entry in table.entries] == [False, True]
    assert all(one == table for one in comm.exchange(table))
    head = vpa.ParallelLMHead.seeded(0, vpa.shard_vocab(5000, 2, pad_to=8), comm.rank, hidden_size=64, library=cupy)
    hidden = cupy.asarray(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32))
    expected = vpa.LogitsProcessor(comm).get_top_tokens(head, hidden)
    for called, captured in ((1, None), (None, 1)):
        entries = [dataclasses.replace(one, pays_from=captured if one.captured else called) for one in table.entries]
        processor = vpa.LogitsProcessor(comm, mode="auto", switch=dataclasses.replace(table, entries=tuple(entries)))
        kept = []
        graph = vpa.CapturedTokens(comm, lambda: kept.append(processor.get_top_tokens(head, hidden)), (), None)
        graph.replay()
        assert cupy.array_equal(kept[-1], expected)
        graph.close()
    print("alike")
    comm.close()
    """
    done = ranks(2, ["-c", textwrap.dedent(body)], timeout=200)
    assert done.returncode == 0 and done.stdout.count("alike") == 2, done.stderr
