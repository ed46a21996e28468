"""The choice of the norm's mode: a pure function, and what its limits are."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from vpa import backends, norm_plan, norm_steps, record
from vpa.norm import MODES
from vpa.norm_plan import MEASURED_LIMITS, Rates, choose, one_shot_limit, received_bytes

RECORD = Path(__file__).resolve().parent.parent / "mpi_runs" / "results" / "norm_h200_nvlink_2.json"


@pytest.mark.parametrize(("tp", "limit"), [(2, MEASURED_LIMITS[2]), (3, 615_613), (4, 448_780), (8, 319_075)])
def test_limits(tp, limit):
    how = "measured" if tp == 2 else "computed"
    rows = limit // (7168 * 2)
    assert choose(rows, 7168, 2, tp, "nccl").mode == "one_shot"
    assert choose(rows + 2, 7168, 2, tp, "nccl").mode == "all_reduce"
    if how == "computed":
        assert abs(one_shot_limit(tp) - limit) <= 1
    for given in (rows, rows + 2):
        choice = choose(given, 7168, 2, tp, "nccl")
        assert f"{given * 14336} bytes a rank" in choice.reason and how in choice.reason


def test_the_measured_limit_and_rates_are_those_of_the_record():
    medians = {
        (row["input"], row["rows"], row["arm"]): (row["median_us"], row["bytes_moved"])
        for row in record.read(RECORD)["rows"]
        if row["mode"] == "captured" and row["cache"] == "hot" and row["input"].startswith("norm")
    }
    modes = {}
    for input_name, rows, arm in medians:
        if arm == "one_shot":
            size = rows * int(input_name.split()[1]) * 2
            modes[size] = [medians[input_name, rows, mode][0] for mode in ("one_shot", "all_reduce")]
    quicker = {size: one_shot < all_reduce for size, (one_shot, all_reduce) in modes.items()}
    limit = MEASURED_LIMITS[2]
    assert all(quicker[size] == (size <= limit) for size in quicker) and limit == max(filter(quicker.get, quicker))

    def rate(arm: str) -> float:
        time, moved = medians["norm 7168", 4096, arm]
        return 1e6 * moved / time

    steps = [modes[hidden * 2][1] - modes[hidden * 2][0] for hidden in (6144, 7168)]
    assert norm_plan.RATES.link == pytest.approx(rate("floor: bare gather"), rel=0.02)
    assert norm_plan.RATES.memory == pytest.approx(rate("floor: plain move"), rel=0.05)
    assert 1e6 * norm_plan.RATES.step == pytest.approx(sum(steps) / 2, rel=0.05)


def test_limits_are_where_both_take_as_long():
    for tp in range(2, 65):
        size = one_shot_limit(tp)

        def seconds(mode: str, steps: int, memory: float, tp: int = tp, size: int = size) -> float:
            rates = norm_plan.RATES
            return steps * rates.step + received_bytes(mode, size, tp) / rates.link + memory * size / rates.memory

        one_shot = seconds("one_shot", tp - 1, 2 * tp + 3)
        all_reduce = seconds("all_reduce", 2 * (tp - 1), 2 + 3)
        assert one_shot == pytest.approx(all_reduce, rel=1e-3)
        assert seconds("sequence_parallel", 3 * (tp - 1), 5 / tp + 2) > min(one_shot, all_reduce)


def test_slower_links_and_quicker_steps_favour_fewer_bytes():
    assert one_shot_limit(4, Rates(25e9, 4e12, 1.2e-6)) < one_shot_limit(4)
    assert one_shot_limit(4, Rates(230e9, 4e12, 2e-6)) > one_shot_limit(4)
    assert choose(200, 7168, 2, 2, "nccl", Rates(450e9, 4.8e12, 2e-6)).mode == "one_shot"


@pytest.mark.parametrize("transport", ["solo", "mpi", "nccl"])
def test_where_bytes_do_not_count(transport):
    assert choose(4096, 7168, 2, 1, transport).mode == "one_shot"
    if transport != "nccl":
        assert choose(4096, 7168, 2, 4, transport).mode == "one_shot"


def test_bytes_received():
    assert [received_bytes(mode, 8, 2) for mode in MODES] == [8, 8, 12]
    assert [received_bytes(mode, 8, 8) for mode in MODES] == [56, 14, 21]
    assert [received_bytes(mode, 8, 2, "mpi") for mode in MODES] == [8, 8, 16]
    assert [received_bytes(mode, 8, 8, "mpi") for mode in MODES] == [56, 56, 70]


class Counting:
    """A rank over host memory that receives nothing, and counts what it would."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.received = 0, size, 0

    def all_gather(self, send, recv) -> None:
        self.received += (self.size - 1) * send.nbytes

    all_reduce = reduce_scatter = all_gather  # there all gather what is summed


def test_bytes_received_are_those_of_rows_that_are_filled_up():
    """One row of 4096 bytes over 4 ranks travels as four: what a rank receives is counted in the steps themselves."""
    assert received_bytes("sequence_parallel", 4096, 4, "mpi", rows=1) == 73728
    for mode, tp, rows in itertools.product(MODES, (2, 3, 4), (1, 2, 3, 4, 5, 8)):
        comm = Counting(tp)
        partial, weight = np.zeros((rows, 8), np.float32), np.ones(8, np.float32)
        call = norm_steps.Call(partial.shape, partial.dtype, None, weight, np.float32(1), mode, "once")
        norm_steps.prepare(backends.select(None, partial), comm, partial, call)()
        expected = received_bytes(mode, partial.nbytes, tp, "mpi", rows=rows)
        assert comm.received == pytest.approx(expected), (mode, tp, rows)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: choose(1, 8, 2, 2, "tcp"), ValueError, "transport is 'tcp'; solo, mpi, nccl are accepted"),
        (lambda: choose(1, 8, 2, 2, None), ValueError, "transport is None; solo, mpi, nccl are accepted"),
        (lambda: choose(1, 8, 2, 0, "nccl"), ValueError, "tp is 0; it is at least 1"),
        (lambda: choose(-1, 8, 2, 2, "nccl"), ValueError, "rows is -1; it is at least 0"),
        (lambda: choose(1.5, 8, 2, 2, "nccl"), TypeError, "rows is 1.5; "),
        (lambda: choose("1", 8, 2, 2, "nccl"), TypeError, "rows is '1'; "),
        (lambda: choose(1, 0, 2, 2, "nccl"), ValueError, "hidden is 0; it is at least 1"),
        (lambda: choose(1, 8, 0, 2, "nccl"), ValueError, "itemsize is 0; it is at least 1"),
        (lambda: choose(1, 8, 2, 2, "nccl", 5), TypeError, "rates is a int; a vpa.norm_plan.Rates is accepted"),
        (lambda: Rates(0, 1, 1), ValueError, "link is 0; a finite number above 0 is accepted"),
        (lambda: Rates(1, "1", 1), TypeError, "memory is '1'; a real number is accepted"),
        (lambda: one_shot_limit(1), ValueError, "tp is 1; it is at least 2"),
        (lambda: one_shot_limit(0), ValueError, "tp is 0; it is at least 1"),
        (lambda: received_bytes("bad", 1, 2), ValueError, "mode is 'bad'; one_shot, all_reduce, sequence_parallel are"),
        (lambda: received_bytes("one_shot", -1, 2), ValueError, "size is -1; it is at least 0"),
        (lambda: received_bytes("one_shot", 1, 2, "tcp"), ValueError, "transport is 'tcp'"),
    ],
)
def test_what_does_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call()
