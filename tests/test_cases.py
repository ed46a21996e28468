"""Inputs that broke other systems, each with its kind around it: dtypes, numbers of ranks, backends, both layouts."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DTYPES, full_argmax, laid_out, to_host

from vpa import (
    VocabShard,
    emulate_top_tokens,
    get_top_tokens,
    local_argmax_candidates,
    order,
    pick_from_candidates,
    shard_vocab,
)
from vpa.comm import solo

LAYOUTS = ("packed", "pairs")
INF, NAN = np.inf, np.nan


def check(backend, rows, shards, expected, dtype="float32") -> None:
    """Cut ``rows`` [B, vocabulary] by the shards' ids and compare the tokens of both layouts with ``expected``."""
    whole = np.asarray(rows, np.float32).astype(DTYPES[dtype])
    parts = []
    for shard in shards:
        part = np.full((len(whole), shard.width), NAN, DTYPES[dtype])
        ids = shard.ids()
        part[:, ids >= 0] = whole[:, ids[ids >= 0]]
        parts.append(backend.xp.asarray(part))
    for layout in LAYOUTS:
        tokens = emulate_top_tokens(parts, shards, layout=layout, backend=backend.name)
        assert to_host(tokens).tolist() == expected, (layout, shards[0].tp_size)
    assert full_argmax(whole).tolist() == expected


