"""The head's product and scan in one kernel: exact where sums are, over shapes, ranges, biases and transforms."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DTYPES, to_host

import vpa
from vpa import LogitsProcessor, ParallelLMHead, Transform, VocabShard, kernels, shard_vocab
from vpa.backends import head_launches, launches

SHARDS = {
    "whole": VocabShard.even(1000, 1)[0],
    "less than a tile": VocabShard.even(5, 1)[0],
    "two ranges": shard_vocab(1010, 2, added_vocab_size=16)[1],
    "empty": shard_vocab(65, 8)[6],
    "out of order": VocabShard(0, 1, 5000, 700, ((3, 250, 4000), (260, 1, 17), (300, 399, 100))),
}
TRANSFORMS = (None, Transform(scale=-0.5, soft_cap=3.0))

#: (rows, hidden size): with columns left over, fewer than a load, and enough for warps to share a tile.
SIZES = ((1, 8), (1, 7168), (3, 40), (4, 7168), (4, 10752), (8, 264), (9, 33), (16, 7168), (17, 64), (40, 72))


def given(rows: int, size: int, shard: VocabShard, dtype: str, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Hidden states, weight and bias of small integers: sums are exact in any order, and ties abound."""
    rng = np.random.default_rng([seed, rows, size])
    sparse = 8 / size  # so that sums stay below 2^8, which bf16 holds
    hidden = rng.integers(-3, 4, (rows, size)) * (rng.random((rows, size)) < sparse)
    weight = rng.integers(-3, 4, (shard.width, size))
    return hidden.astype(DTYPES[dtype]), weight.astype(DTYPES[dtype]), rng.integers(-3, 4, shard.width).astype("f4")


def expected(hidden, weight, bias, shard: VocabShard, transform: Transform | None) -> np.ndarray:
    """One candidate a row, from the logits of NumPy's product."""
    logits = hidden.astype(np.float32) @ weight.astype(np.float32).T
    if bias is not None:
        logits = logits + bias
    logits = logits.astype(hidden.dtype)
    return vpa.local_argmax_candidates(logits, shard, splits=1, backend="numpy", transform=transform)


@pytest.mark.parametrize("warp_size", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHARDS)
def test_without_tensor_cores(name, dtype, warp_size):
    from vpa.backends.simt import RawModule

    shard = SHARDS[name]
    for rows, size, with_bias, transform in ((1, 8, True, None), (9, 33, False, TRANSFORMS[1]), (4, 40, True, None)):
        hidden, weight, bias = given(rows, size, shard, dtype)
        bias = bias if with_bias else None
        shape = head_launches.head_shape(rows, size, shard.num_valid, False, 1)
        out = np.zeros((rows, shape.blocks), np.uint64)
        launch = head_launches.head(hidden, weight, shard, bias, out, transform, shape, False)
        source = kernels.source(launch.kernel, **launch.defines)
        kernel = RawModule(source.text, name="head.cu", warp_size=warp_size).get_function(launch.kernel)
        kernel((launch.grid,), (launch.block,), launch.args)
        assert np.array_equal(out.max(axis=1, keepdims=True), expected(hidden, weight, bias, shard, transform))


@pytest.mark.parametrize("keep", ["packed", "pairs"])
def test_a_pick_may_keep_candidates(keep):
    from vpa.backends import simt_

    shard = VocabShard.even(3000, 1)[0]
    logits = np.random.default_rng(0).standard_normal((8, 3000)).astype(np.float32)
    candidates = vpa.local_argmax_candidates(logits, shard, layout=keep)
    out = np.zeros((2, 1), np.uint64)
    simt_.run(launches.pick(candidates, 2, out))
    best = vpa.local_argmax_candidates(logits, shard, splits=1).reshape(4, 2).max(axis=0)
    assert np.array_equal(out[:, 0], best)


def test_shapes_leave_no_block_without_work():
    for rows in (1, 4, 5, 8, 16, 100):
        for size in (8, 1024, 4096, 7168):
            shape = head_launches.head_shape(rows, size, 32320, True, 132)
            assert shape.batch in (8, 16) and 1 <= shape.blocks <= 4 * 132
            assert shape.sharers == 1 or (size == 7168 and rows <= 4)
    assert head_launches.head_shape(1, 7168, 8, True, 132).blocks == 1
    assert head_launches.head_shape(1, 7168, 0, True, 132).blocks == 1


