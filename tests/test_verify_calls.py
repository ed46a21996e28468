"""What a call of a verification compares between ranks, where its results may lie, and how it is called."""

from __future__ import annotations

import numpy as np
import pytest
from threads import on_ranks
from verification import lists

import vpa

K, SIZE = 1, 2
SHARDS = vpa.VocabShard.even(50, SIZE)
RIGHT = ([[0, 0], [0, -1]], [2, 1], [0, 1])


def arguments() -> dict[str, np.ndarray]:
    """Two requests of two rows over logits of zeros: one accepts its draft, the other does not."""
    return {
        "draft_ids": np.array([0, 0, 0, 7]),
        "cu_num_rows": np.array([0, 2, 4], np.int32),
        "positions": np.arange(5, 9),
        "seq_lens": np.full(2, 20, np.int32),
        "prefill_lens": np.ones(2, np.int32),
        "seeds": np.zeros(2, np.int64),
    }


def zeros(rank: int = 0, size: int = SIZE) -> np.ndarray:
    return np.zeros((4, vpa.VocabShard.even(50, size)[rank].width), np.float32)


def built(comm, **changes) -> vpa.GreedyVerify:
    given = {"max_rows": 4, "max_requests": 2, "num_draft_tokens": K, "dtype": "float32", **changes}
    return vpa.GreedyVerify(vpa.VocabShard.even(50, comm.size)[comm.rank], comm, **given)


def by_function(comm, given, rates):
    return vpa.greedy_verify(
        zeros(comm.rank), SHARDS[comm.rank], comm, num_draft_tokens=K, acceptance=rates, **given
    )  # fmt: skip


def by_object(comm, given, rates):
    """Both ranks build alike; what differs is the call."""
    return built(comm, acceptance=rates)(zeros(comm.rank), **given)


class TestRanksThatDiffer:
    """Every rank is told what differs: a rank that went on would wait for the others, or take other drafts."""

    @pytest.mark.parametrize("call", [by_function, by_object])
    @pytest.mark.parametrize(
        ("name", "place"),
        [("draft_ids", 3), ("cu_num_rows", 2), ("positions", 0), ("seq_lens", 1), ("prefill_lens", 0), ("seeds", 1)],
    )
    def test_each_array_of_requests(self, call, name, place):
        def body(comm):
            given = arguments()
            given[name][place] -= comm.rank
            return call(comm, given, None)

        for told in on_ranks(SIZE, body):
            assert told.startswith(f"ValueError: ranks call with different contents of {name} (checksum): rank 0 has ")

    @pytest.mark.parametrize("call", [by_function, by_object])
    def test_rates(self, call):
        for told in on_ranks(SIZE, lambda comm: call(comm, arguments(), np.full(K, 0.5 + comm.rank / 4, np.float32))):
            assert told.startswith("ValueError: ranks call with different contents of acceptance (checksum): rank 0")

    @pytest.mark.parametrize("call", [by_function, by_object])
    def test_those_that_do_not_differ_agree(self, call):
        for outcome in on_ranks(SIZE, lambda comm: call(comm, arguments(), None)):
            assert lists(outcome) == RIGHT

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("nan", ("first", "ignore")),
            ("form", ("candidate", "blocks")),
            ("dtype", ("float32", "float16")),
            ("num_draft_tokens", (1, 2)),
            ("acceptance", (None, np.ones(1, np.float32))),
        ],
    )
    def test_objects_that_were_built_otherwise(self, name, values):
        """Each rank has both, built alike, and one calls the other one."""

        def body(comm):
            objects = [built(comm, **{name: value}) for value in values]
            chosen = objects[comm.rank == SIZE - 1]
            return chosen(zeros(comm.rank).astype(chosen.dtype), **arguments())

        for told in on_ranks(SIZE, body):
            assert told.startswith(f"ValueError: ranks call with different {name}: rank 0 has ")

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("layout", ("packed", "pairs")),
            ("transform", (None, vpa.Transform(scale=-1.0))),
            ("dtype", ("float32", "float16")),
        ],
    )
    def test_objects_for_top_tokens_that_were_built_otherwise(self, name, values):
        def body(comm):
            given = {"max_rows": 4, "dtype": "float32"}
            objects = [vpa.TopTokens(SHARDS[comm.rank], comm, **{**given, name: value}) for value in values]
            chosen = objects[comm.rank == SIZE - 1]
            return chosen(zeros(comm.rank).astype(chosen.dtype))

        for told in on_ranks(SIZE, body):
            assert told.startswith(f"ValueError: ranks call with different {name}: rank 0 has ")


