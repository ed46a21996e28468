"""Sums over ranks and the norm over them: host memory and NCCL, right bits, arguments, and ranks that part."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from comm.test_gpu_ranks import need_nccl

import vpa

HERE = Path(__file__).resolve().parent.parent


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_real_ranks_give_the_rules_bits(ranks, count):
    done = ranks(count, [HERE / "ranks" / "norm.py", "mpi", "numpy"])
    assert done.returncode == 0, done.stderr
    assert f"agree: {count} rank" in done.stdout


@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["raw", "numba"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_nccl_ranks_give_the_rules_bits_or_keep_to_the_bound(ranks, count, backend):
    need_nccl(count)
    done = ranks(count, [HERE / "ranks" / "norm.py", "nccl", backend], timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"agree: {count} rank" in done.stdout and "NCCL" in done.stdout


@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 2, 4])
def test_gpu_arrays_are_summed_through_host_memory(ranks, count):
    done = ranks(count, [HERE / "ranks" / "norm.py", "mpi", "raw"], timeout=200)
    assert done.returncode == 0, done.stderr


class TestArguments:
    """What a communicator refuses to sum, by one rank's."""

    @pytest.mark.parametrize(
        ("method", "send", "recv", "error", "message"),
        [
            ("all_reduce", [1.0], [1.0], TypeError, "send is a list; an all-reduce takes NumPy or CuPy arrays"),
            ("reduce_scatter", np.ones(4, "f4"), [1.0], TypeError, "recv is a list; a reduce-scatter takes NumPy or"),
            ("all_gather", [1.0], np.ones(1), TypeError, "send is a list; an all-gather takes NumPy or CuPy arrays"),
            ("all_reduce", np.ones(4), np.ones(4), TypeError, "all-reduce of float64; bfloat16, float16, float32 are"),
            ("all_reduce", np.ones(4, "f4"), np.ones(5, "f4"), ValueError, "recv takes 4 elements of float32, of the"),
            ("all_reduce", np.ones(4, "f4"), np.ones(4, "f2"), ValueError, r"float32\[4\] into float16\[4\]"),
            ("all_reduce", np.ones(8, "f4")[::2], np.ones(4, "f4"), ValueError, "an all-reduce takes C-contiguous"),
            ("reduce_scatter", np.ones(4, "i4"), np.ones(4, "i4"), TypeError, "reduce-scatter of int32; bfloat16"),
            ("reduce_scatter", np.ones(4, "f4"), np.ones(3, "f4"), ValueError, "recv takes 4 elements of float32"),
            ("reduce_scatter", np.ones((2, 2), "f4").T, np.ones(4, "f4"), ValueError, "a reduce-scatter takes C-cont"),
        ],
    )
    def test_solo(self, method, send, recv, error, message):
        with pytest.raises(error, match=message):
            getattr(vpa.comm.solo(), method)(send, recv)

    def test_one_rank_copies(self):
        for method in ("all_reduce", "reduce_scatter"):
            send, recv = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(6, np.float32)
            getattr(vpa.comm.solo(), method)(send, recv)
            assert np.array_equal(recv, send.ravel())

    @pytest.mark.mpi
    def test_parts_have_to_be_equal(self, ranks):
        done = ranks(
            2,
            program("""
            print(raised(lambda: comm.reduce_scatter(np.ones(5, np.float32), np.ones(2, np.float32))), flush=True)
            comm.close()
            """),
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("reduce-scatter over 2 ranks of float32[5] into float32[2]; send divides by 2") == 2


START = """
import time, numpy as np, vpa
comm = vpa.comm.from_mpi("mpi", timeout=4)
def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
import ml_dtypes
ones = np.ones((3, 8), np.float32)
halves, bfloats = np.ones((6, 8), np.float16), np.ones((6, 8), ml_dtypes.bfloat16)
def norm(**settings):
    return vpa.allreduce_rmsnorm(ones, None, ones[0], 0, comm, **settings)
"""


def program(body: str) -> list[str]:
    return ["-c", START + textwrap.dedent(body)]


@pytest.mark.mpi
class TestRanksThatPart:
    @pytest.mark.parametrize(
        ("zero", "one", "told"),
        [
            ("comm.all_reduce(ones, ones.copy())", "comm.reduce_scatter(ones[:2], ones[:1].copy())",
             "ranks make different calls: rank 0 all_reduce of 96 bytes of float32, rank 1 reduce_scatter of 64 bytes"),
            ("comm.all_reduce(ones, ones.copy())", "comm.all_reduce(ones[:2], ones[:2].copy())",
             "rank 0 all_reduce of 96 bytes of float32, rank 1 all_reduce of 64 bytes of float32"),
            ("comm.all_reduce(ones, ones.copy())", "comm.all_reduce(halves, halves.copy())",
             "rank 0 all_reduce of 96 bytes of float32, rank 1 all_reduce of 96 bytes of float16"),
            ("comm.reduce_scatter(halves, halves[:3].copy())", "comm.reduce_scatter(bfloats, bfloats[:3].copy())",
             "rank 0 reduce_scatter of 96 bytes of float16, rank 1 reduce_scatter of 96 bytes of bfloat16"),
            ("comm.all_gather(ones, np.ones((6, 8), 'f4'))", "comm.all_gather(halves, np.ones((12, 8), 'f2'))",
             "rank 0 all_gather of 96 bytes of float32, rank 1 all_gather of 96 bytes of float16"),
            ("norm()", "comm.all_reduce(ones, ones.copy())",
             "rank 0 check of arguments, rank 1 all_reduce of 96 bytes"),
            ("norm()", "vpa.get_top_tokens(ones, vpa.VocabShard.even(16, 2)[1], comm)",
             "different function: rank 0 has allreduce_rmsnorm, rank 1 has get_top_tokens"),
        ],
    )  # fmt: skip
    def test_all_are_told_and_go_on(self, ranks, zero, one, told):
        done = ranks(
            2,
            program(f"""
            told = comm.exchange(raised(lambda: {zero}) if comm.rank == 0 else raised(lambda: {one}))
            assert all({told!r} in text for text in told), told
            assert norm()[1].tolist() == [[2.0] * 8] * 3
            comm.close()
            """),
            timeout=30,
        )
        assert done.returncode == 0, done.stderr

    def test_a_rank_that_does_not_come_ends_the_job_within_the_time_limit(self, ranks):
        start = time.monotonic()
        done = ranks(2, program("if comm.rank: time.sleep(60)\ncomm.all_reduce(ones, ones.copy())"), timeout=40)
        assert done.returncode != 0 and time.monotonic() - start < 30
        assert "waited 4 s for all_reduce of 96 bytes" in done.stderr
