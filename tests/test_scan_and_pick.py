"""Scan and pick on every backend: the candidates of the numpy backend bit for bit, and the token of NumPy's argmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracle import DTYPES, LAYOUTS, full_argmax, laid_out, to_host

from vpa import VocabShard, local_argmax_candidates, order, pick_from_candidates, shard_vocab
from vpa.bench.families import FAMILIES, make_shard

SHARDS = {
    "even_1": VocabShard.even(1000, 1)[0],
    "one_column": VocabShard.even(1, 1)[0],
    "narrower_than_a_load": VocabShard.even(5, 1)[0],
    "odd": VocabShard.even(32001, 3)[1],
    "padded_with_added_ids": shard_vocab(1010, 2, added_vocab_size=16)[0],
    "last_padded": shard_vocab(32001, 4)[3],
    "empty": shard_vocab(65, 8)[6],
    "ranges_out_of_order": VocabShard(0, 1, 5000, 700, ((3, 250, 4000), (260, 1, 17), (300, 399, 100))),
    "many_ranges": VocabShard(0, 1, 1280, 1290, tuple((10 * i + 3, 7, 10 * (127 - i)) for i in range(128))),
}


def numpy_candidates(logits: np.ndarray, shard: VocabShard, layout: str, splits: int = 8) -> np.ndarray:
    """Candidates by the order's own functions, split by split, without the backend's shortcuts."""
    ids = shard.ids()
    valid = np.flatnonzero(ids >= 0)
    columns = np.concatenate([np.arange(start, start + count) for start, count, _ in shard.ranges] or [valid])
    chunk = math.ceil(math.ceil(len(columns) / splits) / 64) * 64
    packed = np.zeros((len(logits), splits), np.uint64)
    for split in range(splits):
        part = columns[split * chunk : (split + 1) * chunk]
        if len(part):
            packed[:, split] = order.pack(order.keys(logits[:, part]), ids[part]).max(axis=1)
    return order.pairs_of(packed) if layout == "pairs" else packed


def bits(array) -> np.ndarray:
    return to_host(array).view(np.uint8)


@pytest.mark.parametrize("layout", ["packed", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard", SHARDS)
def test_candidates_of_every_family(backend, shard, dtype, layout):
    shard = SHARDS[shard]
    for family in FAMILIES:
        host = make_shard(family, 3, 5, shard, DTYPES[dtype])
        logits = backend.xp.asarray(host)
        candidates = local_argmax_candidates(logits, shard, layout=layout, backend=backend.name)
        assert np.array_equal(bits(candidates), bits(numpy_candidates(host, shard, layout))), family
        tokens = to_host(pick_from_candidates(candidates, 5, backend=backend.name))
        ids = shard.ids()
        valid = np.flatnonzero(ids >= 0)
        by_id = valid[np.argsort(ids[valid])]
        expected = ids[by_id][full_argmax(host[:, by_id])] if len(by_id) else np.full(5, -1)
        assert np.array_equal(tokens, expected), family


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("memory", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 64, 129, 1000, 4099])
def test_any_stride_and_alignment(backend, columns, dtype, memory, shift):
    shard = VocabShard(0, 1, columns + 5, columns + 3, ((2, columns, 1),))
    host = make_shard("ties", columns, 4, shard, DTYPES[dtype])
    host[1, 2] = host[2, 1 + columns] = 9  # the first and the last valid column
    logits = laid_out(host, memory, backend.xp, shift)
    candidates = local_argmax_candidates(logits, shard, backend=backend.name)
    assert np.array_equal(bits(candidates), bits(numpy_candidates(host, shard, "packed")))
    assert np.array_equal(
        to_host(pick_from_candidates(candidates, 4, backend=backend.name)), 1 + full_argmax(host[:, 2 : 2 + columns])
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broadcast_row(backend, dtype):
    shard = VocabShard.even(333, 1)[0]
    row = make_shard("random", 0, 1, shard, DTYPES[dtype])
    logits = backend.xp.broadcast_to(backend.xp.asarray(row), (6, 333))
    tokens = pick_from_candidates(local_argmax_candidates(logits, shard, backend=backend.name), 6, backend=backend.name)
    assert to_host(tokens).tolist() == full_argmax(row).tolist() * 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern(backend, dtype):
    """Each pattern as the only value above or beside each other kind of value, in one row each."""
    patterns = np.arange(0, 65536, 97 if backend.is_slow else 1, dtype=np.uint16)
    shard = VocabShard.even(130, 1)[0]
    for filler in (0xFF80 if dtype == "bfloat16" else 0xFC00, 0x0000, 0x8000, 0x0001, 0x3C00):
        words = np.full((len(patterns), 130), filler, np.uint16)
        words[:, 77] = patterns
        host = words.view(DTYPES[dtype])
        candidates = local_argmax_candidates(backend.xp.asarray(host), shard, backend=backend.name)
        tokens = to_host(pick_from_candidates(candidates, len(patterns), backend=backend.name))
        assert np.array_equal(tokens, full_argmax(host)), hex(filler)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bit_patterns(backend, dtype):
    """Rows of arbitrary bits: NaNs of all kinds, subnormals, both zeros, infinities, in all lanes of a load."""
    rng = np.random.default_rng(5)
    words = f"u{DTYPES[dtype].itemsize}"
    rows = rng.integers(0, 2 ** (8 * DTYPES[dtype].itemsize), (64, 1003), dtype=words)
    small = rng.integers(0, 4, (64, 1003), dtype=words)  # zero and the first subnormals
    small |= rng.integers(0, 2, small.shape, dtype=words) << np.dtype(words).type(8 * small.itemsize - 1)
    negative = small | np.dtype(words).type(1 << (8 * small.itemsize - 1))
    shard = VocabShard.even(1003, 1)[0]
    for host in (rows, small, negative):
        host = host.view(DTYPES[dtype])
        candidates = local_argmax_candidates(backend.xp.asarray(host), shard, backend=backend.name)
        tokens = to_host(pick_from_candidates(candidates, 64, backend=backend.name))
        assert np.array_equal(tokens, full_argmax(host))


@pytest.mark.parametrize("equal", range(2, 10))
def test_ties_inside_one_load(backend, equal):
    host = np.full((8, 64), -2, np.float32).astype(DTYPES["bfloat16"])
    for row in range(8):
        host[row, 3 + row : 3 + row + equal] = 5
    shard = VocabShard.even(64, 1)[0]
    candidates = local_argmax_candidates(backend.xp.asarray(host), shard, backend=backend.name)
    assert to_host(pick_from_candidates(candidates, 8, backend=backend.name)).tolist() == list(range(3, 11))


@pytest.mark.parametrize("splits", [1, 2, 3, 16, np.int8(100)])  # the last, doubled, is beyond its own range
def test_the_number_of_splits_changes_no_token(backend, splits):
    shard = VocabShard.even(5000, 2)[1]
    host = make_shard("ties", 1, 9, shard, DTYPES["float16"])
    for layout in ("packed", "pairs"):
        candidates = local_argmax_candidates(
            backend.xp.asarray(host), shard, layout=layout, splits=splits, backend=backend.name
        )
        assert candidates.shape == (9, int(splits) * (2 if layout == "pairs" else 1))
        assert np.array_equal(bits(candidates), bits(numpy_candidates(host, shard, layout, int(splits))))
        tokens = pick_from_candidates(candidates, 9, backend=backend.name)
        assert np.array_equal(to_host(tokens), 2500 + full_argmax(host))


@pytest.mark.parametrize("layout", ["packed", "pairs"])
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 3), (3, 3), (8, 2), (5, 70)])
def test_pick_reads_rank_by_rank(backend, layout, ranks, rows):
    """Row b of rank r is line r * rows + b, also where the number of ranks equals that of rows."""
    rng = np.random.default_rng(ranks)
    values = rng.integers(-2, 3, (ranks * rows, 8)).astype(np.float32)
    values[rng.random(values.shape) < 0.05] = np.nan
    ids = rng.permutation(ranks * rows * 8).reshape(ranks * rows, 8)
    packed = order.pack(order.keys(values), ids)
    packed[rng.random(packed.shape) < 0.3] = order.NO_CANDIDATE
    gathered = order.pairs_of(packed) if layout == "pairs" else packed
    best = np.stack([packed[r * rows : (r + 1) * rows].max(axis=1) for r in range(ranks)]).max(axis=0)
    tokens = pick_from_candidates(backend.xp.asarray(gathered), rows, backend=backend.name)
    assert tokens.dtype == np.int64
    assert np.array_equal(to_host(tokens), order.unpack(best)[1])


def test_pick_takes_strided_candidates(backend):
    packed = order.pack(order.keys(np.arange(12, dtype=np.float32).reshape(3, 4)), np.arange(12).reshape(3, 4))
    wide = backend.xp.zeros((3, 8), np.uint64)
    wide[:, ::2] = backend.xp.asarray(packed)
    assert to_host(pick_from_candidates(wide[:, ::2], 3, backend=backend.name)).tolist() == [3, 7, 11]


def test_given_outputs_are_written_and_returned(backend):
    shard = VocabShard.even(100, 1)[0]
    logits = backend.xp.asarray(make_shard("random", 0, 3, shard, DTYPES["float32"]))
    out, tokens = backend.xp.empty((3, 8), np.uint64), backend.xp.empty(3, np.int64)
    assert local_argmax_candidates(logits, shard, out=out, backend=backend.name) is out
    assert pick_from_candidates(out, 3, out=tokens, backend=backend.name) is tokens
    assert np.array_equal(to_host(tokens), full_argmax(to_host(logits)))


def test_inputs_are_not_written(backend):
    shard = shard_vocab(1010, 2, added_vocab_size=16)[0]
    host = make_shard("nan", 0, 3, shard, DTYPES["bfloat16"])
    logits = backend.xp.asarray(host)
    candidates = local_argmax_candidates(logits, shard, backend=backend.name)
    before = to_host(candidates).copy()
    pick_from_candidates(candidates, 3, backend=backend.name)
    assert np.array_equal(bits(logits), bits(host)) and np.array_equal(to_host(candidates), before)


def test_no_rows(backend):
    shard = VocabShard.even(163840, 4)[2]
    logits = backend.xp.zeros((0, shard.width), np.float32)
    for layout, width in (("packed", 8), ("pairs", 16)):
        candidates = local_argmax_candidates(logits, shard, layout=layout, backend=backend.name)
        assert candidates.shape == (0, width)
        tokens = pick_from_candidates(candidates, 0, backend=backend.name)
        assert tokens.shape == (0,) and tokens.dtype == np.int64


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["raw", "numba"])
def test_offsets_beyond_32_bits(name):
    """Rows more than 2^31 elements apart, and columns too; both strides negative as well."""
    import cupy

    step = 2**31 + 5
    buffer = cupy.zeros(step + 64, np.uint16)
    logits = cupy.ndarray((2, 40), np.uint16, buffer.data, strides=(2 * step, 2))
    logits[0, 3] = logits[1, 30] = 0x4000
    shard, view = VocabShard.even(40, 1)[0], logits.view(DTYPES["bfloat16"])
    for array, expected in ((view, [3, 30]), (view[::-1], [30, 3]), (view[:, ::-1], [36, 9])):
        assert (
            to_host(pick_from_candidates(local_argmax_candidates(array, shard, backend=name), 2)).tolist() == expected
        )
    two, expected = VocabShard.even(2, 1)[0], [1 if c == 30 else 0 for c in range(40)]
    candidates = local_argmax_candidates(view.T, two, backend=name)
    assert to_host(pick_from_candidates(candidates, 40)).tolist() == expected


class TestRefusals:
    """Bad arguments: what was got, what is accepted, what to do."""

    shard = VocabShard.even(100, 1)[0]
    logits = np.zeros((3, 100), np.float32)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"logits": np.zeros((3, 100))}, TypeError, "float64; bfloat16, float16, float32 are accepted"),
            ({"logits": np.zeros((3, 100), np.uint16)}, TypeError, "uint16.*ml_dtypes.bfloat16"),
            ({"logits": [[1.0] * 100]}, TypeError, "list; a NumPy or CuPy array, or an array with __dlpack__"),
            ({"logits": np.zeros(100, np.float32)}, ValueError, r"shape \(100,\); this shard takes \[rows, 100\]"),
            ({"logits": np.zeros((3, 99), np.float32)}, ValueError, r"shape \(3, 99\); this shard takes \[rows, 100\]"),
            ({"logits": np.zeros((3, 0), np.float32)}, ValueError, r"shape \(3, 0\)"),
            ({"layout": "triples"}, ValueError, "'triples'; 'packed' and 'pairs' are accepted"),
            ({"splits": 2.5}, TypeError, "splits is 2.5; an integer is accepted"),
            ({"splits": 8.0}, TypeError, "splits is 8.0; an integer is accepted"),
            ({"splits": True}, TypeError, "splits is True; an integer is accepted"),
            ({"splits": "8"}, TypeError, "splits is '8'; an integer is accepted"),
            ({"layout": ["packed"]}, ValueError, "'packed' and 'pairs' are accepted"),
            ({"logits": np.zeros((3, 100), ">f4")}, TypeError, "logits are >f4; bfloat16"),
            ({"logits": np.ma.zeros((3, 100), np.float32)}, TypeError, "masked"),
            ({"splits": 0}, ValueError, "splits is 0; it is at least 1"),
            ({"splits": np.int8(-8)}, ValueError, "splits is -8; it is at least 1"),
            ({"backend": "cuda"}, ValueError, "'cuda'; numpy, raw"),
            ({"backend": "raw"}, TypeError, "'raw' works on CuPy arrays, got NumPy"),
            ({"shard": (0, 100)}, TypeError, "shard is a tuple; a vpa.VocabShard"),
            ({"out": np.zeros((3, 8), np.int64)}, ValueError, r"out is int64\[3, 8\]; a C-contiguous uint64\[3, 8\]"),
            ({"out": np.zeros((8, 3), np.uint64).T}, ValueError, "out is non-contiguous"),
            ({"out": np.zeros((3, 16), np.uint64)}, ValueError, r"uint64\[3, 16\]"),
            ({"out": np.broadcast_to(np.uint64(0), (1, 8))[:0]}, ValueError, r"uint64\[0, 8\]"),
            ({"out": np.frombuffer(bytes(192), np.uint64).reshape(3, 8)}, ValueError, "out is read-only"),
        ],
    )
    def test_scan(self, change, error, message):
        arguments = {"logits": self.logits, "shard": self.shard, **change}
        with pytest.raises(error, match=message):
            local_argmax_candidates(arguments.pop("logits"), arguments.pop("shard"), **arguments)

    def test_pairs_of_a_vocabulary_whose_ids_fp32_cannot_hold(self):
        shard = VocabShard(0, 1, 2**24 + 1, 100, ((0, 100, 2**24 - 99),))
        with pytest.raises(ValueError, match="exact below 2\\^24; vocab_size is 16777217: use layout='packed'"):
            local_argmax_candidates(self.logits, shard, layout="pairs")
        fits = VocabShard(0, 1, 2**24, 100, ((0, 100, 2**24 - 100),))
        candidates = local_argmax_candidates(self.logits, fits, layout="pairs")
        assert pick_from_candidates(candidates, 3).tolist() == [2**24 - 100] * 3

    def test_elements_off_their_alignment(self):
        memory = np.zeros(3 * 400 + 2, np.uint8)
        for view in (
            np.ndarray((3, 100), np.float32, memory, offset=2),
            np.ndarray((3, 100), np.float16, memory, strides=(201, 2)),
        ):
            with pytest.raises(ValueError, match="start at or step by a fraction of a float"):
                local_argmax_candidates(view, self.shard)

    @pytest.mark.parametrize(
        ("gathered", "rows", "error", "message"),
        [
            (np.zeros((6, 8), np.int64), 3, TypeError, r"int64; uint64 \(packed\), float32 \(pairs\) are accepted"),
            (
                np.zeros((7, 8), np.uint64),
                3,
                ValueError,
                r"shape \(7, 8\); with num_rows 3 it is \[ranks \* 3, candidates\]",
            ),
            (np.zeros((6, 7), np.float32), 3, ValueError, r"\[ranks \* 3, 2 \* candidates\]"),
            (np.zeros(48, np.uint64), 3, ValueError, r"shape \(48,\)"),
            (np.zeros((0, 8), np.uint64), 3, ValueError, r"shape \(0, 8\)"),
            (np.zeros((6, 0), np.uint64), 3, ValueError, r"shape \(6, 0\)"),
            (np.zeros((6, 8), np.uint64), 0, ValueError, "num_rows 0"),
            (np.zeros((6, 8), np.uint64), -3, ValueError, "num_rows is -3"),
            (np.zeros((6, 8), np.uint64), 3.0, TypeError, "num_rows is 3.0; an integer is accepted"),
            (np.zeros((6, 8), np.uint64), True, TypeError, "num_rows is True; an integer is accepted"),
            (np.zeros((), np.uint64), 1, ValueError, r"gathered has shape \(\)"),
        ],
    )
    def test_pick(self, gathered, rows, error, message):
        with pytest.raises(error, match=message):
            pick_from_candidates(gathered, rows)
