"""Scan, gather, pick in one call: ``get_top_tokens``, and ``TopTokens``, which plans once and can be captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays, backends
from vpa.captured import CapturedTokens, check_capturable
from vpa.comm import agree, check_communicator
from vpa.pick import pick_from_candidates
from vpa.plan import Plan
from vpa.scan import apply_transform, candidates_shape, check, transformed
from vpa.transform import Transform, check_transform
from vpa.vocab import VocabShard, positive
from vpa.workspace import Buffers, Workspace, check_comm, check_outlives, check_warm

#: For host arrays, whatever GPUs there are.
_HOST_PLAN = Plan.agreed(None, 1)

_TOKENS = np.dtype(np.int64)


def get_top_tokens(
    logits: Any,
    shard: VocabShard,
    comm: Any,
    *,
    layout: str = "packed",
    backend: str | None = None,
    transform: Transform | None = None,
) -> Any:
    """The greedy token of each row of logits whose vocabulary is split over ranks; every rank calls and gets the same.

    logits: this rank's [B, shard.width], bf16, fp16 or fp32; any strides, any library that speaks DLPack.
    comm: a communicator of ``shard.tp_size`` ranks, ``vpa.comm.solo()`` for one.
    layout, backend, transform: as for ``local_argmax_candidates``.

    Returns int64 [B] of the caller's library: per row the id that ``argmax`` over the whole vocabulary gives, by the
    order of ``vpa.order``, of the transformed logits if there is a transform. Raises ``TypeError`` or ``ValueError`` on
    every rank where one rank's arguments do not fit, or the ranks' rows, dtypes, layouts or transforms differ; that
    takes an exchange over the host, which ``TopTokens`` saves.
    """
    return tokens_of_computed(lambda: logits, shard, comm, layout, backend, transform)


def tokens_of_computed(
    compute: Callable[[], Any],
    shard: VocabShard,
    comm: Any,
    layout: str,
    backend: str | None,
    transform: Transform | None,
) -> Any:
    """``get_top_tokens`` of logits that ``compute()`` gives: an error in computing them is told to all ranks too."""
    check_communicator(comm)
    taken, module, error = None, None, None
    try:
        taken = arrays.given(compute(), "logits")
        module = check(taken.array, shard, layout, backend, transform)
        check_comm(shard, comm, taken.array)
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts, own = {}, None
    if error is None:
        facts = _facts("get_top_tokens", shard, layout, transform, taken.array.dtype, **_of_call(taken.array))
        own = (shard.num_valid, 0 if arrays.is_host(taken.array) else arrays.multiprocessors())
    plan = Plan.agreed(agree(comm, facts, error, own), taken.array.dtype.itemsize)
    rows = len(taken.array)
    tokens = arrays.namespace(taken.array).empty(rows, np.int64)
    if rows:
        steps = _Steps.of(module, taken.array, shard, layout, transform, plan, None, tokens)
        steps.enqueue(taken.array, comm, tokens)
    return taken.give_back(tokens)


def tokens_of_candidates(
    compute: Callable[[], Any], shard: VocabShard, comm: Any, dtype: Any, transform: Transform | None
) -> Any:
    """The tokens of one packed candidate a row, uint64 [B, 1], that ``compute()`` gives for this rank's shard.

    dtype: of the logits, which ranks must have alike, as the transform and B; an error in computing is told to all.
    """
    check_communicator(comm)
    candidates, error = None, None
    try:
        candidates = compute()
        check_comm(shard, comm, candidates)
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts = {}
    if error is None:
        facts = _facts("get_top_tokens (fused)", shard, "packed", transform, dtype, **_of_call(candidates))
    agree(comm, facts, error)
    gathered, rows = candidates, len(candidates)
    if comm.size > 1 and rows:
        gathered = arrays.namespace(candidates).empty((comm.size * rows, 1), np.uint64)
        comm.all_gather(candidates, gathered)
    return pick_from_candidates(gathered, rows)


class TopTokens:
    """``get_top_tokens`` with its checks and memory settled once. Every rank builds it, and then makes the same calls.

    max_rows: the most rows of a call. dtype: the logits', or its name. Other arguments as for ``get_top_tokens``.

    A call takes logits [B <= max_rows, shard.width] and returns int64 [B] in fresh memory, or in ``out``. Ranks that
    call with different B get a ``ValueError`` over host memory; over NCCL, where nothing is exchanged over the host,
    they are ended by the communicator's time limit.

    Raises on every rank if one rank's arguments do not fit or the ranks' differ.
    """

    def __init__(
        self,
        shard: VocabShard,
        comm: Any,
        *,
        max_rows: int,
        dtype: Any,
        layout: str = "packed",
        backend: str | None = None,
        transform: Transform | None = None,
    ) -> None:
        check_communicator(comm)
        self.shard, self.comm, self.layout, self.backend, self.transform = shard, comm, layout, backend, transform
        error = None
        try:
            if not isinstance(shard, VocabShard):
                raise TypeError(f"shard is a {type(shard).__name__}; a vpa.VocabShard is accepted")
            self.dtype = arrays.check_logits_dtype(dtype)
            self.max_rows = positive("max_rows", max_rows)
            arrays.check_layout(layout, shard.vocab_size)
            backends.check_backend(backend)
            check_transform(transform)
            check_comm(shard, comm)
        except Exception as failure:
            error = failure
        facts, own = {}, None
        if error is None:
            facts = _facts("TopTokens", shard, layout, transform, self.dtype, max_rows=self.max_rows)
            own = (shard.num_valid, arrays.multiprocessors())
        self._plan = Plan.agreed(agree(comm, facts, error, own), self.dtype.itemsize if error is None else 0)
        self._workspace = Workspace()

    def __call__(self, logits: Any, *, out: Any = None) -> Any:
        """The tokens of ``logits`` [B, width]: int64 [B], in ``out`` if given, which lies apart from them. Enqueued on
        CuPy's current stream."""
        taken, kind, error = None, None, None
        try:
            taken = arrays.given(logits, "logits")
            kind = arrays.kind_of(taken.array)
            if not self._workspace.knows(kind):  # arrays of a kind that was called with before have passed these checks
                self._check(taken.array)
            capturing = not arrays.is_host(taken.array) and arrays.is_capturing()
            if capturing:
                self._check_captured(taken.array, kind, out)
            target = arrays.target(out, (len(taken.array),), _TOKENS, taken)
        except Exception as failure:
            error = failure
        if not getattr(self.comm, "capturable", False):  # then it passes through the host anyway
            agree(self.comm, {} if error else self._facts_of("TopTokens()", taken.array), error)
        elif error is not None:
            raise error
        if len(taken.array):
            with self._workspace.lock:
                steps = self._steps_for(kind, taken.array, target.array)
                self._workspace.enqueue(
                    taken.array, lambda: steps.enqueue(taken.array, self.comm, target.array), capturing
                )
        return arrays.returned(target, out)

    def capture(self, logits: Any) -> CapturedTokens:
        """Capture the call on ``logits`` [B, width], a GPU array, into one CUDA graph. Every rank calls it, B alike.

        Warms up first: kernels are compiled and the communicator has carried one gather before the capture begins.
        ``ValueError`` for host arrays, and for a communicator whose collectives pass through the host.
        """
        array, module, error = None, None, None
        try:
            array = arrays.given(logits, "logits").array
            module = self._check(array)
            if arrays.is_host(array):
                raise ValueError("a CUDA graph is captured from GPU arrays; got a NumPy array")
            check_capturable(self.comm)
            _check_applied(module, self.transform)
        except Exception as failure:
            error = failure
        agree(self.comm, {} if error else self._facts_of("TopTokens.capture()", array), error)
        rows = len(array)
        tokens = arrays.namespace(array).empty(rows, np.int64)
        steps = None
        if rows:
            plan = self._gpu_plan()
            steps = _Steps.of(module, array, self.shard, self.layout, self.transform, plan, None, tokens)

        def enqueue() -> None:
            if steps is not None:
                steps.enqueue(array, self.comm, tokens)

        return CapturedTokens(self.comm, enqueue, (array, steps, tokens), tokens)

    def _facts_of(self, function: str, logits: Any) -> dict[str, Any]:
        """What ranks must have alike in a call: also what the object was built with, for they may hold several."""
        return _facts(function, self.shard, self.layout, self.transform, self.dtype, **_of_call(logits))

    def _check(self, logits: Any) -> ModuleType:
        module = check(logits, self.shard, self.layout, self.backend)
        if logits.dtype != self.dtype or len(logits) > self.max_rows:
            raise ValueError(
                f"got {len(logits)} rows of {logits.dtype}; "
                f"this object was built for at most {self.max_rows} of {self.dtype}"
            )
        check_comm(self.shard, self.comm, logits)
        return module

    def _check_captured(self, logits: Any, kind: Any, out: Any) -> None:
        """Raise if a call of this kind cannot be part of a capture that the caller has under way."""
        check_capturable(self.comm)
        _check_applied(backends.select(self.backend, logits), self.transform)
        check_warm(self._workspace.knows(kind))
        check_outlives(out)

    def _steps_for(self, kind: Any, logits: Any, tokens: Any) -> _Steps:
        """The steps for logits of a kind, packed at the first call with them."""

        def make() -> _Steps:
            plan = _HOST_PLAN if arrays.is_host(logits) else self._gpu_plan()

            def fresh() -> Buffers:
                return Buffers.fresh(logits, plan.most_candidates(self.max_rows), self.shard.tp_size, self.layout)

            def buffers() -> Buffers:
                return self._workspace.buffers(logits, fresh)

            module = backends.select(self.backend, logits)
            return _Steps.of(module, logits, self.shard, self.layout, self.transform, plan, buffers, tokens)

        return self._workspace.steps(kind, make)

    def _gpu_plan(self) -> Plan:
        """The plan for GPU arrays. One rank alone makes it when it has such arrays: CuPy may not have been in use when
        the object was built."""
        if self.comm.size == 1:
            return Plan.agreed([(self.shard.num_valid, arrays.multiprocessors())], self.dtype.itemsize)
        return self._plan


