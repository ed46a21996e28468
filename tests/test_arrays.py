"""Arrays of other libraries through DLPack: taken without a copy, results given back in the caller's library."""

from __future__ import annotations

import ctypes
import types

import numpy as np
import pytest
from oracle import DTYPES, full_argmax

import vpa
from vpa import arrays, dlpack

SHARD = vpa.VocabShard.even(100, 1)[0]


class Foreign:
    """An array of a library of its own: it speaks DLPack and belongs to a namespace, and knows nothing of NumPy."""

    def __init__(self, words: np.ndarray, bfloat16: bool = False) -> None:
        self._words, self._bfloat16 = words, bfloat16

    def __dlpack_device__(self):
        return self._words.__dlpack_device__()

    def __dlpack__(self, **keywords):
        if self._bfloat16 and keywords:
            raise BufferError("this library exports bf16 in the first form of DLPack alone")
        capsule = self._words.__dlpack__(**keywords)
        if self._bfloat16:  # 16-bit words, told as kDLBfloat
            dlpack._tensor_of(capsule)[0].code = 4
        return capsule

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=Foreign, __name__="foreign")


class Versioned(Foreign):
    """One whose bf16 exports are in the second form of DLPack alone."""

    def __dlpack__(self, *, max_version=None, **keywords):
        if max_version is None:
            raise BufferError("this library exports the second form of DLPack alone")
        capsule = self._words.__dlpack__(max_version=max_version, **keywords)
        dlpack._tensor_of(capsule)[0].code = 4
        return capsule


class Legacy(Foreign):
    """One of the first form of DLPack alone, which does not say whether memory may be written; ``__array__`` does."""

    def __dlpack__(self):
        return self._words.__dlpack__()

    def __array__(self, dtype=None, copy=None):
        return self._words


def words_of(host: np.ndarray) -> np.ndarray:
    return host.view(np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["contiguous", "column_major", "sliced", "one_row", "no_rows"])
def test_foreign_arrays_are_taken_and_given_back(dtype, form):
    host = np.random.default_rng(3).integers(-9, 10, (4, 100)).astype(DTYPES[dtype])
    host = {"contiguous": host, "column_major": np.asfortranarray(host), "one_row": host[:1], "no_rows": host[:0]}.get(
        form, np.concatenate([host, host], axis=1)[:, 50:150]
    )
    foreign = Foreign(words_of(host), bfloat16=True) if dtype == "bfloat16" else Foreign(host)
    tokens = vpa.get_top_tokens(foreign, SHARD, vpa.comm.solo())
    assert isinstance(tokens, Foreign)
    assert np.array_equal(tokens._words, full_argmax(host))


@pytest.mark.parametrize("library", [Foreign, Versioned])
def test_bfloat16_through_dlpack_shares_memory(library):
    host = np.zeros((2, 100), DTYPES["bfloat16"])
    taken = arrays.given(library(words_of(host), bfloat16=True), "logits")
    assert taken.array.dtype == DTYPES["bfloat16"] and taken.array.shape == (2, 100)
    host[1, 7] = 5
    assert taken.array[1, 7] == 5


@pytest.mark.parametrize(("library", "says_so"), [(Foreign, False), (Versioned, True)])
@pytest.mark.parametrize("writeable", [True, False])
def test_bfloat16_is_writeable_only_where_its_library_says_so(library, says_so, writeable):
    words = np.zeros((2, 100), np.uint16)
    words.flags.writeable = writeable or not says_so  # NumPy exports read-only memory in the second form alone
    assert arrays.given(library(words, bfloat16=True), "logits").array.flags.writeable == (writeable and says_so)


def test_a_later_dlpack_is_refused():
    class Later(Versioned):
        def __dlpack__(self, *, max_version=None, **keywords):
            capsule = super().__dlpack__(max_version=max_version, **keywords)
            pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
            dlpack._Versioned.from_address(pointer_of(capsule, b"dltensor_versioned")).major = 2
            return capsule

    with pytest.raises(TypeError, match=r"it is of DLPack 2\.\d; 1 is accepted"):
        arrays.given(Later(np.zeros((2, 100), np.uint16)), "logits")


@pytest.mark.parametrize("library", [Foreign, Versioned])
def test_memory_taken_through_dlpack_outlives_its_owner(library):
    foreign = library(words_of(np.full((2, 100), 3, DTYPES["bfloat16"])), bfloat16=True)
    taken = arrays.given(foreign, "logits").array
    del foreign
    assert (taken == 3).all()


