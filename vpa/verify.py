"""Greedy verification of drafts with one small gather: scan, gather, and one finish that also accepts.

The scan gives candidates of each row, or statistics of blocks of ids (``vpa.contribution``); the finish picks each
row's argmax from what all ranks gave, and applies the rules of ``vpa.acceptance``. No logits travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays, backends
from vpa.comm import agree, check_communicator
from vpa.contribution import FORMS, Contribution, blocks_of
from vpa.emulate import check_all_ranks, plan_of
from vpa.order import NAN_RULES
from vpa.plan import Plan
from vpa.requests import Requests, draft_tokens, rates
from vpa.scan import check
from vpa.vocab import VocabShard, positive
from vpa.workspace import Buffers, Captured, Workspace, check_capturable, check_comm, check_warm

#: Tokens int64 [R, K + 1], and how many were sampled and rejected, int32 [R].
Outputs = tuple[Any, Any, Any]


def greedy_verify(
    logits: Any,
    shard: VocabShard,
    comm: Any,
    *,
    draft_ids: Any,
    cu_num_rows: Any,
    num_draft_tokens: int,
    positions: Any,
    seq_lens: Any,
    prefill_lens: Any,
    seeds: Any,
    acceptance: Any = None,
    form: str = "candidate",
    nan: str = "first",
    backend: str | None = None,
) -> Outputs:
    """Which drafts greedy decoding accepts, and the token after them; every rank calls and gets the same.

    logits: this rank's [N, shard.width] of all requests' rows, bf16, fp16 or fp32, any strides. Request ``r`` owns rows
        ``cu_num_rows[r] .. cu_num_rows[r + 1] - 1``: one that follows its last known token, and one for each draft.
    comm: a communicator of ``shard.tp_size`` ranks.
    draft_ids, positions: int64 [N]; the draft at a row is judged against the argmax of the row before. The first of a
        request's rows has none, whatever stands there. An id outside the vocabulary, as -1, is never accepted.
    cu_num_rows: int32 [R + 1], from 0 on; rows from ``cu_num_rows[R]`` on are padding. num_draft_tokens: the most
        drafts of a request, K, at most 1024; a request may have fewer, or none, or no rows.
    seq_lens, prefill_lens: int32 [R]. A request whose ``seq_len < prefill_len`` samples nothing; a draft whose position
        less its place among the request's rows is below ``prefill_len`` is a placeholder.
    seeds: int64 [R], of the draws of synthetic acceptance.
    acceptance: float32 [K] of conditional rates (``vpa.conditional_acceptance``): a draft is accepted by a draw, not
        because it is the argmax. None: by the argmax. An array on the host is copied to the logits' GPU at each call.
    form: ``"candidate"``, or ``"blocks"``, the best of each block of 8192 ids (of 1024 in a request's last row), which
        begin at multiples of that in the vocabulary. Both give the same.
    nan: ``"first"``, NaN precedes every number; ``"ignore"``, NaN is -inf, so that a row of NaN alone gives id 0.
    backend: as for ``get_top_tokens``.

    Returns ``(tokens, num_sampled, num_rejected)``: int64 [R, K + 1], the accepted drafts of each request, then one
    token more, -1 beyond; int32 [R] each. All arrays are of one library, the logits'.

    Raises ``TypeError`` or ``ValueError`` on every rank where one rank's arguments do not fit or ranks' differ: their
    sizes, and what arrays on the host hold. What arrays on a GPU hold is trusted, since a check would wait for it: that
    ``cu_num_rows`` is as above, that rates lie in [0, 1], and that all ranks have the same. Whatever they hold, nothing
    outside the arrays is read or written.
    """
    check_communicator(comm)
    taken, module, requests, error = None, None, None, None
    try:
        taken = arrays.given(logits, "logits")
        check_form(form, nan)
        check(taken.array, shard, "packed", backend)
        module = backends.verification(backend, taken.array)
        check_comm(shard, comm, taken.array)
        requests = Requests.given(
            taken.array, num_draft_tokens, acceptance, draft_ids=draft_ids, cu_num_rows=cu_num_rows,
            positions=positions, seq_lens=seq_lens, prefill_lens=prefill_lens, seeds=seeds,
        )  # fmt: skip
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts, own = {}, None
    if error is None:
        facts = _facts("greedy_verify", shard, form, nan, taken.array.dtype) | _of_call(taken.array, requests)
        own = (shard.num_valid, 0 if arrays.is_host(taken.array) else arrays.multiprocessors(), blocks_of(shard))
    told = agree(comm, facts, error, own)
    splits = _plan(told, taken.array.dtype.itemsize).splits(len(taken.array))
    contribution = Contribution.agreed(form, requests.num_draft_tokens, splits, _spans(told), shard.vocab_size)
    outputs = fresh_outputs(taken.array, requests)
    steps = VerifySteps.of(module, taken.array, shard, nan, contribution, requests, outputs)
    steps.enqueue(taken.array, comm, requests, outputs)
    return tuple(map(taken.give_back, outputs))  # type: ignore[return-value]


def emulate_greedy_verify(
    shards_of_logits: Sequence[Any],
    shards: Sequence[VocabShard],
    *,
    num_draft_tokens: int,
    acceptance: Any = None,
    form: str = "candidate",
    nan: str = "first",
    backend: str | None = None,
    **requests_arguments: Any,
) -> Outputs:
    """What ``greedy_verify`` gives on every rank, computed by one process that has all ranks' logits.

    shards_of_logits: one [N, width] array per shard, all of one library, dtype and N. Other arguments, the result and
    the errors are those of ``greedy_verify``.
    """
    taken, shards = check_all_ranks(shards_of_logits, shards)
    first = taken[0].array
    check_form(form, nan)
    for one, shard in zip(taken, shards, strict=True):
        check(one.array, shard, "packed", backend)
    module = backends.verification(backend, first)
    requests = Requests.given(first, num_draft_tokens, acceptance, **requests_arguments)
    splits = plan_of(first, shards).splits(len(first))
    spans = [blocks_of(shard) for shard in shards]
    contribution = Contribution.agreed(form, requests.num_draft_tokens, splits, spans, shards[0].vocab_size)
    outputs = fresh_outputs(first, requests)
    lines, width = contribution.shape(len(first), requests.count)
    gathered = arrays.namespace(first).empty((len(shards) * lines, width), np.uint64)
    if len(first) and lines:
        for rank, (one, shard) in enumerate(zip(taken, shards, strict=True)):
            part = gathered[rank * lines : (rank + 1) * lines]
            module.prepare_verify_scan(one.array, shard, contribution, nan, requests, part)(one.array, requests, part)
    finish = finish_of(module, gathered, len(first), shards[0].vocab_size, contribution, requests, outputs)
    finish(gathered, requests, outputs)
    return tuple(map(taken[0].give_back, outputs))  # type: ignore[return-value]


class GreedyVerify:
    """``greedy_verify`` with its checks and memory settled once. Every rank builds it, and then makes the same calls.

    max_rows, max_requests: the most rows of logits and requests of a call. dtype: the logits', or its name. acceptance
    is copied to the GPU at the first call there. Other arguments as for ``greedy_verify``.

    A call takes logits [N <= max_rows, shard.width] and the arrays of R <= max_requests requests. Over host memory all
    ranks' arguments are compared at each call; over NCCL, where nothing is exchanged over the host, ranks that call
    with other N or R are ended by the communicator's time limit.

    Raises on every rank if one rank's arguments do not fit or the ranks' differ.
    """

    def __init__(
        self,
        shard: VocabShard,
        comm: Any,
        *,
        max_rows: int,
        max_requests: int,
        num_draft_tokens: int,
        dtype: Any,
        acceptance: Any = None,
        form: str = "candidate",
        nan: str = "first",
        backend: str | None = None,
    ) -> None:
        check_communicator(comm)
        self.shard, self.comm, self.form, self.nan, self.backend = shard, comm, form, nan, backend
        self._acceptance = acceptance
        error, facts, own = None, {}, None
        try:
            if not isinstance(shard, VocabShard):
                raise TypeError(f"shard is a {type(shard).__name__}; a vpa.VocabShard is accepted")
            self.dtype = arrays.check_logits_dtype(dtype)
            self.max_rows, self.max_requests = positive("max_rows", max_rows), positive("max_requests", max_requests)
            self.num_draft_tokens = draft_tokens(num_draft_tokens)
            if acceptance is not None:
                rates(acceptance, self.num_draft_tokens, arrays.given(acceptance, "acceptance").array)
            check_form(form, nan)
            backends.check_backend(backend)
            check_comm(shard, comm)
            sizes = {"max_rows": self.max_rows, "max_requests": self.max_requests}
            facts = _facts("GreedyVerify", shard, form, nan, self.dtype) | sizes
            facts |= {"num_draft_tokens": self.num_draft_tokens, "acceptance": acceptance is not None}
            own = (shard.num_valid, arrays.multiprocessors(), blocks_of(shard))
        except Exception as failure:
            error = failure
        self._told = agree(comm, facts, error, own)
        self._workspace = Workspace()

    def __call__(self, logits: Any, *, out: Outputs | None = None, **requests_arguments: Any) -> Outputs:
        """``greedy_verify`` of ``logits`` and ``draft_ids``, ``cu_num_rows``, ``positions``, ``seq_lens``,
        ``prefill_lens`` and ``seeds``: fresh arrays, or ``out``, three C-contiguous ones that are written. Enqueued on
        CuPy's current stream."""
        taken, requests, targets, error, capturing = None, None, None, None, False
        try:
            taken, requests = self._given(logits, requests_arguments)
            kind = (arrays.kind_of(taken.array), requests.count)
            capturing = not arrays.is_host(taken.array) and arrays.is_capturing()
            if capturing:
                check_capturable(self.comm)
                check_warm(self._workspace.knows(kind), out)
            targets = _targets(out, taken, requests)
        except Exception as failure:
            error = failure
        if not getattr(self.comm, "capturable", False):  # then it passes through the host anyway
            facts = {} if error else {"function": "GreedyVerify()", **_of_call(taken.array, requests)}
            agree(self.comm, facts, error)
        elif error is not None:
            raise error
        outputs = tuple(target.array for target in targets)
        with self._workspace.lock:
            steps = self._workspace.steps(kind, lambda: self._steps(taken.array, requests, outputs, shared=True))
            self._workspace.enqueue(
                taken.array, lambda: steps.enqueue(taken.array, self.comm, requests, outputs), capturing
            )
        return tuple(map(arrays.returned, targets, out or (None,) * 3))  # type: ignore[return-value]

    def capture(self, logits: Any, **requests_arguments: Any) -> CapturedGreedyVerify:
        """Capture the call on these arrays, of a GPU, into one CUDA graph. Every rank calls it, with the same sizes.

        Warms up first: kernels are compiled and the communicator has carried one gather before the capture begins.
        ``ValueError`` for host arrays, and for a communicator whose collectives pass through the host.
        """
        taken, requests, error = None, None, None
        try:
            taken, requests = self._given(logits, requests_arguments)
            if arrays.is_host(taken.array):
                raise ValueError("a CUDA graph is captured from GPU arrays; got a NumPy array")
            check_capturable(self.comm)
        except Exception as failure:
            error = failure
        facts = {} if error else {"function": "GreedyVerify.capture", **_of_call(taken.array, requests)}
        agree(self.comm, facts, error)
        array = taken.array
        outputs = fresh_outputs(array, requests)
        steps = self._steps(array, requests, outputs, shared=False)

        def enqueue() -> None:
            steps.enqueue(array, self.comm, requests, outputs)

        return CapturedGreedyVerify(self.comm, enqueue, (array, steps, requests, outputs), outputs)

    def _given(self, logits: Any, requests_arguments: dict[str, Any]) -> tuple[arrays.Given, Requests]:
        taken = arrays.given(logits, "logits")
        check(taken.array, self.shard, "packed", self.backend)
        check_comm(self.shard, self.comm, taken.array)
        requests = Requests.given(taken.array, self.num_draft_tokens, self._rates(taken.array), **requests_arguments)
        if taken.array.dtype != self.dtype or len(taken.array) > self.max_rows or requests.count > self.max_requests:
            raise ValueError(
                f"got {len(taken.array)} rows of {taken.array.dtype} of {requests.count} requests; this object was "
                f"built for at most {self.max_rows} rows of {self.dtype} of {self.max_requests} requests"
            )
        return taken, requests

    def _rates(self, like: Any) -> Any:
        """The rates where the logits are: copied to their GPU once."""
        if self._acceptance is None or arrays.is_host(like):
            return self._acceptance
        kind = ("acceptance", like.device.id)
        if arrays.is_capturing():
            check_warm(self._workspace.knows(kind), self)
        return self._workspace.steps(kind, lambda: rates(self._acceptance, self.num_draft_tokens, like))

    def _steps(self, logits: Any, requests: Requests, outputs: Outputs, shared: bool) -> VerifySteps:
        """The steps of a call, packed, in the object's memory if that is ``shared``, else in memory of their own."""
        told, host = self._told, arrays.is_host(logits)
        if self.comm.size == 1:  # CuPy may not have been in use when the object was built
            told = [(self.shard.num_valid, 0 if host else arrays.multiprocessors(), blocks_of(self.shard))]
        plan = _plan(None if host else told, self.dtype.itemsize)

        def contribution(splits: int) -> Contribution:
            return Contribution.agreed(self.form, self.num_draft_tokens, splits, _spans(told), self.shard.vocab_size)

        def fresh() -> Buffers:
            most = plan.most_candidates(self.max_rows)
            if self.form == "blocks":
                most = self.max_requests * contribution(0).line
            return Buffers.fresh(logits, most, self.shard.tp_size, "packed")

        return VerifySteps.of(
            backends.verification(self.backend, logits), logits, self.shard, self.nan,
            contribution(plan.splits(len(logits))), requests, outputs,
            (lambda: self._workspace.buffers(logits, fresh)) if shared else None,
        )  # fmt: skip


class CapturedGreedyVerify(Captured):
    """One call of ``GreedyVerify`` as a CUDA graph over fixed memory; made by ``GreedyVerify.capture``.

    The graph reads the arrays that were captured, which it keeps alive: change them in place. Which rows a request owns
    may change too, as long as all fit: requests without rows and rows of no request are those left over.
    """

    @property
    def results(self) -> Outputs:
        """The three CuPy arrays that every ``replay`` overwrites and returns."""
        return self._results


@dataclass(frozen=True)
class VerifySteps:
    """Scan, gather and finish of one kind of call, on checked arguments, with the memory between them.

    scan: (logits, requests, candidates), None where no row has an owner; finish: (gathered, requests, outputs).
    """

    scan: Callable[[Any, Requests, Any], None] | None
    finish: Callable[[Any, Requests, Outputs], None]
    candidates: Any
    gathered: Any

    @classmethod
    def of(
        cls,
        module: ModuleType,
        like: Any,
        shard: VocabShard,
        nan: str,
        contribution: Contribution,
        requests: Requests,
        outputs: Outputs,
        buffers: Callable[[], Buffers] | None = None,
    ) -> VerifySteps:
        """The steps for arrays like these, in the leading parts of ``buffers`` or in fresh memory."""
        lines, width = contribution.shape(len(like), requests.count)
        memory = buffers() if buffers else Buffers.fresh(like, lines * width, shard.tp_size, "packed")
        candidates = memory.candidates[: lines * width].reshape(lines, width)
        gathered = memory.gathered[: shard.tp_size * lines * width].reshape(-1, width)
        scan = None
        if len(like) and requests.count:
            scan = module.prepare_verify_scan(like, shard, contribution, nan, requests, candidates)
        finish = finish_of(module, gathered, len(like), shard.vocab_size, contribution, requests, outputs)
        return cls(scan, finish, candidates, gathered)

    def enqueue(self, logits: Any, comm: Any, requests: Requests, outputs: Outputs) -> None:
        """Write the three outputs."""
        if self.scan is not None:
            self.scan(logits, requests, self.candidates)
            if comm.size > 1:
                comm.all_gather(self.candidates, self.gathered)
        self.finish(self.gathered, requests, outputs)


def finish_of(
    module: ModuleType,
    gathered: Any,
    rows: int,
    vocab_size: int,
    contribution: Contribution,
    requests: Requests,
    outputs: Outputs,
) -> Callable[[Any, Requests, Outputs], None]:
    """The finish of some rows of some requests. Without either, nothing is sampled."""
    if rows and requests.count:
        return module.prepare_verify_finish(gathered, contribution, requests, vocab_size, outputs)

    def nothing(gathered: Any, requests: Requests, outputs: Outputs) -> None:
        for output, value in zip(outputs, (-1, 0, 0), strict=True):
            output[...] = value

    return nothing


def fresh_outputs(like: Any, requests: Requests) -> Outputs:
    """Memory for the results, in the library of ``like``."""
    library = arrays.namespace(like)
    return tuple(library.empty(shape, dtype) for shape, dtype in _shapes(requests))  # type: ignore[return-value]


def check_form(form: Any, nan: Any) -> None:
    """Raise ``ValueError`` unless ``form`` and ``nan`` are known."""
    for name, value, accepted in (("form", form, FORMS), ("nan", nan, NAN_RULES)):
        if not isinstance(value, str) or value not in accepted:
            raise ValueError(f"{name} is {value!r}; {' and '.join(map(repr, accepted))} are accepted")


def _shapes(requests: Requests) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    numbers = ((requests.count,), np.dtype(np.int32))
    return ((requests.count, requests.num_draft_tokens + 1), np.dtype(np.int64)), numbers, numbers


def _targets(out: Outputs | None, taken: arrays.Given, requests: Requests) -> list[arrays.Given]:
    """Where the results go: the caller's arrays, checked, or fresh ones."""
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 3):
        raise TypeError(f"out is a {type(out).__name__}; three arrays (tokens, num_sampled, num_rejected) are accepted")
    names = ("tokens", "num_sampled", "num_rejected")
    return [
        arrays.target(given, shape, dtype, taken, f"out: {name}")
        for given, (shape, dtype), name in zip(out or (None,) * 3, _shapes(requests), names, strict=True)
    ]


def _plan(told: list[Any] | None, itemsize: int) -> Plan:
    return Plan.agreed(None if told is None else [(columns, count) for columns, count, _ in told], itemsize)


def _spans(told: list[Any] | None) -> list[tuple[int, int]] | None:
    return None if told is None else [span for _, _, span in told]


def _facts(function: str, shard: VocabShard, form: str, nan: str, dtype: Any) -> dict[str, Any]:
    """What ranks must have alike, in words that a message can use."""
    return {
        "function": function,
        "dtype": str(dtype),
        "form": form,
        "nan": nan,
        "tp_size": shard.tp_size,
        "vocab_size": shard.vocab_size,
    }


def _of_call(logits: Any, requests: Requests) -> dict[str, Any]:
    """What ranks must have alike in one call."""
    return {"rows": len(logits), "arrays": arrays.namespace(logits).__name__, **requests.facts()}