def uneven(*widths: int) -> tuple[VocabShard, ...]:
    """Shards of these widths, one after another."""
    starts = np.cumsum([0, *widths])
    return tuple(
        VocabShard(rank, len(widths), int(starts[-1]), width, ((0, width, int(starts[rank])),))
        for rank, width in enumerate(widths)
    )


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
class TestNothingBeatsARealMinusInfinity:
    def test_one_column(self, backend, dtype, tp):
        check(backend, [[-INF]], VocabShard.even(1, tp), [0], dtype)

    def test_all_but_the_last_id(self, backend, dtype, tp):
        lowest = {"bfloat16": -3.3895314e38, "float16": -65504.0, "float32": np.finfo(np.float32).min}[dtype]
        rows = np.full((2, 300), -INF)
        rows[1, -1] = lowest
        check(backend, rows, VocabShard.even(300, tp), [0, 299], dtype)
        check(backend, np.full((1, 300), lowest), VocabShard.even(300, tp), [0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["first", "last", "straddling"])
class TestNanAndSignedZeros:
    def shards(self, place: str, count: int) -> tuple[VocabShard, ...]:
        """Two shards with ``count`` ids of interest in the first, in the last, or cut between them; -inf elsewhere."""
        return {"first": uneven(count, 3), "last": uneven(3, count), "straddling": uneven(count - 1, 4)}[place]

    @pytest.mark.parametrize(
        ("values", "token"),
        [([1, NAN, INF, NAN], 1), ([INF, NAN], 1), ([NAN, INF], 0), ([-INF, NAN], 1), ([NAN, NAN, NAN], 0)],
    )
    def test_the_first_nan(self, backend, dtype, place, values, token):
        start = 3 if place == "last" else 0
        row = np.full(len(values) + 3, -INF)
        row[start : start + len(values)] = values
        check(backend, [row], self.shards(place, len(values)), [start + token], dtype)

    @pytest.mark.parametrize("zeros", [(-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0)])
    def test_zeros_tie(self, backend, dtype, place, zeros):
        row = [-1, -1, -1, zeros[0], zeros[1], -1, -1, -1]
        shards = {"first": uneven(5, 3), "last": uneven(3, 5), "straddling": uneven(4, 4)}[place]
        check(backend, [row], shards, [3], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [0.0, INF, NAN])
def test_padding_never_wins(backend, dtype, padding):
    row = np.full(1000, -5, np.float32)
    row[737] = -1
    for shards in (shard_vocab(1000, 4), shard_vocab(1000, 4, pad_to=2048)):  # the second: ranks 2 and 3 hold padding
        parts = []
        for shard in shards:
            part = np.full((2, shard.width), padding, np.float32)
            ids = shard.ids()
            part[:, ids >= 0] = row[ids[ids >= 0]]
            parts.append(backend.xp.asarray(part.astype(DTYPES[dtype])))
        for layout in LAYOUTS:
            tokens = emulate_top_tokens(parts, shards, layout=layout, backend=backend.name)
            assert to_host(tokens).tolist() == [737, 737]


@pytest.mark.parametrize(("vocab", "tp"), [(1001, 2), (32001, 3), (32001, 4), (32001, 8)])
def test_a_global_id_is_not_rank_times_width(backend, vocab, tp):
    for shards in (VocabShard.even(vocab, tp), shard_vocab(vocab, tp, pad_to=64 * tp)):
        edges = sorted({token for shard in shards for token in shard.ids()[shard.ids() >= 0][[0, -1]].tolist()})
        rows = np.zeros((len(edges), vocab), np.float32)
        rows[np.arange(len(edges)), edges] = 1
        check(backend, rows, shards, edges, "bfloat16")


class TestStrides:
    def tokens(self, backend, array) -> list[int]:
        shard = VocabShard.even(array.shape[1], 1)[0]
        return to_host(get_top_tokens(array, shard, solo(), backend=backend.name)).tolist()

    def test_a_slice_of_wider_rows(self, backend):
        buffer = backend.xp.full((2, 8), 9, np.float32)
        buffer[:, 0:4] = backend.xp.asarray([[0, 1, 2, 3], [0, 5, 1, 2]], np.float32)
        assert self.tokens(backend, buffer[:, 0:4]) == [3, 1]

    def test_a_transposed_view(self, backend):
        assert self.tokens(backend, backend.xp.asarray([[1, 9, 3], [2, 4, 8]], np.float32).T) == [1, 0, 1]

    def test_every_second_column(self, backend):
        wide = backend.xp.full((3, 20), 100, np.float32)
        wide[:, ::2] = backend.xp.asarray(np.eye(3, 10, 4), np.float32)
        assert self.tokens(backend, wide[:, ::2]) == [4, 5, 6]

    def test_one_element_into_a_buffer(self, backend):
        buffer = backend.xp.full(41, 7, np.float16)
        view = buffer[1:].reshape(2, 20)
        view[...] = backend.xp.asarray(np.eye(2, 20, 19), np.float16)
        assert self.tokens(backend, view) == [19, 0]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("vocab", [3, 32001, 50257])
    @pytest.mark.parametrize(("memory", "shift"), [("contiguous", 1), ("contiguous", 3), ("odd_rows", 0)])
    def test_rows_aligned_to_their_elements_only(self, backend, dtype, vocab, memory, shift):
        rows = np.zeros((3, vocab), np.float32)
        rows[0, 0] = rows[1, vocab - 1] = rows[2, vocab // 2] = 1
        array = laid_out(rows.astype(DTYPES[dtype]), memory, backend.xp, shift)
        assert self.tokens(backend, array) == [0, vocab - 1, vocab // 2]


@pytest.mark.parametrize("tp", [1, 4])
def test_an_empty_batch(backend, tp):
    shards = VocabShard.even(163840, tp)
    parts = [backend.xp.zeros((0, shard.width), np.float16) for shard in shards]
    tokens = emulate_top_tokens(parts, shards, backend=backend.name)
    assert tokens.shape == (0,) and tokens.dtype == np.int64


def test_rows_without_columns_are_refused(backend):
    with pytest.raises(ValueError, match=r"logits have shape \(2, 0\)"):
        get_top_tokens(backend.xp.zeros((2, 0), np.float32), VocabShard.even(8, 1)[0], solo(), backend=backend.name)


@pytest.mark.parametrize("dtype", DTYPES)
class TestTies:
    @pytest.mark.parametrize("tp", [1, 2, 3, 8])
    def test_a_row_of_equal_values(self, backend, dtype, tp):
        check(backend, np.full((3, 1001), 0.5), VocabShard.even(1001, tp), [0, 0, 0], dtype)

    def test_on_both_sides_of_a_shard_edge(self, backend, dtype):
        row = np.zeros(2000)
        row[[999, 1000]] = 2
        check(backend, [row], VocabShard.even(2000, 2), [999], dtype)

    def test_made_by_rounding(self, backend, dtype):
        """1 and 1 + 2^-12 are one number in bf16 and fp16, two in fp32."""
        row = np.zeros(64)
        row[10], row[20] = 1.0, 1 + 2.0**-12
        check(backend, [row], VocabShard.even(64, 2), [20 if dtype == "float32" else 10], dtype)


@pytest.mark.parametrize("shift", [0, 16])
def test_subnormals_are_not_flushed(backend, shift):
    """bf16 words, and the same shifted to fp32; their negatives; and across shards."""
    words = np.array([[1, 3, 2, 0], [0x8001, 0x8003, 0x8002, 0x8001]], np.uint32) << shift
    rows = words.astype(np.uint16).view(DTYPES["bfloat16"]) if shift == 0 else words.view(np.float32)
    shards = VocabShard.even(4, 2)
    parts = [backend.xp.asarray(np.ascontiguousarray(part)) for part in (rows[:, :2], rows[:, 2:])]
    for layout in LAYOUTS:
        assert to_host(emulate_top_tokens(parts, shards, layout=layout, backend=backend.name)).tolist() == [1, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_candidates_are_rank_by_rank(backend, layout):
    values, ids = np.float32([[1, 9, 3], [4, 5, 6]]), np.array([[10, 11, 12], [100, 101, 102]])
    for rows in (3, 2):  # three rows of two ranks, and as many rows as ranks
        packed = order.pack(order.keys(values[:, :rows]), ids[:, :rows]).reshape(2 * rows, 1)
        gathered = backend.xp.asarray(order.pairs_of(packed) if layout == "pairs" else packed)
        tokens = pick_from_candidates(gathered, rows, backend=backend.name)
        assert to_host(tokens).tolist() == [100, 11, 102][:rows]


def test_a_capture_of_an_empty_batch_and_an_eager_one_agree(backend):
    if backend.xp is np:
        candidates = local_argmax_candidates(np.zeros((0, 64), np.float32), VocabShard.even(64, 1)[0])
        assert pick_from_candidates(candidates, 0).tolist() == []
        return
    from vpa import TopTokens

    top = TopTokens(VocabShard.even(64, 1)[0], solo(), max_rows=4, dtype="float32", backend=backend.name)
    captured = top.capture(backend.xp.zeros((0, 64), np.float32))
    assert captured.replay().tolist() == []