def test_the_sizes_above_share_tiles():
    assert {head_launches.head_shape(rows, size, 1000, True, 132).sharers for rows, size in SIZES} == {1, 8}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_any_layout(dtype):
    """By cuBLAS: rows apart, transposed, reversed, overlapping, of one row or column; exact where sums are."""
    import cupy

    from vpa.backends import cublas

    rng = np.random.default_rng(0)

    def views(rows: int, columns: int):
        """(NumPy's, CuPy's) matrices of one shape and content, that lie in memory in many ways."""
        host = rng.integers(-3, 4, (2 * rows + 8, 2 * columns + 8)).astype(DTYPES[dtype])
        turned = rng.integers(-3, 4, (columns, rows)).astype(DTYPES[dtype])
        ways = [
            (host, lambda a: a[:rows, :columns]),
            (host, lambda a: a[1 : 2 * rows + 1 : 2, :columns]),
            (host, lambda a: a[:rows, 1 : 2 * columns + 1 : 2]),
            (host, lambda a: a[rows - 1 :: -1, :columns]),
            (host, lambda a: a[5:6, :columns] if rows == 1 else a[:rows, columns - 1 :: -1]),
            (host, lambda a: a[0, :columns][None] if rows == 1 else a[:rows, :columns]),
            (host, lambda a: a[:5, :columns][::-1][:1] if rows == 1 else a[:rows, :columns]),
            (turned, lambda a: a.T),
        ]
        for whole, way in ways:
            words = f"u{whole.itemsize}"
            on_gpu = way(cupy.asarray(whole.view(words)))
            placed = cupy.ndarray(on_gpu.shape, whole.dtype, on_gpu.data, on_gpu.strides)
            yield np.ascontiguousarray(way(whole.view(words))).view(whole.dtype), placed

    for rows, columns, outputs in ((1, 8, 5), (3, 40, 1), (5, 1, 7), (1, 1, 1), (16, 24, 33)):
        for host_x, x in views(rows, columns):
            for host_weight, weight in views(outputs, columns):
                want = host_x.astype(np.float32) @ host_weight.astype(np.float32).T
                assert np.array_equal(to_host(cublas.product(x, weight, np.dtype(np.float32))), want)
                assert np.array_equal(to_host(cublas.product(x, weight, x.dtype)), want.astype(DTYPES[dtype]))
    for rows, columns, outputs in ((0, 8, 5), (3, 0, 4), (3, 8, 0)):
        x, weight = (cupy.zeros((n, columns), DTYPES[dtype]) for n in (rows, outputs))
        assert cublas.product(x, weight, x.dtype).shape == (rows, outputs)
        assert not to_host(cublas.product(x, weight, x.dtype)).astype(np.float32).any()


@pytest.mark.gpu
def test_fp32_products_are_fp32s():
    """Not TF32's, which has ten bits after the first."""
    import cupy

    from vpa.backends import cublas

    x = cupy.full((3, 64), 1 + 2.0**-20, np.float32)
    product = to_host(cublas.product(x, cupy.eye(64, dtype=np.float32), np.dtype(np.float32)))
    assert (product == np.float32(1 + 2.0**-20)).all()


@pytest.mark.gpu
def test_subnormal_inputs_count_without_tensor_cores():
    import cupy

    from vpa.backends import raw

    weight = np.zeros((5, 1), np.float32)
    weight[3] = 2.0**-140
    out = cupy.zeros((1, 1), np.uint64)
    raw.head_candidates(
        cupy.full((1, 1), 2.0**100, np.float32), cupy.asarray(weight), VocabShard.even(5, 1)[0], None, None, out
    )
    assert to_host(vpa.pick_from_candidates(out, 1)).tolist() == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHARDS)
