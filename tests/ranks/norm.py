"""Run by every rank of a job: the norm over real ranks, in every mode, against the rules; and sums over ranks alone.

usage: norm.py TRANSPORT BACKEND      (mpi|nccl, numpy|raw|numba)
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from norm_oracle import KINDS, inputs, same
from oracle import DTYPES, laid_out, to_host

import vpa
from vpa import norm, rmsnorm
from vpa.bench.norm_check import Rules

HIDDEN = 136


def main() -> None:
    transport, backend = sys.argv[1:]
    with vpa.comm.from_mpi(transport, timeout=60) as comm:
        assert comm.transport == transport
        if backend == "numpy":
            xp = np
        else:
            import cupy as xp
        check_sums(comm, xp)
        check_norms(comm, backend, xp)
        check_prepared(comm, backend, xp)
        check_errors(comm, xp)
        if comm.rank == 0:
            print(f"agree: {vpa.comm.describe(comm)}")


def alike(comm, array: np.ndarray) -> bool:
    """Whether all ranks have the same bits."""
    return len(set(comm.exchange(array.tobytes()))) == 1


@np.errstate(all="ignore")
def check_sums(comm, xp) -> None:
    for dtype, kind in itertools.product(DTYPES, KINDS):
        parts = inputs(dtype, comm.size, 2 * comm.size, HIDDEN, 1, kind)[0]
        expected, bound = rmsnorm.sum_over_ranks(parts), norm.sum_bound(list(parts))
        send = xp.asarray(parts[comm.rank])
        whole, part = xp.empty_like(send), xp.empty_like(send[:2])
        comm.all_reduce(send, whole)
        comm.reduce_scatter(send, part)
        own = slice(2 * comm.rank, 2 * comm.rank + 2)
        for got, wanted, most in ((whole, expected, bound), (part, expected[own], bound[own])):
            got = to_host(got)
            if comm.transport == "nccl":
                near = np.abs(got.astype(np.float64) - wanted.astype(np.float64)) <= most
                assert (near | np.isinf(most) | rmsnorm.alike(got, wanted)).all(), (dtype, kind)
            else:
                assert same(got, wanted), (dtype, kind)
        assert alike(comm, to_host(whole))
        comm.all_reduce(send, send)  # in place
        assert same(to_host(send), to_host(whole)) or comm.transport == "nccl"


def check_norms(comm, backend, xp) -> None:
    rows = itertools.cycle((1, comm.size + 1, 4 * comm.size, 2, 0))
    for dtype, kind, rounding in itertools.product(DTYPES, ("random", "order", "nan", "infinite"), rmsnorm.ROUNDINGS):
        parts, residual, weight = inputs(dtype, comm.size, max(next(rows), 1), HIDDEN, 2, kind)
        held = None if rounding == "gemma" else residual
        rules = Rules(parts, held, weight, 1e-6, rounding)
        memory = "padded_rows" if comm.rank % 2 else "contiguous"  # a rank's own memory is its own business
        partial = laid_out(parts[comm.rank], memory, xp, comm.rank)
        for mode in norm.MODES:
            got = vpa.allreduce_rmsnorm(
                partial, None if held is None else xp.asarray(held), xp.asarray(weight), 1e-6, comm,
                mode=mode, rounding=rounding, backend=backend,
            )  # fmt: skip
            normed, kept = map(to_host, got)
            assert alike(comm, normed) and alike(comm, kept), (dtype, kind, rounding, mode)
            same_sum = mode == "one_shot" or comm.transport == "mpi" or comm.size == 1
            assert not rules.wrong(normed, kept, same_sum).any(), (dtype, kind, rounding, mode)
            none = vpa.allreduce_rmsnorm(partial[:0], None, xp.asarray(weight), 1e-6, comm, mode=mode, backend=backend)
            assert none[0].shape == (0, HIDDEN)


def check_prepared(comm, backend, xp) -> None:
    """A prepared call, of arrays with gaps too, follows what its arrays hold; and so does a graph of it."""
    parts, residual, weight = inputs("bfloat16", comm.size, 5, HIDDEN, 3)
    for mode, memory in itertools.product(norm.MODES, ("contiguous", "every_second_column")):
        arrays = [laid_out(array, memory, xp, 0) for array in (parts[comm.rank], residual, weight[None])]
        partial, held, gain = arrays[0], arrays[1], arrays[2][0]
        prepared = vpa.prepare_allreduce_rmsnorm(partial, held, gain, 1e-6, comm, mode=mode, backend=backend)
        results = prepared()
        assert results[0] is prepared.normed and results[1] is prepared.new_residual
        call, graph = prepared, None
        if xp is not np and (comm.capturable or comm.size == 1):
            stream = xp.cuda.Stream(non_blocking=True)
            xp.cuda.runtime.deviceSynchronize()
            with stream:
                stream.begin_capture()
                prepared()
                graph = stream.end_capture()

            def call(stream=stream, graph=graph) -> None:
                xp.cuda.runtime.deviceSynchronize()
                graph.launch(stream)
                stream.synchronize()

        for shift in range(3):
            moved = np.roll(parts, shift, axis=1), np.roll(residual, 2 * shift, axis=1), np.roll(weight, shift)
            for array, new in zip((partial, held, gain), (moved[0][comm.rank], *moved[1:]), strict=True):
                array.view("u2")[...] = xp.asarray(np.ascontiguousarray(new).view("u2"))  # CuPy may know no bf16
            call()
            normed, kept = map(to_host, results)
            same_sum = mode == "one_shot" or comm.transport == "mpi" or comm.size == 1
            assert not Rules(*moved, 1e-6, "once").wrong(normed, kept, same_sum).any(), (mode, memory, shift)
            assert alike(comm, normed) and alike(comm, kept)
        comm.barrier()
        del graph, call


def raised(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def check_errors(comm, xp) -> None:
    """Whatever is wrong on the last rank alone is an error on all, and the next call works."""
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    right = {
        "partial": xp.ones((3, 8), np.float32),
        "residual": xp.ones((3, 8), np.float32),
        "weight": xp.ones(8, np.float32),
        "eps": 1e-6,
        "comm": comm,
    }
    for change, told in (
        ({"partial": xp.ones((2, 8), np.float32), "residual": None}, "ValueError: ranks call with different rows"),
        ({"partial": xp.ones((3, 9), np.float32)}, "ValueError"),
        ({"partial": [[1.0]]}, "TypeError"),
        ({"residual": None}, "ValueError: ranks call with different residual"),
        ({"weight": xp.ones(8, np.float64)}, "TypeError"),
        ({"eps": 1e-5}, "ValueError: ranks call with different eps"),
        ({"mode": "all_reduce"}, "ValueError: ranks call with different mode"),
        ({"rounding": "gemma"}, "ValueError: ranks call with different rounding"),
        ({"rounding": "twice"}, "ValueError"),
    ):
        settings = {**right, **change} if odd else right
        for function in (vpa.allreduce_rmsnorm, vpa.prepare_allreduce_rmsnorm):
            for text in comm.exchange(raised(lambda settings=settings, function=function: function(**settings))):
                assert told in text, (told, text)
        assert to_host(vpa.allreduce_rmsnorm(**right)[1]).tolist() == [[comm.size + 1.0] * 8] * 3


if __name__ == "__main__":
    main()