@pytest.mark.parametrize("argument", [3, "text", [[1.0]], object(), None])
def test_what_is_no_array_is_refused(argument):
    with pytest.raises(TypeError, match=r"logits is a .*a NumPy or CuPy array, or an array with __dlpack__"):
        arrays.given(argument, "logits")


@pytest.mark.parametrize("kind", [BufferError, RuntimeError, KeyError, AssertionError, MemoryError, Exception])
def test_a_library_that_cannot_export_is_refused_with_its_own_words(kind):
    class Refusing(Foreign):
        def __dlpack__(self, **keywords):
            raise kind("requires grad, use detach()")

    with pytest.raises(TypeError, match=r"logits cannot be taken through DLPack: '?requires grad, use detach\(\)"):
        arrays.given(Refusing(np.zeros((2, 2), np.float32)), "logits")


def test_an_error_without_words_is_named():
    class Refusing(Foreign):
        def __dlpack_device__(self):
            raise NotImplementedError

    with pytest.raises(TypeError, match="logits cannot be taken through DLPack: NotImplementedError"):
        arrays.given(Refusing(np.zeros((2, 2), np.float32)), "logits")


@pytest.mark.parametrize(("question", "remedy"), [("is_neg", "resolve_neg"), ("is_conj", "resolve_conj")])
def test_lazy_views_are_refused(question, remedy):
    lazy, plain = (Foreign(np.eye(2, 100, dtype=np.float32)) for _ in range(2))
    setattr(lazy, question, lambda: True)
    setattr(plain, question, lambda: False)
    with pytest.raises(TypeError, match=rf"logits cannot .*{question}\(\) is true.*call \.{remedy}\(\) first"):
        vpa.get_top_tokens(lazy, SHARD, vpa.comm.solo())
    assert vpa.get_top_tokens(plain, SHARD, vpa.comm.solo())._words.tolist() == [0, 1]


def test_another_dtype_through_dlpack_is_refused():
    with pytest.raises(TypeError, match="logits are int32; bfloat16, float16, float32"):
        vpa.get_top_tokens(Foreign(np.zeros((2, 100), np.int32)), SHARD, vpa.comm.solo())


def test_a_library_that_narrows_the_result_is_refused():
    class Narrow(Foreign):
        dtype = np.dtype(np.int32)

        def __array_namespace__(self):
            return types.SimpleNamespace(from_dlpack=Narrow, __name__="narrow")

    with pytest.raises(TypeError, match=r"narrow made int32 of a int64 result.*jax_enable_x64"):
        vpa.get_top_tokens(Narrow(np.zeros((2, 100), np.float32)), SHARD, vpa.comm.solo())


@pytest.mark.parametrize("library", [Foreign, Legacy])
@pytest.mark.parametrize("rows", [3, 1, 0])
def test_a_foreign_out_is_written_in_place(library, rows):
    logits = np.eye(rows, 100, 5, dtype=np.float32)
    candidates = np.zeros((rows, 8), np.uint64)
    out = library(candidates)
    assert vpa.local_argmax_candidates(Foreign(logits), SHARD, out=out) is out
    assert vpa.pick_from_candidates(candidates, rows).tolist() == [5, 6, 7][:rows]


def test_a_foreign_out_that_may_not_be_written_is_refused():
    class Copied(Legacy):
        def __array__(self, dtype=None, copy=None):
            return self._words.copy()

    class Immutable(Legacy):
        def __array__(self, dtype=None, copy=None):
            view = self._words.view()
            view.flags.writeable = False
            return view

    class Odd(Legacy):
        def __array__(self, dtype=None, copy=None):
            raise KeyError("no")

    for library in (Copied, Immutable, Odd):
        with pytest.raises(ValueError, match="out is read-only, or its library's DLPack does not say that it is not"):
            vpa.local_argmax_candidates(np.eye(3, 100, dtype=np.float32), SHARD, out=library(np.zeros((3, 8), "u8")))


def test_subclasses_of_numpy_arrays():
    class Contrary(np.ndarray):
        """Every slice is two-dimensional, as np.matrix's are."""

        def __getitem__(self, index):
            return np.atleast_2d(super().__getitem__(index))

    array = np.eye(3, 100, 5, dtype=np.float32).view(Contrary)
    assert vpa.get_top_tokens(array, SHARD, vpa.comm.solo()).tolist() == [5, 6, 7]


