"""The choice of the norm's mode: a pure function, and what its limits are."""

from __future__ import annotations

import pytest

from vpa import norm_plan
from vpa.norm import MODES
from vpa.norm_plan import Rates, choose, one_shot_limit, received_bytes


@pytest.mark.parametrize(("tp", "limit"), [(2, 2_400_000), (3, 864_000), (4, 654_545), (8, 480_000)])
def test_limits_of_the_nominal_rates(tp, limit):
    assert abs(one_shot_limit(tp) - limit) <= 1
    rows = limit // (7168 * 2)
    assert choose(rows, 7168, 2, tp, "nccl").mode == "one_shot"
    assert choose(rows + 2, 7168, 2, tp, "nccl").mode == "all_reduce"
    for given in (rows, rows + 2):
        choice = choose(given, 7168, 2, tp, "nccl")
        assert f"{given * 14336} bytes a rank" in choice.reason and "computed" in choice.reason


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
    assert one_shot_limit(4, Rates(25e9, 4.8e12, 1e-6)) < one_shot_limit(4)
    assert one_shot_limit(4, Rates(450e9, 4.8e12, 2e-6)) > one_shot_limit(4)


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


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="transport is 'tcp'; solo, mpi, nccl are accepted"):
        choose(1, 8, 2, 2, "tcp")
    with pytest.raises(ValueError, match="tp is 0; it is at least 1"):
        choose(1, 8, 2, 0, "nccl")