def test_on_a_gpu(name, dtype):
    import cupy

    from vpa.backends import raw

    shard = SHARDS[name]
    for rows, size in SIZES:
        for with_bias, transform in ((False, None), (True, TRANSFORMS[1])):
            hidden, weight, bias = given(rows, size, shard, dtype)
            bias = bias if with_bias else None
            out = cupy.zeros((rows, 1), np.uint64)
            placed = [None if array is None else cupy.asarray(array) for array in (hidden, weight, bias)]
            raw.head_candidates(placed[0], placed[1], shard, placed[2], transform, out)
            want = expected(hidden, weight, bias, shard, transform)
            assert np.array_equal(to_host(out), want), (rows, size, with_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_pass_through_tensor_cores(dtype):
    import cupy

    from vpa.backends import raw

    shard = SHARDS["whole"]
    hidden, weight, _ = given(4, 64, shard, dtype)
    hidden[:] = 1
    weight[700, 3], weight[31, 5], weight[900, 7] = np.nan, np.inf, -np.inf
    out = cupy.zeros((4, 1), np.uint64)
    raw.head_candidates(cupy.asarray(hidden), cupy.asarray(weight), shard, None, None, out)
    assert (to_host(vpa.pick_from_candidates(out, 4)) == 700).all()
    weight[700, 3] = 0
    raw.head_candidates(cupy.asarray(hidden), cupy.asarray(weight), shard, None, None, out)
    assert (to_host(vpa.pick_from_candidates(out, 4)) == 31).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_processor_gives_the_same_tokens_fused(dtype):
    """All ranks in one process, biased, transformed, mapped to a target's vocabulary; rows of one to many batches."""
    import cupy

    shards = shard_vocab(500, 4)
    weights = [given(1, 64, shard, dtype, shard.rank)[1:] for shard in shards]
    heads = [
        ParallelLMHead(cupy.asarray(weight), shards, rank, cupy.asarray(bias.astype(DTYPES[dtype])))
        for rank, (weight, bias) in enumerate(weights)
    ]
    settings = {"scale": -0.5, "soft_cap": 30.0, "draft_to_target": np.arange(500), "target_vocab_size": 1000}
    for rows in (0, 1, 9, 40):
        hidden = cupy.asarray(given(max(rows, 1), 64, shards[0], dtype)[0][:rows])
        two_steps = LogitsProcessor(**settings).get_top_tokens(heads, hidden)
        fused = LogitsProcessor(**settings, fused=True).get_top_tokens(heads, hidden)
        assert np.array_equal(to_host(two_steps), to_host(fused)), rows


@pytest.mark.gpu
def test_biases_and_hidden_states_of_any_strides():
    import cupy

    shard = VocabShard.even(100, 1)[0]
    hidden, weight, bias = given(4, 64, shard, "bfloat16")
    twice = np.repeat(bias, 2)
    one_row = cupy.asarray(hidden.view(np.uint16))[0][None].view(hidden.dtype)
    wide = cupy.asarray(hidden.astype(np.float32))
    for placed in (cupy.asarray(twice)[::2], cupy.asarray(bias[::-1].copy())[::-1], cupy.asarray(bias)):
        head = ParallelLMHead(cupy.asarray(weight), (shard,), 0, placed)
        want = to_host(vpa.pick_from_candidates(cupy.asarray(expected(hidden, weight, bias, shard, None)), 4))
        for fused in (False, True):
            processor = LogitsProcessor(fused=fused)
            assert np.array_equal(to_host(processor.get_top_tokens(head, wide)), want)
            assert np.array_equal(to_host(processor.get_top_tokens(head, cupy.asfortranarray(wide))), want)
            assert to_host(processor.get_top_tokens(head, one_row)).tolist() == [want[0]]
    flat = ParallelLMHead(cupy.asarray(weight), (shard,), 0, cupy.broadcast_to(cupy.ones(1, np.float32), (100,)))
    tokens = [to_host(LogitsProcessor(fused=fused).get_top_tokens(flat, wide)) for fused in (False, True)]
    assert np.array_equal(*tokens)
    turned = ParallelLMHead(cupy.asarray(weight.view(np.uint16).T.copy()).T.view(hidden.dtype), (shard,), 0)
    with pytest.raises(ValueError, match="elements lie side by side: copy it, or leave fused unset"):
        LogitsProcessor(fused=True).get_top_tokens(turned, wide)


def test_fused_is_refused_where_it_is_not_made_for():
    with pytest.raises(ValueError, match="packed candidates"):
        LogitsProcessor(fused=True, layout="pairs")
    with pytest.raises(ValueError, match="backend 'numba'"):
        LogitsProcessor(fused=True, backend="numba")
    head = ParallelLMHead.seeded(0, VocabShard.even(100, 1), hidden_size=8)
    with pytest.raises(TypeError, match="GPU arrays; got NumPy arrays: leave fused unset"):
        LogitsProcessor(fused=True).get_top_tokens(head, np.zeros((2, 8), head.weight.dtype))
