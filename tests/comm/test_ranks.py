"""Jobs of several ranks over host memory: they agree, they all raise when one is wrong, and none hangs."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

HERE = Path(__file__).resolve().parent.parent

START = """
import sys, time, numpy as np, ml_dtypes, vpa
comm = vpa.comm.from_mpi("mpi", timeout=4)
shard = vpa.VocabShard.even(1001, comm.size)[comm.rank]
def logits(rows, dtype=np.float32):
    return np.zeros((rows, shard.width), dtype)
def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
def report(text):
    for rank, line in enumerate(comm.exchange(text)):
        if comm.rank == 0:
            print(rank, line)
"""


def program(body: str) -> list[str]:
    return ["-c", START + textwrap.dedent(body)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_real_ranks_agree_with_the_whole_product(ranks, count):
    done = ranks(count, [HERE / "ranks" / "top_tokens.py", "mpi", "numpy"])
    assert done.returncode == 0, done.stderr
    assert f"agree: {count} rank" in done.stdout


@pytest.mark.parametrize(
    ("call", "wrong", "others"),
    [
        (
            "vpa.get_top_tokens(logits(5 if rank else 4), shard, comm)",
            "different rows: rank 0 has 4, rank 1 has 5",
            None,
        ),
        (
            "vpa.get_top_tokens(logits(4, np.float16 if rank else np.float32), shard, comm)",
            "different dtype: rank 0 has float32, rank 1 has float16",
            None,
        ),
        (
            "vpa.get_top_tokens(logits(4), shard, comm, layout='pairs' if rank else 'packed')",
            "different layout: rank 0 has packed, rank 1 has pairs",
            None,
        ),
        (
            "vpa.get_top_tokens(logits(4)[:, 1:] if rank else logits(4), shard, comm)",
            "ValueError: logits have shape",
            "ValueError: rank 1 raised ValueError: logits have shape",
        ),
        (
            "vpa.get_top_tokens(logits(4, np.float64) if rank else logits(4), shard, comm)",
            "TypeError: logits are float64",
            "TypeError: rank 1 raised TypeError: logits are float64",
        ),
        (
            "vpa.get_top_tokens('logits' if rank else logits(4), shard, comm)",
            "TypeError: logits is a builtins.str",
            "TypeError: rank 1 raised TypeError: logits is a builtins.str",
        ),
        (
            "vpa.get_top_tokens(np.zeros((4, 501), np.float32), vpa.VocabShard.even(1001, 2)[0], comm)",
            "ValueError: the shard is rank 0 of 2, the communicator rank 1 of 2",
            "ValueError: rank 1 raised ValueError",
        ),
        (
            "vpa.TopTokens(shard, comm, max_rows=5 if rank else 4, dtype='float32')",
            "different max_rows: rank 0 has 4, rank 1 has 5",
            None,
        ),
        (
            "vpa.TopTokens(shard, comm, max_rows=4, dtype='int8' if rank else 'float32')",
            "TypeError: logits are int8",
            "TypeError: rank 1 raised TypeError: logits are int8",
        ),
        (
            "vpa.TopTokens(shard, comm, max_rows=9, dtype='float32')(logits(5 if rank else 4))",
            "different rows: rank 0 has 4, rank 1 has 5",
            None,
        ),
        (
            "vpa.TopTokens(shard, comm, max_rows=4, dtype='float32')(logits(5 if rank else 4))",
            "ValueError: got 5 rows",
            "ValueError: rank 1 raised ValueError: got 5 rows",
        ),
        (
            "vpa.TopTokens(shard, comm, max_rows=4, dtype='float32').capture(logits(4))",
            "ValueError: a CUDA graph is captured from GPU arrays; got a NumPy array",
            None,
        ),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all_and_calls_go_on(ranks, call, wrong, others):
    done = ranks(
        2,
        program(f"""
        rank = comm.rank
        report(raised(lambda: {call}))
        report(vpa.get_top_tokens(logits(3), shard, comm).tolist())
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (others or wrong) in lines[0] and wrong in lines[1], done.stdout
    assert lines[2:] == ["0 [0, 0, 0]", "1 [0, 0, 0]"]


