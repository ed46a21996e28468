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
from vpa import backends, norm, norm_steps, rmsnorm

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
        check_errors(comm, xp)
        if xp is not np and comm.capturable:
            check_captured(comm, backend, xp)
        if comm.rank == 0:
            print(f"agree: {vpa.comm.describe(comm)}")


def alike(comm, array: np.ndarray) -> bool:
    """Whether all ranks have the same bits."""
    return len(set(comm.exchange(array.tobytes()))) == 1


def check_sums(comm, xp) -> None:
    for dtype, kind in itertools.product(DTYPES, KINDS):
        if comm.transport == "nccl" and kind in ("large", "nan", "infinite"):
            continue  # a sum on the way may overflow in another order
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
                with np.errstate(invalid="ignore"):
                    assert (np.abs(got.astype(np.float64) - wanted.astype(np.float64)) <= most).all(), (dtype, kind)
            else:
                assert same(got, wanted), (dtype, kind)
        assert alike(comm, to_host(whole))
        comm.all_reduce(send, send)  # in place
        assert same(to_host(send), to_host(whole)) or comm.transport == "nccl"


def check_norms(comm, backend, xp) -> None:
    rows = itertools.cycle((1, comm.size + 1, 4 * comm.size, 2, 0))
    for dtype, kind, rounding in itertools.product(DTYPES, ("random", "order", "nan"), rmsnorm.ROUNDINGS):
        parts, residual, weight = inputs(dtype, comm.size, max(next(rows), 1), HIDDEN, 2, kind)
        held = None if rounding == "gemma" else residual
        expected = np.empty_like(residual), np.empty_like(residual)
        rmsnorm.residual_rmsnorm(parts, held, weight, 1e-6, rounding, *expected)
        memory = "padded_rows" if comm.rank % 2 else "contiguous"  # a rank's own memory is its own business
        partial = laid_out(parts[comm.rank], memory, xp, comm.rank)
        for mode in norm.MODES:
            got = vpa.allreduce_rmsnorm(
                partial, None if held is None else xp.asarray(held), xp.asarray(weight), 1e-6, comm,
                mode=mode, rounding=rounding, backend=backend,
            )  # fmt: skip
            normed, kept = map(to_host, got)
            assert alike(comm, normed) and alike(comm, kept), (dtype, kind, rounding, mode)
            if mode == "one_shot" or comm.transport == "mpi":
                assert same(kept, expected[1]) and same(normed, expected[0]), (dtype, kind, rounding, mode)
            elif held is None and kind == "random":
                off = np.abs(kept.astype(np.float64) - expected[1].astype(np.float64))
                assert (off <= norm.sum_bound(list(parts))).all(), (dtype, mode)
            none = vpa.allreduce_rmsnorm(partial[:0], None, xp.asarray(weight), 1e-6, comm, mode=mode, backend=backend)
            assert none[0].shape == (0, HIDDEN)


def check_captured(comm, backend, xp) -> None:
    """The steps of a call in a graph: replayed, they follow their inputs."""
    parts, residual, weight = inputs("bfloat16", comm.size, 5, HIDDEN, 3)
    partial, held, gain = (xp.asarray(array) for array in (parts[comm.rank], residual, weight))
    for mode in norm.MODES:
        call = norm_steps.Call(partial.shape, partial.dtype, held, gain, np.float32(1e-6), mode, "once")
        prepared = norm_steps.prepare(backends.select(backend, partial), comm, partial, call)
        stream = xp.cuda.Stream(non_blocking=True)
        xp.cuda.runtime.deviceSynchronize()
        with stream:
            prepared()
            stream.synchronize()
            stream.begin_capture()
            prepared()
            graph = stream.end_capture()
        for shift in range(3):
            moved = np.roll(parts, shift, axis=1)
            partial[...] = xp.asarray(moved[comm.rank])
            xp.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
            if mode == "one_shot":
                expected = np.empty_like(residual), np.empty_like(residual)
                rmsnorm.residual_rmsnorm(moved, residual, weight, 1e-6, "once", *expected)
                assert same(to_host(prepared.normed), expected[0]) and same(to_host(prepared.new_residual), expected[1])
            assert alike(comm, to_host(prepared.normed))
        comm.barrier()
        del graph


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
        for text in comm.exchange(raised(lambda settings=settings: vpa.allreduce_rmsnorm(**settings))):
            assert told in text, (told, text)
        assert to_host(vpa.allreduce_rmsnorm(**right)[1]).tolist() == [[comm.size + 1.0] * 8] * 3


if __name__ == "__main__":
    main()
