"""Greedy verification by one small gather, and by gathering the logits: outcomes of every request, times and bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import vpa
from vpa import arrays, backends
from vpa.acceptance import accept
from vpa.bench.arms import max_with_index
from vpa.bench.experiment import Progress, Row, inputs_of, row_of
from vpa.bench.headline import points
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, copy, to_host
from vpa.bench.settings import DRAFT_TOKENS, Settings
from vpa.bench.steps import Step, floor_steps, timed
from vpa.bench.verify_cases import KINDS, Case, make_case
from vpa.contribution import FORMS, Contribution, blocks_of
from vpa.full_gather import full_argmax, in_order_of_ids, send_of
from vpa.plan import Plan
from vpa.requests import Requests
from vpa.verify_steps import Outputs, VerifySteps, fresh_outputs
from vpa.vocab import VocabShard


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Rows of the record: of every input, number of drafts, kind of requests and batch size the outcomes of all arms,
    against the oracle; then, unless ``check_only``, the times of the first input."""
    drafts = settings.draft_tokens or DRAFT_TOKENS
    sized = dataclasses.replace(settings, rows=(max(settings.rows) * (max(drafts) + 1),))
    vocab_size, first = job.shards[0].vocab_size, None
    for name, dtype, logits in inputs_of(sized, job, source):
        best = job.full_argmax(logits)
        first = first or (name, dtype, logits, best)
        for count, requests, kind in itertools.product(drafts, settings.rows, KINDS):
            progress(f"checking {requests} requests of {count} drafts, {kind}, {name} {dtype}")
            rows = requests * (count + 1)
            case = make_case(kind, settings.seed, best[:rows], count, vocab_size)
            for arm, outcome in _outcomes(job, _leading(logits, rows), case).items():
                wrong = job.total(int((~case.right(outcome)).sum()))
                yield row_of(
                    settings, job, requests, dtype, f"{name}, {kind}", arm, wrong, part=f"K {count}", **case.lengths()
                )
    if settings.check_only or first is None:
        return
    name, dtype, logits, best = first
    for count, requests in itertools.product(drafts, filter(None, settings.rows)):
        rows = requests * (count + 1)
        parts, case = _leading(logits, rows), make_case("greedy", settings.seed, best[:rows], count, vocab_size)
        for gather, mode, cache in points(job):
            if cache != "hot":
                continue
            progress(f"timing {requests} requests of {count} drafts, gather {gather}, {mode}")
            arms = _arms(job, parts, case, gather)
            steps = {arm: step for arm, (step, _) in arms.items()}
            wrong, kernels, samples = timed(job, steps, mode, settings.calls, settings.rounds)
            for arm, (_, moved) in arms.items():
                yield row_of(
                    settings, job, requests, dtype, f"{name}, K {count}", arm, wrong[arm], gather=gather, mode=mode,
                    cache=cache, calls=settings.calls, kernels=kernels.get(arm), samples=job.largest(samples[arm]),
                    bytes_moved=moved, **({} if wrong[arm] is None else case.lengths()),
                )  # fmt: skip


def _leading(logits: dict[int, Any], rows: int) -> dict[int, Any]:
    """The first rows of each rank's logits."""
    return {rank: array[:rows] for rank, array in logits.items()}


def _outcomes(job: Job, parts: dict[int, Any], case: Case) -> dict[str, Outputs]:
    """What each arm gives, on the host: the public function in both forms, and the full path."""
    found = {}
    arguments = case.placed(job.place)
    for form in FORMS:
        if job.emulated:
            outcome = vpa.emulate_greedy_verify(
                [parts[rank] for rank in job.played], job.shards, **arguments, form=form, backend=job.backend
            )
        else:
            rank = job.comm.rank
            outcome = vpa.greedy_verify(
                parts[rank], job.shards[rank], job.comm, **arguments, form=form, backend=job.backend
            )
        found[f"sharded ({form})"] = outcome
    if len(parts[job.timed]):
        gather = "excluded" if job.emulated else "included"
        found |= {name: step.calls[0]() for name, (step, _) in _full_paths(job, parts, case, gather).items()}
    return {arm: tuple(map(to_host, outcome)) for arm, outcome in found.items()}