class TestResultsInMemoryOfTheCallers:
    def out(self, tokens=None, sampled=None, rejected=None):
        made = (np.full((2, 2), 9), np.full(2, 9, np.int32), np.full(2, 9, np.int32))
        return tuple(
            one if one is not None else fresh for one, fresh in zip((tokens, sampled, rejected), made, strict=True)
        )

    def refused(self, out, given=None, logits=None, others="") -> None:
        """Both ranks raise, though only the last one's memory overlaps, and nothing is written there."""
        given = arguments() if given is None else given
        before = [np.array(one) for one in (*out, *given.values())]

        def body(comm):
            verify = built(comm)
            if comm.rank == SIZE - 1:
                return verify(zeros(comm.rank) if logits is None else logits, **given, out=out)
            return verify(zeros(comm.rank), **arguments(), out=self.out())

        first, last = on_ranks(SIZE, body)
        assert last == f"ValueError: {others}, which would be overwritten; give each its own"
        assert first == f"ValueError: rank 1 raised {last}"
        assert all(np.array_equal(a, b) for a, b in zip(before, (*out, *given.values()), strict=True))

    def test_results_in_one_another(self):
        both = np.full(2, 9, np.int32)
        self.refused(self.out(None, both, both), others="out: num_sampled shares memory with out: num_rejected")
        tokens = np.full((2, 2), 9)
        self.refused(
            self.out(tokens, tokens.reshape(-1).view(np.int32)[6:8]),
            others="out: tokens shares memory with out: num_sampled",
        )

    @pytest.mark.parametrize("name", ["draft_ids", "positions"])
    def test_tokens_in_an_argument(self, name):
        given = arguments()
        self.refused(self.out(given[name].reshape(2, 2)), given, others=f"out: tokens shares memory with {name}")

    @pytest.mark.parametrize("name", ["seq_lens", "prefill_lens", "seeds", "cu_num_rows"])
    def test_counts_in_an_argument(self, name):
        given = arguments()
        words = given[name].view(np.int32)
        self.refused(self.out(rejected=words[-2:]), given, others=f"out: num_rejected shares memory with {name}")

    def test_counts_in_the_logits(self):
        logits = np.ones((4, SHARDS[1].width), np.float32)
        self.refused(
            self.out(None, logits[3, 10:12].view(np.int32)), logits=logits,
            others="out: num_sampled shares memory with the input",
        )  # fmt: skip

    def test_results_beside_one_another(self):
        """Parts of one array that do not overlap; read-only arguments may be one array."""
        memory = np.full(12, 9, np.int32)
        out = memory[:8].view(np.int64).reshape(2, 2), memory[8:10], memory[10:]
        given = arguments()
        given["seq_lens"] = given["prefill_lens"]
        verify = built(vpa.comm.solo())
        assert lists(verify(zeros(size=1), **given, out=out)) == RIGHT
        assert memory[8:].tolist() == [2, 1, 0, 1]

    def test_no_requests(self):
        nothing = np.zeros(0, np.int32)
        given = {name: array[:0] for name, array in arguments().items()} | {"cu_num_rows": np.zeros(1, np.int32)}
        out = np.zeros((0, 2), np.int64), nothing, nothing
        assert lists(built(vpa.comm.solo())(zeros(size=1)[:0], **given, out=out)) == ([], [], [])


def test_rates_are_those_of_the_day_it_was_built():
    rates = np.ones(K, np.float32)
    verify = built(vpa.comm.solo(), acceptance=rates)
    rates[:] = 0
    assert lists(verify(zeros(size=1), **arguments())) == ([[0, 0], [7, 0]], [2, 2], [0, 0])
    rates[:] = np.nan
    assert lists(verify(zeros(size=1), **arguments())) == ([[0, 0], [7, 0]], [2, 2], [0, 0])


class TestArgumentsByName:
    """What a caller did not write is in no message, and one rank's mistake reaches all."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"acceptance": None}, "GreedyVerify() got an unexpected keyword argument 'acceptance'; of requests it "),
            ({"num_draft_tokens": 1}, "GreedyVerify() got an unexpected keyword argument 'num_draft_tokens'; of "),
            ({"drafts": 1}, "GreedyVerify() got an unexpected keyword argument 'drafts'; of requests it takes draft_"),
            ({"seeds": ...}, "GreedyVerify() is called without seeds; of requests it takes draft_ids, cu_num_rows,"),
            ({"seeds": ..., "positions": ...}, "GreedyVerify() is called without positions, seeds; of requests it "),
        ],
    )
    def test_of_the_object(self, changes, message):
        def body(comm):
            given = {**arguments(), **(changes if comm.rank == SIZE - 1 else {})}
            return built(comm)(zeros(comm.rank), **{name: one for name, one in given.items() if one is not ...})

        first, last = on_ranks(SIZE, body)
        assert last.startswith(f"TypeError: {message}") and first == f"TypeError: rank 1 raised {last}"

    def test_of_a_capture(self):
        with pytest.raises(TypeError, match=r"^GreedyVerify.capture\(\) is called without draft_ids, cu_num_rows, pos"):
            built(vpa.comm.solo()).capture(zeros(size=1))

    def test_of_the_emulation(self):
        parts = [zeros(rank) for rank in range(SIZE)]
        with pytest.raises(
            TypeError, match=r"^emulate_greedy_verify\(\) is called without draft_ids, cu_num_rows, pos"
        ):
            vpa.emulate_greedy_verify(parts, SHARDS, num_draft_tokens=1)
        with pytest.raises(TypeError, match=r"^emulate_greedy_verify\(\) got an unexpected keyword argument 'splits'"):
            vpa.emulate_greedy_verify(parts, SHARDS, num_draft_tokens=1, splits=3, **arguments())
