"""``GreedyVerify``: greedy verification that plans its memory once, and can be captured into a CUDA graph."""

from __future__ import annotations

from typing import Any

from vpa import arrays, backends
from vpa.captured import Captured, check_capturable
from vpa.comm import agree, check_communicator
from vpa.contribution import Contribution, blocks_of
from vpa.requests import Requests, check_names, checksums, draft_tokens, rates
from vpa.scan import check
from vpa.verify_steps import (
    Outputs,
    VerifySteps,
    check_form,
    facts_of,
    facts_of_call,
    fresh_outputs,
    plan_of_told,
    shapes_of,
    spans_of_told,
)
from vpa.vocab import VocabShard, positive
from vpa.workspace import Buffers, Workspace, check_comm, check_outlives, check_warm


class GreedyVerify:
    """``greedy_verify`` with its checks and memory settled once. Every rank builds it, and then makes the same calls.

    max_rows, max_requests: the most rows of logits and requests of a call. dtype: the logits', or its name. acceptance
    is copied when the object is built. Other arguments as for ``greedy_verify``.

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
        self._acceptance = None
        error, facts, own = None, {}, None
        try:
            if not isinstance(shard, VocabShard):
                raise TypeError(f"shard is a {type(shard).__name__}; a vpa.VocabShard is accepted")
            self.dtype = arrays.check_logits_dtype(dtype)
            self.max_rows, self.max_requests = positive("max_rows", max_rows), positive("max_requests", max_requests)
            self.num_draft_tokens = draft_tokens(num_draft_tokens)
            given_rates = None
            if acceptance is not None:
                given_rates = arrays.given(acceptance, "acceptance").array
                given_rates = arrays.copy_of(rates(given_rates, self.num_draft_tokens, given_rates))
                self._acceptance = given_rates
            check_form(form, nan)
            backends.check_backend(backend)
            check_comm(shard, comm)
            sizes = {"max_rows": self.max_rows, "max_requests": self.max_requests}
            facts = facts_of("GreedyVerify", shard, form, nan, self.dtype) | sizes
            facts |= {"num_draft_tokens": self.num_draft_tokens, "acceptance": acceptance is not None}
            facts |= checksums(acceptance=given_rates)
            own = (shard.num_valid, arrays.multiprocessors(), blocks_of(shard))
        except Exception as failure:
            error = failure
        self._told = agree(comm, facts, error, own)
        self._workspace = Workspace()

    def __call__(self, logits: Any, *, out: Outputs | None = None, **requests_arguments: Any) -> Outputs:
        """``greedy_verify`` of ``logits`` and ``draft_ids``, ``cu_num_rows``, ``positions``, ``seq_lens``,
        ``prefill_lens`` and ``seeds``: fresh arrays, or ``out``, three C-contiguous ones that are written, each in
        memory of its own. Enqueued on CuPy's current stream."""
        taken, requests, targets, error, capturing = None, None, None, None, False
        try:
            taken, requests = self._given("GreedyVerify()", logits, requests_arguments)
            kind = (arrays.kind_of(taken.array), requests.count)
            capturing = not arrays.is_host(taken.array) and arrays.is_capturing()
            if capturing:
                check_capturable(self.comm)
                check_warm(self._workspace.knows(kind))
                check_outlives(out)
            targets = _targets(out, taken, requests)
        except Exception as failure:
            error = failure
        if not getattr(self.comm, "capturable", False):  # then it passes through the host anyway
            agree(self.comm, {} if error else self._facts("GreedyVerify()", taken.array, requests), error)
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
            taken, requests = self._given("GreedyVerify.capture()", logits, requests_arguments)
            if arrays.is_host(taken.array):
                raise ValueError("a CUDA graph is captured from GPU arrays; got a NumPy array")
            check_capturable(self.comm)
        except Exception as failure:
            error = failure
        agree(self.comm, {} if error else self._facts("GreedyVerify.capture()", taken.array, requests), error)
        array = taken.array
        outputs = fresh_outputs(array, requests)
        steps = self._steps(array, requests, outputs, shared=False)

        def enqueue() -> None:
            steps.enqueue(array, self.comm, requests, outputs)

        return CapturedGreedyVerify(self.comm, enqueue, (array, steps, requests, outputs), outputs)

    def _facts(self, function: str, logits: Any, requests: Requests) -> dict[str, Any]:
        """What ranks must have alike in a call: also what the object was built with, for they may hold several."""
        return facts_of(function, self.shard, self.form, self.nan, self.dtype) | facts_of_call(logits, requests)

    def _given(self, function: str, logits: Any, requests_arguments: dict[str, Any]) -> tuple[arrays.Given, Requests]:
        check_names(function, requests_arguments)
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
            check_warm(self._workspace.knows(kind))
        with self._workspace.lock:
            return self._workspace.steps(kind, lambda: rates(self._acceptance, self.num_draft_tokens, like))

    def _steps(self, logits: Any, requests: Requests, outputs: Outputs, shared: bool) -> VerifySteps:
        """The steps of a call, packed, in the object's memory if that is ``shared``, else in memory of their own."""
        told, host = self._told, arrays.is_host(logits)
        if self.comm.size == 1:  # CuPy may not have been in use when the object was built
            told = [(self.shard.num_valid, 0 if host else arrays.multiprocessors(), blocks_of(self.shard))]
        plan = plan_of_told(None if host else told, self.dtype.itemsize)

        def contribution(splits: int) -> Contribution:
            return Contribution.agreed(
                self.form, self.num_draft_tokens, splits, spans_of_told(told), self.shard.vocab_size
            )

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


def _targets(out: Outputs | None, taken: arrays.Given, requests: Requests) -> list[arrays.Given]:
    """Where the results go: the caller's arrays, checked, or fresh ones."""
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 3):
        raise TypeError(f"out is a {type(out).__name__}; three arrays (tokens, num_sampled, num_rejected) are accepted")
    names = ("out: tokens", "out: num_sampled", "out: num_rejected")
    targets = [
        arrays.target(given, shape, dtype, taken, name)
        for given, (shape, dtype), name in zip(out or (None,) * 3, shapes_of(requests), names, strict=True)
    ]
    if out is not None:
        written = {name: target.array for name, target in zip(names, targets, strict=True)}
        arrays.check_apart(written, requests.arrays())
    return targets