def test_transports_that_differ_are_refused_on_all(ranks):
    done = ranks(
        2,
        program("""
        report(raised(lambda: vpa.comm.from_mpi("auto" if comm.rank else "mpi")))
        report(raised(lambda: vpa.comm.from_mpi("tcp")))
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks ask for different transports: 'auto', 'mpi'") == 2
    assert done.stdout.count("'tcp'; auto, nccl, mpi are accepted") == 2


def test_nccl_without_a_gpu_is_refused_in_plain_words(ranks):
    done = ranks(2, ["-c", "import vpa; vpa.comm.from_mpi('nccl')"], timeout=30, env=without_gpus())
    assert done.returncode != 0
    assert "transport 'nccl' cannot be used: rank 0 on" in done.stderr and "has no GPU" in done.stderr


def without_gpus() -> dict[str, str]:
    import os

    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("zero", "one", "told"),
    [
        (
            "vpa.TopTokens(shard, comm, max_rows=3, dtype='float32')",
            "vpa.get_top_tokens(logits(3), shard, comm)",
            "different function: rank 0 has TopTokens, rank 1 has get_top_tokens",
        ),
        (
            "top(logits(3))",
            "vpa.get_top_tokens(logits(3), shard, comm)",
            "rank 0 has TopTokens(), rank 1 has get_top_tokens",
        ),
        ("gather(8)", "gather(4)", "rank 0 all_gather of 64 bytes of uint64, rank 1 all_gather of 32 bytes of uint64"),
        ("gather(8)", "comm.exchange('x' * 5000)", "rank 0 all_gather of 64 bytes of uint64, rank 1 exchange"),
        (
            "comm.exchange('mine')",
            "vpa.get_top_tokens(logits(3), shard, comm)",
            "ranks make different calls: rank 0 exchange, rank 1 check of arguments",
        ),
        (
            "comm.exchange_as('sizes', 1)",
            "comm.exchange_as('names', 2)",
            "ranks make different calls: rank 0 sizes, rank 1 names",
        ),
        ("gather(8)", "comm.barrier()", "rank 0 all_gather of 64 bytes of uint64, rank 1 barrier"),
        ("gather(900)", "gather(901)", "all_gather of 7200 bytes of uint64, rank 1 all_gather of 7208 bytes of uint64"),
    ],
)
def test_ranks_that_make_different_calls_are_told_so_and_go_on(ranks, zero, one, told):
    done = ranks(
        2,
        program(f"""
        top = vpa.TopTokens(shard, comm, max_rows=3, dtype="float32")
        def gather(count):
            send, recv = np.full(count, comm.rank, np.uint64), np.empty(2 * count, np.uint64)
            comm.all_gather(send, recv)
        report(raised(lambda: {zero}) if comm.rank == 0 else raised(lambda: {one}))
        report(top(logits(3)).tolist() + vpa.get_top_tokens(logits(2), shard, comm).tolist())
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert told in lines[0] and told in lines[1], done.stdout
    assert lines[2:] == ["0 [0, 0, 0, 0, 0]", "1 [0, 0, 0, 0, 0]"]


def test_a_failure_between_scan_and_gather_poisons_no_later_call(ranks):
    done = ranks(
        2,
        program("""
        from vpa.backends import numpy_
        right = numpy_.local_argmax_candidates
        def fail(*arguments):
            raise MemoryError("no memory for it")
        if comm.rank == 1:
            numpy_.local_argmax_candidates = fail
        first = raised(lambda: vpa.get_top_tokens(logits(3), shard, comm))
        numpy_.local_argmax_candidates = right
        second = raised(lambda: vpa.get_top_tokens(logits(3), shard, comm)) if comm.rank == 1 else "none"
        report(first + " | " + second)
        report(vpa.get_top_tokens(logits(3), shard, comm).tolist())
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "rank 0 all_gather of 192 bytes of uint64, rank 1 check of arguments" in lines[0]
    assert "MemoryError: no memory for it" in lines[1] and "rank 0 all_gather of 192 bytes of uint64" in lines[1]
    assert lines[2:] == ["0 [0, 0, 0]", "1 [0, 0, 0]"]


def test_a_communicator_that_timed_out_or_was_closed_says_so(ranks):
    done = ranks(
        2,
        program("""
        other = vpa.comm.from_mpi("mpi", timeout=1)
        if comm.rank == 0:
            print(raised(other.barrier))
            print(raised(other.barrier), flush=True)
        else:
            time.sleep(3)
        third = vpa.comm.from_mpi("mpi")
        third.close()
        for use in (third.barrier, lambda: third.exchange(1), third.__enter__):
            report(raised(use))
        """),
        timeout=30,
    )
    assert "CommTimeout: rank 0 waited 1 s for barrier" in done.stdout
    assert "this communicator is lost: barrier timed out; make another" in done.stdout
    assert done.stdout.count("this communicator is closed; make another with vpa.comm.from_mpi()") == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("vpa.comm.from_mpi('mpi', timeout=0)", "timeout is 0; seconds, more than 0"),
        ("vpa.comm.from_mpi('mpi', timeout='5')", "timeout is '5'"),
        ("vpa.comm.from_mpi('mpi', timeout=float('nan'))", "timeout is nan"),
        ("vpa.comm.from_mpi('mpi', mpi_comm=3)", "mpi_comm is 3; an mpi4py.MPI.Intracomm"),
        ("vpa.comm.from_mpi('mpi', mpi_comm=MPI.COMM_NULL)", "mpi_comm is <mpi4py.MPI.Comm"),
        ("vpa.comm.from_mpi(MPI.COMM_WORLD)", "transport is <mpi4py.MPI.Intracomm"),
        ("vpa.get_top_tokens(logits(3), shard, MPI.COMM_WORLD)", "comm is a Intracomm without all_gather, close"),
        ("vpa.get_top_tokens(logits(3), shard, None)", "comm is a NoneType without rank, size"),
    ],
)
def test_communicators_that_cannot_be_are_refused(ranks, call, message):
    done = ranks(1, program(f"from mpi4py import MPI\nprint(raised(lambda: {call}))\ncomm.close()"), timeout=30)
    assert done.returncode == 0 and message in done.stdout, done.stdout + done.stderr


def test_a_part_of_the_job_takes_gpus_by_the_rank_on_the_host(monkeypatch):
    from vpa.comm.device import launched_local_rank

    for name in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "PALS_LOCAL_RANKID"):
        monkeypatch.delenv(name, raising=False)
    assert launched_local_rank(1) == 1
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert launched_local_rank(1) == 3


@pytest.mark.parametrize(
    "body",
    [
        "if comm.rank == 2: time.sleep(60)\nvpa.get_top_tokens(logits(3), shard, comm)",
        "top = vpa.TopTokens(shard, comm, max_rows=3, dtype='float32')\n"
        "if comm.rank != 2: top(logits(3))\ntime.sleep(60)",
        "if comm.rank == 2: raise KeyError('lost')\nvpa.get_top_tokens(logits(3), shard, comm)",
        "if comm.rank == 2: sys.exit(3)\ncomm.barrier()",
        "if comm.rank == 2: import os, signal; os.kill(os.getpid(), signal.SIGKILL)\ncomm.barrier()",
    ],
    ids=["late", "other_call", "exception", "exit", "killed"],
)
def test_a_rank_that_does_not_come_ends_the_job_within_the_time_limit(ranks, body):
    start = time.monotonic()
    done = ranks(3, program(body), timeout=40)
    assert done.returncode != 0
    assert time.monotonic() - start < 30
    if "SIGKILL" not in body:
        assert "another rank failed, or does not make this call" in done.stderr


def test_a_rank_that_fails_before_the_communicator_exists(ranks):
    body = """
import vpa, mpi4py.MPI as MPI
if MPI.COMM_WORLD.rank == 2:
    raise KeyError("before")
vpa.comm.from_mpi("mpi", timeout=4)
"""
    done = ranks(3, ["-c", body], timeout=40)
    assert done.returncode != 0
    assert "KeyError: 'before'" in done.stderr and "waited 4 s for the others to set up a communicator" in done.stderr


def test_exchange_carries_values_of_any_length(ranks):
    done = ranks(
        3,
        program("""
        for length in (0, 1, 400, 503, 504, 505, 100_000):
            values = comm.exchange({"rank": comm.rank, "text": "x" * length * (comm.rank + 1)})
            assert [value["rank"] for value in values] == [0, 1, 2]
            assert [len(value["text"]) for value in values] == [length, 2 * length, 3 * length]
        comm.close()
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def test_a_value_that_cannot_be_sent_is_an_error_on_every_rank(ranks):
    done = ranks(
        2,
        program("""
        report(raised(lambda: comm.exchange((lambda: 0) if comm.rank else 0)))
        report(comm.exchange(comm.rank))
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "ValueError: rank 1 cannot send its value: " in lines[0] and "pickle" in lines[1], done.stdout
    assert lines[2:] == ["0 [0, 1]", "1 [0, 1]"]


def test_an_interrupted_call_leaves_the_communicator_lost_and_its_memory_alone(ranks):
    """The other ranks come after the interrupt, so MPI writes the buffers of the call that was given up."""
    done = ranks(
        2,
        program("""
        import gc, signal
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        send, recv = np.full(1 << 16, comm.rank, np.uint64), np.empty(2 << 16, np.uint64)
        other = vpa.comm.from_mpi("mpi", timeout=20)
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            try:
                other.all_gather(send, recv)
            except KeyboardInterrupt:
                pass
            print(raised(other.barrier), flush=True)
            del send, recv, other
            gc.collect()
            blocks = [np.zeros(1024, np.uint8) for _ in range(10000)]  # would take the memory, had it been freed
            comm.barrier()
            time.sleep(1)
            print("zeros", all(not block.any() for block in blocks), flush=True)
        else:
            comm.barrier()
            other.all_gather(send, recv)
        """),
        timeout=60,
    )
    assert done.returncode != 0
    assert "lost: all_gather of 524288 bytes of uint64 was ended by KeyboardInterrupt" in done.stdout
    assert "zeros True" in done.stdout
    how = "all_gather of 524288 bytes of uint64 that was ended by KeyboardInterrupt"
    assert f"rank 0 ends the job, after {how}" in done.stderr


def test_a_rank_that_leaves_before_mpi_starts(ranks):
    """Starting MPI waits for all ranks, inside a call that holds the interpreter."""
    body = """
import os, sys, vpa
if "2" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    sys.exit(3)
vpa.comm.from_mpi("mpi", timeout=3)
"""
    start = time.monotonic()
    done = ranks(3, ["-c", body], timeout=40)
    assert done.returncode != 0 and time.monotonic() - start < 30
    if "Timeout" in done.stderr:  # else the launcher ended the job first
        assert "_import_mpi_and_wait_for_every_rank_to_do_so" in done.stderr


def test_gathers_that_do_not_fit_are_refused(ranks):
    done = ranks(
        2,
        program("""
        send = np.arange(6, dtype=np.uint64).reshape(3, 2)
        report(raised(lambda: comm.all_gather(send, np.empty((5, 2), np.uint64))))
        report(raised(lambda: comm.all_gather(send, np.empty((6, 2), np.int64))))
        report(raised(lambda: comm.all_gather(send.T, np.empty((4, 3), np.uint64))))
        recv = np.empty((6, 2), np.uint64)
        comm.all_gather(send + np.uint64(10 * comm.rank), recv)
        report(recv.ravel().tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])
        comm.all_gather(send[:0], recv[:0])
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recv takes 12 elements of uint64") == 4
    assert done.stdout.count("takes C-contiguous arrays") == 2
    assert done.stdout.count("True") == 2


def test_a_communicator_of_ones_own_needs_four_members(ranks):
    """Anything with rank, size, all_gather and close will do; here a bare MPI gather."""
    done = ranks(
        2,
        program("""
        from mpi4py import MPI
        class Own:
            rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
            def all_gather(self, send, recv):
                MPI.COMM_WORLD.Allgather(send.view(np.uint8), recv.view(np.uint8))
            def close(self):
                pass
        class Telling(Own):
            def exchange(self, value):
                return MPI.COMM_WORLD.allgather(value)
        x = np.random.default_rng(comm.rank).integers(-3, 4, (5, shard.width)).astype(np.float32)
        same = vpa.get_top_tokens(x, shard, Own()).tolist() == vpa.get_top_tokens(x, shard, comm).tolist()
        report(same)
        report(vpa.get_top_tokens(x, shard, Telling()).tolist() == vpa.get_top_tokens(x, shard, comm).tolist())
        report(raised(lambda: vpa.get_top_tokens(x[comm.rank :], shard, Telling())))
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 4
    assert done.stdout.count("ranks call with different rows: rank 0 has 5, rank 1 has 4") == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_drafts_over_real_ranks(ranks, count):
    done = ranks(count, [HERE / "ranks" / "drafters.py"], timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"agree: {count}" in done.stdout


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_verification_over_real_ranks(ranks, count):
    done = ranks(count, [HERE / "ranks" / "verify.py", "mpi", "numpy"], timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"agree: {count} rank" in done.stdout


def test_verification_over_a_communicator_that_exchanges_nothing(ranks):
    """Ranks do not know each other's shards there: blocks have room for the whole vocabulary's."""
    done = ranks(
        3,
        program("""
        from mpi4py import MPI
        class Own:
            rank, size = comm.rank, comm.size
            def all_gather(self, send, recv):
                MPI.COMM_WORLD.Allgather(send.view(np.uint8), recv.view(np.uint8))
            def close(self):
                pass
        shard = vpa.VocabShard.even(30000, comm.size)[comm.rank]
        x = np.random.default_rng(comm.rank).integers(-3, 4, (6, shard.width)).astype(np.float32)
        given = dict(draft_ids=np.zeros(6, np.int64), cu_num_rows=np.array([0, 3, 3, 4, 6], np.int32),
                     positions=np.arange(6) + 5, seeds=np.zeros(4, np.int64),
                     **{name: np.ones(4, np.int32) for name in ("seq_lens", "prefill_lens")})
        outcomes = []
        for one in (comm, Own()):
            for form in ("candidate", "blocks"):
                sizes = dict(max_rows=6, max_requests=4, num_draft_tokens=2)
                verify = vpa.GreedyVerify(shard, one, **sizes, dtype="float32", form=form)
                outcomes.append(verify(x, **given))
                outcomes.append(vpa.greedy_verify(x, shard, one, **given, num_draft_tokens=2, form=form))
        first = [array.tolist() for array in outcomes[0]]
        report(all([array.tolist() for array in outcome] == first for outcome in outcomes))
        comm.close()
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 3
