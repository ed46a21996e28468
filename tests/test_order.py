"""The order, checked against host NumPy over all 16-bit patterns and the fp32 patterns where rules meet."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from oracle import DTYPES, float_of_bits, full_argmax, precedes

from vpa import order

FP32_PATTERNS = np.array(
    [
        bits | sign
        for sign in (0, 0x80000000)
        for bits in (
            0x00000000,  # zero
            0x00000001,  # smallest subnormal
            0x007FFFFF,  # largest subnormal
            0x00800000,  # smallest normal
            0x3F800000,  # 1
            0x7F7FFFFF,  # largest finite
            0x7F800000,  # inf
            0x7FC00000,  # quiet NaN
            0x7F800001,  # signalling NaN
            0x7FABCDEF,  # NaNs with other payloads
            0x7FFFFFFF,
        )
    ],
    np.uint32,
)


def all_patterns(dtype: str) -> np.ndarray:
    if dtype == "float32":
        return FP32_PATTERNS.view(np.float32)
    return np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])


def widened(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return values.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_rank_every_pattern_as_numpy_does(dtype):
    values = all_patterns(dtype)
    keys, numbers = order.keys(values), widened(values)
    is_nan = np.isnan(numbers)
    assert (keys[is_nan] == 0xFFFFFFFF).all()
    assert (keys[~is_nan] < 0xFFFFFFFF).all() and (keys > 0).all()
    by_key = np.argsort(keys[~is_nan], kind="stable")
    ranked, ranked_keys = numbers[~is_nan][by_key], keys[~is_nan][by_key]
    assert np.array_equal(ranked, np.sort(numbers[~is_nan]))
    # Neighbours: the key rises exactly where the number does, so that ties, and only ties, share a key.
    assert np.array_equal(np.diff(ranked_keys.astype(np.int64)) > 0, ranked[1:] > ranked[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_and_ties_pick_what_argmax_picks(dtype):
    """Each pattern beside the next one up, itself, and a NaN, in both orders: packed maximum against NumPy's argmax."""
    values = all_patterns(dtype)
    ranked = values[np.argsort(order.keys(values), kind="stable")]
    nan = np.full(len(values), np.nan, np.float32).astype(DTYPES[dtype])
    for left, right in (
        (ranked, np.roll(ranked, 1)),
        (np.roll(ranked, 1), ranked),
        (ranked, ranked.copy()),
        (ranked, nan),
        (nan, ranked),
    ):
        rows = np.stack([left, right], axis=1)
        packed = order.pack(order.keys(rows), np.arange(2)).max(axis=1)
        assert np.array_equal(order.unpack(packed)[1], full_argmax(rows))


def test_fp32_patterns_pairwise_against_the_rules():
    keys = order.keys(FP32_PATTERNS.view(np.float32))
    for (a, key_a), (b, key_b) in itertools.product(zip(FP32_PATTERNS, keys, strict=True), repeat=2):
        first = precedes((float_of_bits(a), 0), (float_of_bits(b), 1))
        assert (order.pack(key_a, 0) > order.pack(key_b, 1)) == first, (hex(a), hex(b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_widening_changes_no_value(dtype):
    values = all_patterns(dtype)
    got, expected = order.float_bits(values).view(np.float32), widened(values)
    assert np.array_equal(got, expected, equal_nan=True)
    finite = ~np.isnan(expected)
    assert np.array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_from_keys(dtype):
    values = widened(all_patterns(dtype))
    back = order.values_of(order.keys(values))
    assert np.array_equal(back, values, equal_nan=True)
    assert not np.signbit(back[back == 0]).any()
    assert (back[np.isnan(back)].view(np.uint32) == 0x7FC00000).all()


@pytest.mark.parametrize("token", [0, 1, 2**24 - 1, 2**24 + 1, order.MAX_VOCAB_SIZE - 1])
def test_pack_and_unpack(token):
    keys = order.keys(FP32_PATTERNS.view(np.float32))
    packed = order.pack(keys, np.full(len(keys), token))
    assert (packed > order.NO_CANDIDATE).all()
    got_keys, got_ids = order.unpack(packed)
    assert np.array_equal(got_keys, keys) and (got_ids == token).all()


def test_packed_order_is_the_order_of_candidates():
    values, ids = [math.nan, math.inf, 1.0, -0.0, 0.0, -math.inf], [0, 3, 2**32 - 3]
    candidates = list(itertools.product(values, ids))
    for a, b in itertools.permutations(candidates, 2):
        if a[1] == b[1]:
            continue
        packed_a, packed_b = (order.pack(order.keys(np.float32([v])), np.array([i]))[0] for v, i in (a, b))
        assert (packed_a > packed_b) == precedes(a, b), (a, b)


def test_no_candidate_loses_to_minus_infinity_in_both_layouts():
    lowest = order.pack(order.keys(np.float32([-np.inf])), np.array([order.MAX_VOCAB_SIZE - 1]))
    assert lowest[0] > order.NO_CANDIDATE
    assert order.unpack(np.array([order.NO_CANDIDATE]))[1][0] == -1
    empty = order.pairs_of(np.array([[order.NO_CANDIDATE]]))
    assert empty.tolist() == [[-math.inf, math.inf]]
    assert order.packed_of(empty)[0, 0] == order.NO_CANDIDATE


def test_pairs_hold_the_same_candidates():
    keys = order.keys(FP32_PATTERNS.view(np.float32))
    packed = order.pack(keys, np.arange(len(keys)) * 700_001 % 2**24).reshape(2, -1)
    pairs = order.pairs_of(packed)
    assert pairs.dtype == np.float32 and pairs.shape == (2, 2 * packed.shape[1])
    assert np.array_equal(order.packed_of(pairs), packed)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"float64.*bfloat16, float16, float32"):
        order.keys(np.zeros(3))