@dataclass(frozen=True)
class _Steps:
    """Scan, gather and pick of one kind of call, on checked arguments, with the memory between them.

    scan: (logits, candidates), pick: (gathered, tokens); where the backend can, they are packed for these shapes.
    whole: (logits, tokens), where one kernel does it all, and then there is nothing else.
    """

    scan: Any = None
    pick: Any = None
    candidates: Any = None
    gathered: Any = None
    whole: Any = None

    @classmethod
    def of(
        cls,
        module: ModuleType,
        like: Any,
        shard: VocabShard,
        layout: str,
        transform: Transform | None,
        plan: Plan,
        buffers: Callable[[], Buffers] | None,
        tokens: Any,
    ) -> _Steps:
        """The steps for rows >= 1 of logits like ``like``, in the leading parts of ``buffers`` or in fresh memory."""
        left, applied_before = (), None
        if hasattr(module, "prepare_scan"):
            given, (like, left) = like, transformed(module, like, transform)
            applied_before = None if like is given else transform
        alone = shard.tp_size == 1 and like.strides[1] == like.itemsize and plan.in_one_kernel()
        if alone and hasattr(module, "prepare_tokens"):
            return cls(whole=_after(applied_before, module.prepare_tokens(like, shard, tokens, *left)))
        rows = len(like)
        splits = plan.splits(rows)
        lines, numbers = candidates_shape(rows, layout, splits)
        memory = buffers() if buffers else Buffers.fresh(like, rows * splits, shard.tp_size, layout)
        candidates = memory.candidates[: lines * numbers].reshape(lines, numbers)
        gathered = memory.gathered[: shard.tp_size * lines * numbers].reshape(-1, numbers)
        if not hasattr(module, "prepare_scan"):

            def scan(logits: Any, out: Any) -> None:
                logits, left = transformed(module, logits, transform)
                module.local_argmax_candidates(logits, shard, layout, splits, out, *left)

            def pick(gathered: Any, out: Any) -> None:
                module.pick_from_candidates(gathered, rows, out)

            return cls(scan, pick, candidates, gathered)
        scan = _after(applied_before, module.prepare_scan(like, shard, layout, splits, candidates, *left))
        return cls(scan, module.prepare_pick(gathered, rows, tokens), candidates, gathered)

    def enqueue(self, logits: Any, comm: Any, tokens: Any) -> None:
        """Write the tokens of ``logits`` to ``tokens``."""
        if self.whole is not None:
            self.whole(logits, tokens)
            return
        self.scan(logits, self.candidates)
        if comm.size > 1:
            comm.all_gather(self.candidates, self.gathered)
        self.pick(self.gathered, tokens)


def _after(transform: Transform | None, launch: Any) -> Any:
    """A packed launch over transformed logits, for a backend that does not apply the transform itself."""
    return launch if transform is None else lambda logits, out: launch(apply_transform(transform, logits), out)


def _facts(
    function: str, shard: VocabShard, layout: str, transform: Transform | None, dtype: Any, **more: Any
) -> dict[str, Any]:
    """What ranks must have alike, in words that a message can use."""
    return {
        "function": function,
        **more,
        "transform": str(transform),
        "dtype": str(dtype),
        "layout": layout,
        "tp_size": shard.tp_size,
        "vocab_size": shard.vocab_size,
    }


def _of_call(logits: Any) -> dict[str, Any]:
    """What ranks must have alike in one call: the plan, too, follows from it."""
    return {"rows": len(logits), "arrays": arrays.namespace(logits).__name__}


def _check_applied(module: ModuleType, transform: Transform | None) -> None:
    """Raise where a transform would be applied by a pass of its own, whose memory a graph would not keep."""
    if transform is not None and not transform.is_identity and not getattr(module, "TRANSFORMS", False):
        raise ValueError(
            "this backend does not apply a transform in its scan, so that no CUDA graph can hold the call; "
            "use backend='raw'"
        )
