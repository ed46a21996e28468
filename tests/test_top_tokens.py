"""get_top_tokens, TopTokens and emulation in one process: S1's matrix, capture and replay, refusals."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from oracle import DTYPES, full_argmax, laid_out, to_host

import vpa
from vpa import VocabShard, emulate_top_tokens, get_top_tokens, shard_vocab
from vpa.bench.families import FAMILIES, make_shard

ROWS = (1, 3, 8, 64)


def sharding(vocab: int, tp: int) -> tuple[VocabShard, ...]:
    """Padded as engines pad; for a number of ranks that does not divide, an even cut without padding."""
    return VocabShard.even(vocab, tp) if tp == 3 else shard_vocab(vocab, tp)


@pytest.mark.parametrize("vocab", [131072, 32001])
@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_matrix_of_shards_dtypes_and_families(backend, family, dtype, tp, vocab):
    batches = (1, 3) if backend.is_slow else ROWS
    whole = make_shard(family, 11, max(batches), VocabShard.even(vocab, 1)[0], DTYPES[dtype])
    expected = full_argmax(whole)
    shards = sharding(vocab, tp)
    parts = [backend.xp.asarray(make_shard(family, 11, max(batches), shard, DTYPES[dtype])) for shard in shards]
    for layout in ("packed", "pairs"):
        for rows in batches:
            tokens = emulate_top_tokens([part[:rows] for part in parts], shards, layout=layout, backend=backend.name)
            assert tokens.dtype == np.int64
            assert np.array_equal(to_host(tokens), expected[:rows]), (layout, rows)


@pytest.mark.parametrize("memory", ["column_major", "every_second_column", "odd_rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_contiguous_shards(backend, dtype, memory):
    shards = shard_vocab(32001, 4)
    whole = make_shard("planted", 2, 5, VocabShard.even(32001, 1)[0], DTYPES[dtype])
    parts = [laid_out(make_shard("planted", 2, 5, shard, DTYPES[dtype]), memory, backend.xp) for shard in shards]
    assert np.array_equal(to_host(emulate_top_tokens(parts, shards, backend=backend.name)), full_argmax(whole))


def test_added_vocabulary_is_ranked_by_id_not_by_rank(backend):
    """Rank 0 holds added ids above all of rank 1's: an equal value on rank 1 has the lower id."""
    shards = shard_vocab(1010, 2, added_vocab_size=16)
    parts = [np.full((2, shard.width), -1, np.float32) for shard in shards]
    parts[0][:, 512] = 7  # id 1010
    parts[1][0, 100] = 7  # id 612
    tokens = emulate_top_tokens([backend.xp.asarray(part) for part in parts], shards, backend=backend.name)
    assert to_host(tokens).tolist() == [612, 1010]


def test_one_rank_needs_no_communication(backend):
    shard = VocabShard.even(5000, 1)[0]
    logits = backend.xp.asarray(make_shard("ties", 0, 7, shard, DTYPES["bfloat16"]))
    tokens = get_top_tokens(logits, shard, vpa.comm.solo(), backend=backend.name)
    assert np.array_equal(to_host(tokens), full_argmax(to_host(logits)))
    top = vpa.TopTokens(shard, vpa.comm.solo(), max_rows=7, dtype="bfloat16", backend=backend.name)
    for rows in (7, 1, 0, 3):
        assert np.array_equal(to_host(top(logits[:rows])), full_argmax(to_host(logits[:rows])))
    out = backend.xp.empty(3, np.int64)
    assert top(logits[2:5], out=out) is out
    assert np.array_equal(to_host(out), full_argmax(to_host(logits[2:5])))