def _arms(job: Job, parts: dict[int, Any], case: Case, gather: str) -> dict[str, tuple[Step, int | None]]:
    """Each arm as a step, and the bytes of all ranks' contributions that a rank has after its gather."""
    arms: dict[str, tuple[Step, int | None]] = dict(_full_paths(job, parts, case, gather))
    for form in FORMS:
        arms[f"sharded ({form})"] = _sharded(job, parts, case, form, gather)
    arms["sharded (candidate, again)"] = arms["sharded (candidate)"]  # what a difference must exceed
    arms |= {name: (step, None) for name, step in floor_steps([parts[job.timed]], job.library.__name__).items()}
    if gather == "included":
        moved = arms["sharded (candidate)"][1] or 0
        send, recv = (job.library.zeros(size, np.uint8) for size in (moved // job.tp_size, moved))
        arms["floor: bare gather"] = Step([lambda: job.comm.all_gather(send, recv)], job.library.__name__), None
    return arms


def _sharded(job: Job, parts: dict[int, Any], case: Case, form: str, gather: str) -> tuple[Step, int]:
    """Scan, gather and finish below the checks of the public function, launches packed once."""
    mine = parts[job.timed]
    requests = Requests.given(mine, **case.placed(job.place))
    plan = job.plan(mine)
    contribution = Contribution.agreed(
        form, case.num_draft_tokens, plan.splits(len(mine)), list(map(blocks_of, job.shards)), job.shards[0].vocab_size
    )
    module, outputs = backends.verification(job.backend, mine), fresh_outputs(mine, requests)
    made = {
        rank: VerifySteps.of(module, part, job.shards[rank], "first", contribution, requests, outputs)
        for rank, part in parts.items()
    }
    for rank, steps in made.items():
        steps.scan(parts[rank], requests, steps.candidates)
    everyone = job.gather({rank: steps.candidates for rank, steps in made.items()})
    steps = made[job.timed]
    if job.tp_size > 1:
        steps.gathered[...] = 0  # what is checked is what the calls write
    send = _send(job, gather, steps.candidates, steps.gathered, everyone)

    def call() -> Outputs:
        steps.scan(mine, requests, steps.candidates)
        send()
        steps.finish(steps.gathered, requests, outputs)
        return outputs

    return _step(job, case, call), everyone.nbytes if job.tp_size > 1 else 0


def _full_paths(job: Job, parts: dict[int, Any], case: Case, gather: str) -> dict[str, tuple[Step, int]]:
    """The full path: gather the logits, put their columns in the order of ids, argmax, accept. In NumPy; on a GPU with
    CuPy's reduction, as near to a library's argmax as its kernels are exact, and with our own scan of whole rows."""
    mine = parts[job.timed]
    requests = Requests.given(mine, **case.placed(job.place))
    lines = {rank: send_of(part, job.shards) for rank, part in parts.items()}
    words = lines[job.timed]
    everyone = job.gather(lines)
    gathered = job.library.empty_like(everyone) if job.tp_size > 1 else everyone
    send = _send(job, gather, words, gathered, everyone)

    def whole() -> Any:
        send()
        by_rank = list(gathered.reshape(job.tp_size, len(mine), -1))
        return in_order_of_ids(by_rank, job.shards, mine.dtype)

    moved = everyone.nbytes if job.tp_size > 1 else 0
    if job.library is np:
        finishes = {"full path (numpy)": _accepted_by_numpy(job, requests)}
    else:
        finishes = {
            "full path (cupy)": _accepted_after_cupy(job, mine, requests),
            "full path (our scan)": _accepted_after_scan(job, mine, requests),
        }
    return {name: (_step(job, case, lambda finish=finish: finish(whole())), moved) for name, finish in finishes.items()}


def _accepted_by_numpy(job: Job, requests: Requests) -> Callable[[np.ndarray], Outputs]:
    names = ("draft_ids", "cu_num_rows", "num_draft_tokens", "positions", "seq_lens", "prefill_lens", "seeds")
    arguments = {name: getattr(requests, name) for name in (*names, "acceptance")}
    return lambda whole: accept(full_argmax(whole), **arguments, vocab_size=job.shards[0].vocab_size)


def _accepted_after_cupy(job: Job, mine: Any, requests: Requests) -> Callable[[Any], Outputs]:
    """CuPy's reduction; the rules by our own finish, which is given each row's id as its one candidate."""
    one, outputs = Contribution("candidate", requests.num_draft_tokens, 1, 1), fresh_outputs(mine, requests)
    candidates = job.library.empty((len(mine), 1), np.uint64)
    module = backends.verification(job.backend, mine)
    finish = module.prepare_verify_finish(candidates, one, requests, job.shards[0].vocab_size, outputs)

    def accepted(whole: Any) -> Outputs:
        _packed_id()(max_with_index(whole)[1], candidates[:, 0])
        finish(candidates, requests, outputs)
        return outputs

    return accepted


@functools.cache
def _packed_id() -> Any:
    import cupy

    return cupy.ElementwiseKernel("int64 id", "uint64 candidate", "candidate = 0x1FFFFFFFFull - id", "packed_id")


def _accepted_after_scan(job: Job, mine: Any, requests: Requests) -> Callable[[Any], Outputs]:
    """The sharded path's own kernels, as if one rank had the vocabulary."""
    outputs, vocab_size = fresh_outputs(mine, requests), job.shards[0].vocab_size
    alone, like = VocabShard.even(vocab_size, 1)[0], job.library.empty((len(mine), vocab_size), mine.dtype)
    splits = Plan.agreed([(vocab_size, arrays.multiprocessors())], mine.dtype.itemsize).splits(len(mine))
    contribution = Contribution("candidate", requests.num_draft_tokens, splits, splits)
    module = backends.verification(job.backend, mine)
    steps = VerifySteps.of(module, like, alone, "first", contribution, requests, outputs)

    def accepted(whole: Any) -> Outputs:
        steps.enqueue(whole, vpa.comm.solo(), requests, outputs)
        return outputs

    return accepted


def _send(job: Job, gather: str, mine: Any, gathered: Any, everyone: Any) -> Callable[[], None]:
    """The gather, or what stands for it: a copy of all ranks' contributions; nothing where there is one rank."""
    if job.tp_size == 1:
        return lambda: None
    if gather == "included":
        return lambda: job.comm.all_gather(mine, gathered)
    return lambda: copy(everyone, gathered)


def _step(job: Job, case: Case, call: Callable[[], Outputs]) -> Step:
    """A call as a step, whose result is right request by request."""
    right = np.ones(len(case.outcome[1]), bool)
    return Step([call], job.library.__name__, right, lambda outcome: case.right(tuple(map(to_host, outcome))))