def test_a_memmap_with_an_out(tmp_path):
    logits = np.memmap(tmp_path / "logits", np.float32, "w+", shape=(3, 100))
    logits[...] = np.eye(3, 100, 5)
    out = np.empty((3, 8), np.uint64)
    assert vpa.local_argmax_candidates(logits, SHARD, out=out) is out
    assert vpa.pick_from_candidates(out, 3).tolist() == [5, 6, 7]


def test_torch_tensors_on_the_host():
    torch = pytest.importorskip("torch", reason="torch is not installed; it is in the extra `peers`")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.randint(-9, 10, (4, 100)).to(dtype)
        for view in (logits, logits.t().contiguous().t(), logits[:, ::1][1:]):
            tokens = vpa.get_top_tokens(view, SHARD, vpa.comm.solo())
            assert isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64
            assert tokens.tolist() == full_argmax(view.float().numpy()).tolist()
            out = torch.empty((len(view), 8), dtype=torch.uint64)
            assert vpa.local_argmax_candidates(view, SHARD, out=out) is out
            assert vpa.pick_from_candidates(out, len(view)).tolist() == tokens.tolist()
    for refused in (torch.zeros(2, 100, requires_grad=True), torch._neg_view(torch.zeros(2, 100))):
        with pytest.raises(TypeError, match="DLPack"):
            vpa.get_top_tokens(refused, SHARD, vpa.comm.solo())


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu():
    torch = pytest.importorskip("torch", reason="torch is not installed; it is in the extra `peers`")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            logits = torch.randint(-9, 10, (64, 100), device="cuda").to(dtype)
            tokens = vpa.get_top_tokens(logits, SHARD, vpa.comm.solo())
            assert isinstance(tokens, torch.Tensor) and tokens.is_cuda
            assert tokens.tolist() == full_argmax(logits.float().cpu().numpy()).tolist()


class TestResultsInTheMemoryOfTheirInput:
    """They would be written over what is still to be read: wrong without a word."""

    memory = np.zeros(4 * 100, np.float32)

    @property
    def logits(self) -> np.ndarray:
        return self.memory.reshape(4, 100)

    @pytest.mark.parametrize(
        "call",
        [
            lambda logits, words: vpa.local_argmax_candidates(logits, SHARD, splits=2, out=words[8:16].reshape(4, 2)),
            lambda logits, words: vpa.TopTokens(SHARD, vpa.comm.solo(), max_rows=4, dtype="float32")(
                logits, out=words[-4:].view(np.int64)
            ),
            lambda logits, words: vpa.pick_from_candidates(words.reshape(4, 50), 4, out=words[196:].view(np.int64)),
        ],
        ids=["local_argmax_candidates", "TopTokens", "pick_from_candidates"],
    )
    def test_are_refused(self, call):
        with pytest.raises(ValueError, match=r"^out shares memory with the input, which would be overwritten; give "):
            call(self.logits, self.memory.view(np.uint64))
        assert not self.memory.any()

    def test_what_counts_is_bytes_from_the_first_element_to_the_last(self):
        rng, memory = np.random.default_rng(0), np.zeros((12, 12), np.int32)
        seen = set()
        for _ in range(2000):
            first, second = (self.part(rng, memory) for _ in range(2))
            shared = np.may_share_memory(first, second)
            seen.add(shared)
            if shared:
                with pytest.raises(ValueError, match="a shares memory with b"):
                    arrays.check_apart({"a": first}, {"b": second, "none": None})
                with pytest.raises(ValueError, match="a shares memory with b"):
                    arrays.check_apart({"a": first, "b": second}, {})
            else:
                arrays.check_apart({"a": first, "b": second}, {})
        assert seen == {True, False}

    def part(self, rng, memory):
        """Some of it, by steps of either sign, perhaps nothing."""
        cuts = []
        for size in memory.shape:
            begin, end = sorted(rng.integers(0, size + 1, 2))
            step = int(rng.choice([1, 2, -1, -3]))
            cuts.append(slice(begin, end, step) if step > 0 else slice(end - 1, begin - 1 if begin else None, step))
        return memory[tuple(cuts)]