def test_threads_may_share_an_object():
    import concurrent.futures

    shard = VocabShard.even(3000, 1)[0]
    top = vpa.TopTokens(shard, vpa.comm.solo(), max_rows=4, dtype="float32")
    inputs = [make_shard("random", seed, 4, shard, DTYPES["float32"]) for seed in range(60)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for host, tokens in zip(inputs, pool.map(top, inputs), strict=True):
            assert np.array_equal(tokens, full_argmax(host))


def test_results_are_fresh_memory(backend):
    shard = VocabShard.even(100, 1)[0]
    top = vpa.TopTokens(shard, vpa.comm.solo(), max_rows=2, dtype=np.float32, backend=backend.name)
    first = top(backend.xp.asarray(np.eye(2, 100, dtype=np.float32)))
    second = top(backend.xp.asarray(np.eye(2, 100, 5, dtype=np.float32)))
    assert (to_host(first).tolist(), to_host(second).tolist()) == ([0, 1], [5, 6])


class TestRefusals:
    shard = VocabShard.even(100, 1)[0]

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"dtype": "float64"}, TypeError, "float64; bfloat16, float16, float32 are accepted"),
            ({"dtype": "int7"}, TypeError, "int7; bfloat16"),
            ({"dtype": None}, TypeError, "logits are None; bfloat16"),
            ({"max_rows": 0}, ValueError, "max_rows is 0; it is at least 1"),
            ({"max_rows": 2.5}, TypeError, "max_rows is 2.5; an integer"),
            ({"max_rows": True}, TypeError, "max_rows is True; an integer"),
            ({"backend": ["numpy"]}, ValueError, "numpy, raw"),
            ({"comm": None}, TypeError, "comm is a NoneType without rank"),
            ({"layout": "x"}, ValueError, "'packed' and 'pairs'"),
            ({"backend": "x"}, ValueError, "numpy, raw"),
            ({"shard": VocabShard.even(100, 2)[0]}, ValueError, "rank 0 of 2, the communicator rank 0 of 1"),
            ({"shard": None}, TypeError, "shard is a NoneType"),
        ],
    )
    def test_building(self, change, error, message):
        arguments = {"shard": self.shard, "comm": vpa.comm.solo(), "max_rows": 4, "dtype": "float32", **change}
        with pytest.raises(error, match=message):
            vpa.TopTokens(arguments.pop("shard"), arguments.pop("comm"), **arguments)

    @pytest.mark.parametrize(
        ("logits", "message"),
        [
            (np.zeros((5, 100), np.float32), "got 5 rows of float32; this object was built for at most 4 of float32"),
            (np.zeros((4, 100), np.float16), "got 4 rows of float16"),
            (np.zeros((4, 101), np.float32), r"this shard takes \[rows, 100\]"),
        ],
    )
    def test_calling(self, logits, message):
        top = vpa.TopTokens(self.shard, vpa.comm.solo(), max_rows=4, dtype="float32")
        with pytest.raises(ValueError, match=message):
            top(logits)
        assert top(np.zeros((4, 100), np.float32)).tolist() == [0] * 4

    def test_capturing_host_arrays(self):
        top = vpa.TopTokens(self.shard, vpa.comm.solo(), max_rows=4, dtype="float32")
        with pytest.raises(ValueError, match="captured from GPU arrays; got a NumPy array"):
            top.capture(np.zeros((4, 100), np.float32))

    def test_emulating(self):
        shards = VocabShard.even(100, 2)
        good = [np.zeros((2, 50), np.float32)] * 2
        assert emulate_top_tokens(good, shards).tolist() == [0, 0]
        for parts, message in (
            (good[:1], "1 arrays of logits for 2 shards"),
            ([good[0], np.zeros((3, 50), np.float32)], "of 2 rows.*of 3 rows"),
            ([good[0], np.zeros((2, 50), np.float16)], "float32 of.*float16 of"),
            ([np.zeros((), np.float32)] * 2, r"shards_of_logits\[0\] has shape \(\); \[rows, columns\] is accepted"),
            ([good[0], np.zeros((), np.float32)], r"shards_of_logits\[1\] has shape \(\)"),
            ([good[0], np.zeros(50, np.float32)], r"shards_of_logits\[1\] has shape \(50,\)"),
        ):
            with pytest.raises(ValueError, match=message):
                emulate_top_tokens(parts, shards)
        with pytest.raises(TypeError, match=r"shards\[0\] is a int; a vpa.VocabShard"):
            emulate_top_tokens(good, [1, 2])
        with pytest.raises(TypeError, match="shards is a VocabShard; a list or tuple"):
            emulate_top_tokens(good, shards[0])
        with pytest.raises(ValueError, match="another vocabulary or number of ranks"):
            emulate_top_tokens(good, VocabShard.even(150, 3)[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["raw", "numba"])
class TestOnAGpu:
    @pytest.fixture(autouse=True, params=[32001, 70001])
    def vocabulary(self, request):
        """One that a block takes whole, in one kernel, in 16-bit logits, and one that is scanned and picked."""
        self.shard = VocabShard.even(request.param, 1)[0]

    def host(self, family: str, seed: int = 0, dtype: str = "bfloat16") -> np.ndarray:
        return make_shard(family, seed, 8, self.shard, DTYPES[dtype])

    def top(self, name: str, layout: str = "packed", dtype: str = "bfloat16"):
        return vpa.TopTokens(self.shard, vpa.comm.solo(), max_rows=8, dtype=dtype, layout=layout, backend=name)

    @pytest.mark.parametrize("layout", ["packed", "pairs"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_fifty_replays_follow_the_logits(self, name, dtype, layout):
        import cupy

        logits = cupy.asarray(self.host("zeros", dtype=dtype))
        captured = self.top(name, layout, dtype).capture(logits)
        for replay in range(50):
            host = self.host(list(FAMILIES)[replay % len(FAMILIES)], replay, dtype)
            logits.view(f"u{host.itemsize}")[...] = cupy.asarray(host.view(f"u{host.itemsize}"))
            assert np.array_equal(to_host(captured.replay()), full_argmax(host)), replay

    def test_a_capture_as_the_very_first_call(self, name):
        """In a fresh process, with nothing compiled: our own capture works; a caller's own is told to warm up."""
        import subprocess
        import sys

        program = f"""
import cupy, numpy as np, vpa
shard = vpa.VocabShard.even(1000, 1)[0]
logits = cupy.asarray(np.eye(3, 1000, 7, dtype=np.float32))
top = vpa.TopTokens(shard, vpa.comm.solo(), max_rows=3, dtype="float32", backend={name!r})
out = cupy.empty(3, np.int64)
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    stream.begin_capture()
    try:
        top(logits, out=out)
    except RuntimeError as error:
        assert "call once before the capture" in str(error), error
    else:
        raise SystemExit("captured a cold call")
    stream.end_capture()
captured = top.capture(logits)
for i in range(50):
    logits[...] = cupy.asarray(np.eye(3, 1000, i, dtype=np.float32))
    assert captured.replay().get().tolist() == [i, i + 1, i + 2]
top(logits)
with stream:
    stream.begin_capture()
    top(logits, out=out)
    graph = stream.end_capture()
    logits[...] = cupy.asarray(np.eye(3, 1000, 99, dtype=np.float32))
    graph.launch(stream)
stream.synchronize()
assert out.get().tolist() == [99, 100, 101]
print("fine")
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip().endswith("fine"), done.stderr

    def test_as_many_batch_sizes_as_engines_capture(self, name):
        import cupy

        top = vpa.TopTokens(self.shard, vpa.comm.solo(), max_rows=8, dtype="bfloat16", backend=name)
        host = self.host("random")
        logits, out = cupy.asarray(host), cupy.empty(1, np.int64)
        for start in range(200):  # kinds, by where in memory and how far apart the rows lie
            wide = cupy.empty((1, self.shard.width + start), logits.dtype)
            top(wide[:, : self.shard.width])
        top(logits[:1])
        for _ in range(200):
            top(logits)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            top(logits[:1], out=out)
            graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(out.get(), full_argmax(host[:1]))

    def test_a_thread_that_has_used_no_gpu_before(self, name):
        import threading

        import cupy

        host, results = self.host("random"), []
        logits, out = cupy.asarray(host), cupy.empty((8, 8), np.uint64)
        tokens = cupy.empty(8, np.int64)
        call = functools.partial(vpa.local_argmax_candidates, logits, self.shard, out=out, backend=name)
        pick = functools.partial(vpa.pick_from_candidates, out, 8, out=tokens, backend=name)
        call(), pick()
        cupy.cuda.runtime.deviceSynchronize()
        tokens.fill(-2)
        cupy.cuda.runtime.deviceSynchronize()
        thread = threading.Thread(target=lambda: results.extend([call(), pick()]))
        thread.start()
        thread.join()
        cupy.cuda.runtime.deviceSynchronize()
        assert len(results) == 2 and np.array_equal(tokens.get(), full_argmax(host))

    def test_a_callers_capture_without_out_is_refused(self, name):
        import cupy

        top, logits = self.top(name), cupy.asarray(self.host("random"))
        top(logits)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(ValueError, match="pass out="):
                top(logits)
            stream.end_capture()

    def test_calls_on_two_streams_share_buffers_safely(self, name):
        import cupy

        top = self.top(name)
        hosts = [self.host("random", seed) for seed in range(20)]
        arrays = [cupy.asarray(host) for host in hosts]
        cupy.cuda.runtime.deviceSynchronize()
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        results = []
        for index, array in enumerate(arrays):
            with streams[index % 2]:
                results.append(top(array))
        cupy.cuda.runtime.deviceSynchronize()
        for host, tokens in zip(hosts, results, strict=True):
            assert np.array_equal(to_host(tokens), full_argmax(host))

    def test_a_closed_capture_is_refused(self, name):
        import cupy

        captured = self.top(name).capture(cupy.asarray(self.host("random")))
        captured.close()
        with pytest.raises(RuntimeError, match="closed"):
            captured.replay()
