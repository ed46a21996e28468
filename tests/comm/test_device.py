"""Which device and transport: pure functions of facts, so every machine can be tried on any machine."""

from __future__ import annotations

import pytest

from vpa.comm.device import RankFacts, choose_transport, pick_device, spread


def gpu(number: int, host: str = "a", device: int | None = None, **more) -> RankFacts:
    return RankFacts(
        host, number if device is None else device, f"{host}-{number}", nccl=more.pop("nccl", 22809), **more
    )


def test_a_rank_takes_the_gpu_of_its_place_on_the_host():
    assert [pick_device(local, 4) for local in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("facts", "hosts", "gpus"),
    [
        ([gpu(i) for i in range(4)], 1, 4),
        ([gpu(i, device=0) for i in range(4)], 1, 4),
        ([gpu(0)] * 4, 1, 1),
        ([gpu(0), gpu(1), gpu(0, "b"), gpu(1, "b")], 2, 4),
        ([RankFacts("a"), RankFacts("b")], 2, 0),
        ([gpu(0), RankFacts("a")], 1, 1),
    ],
)
def test_hosts_and_gpus_are_counted_once(facts, hosts, gpus):
    assert spread(facts) == (hosts, gpus)


def test_one_visible_gpu_is_device_0_for_every_rank():
    assert [pick_device(local, 1) for local in range(4)] == [0, 0, 0, 0]


def test_nccl_where_every_rank_has_its_own_gpu():
    assert choose_transport("auto", [gpu(i) for i in range(4)]) == ("nccl", "every rank has a GPU")


def test_one_visible_gpu_per_rank_is_told_from_a_shared_one_by_its_id():
    assert choose_transport("auto", [gpu(i, device=0) for i in range(4)])[0] == "nccl"


def test_two_hosts_may_have_equal_ordinals():
    assert choose_transport("nccl", [gpu(0, "a"), gpu(1, "a"), gpu(0, "b"), gpu(1, "b")])[0] == "nccl"


def test_a_shared_gpu_takes_host_memory_and_says_why():
    chosen, why = choose_transport("auto", [gpu(0), gpu(0), gpu(1), gpu(1)])
    assert chosen == "mpi"
    assert (
        why == "ranks 0 and 1 share GPU 0 of a, which needs NCCL 2.30.3 (here 2.28.9) and NCCL_MULTI_RANK_GPU_ENABLE=1"
    )


def test_a_shared_gpu_that_nccl_was_asked_for_is_refused_before_nccl_starts():
    with pytest.raises(
        ValueError, match=r"'nccl' cannot be used: ranks 0 and 1 share GPU 0 of a.*use transport 'mpi' or"
    ):
        choose_transport("nccl", [gpu(0)] * 4)


@pytest.mark.parametrize(
    ("version", "enabled", "chosen"),
    [(23003, True, "nccl"), (23007, True, "nccl"), (23007, False, "mpi"), (23002, True, "mpi")],
)
def test_a_shared_gpu_where_nccl_allows_it(version, enabled, chosen):
    facts = [gpu(0, nccl=version, shared_gpu=enabled)] * 4
    assert choose_transport("auto", facts)[0] == chosen


def test_one_rank_without_the_switch_is_enough_to_refuse():
    facts = [gpu(0, nccl=23007, shared_gpu=True)] * 3 + [gpu(0, nccl=23007, shared_gpu=False)]
    assert choose_transport("auto", facts)[0] == "mpi"


def test_a_rank_without_a_gpu_is_named():
    facts = [gpu(0), RankFacts("b", no_gpu="no GPU is visible")]
    assert choose_transport("auto", facts) == ("mpi", "rank 1 on b has no GPU: no GPU is visible")
    with pytest.raises(ValueError, match="rank 1 on b has no GPU"):
        choose_transport("nccl", facts)


def test_a_rank_without_nccl_is_named():
    assert choose_transport("auto", [gpu(0), gpu(1, nccl=None)]) == ("mpi", "CuPy on rank 1 on a has no NCCL")


def test_host_memory_can_be_asked_for():
    assert choose_transport("mpi", [gpu(i) for i in range(2)]) == ("mpi", "asked for")


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match="'ucx'; auto, nccl, mpi are accepted"):
        choose_transport("ucx", [gpu(0)])
