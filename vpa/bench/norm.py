"""A drafter's tail: all-reduce, residual and norm, then head and token; bits, tokens, times and bytes of each way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import vpa
from vpa import backends, norm_steps, rmsnorm, weights
from vpa.bench import floors, steps, timing
from vpa.bench.experiment import Progress, Row, row_of
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, to_host, wait, wrong_rows
from vpa.bench.norm_check import Rules
from vpa.bench.settings import Settings
from vpa.bench.steps import COLD_RING, COLD_ROUNDS, Step
from vpa.bench.ways import FULL, LOCAL, NO_HEAD, gathered_for_tokens, remembering
from vpa.full_gather import full_argmax
from vpa.lm_head import Head, ParallelLMHead
from vpa.logits import LogitsProcessor
from vpa.mtp import mixed
from vpa.norm import MODES
from vpa.norm_plan import received_bytes
from vpa.norm_steps import Call, Prepared
from vpa.order import LOGITS_DTYPES

EPS = 1e-6

#: Calls of a sample of the tail, whose product is what takes the time.
TAIL_CALLS = 3

#: Batches below this have no cold times: a ring of inputs of theirs has hundreds.
COLD_FROM = 16


@dataclass(frozen=True)
class _Inputs:
    """Partial sums of all ranks [tp, B, H], residual [B, H] and weight [H], on the host and in the job's library."""

    job: Job
    parts: np.ndarray
    residual: np.ndarray
    weight: np.ndarray
    placed: tuple[Any, Any, Any]

    @classmethod
    def first(cls, job: Job, host: tuple[np.ndarray, np.ndarray, np.ndarray], rows: int) -> _Inputs:
        """The first rows of what ``_seeded`` made."""
        parts, residual, weight = np.ascontiguousarray(host[0][:, :rows]), host[1][:rows], host[2]
        return cls(job, parts, residual, weight, tuple(map(job.place, (parts, residual, weight))))

    @functools.cached_property
    def rules(self) -> dict[str, Rules]:
        """What has to come out, of each rounding."""
        return {name: Rules(self.parts, self.residual, self.weight, EPS, name) for name in rmsnorm.ROUNDINGS}

    def call(self, mode: str, rounding: str = "once") -> Call:
        """The settings of a call, for ``vpa.norm_steps``."""
        _, residual, weight = self.placed
        return Call(residual.shape, residual.dtype, residual, weight, np.float32(EPS), mode, rounding)

    def normed(self, mode: str, rounding: str = "once") -> tuple[Any, Any]:
        """The public function's results, over the job's communicator or of all ranks at once."""
        parts, residual, weight = self.placed
        settings = {"mode": mode, "rounding": rounding, "backend": self.job.backend}
        if self.job.emulated:
            return vpa.emulate_allreduce_rmsnorm(list(parts), residual, weight, EPS, **settings)
        partial = parts[self.job.comm.rank]
        return vpa.allreduce_rmsnorm(partial, residual, weight, EPS, self.job.comm, **settings)

    def wrong(self, results: Any, mode: str = "one_shot", rounding: str = "once") -> np.ndarray:
        """1 for each row of (normed, new_residual), or what was ``Prepared``, that is not as it has to be, else 0.

        Bits count, except where NCCL has added: see ``Rules.wrong``.
        """
        normed, kept = (results.normed, results.new_residual) if isinstance(results, Prepared) else results
        same_sum = mode == "one_shot" or self.job.comm.transport != "nccl" or self.job.comm.size == 1
        return self.rules[rounding].wrong(to_host(normed), to_host(kept), same_sum)


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Rows of the record, for every dtype, hidden size and batch size: the bits of the norm in every mode and rounding,
    and the tokens behind it both ways; then, unless ``check_only``, times in the first dtype."""
    for dtype in settings.dtypes:
        for hidden in settings.hidden_sizes:
            progress(f"making hidden size {hidden} in {dtype}")
            host = _seeded(settings, job, source, hidden, dtype)
            head = _head(settings, job, source, hidden, dtype)
            for rows in settings.rows:
                inputs = _Inputs.first(job, host, rows)
                row = functools.partial(_row, settings, job, rows, dtype, hidden)
                progress(f"checking {rows} rows of hidden size {hidden} in {dtype}")
                checks, tokens = _checked(settings, inputs, head, row)
                yield from checks
                if rows and not settings.check_only and dtype == settings.dtypes[0]:
                    progress(f"timing {rows} rows of hidden size {hidden}")
                    yield from _timed_norm(settings, inputs, row)
                    yield from _timed_tail(settings, inputs, head, tokens, row)


def _seeded(
    settings: Settings, job: Job, source: HeadInput | None, hidden: int, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Partial sums, residual and weight of the largest batch: functions of the seed and of numbers alone.

    Each rank makes all ranks' partial sums, to check what travelled. Hidden states of the user's are the residual.
    """
    rows = max(settings.rows)

    def made(number: int, count: int) -> np.ndarray:
        return weights.seeded_rows(mixed(settings.seed, 5, number), 0, count, hidden)

    parts = np.empty((job.tp_size, rows, hidden), LOGITS_DTYPES[dtype])
    for rank in range(job.tp_size):
        parts[rank] = made(2 + rank, rows).astype(parts.dtype)
    given = source is not None and source.hidden is not None
    with np.errstate(all="ignore"):
        residual = (source.hidden[:rows] if given else made(0, rows)).astype(parts.dtype)
    weight = (1 + np.float32(0.4) * made(1, 1)[0]).astype(parts.dtype)  # far from uniform: without it tokens change
    return parts, residual, weight


def _checked(settings: Settings, inputs: _Inputs, head: Head, row: Callable[..., Row]) -> tuple[list[Row], np.ndarray]:
    """Wrong rows of each mode and rounding, and wrong tokens of each way; and the right tokens, int64 [B].

    Both ways pick from the very same logits.
    """
    job, rows = inputs.job, []
    for mode in MODES:
        for rounding in rmsnorm.ROUNDINGS:
            wrong = inputs.wrong(inputs.normed(mode, rounding), mode, rounding)
            rows.append(row("norm", f"{mode} {rounding}", job.total(int(wrong.sum()))))
    processor, head = _processor(settings, job), remembering(head)
    hidden, _ = inputs.normed("one_shot")
    parts = processor.compute_logits_local(head, hidden)
    right = job.full_argmax(job.by_rank(parts))
    for arm, tokens in (
        (FULL, full_argmax(processor.compute_logits(head, hidden))),
        (LOCAL, processor.get_top_tokens(head, hidden)),
    ):
        rows.append(row("tail", arm, job.total(wrong_rows(to_host(tokens), right))))
    return rows, right


def _timed_norm(settings: Settings, inputs: _Inputs, row: Callable[..., Row]) -> Iterator[Row]:
    """The norm alone: its kernel behind a gather, against three kernels and a plain move; modes over real ranks."""
    job = inputs.job
    places = [("excluded", "hot")]
    if job.library is not np and len(inputs.residual) >= COLD_FROM:
        places.append(("excluded", "cold"))
    if job.comm.size > 1:
        places.append(("included", "hot"))
    for gather, cache in places:
        made = _kernel_steps(inputs, cache) if gather == "excluded" else _collective_steps(inputs)
        moved = {arm: bytes_moved for arm, (_, bytes_moved) in made.items()}
        timed = {arm: step for arm, (step, _) in made.items()}
        calls = settings.calls if cache == "hot" else len(next(iter(timed.values())).calls)
        rounds = settings.rounds if cache == "hot" else min(settings.rounds, COLD_ROUNDS)
        for mode in _modes(job, gather, cache):
            wrong, kernels, samples = steps.timed(job, timed, mode, calls, rounds)
            for arm in timed:
                yield row(
                    "norm", arm, wrong[arm], gather=gather, mode=mode, cache=cache, calls=calls,
                    kernels=kernels.get(arm), samples=job.largest(samples[arm]), bytes_moved=moved[arm],
                )  # fmt: skip


def _modes(job: Job, gather: str, cache: str) -> tuple[str, ...]:
    if job.library is np:
        return ("host",)
    captured = gather == "excluded" or job.comm.capturable
    return (*(("captured",) if captured else ()), *(("eager",) if cache == "hot" else ()))


def _kernel_steps(inputs: _Inputs, cache: str) -> dict[str, tuple[Step, int | None]]:
    """Arms over partial sums that are gathered already, and the bytes that each reads and writes."""
    job, (parts, residual, weight) = inputs.job, inputs.placed
    module, library = backends.select(job.backend, parts), job.library.__name__
    call = inputs.call("one_shot")
    ring = [(parts, residual)]
    if cache == "cold":
        import cupy

        l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
        ring = [(parts.copy(), residual.copy()) for _ in range(-(-COLD_RING * l2 // (parts.nbytes + residual.nbytes)))]

    def unfused(parts: Any, residual: Any) -> Prepared:
        total, normed, kept = (job.library.empty_like(residual) for _ in range(3))
        launches = (
            norm_steps.kernel(module, parts, None, None, call.eps, "once", None, total),
            norm_steps.kernel(module, total[None], residual, None, call.eps, "once", None, kept),
            norm_steps.kernel(module, kept[None], None, weight, call.eps, "once", normed, None),
        )
        return Prepared(normed, kept, launches)

    def fused(parts: Any, residual: Any) -> Prepared:
        normed, kept = (job.library.empty_like(residual) for _ in range(2))
        launch = norm_steps.kernel(module, parts, residual, weight, call.eps, "once", normed, kept)
        return Prepared(normed, kept, (launch,))

    def step(make: Callable[[Any, Any], Prepared]) -> Step:
        return Step([_returning(make(*one)) for one in ring], library, np.zeros(len(residual), np.int64), inputs.wrong)

    size, ranks = residual.nbytes, len(parts)
    found: dict[str, tuple[Step, int | None]] = {
        "unfused": (step(unfused), (ranks + 1 + 3 + 2) * size),
        "fused": (step(fused), (ranks + 3) * size),
    }
    found["fused (again)"] = found["fused"]  # the same arm against itself: what a difference must exceed
    if size >= 16:
        words = f"u{residual.itemsize}"
        moves = []
        for one_parts, one_residual in ring:
            joined = job.library.concatenate([one_parts.view(words), one_residual.view(words)[None]])
            moves.append(floors.plain_move(joined, 2))
        found["floor: plain move"] = Step(moves, library), (ranks + 3) * size
    if library == "cupy":
        found["floor: empty kernel"] = Step([floors.empty_kernel()] * len(ring), library), None
    return found


def _collective_steps(inputs: _Inputs) -> dict[str, tuple[Step, int | None]]:
    """Every mode over real ranks, and the bytes that a rank receives."""
    job, (parts, residual, _) = inputs.job, inputs.placed
    module, library, partial = backends.select(job.backend, parts), job.library.__name__, parts[job.comm.rank]

    def step(mode: str) -> Step:
        prepared = norm_steps.prepare(module, job.comm, partial, inputs.call(mode))
        wrong = functools.partial(inputs.wrong, mode=mode)
        return Step([_returning(prepared)], library, np.zeros(len(residual), np.int64), wrong)

    found: dict[str, tuple[Step, int | None]] = {mode: (step(mode), _received(inputs, mode)) for mode in MODES}
    recv = job.library.empty_like(parts)
    bare = Step([functools.partial(job.comm.all_gather, partial, recv)], library)
    found["floor: bare gather"] = bare, _received(inputs, "one_shot")
    return found


def _received(inputs: _Inputs, mode: str) -> int:
    """Bytes that a rank receives from the others in a mode."""
    size, rows, job = inputs.residual.nbytes, len(inputs.residual), inputs.job
    return round(received_bytes(mode, size, job.tp_size, job.comm.transport, rows=rows))


def _returning(prepared: Prepared) -> Callable[[], Prepared]:
    """A call that gives what it has written, to be checked."""

    def call() -> Prepared:
        prepared()
        return prepared

    return call


def _timed_tail(
    settings: Settings, inputs: _Inputs, head: Head, tokens: np.ndarray, row: Callable[..., Row]
) -> Iterator[Row]:
    """The public functions from partial sums to tokens, by both ways."""
    job, processor = inputs.job, _processor(settings, inputs.job)

    def normed() -> Any:
        return inputs.normed("one_shot")[0]

    ways: dict[str, Callable[[], Any]] = {
        FULL: lambda: full_argmax(processor.compute_logits(head, normed())),
        LOCAL: lambda: processor.get_top_tokens(head, normed()),
        NO_HEAD: normed,
    }
    wrong = {arm: job.total(wrong_rows(to_host(ways[arm]()), tokens)) for arm in (FULL, LOCAL)}
    host = job.library is np
    samples = timing.time_called(ways, TAIL_CALLS, settings.rounds, job.comm.barrier, (lambda: None) if host else wait)
    moved = gathered_for_tokens(job, head, len(inputs.residual), settings.layout)
    received = {arm: total * (job.tp_size - 1) // job.tp_size for arm, total in moved.items()}  # all give as much
    for arm in ways:
        yield row(
            "tail", arm, wrong.get(arm), mode="host" if host else "eager", cache="hot",
            gather="excluded" if job.emulated else "included", calls=TAIL_CALLS,
            samples=job.largest(samples[arm]), bytes_moved=_received(inputs, "one_shot") + received.get(arm, 0),
        )  # fmt: skip


def _row(
    settings: Settings,
    job: Job,
    rows: int,
    dtype: str,
    hidden: int,
    stage: str,
    arm: str,
    wrong: int | None,
    **more: Any,
) -> Row:
    """A row of the record; of the norm, ``columns`` are those that it is of."""
    row = row_of(settings, job, rows, dtype, f"{stage} {hidden}", arm, wrong, **more)
    return row if stage == "tail" else {**row, "columns": hidden}


def _processor(settings: Settings, job: Job) -> LogitsProcessor:
    return LogitsProcessor(job.comm, layout=settings.layout, backend=job.backend)


def _head(settings: Settings, job: Job, source: HeadInput | None, hidden: int, dtype: str) -> Head:
    """The played ranks' heads: seeded, or the user's."""
    if source is None:
        sizes = {"hidden_size": hidden, "dtype": dtype, "library": job.library}
        heads = [ParallelLMHead.seeded(mixed(settings.seed, 6), job.shards, rank, **sizes) for rank in job.played]
    else:
        where = f"{source.head.path}:{source.head.tensor}"
        heads = [ParallelLMHead.load(where, job.shards, rank, dtype=dtype, library=job.library) for rank in job.played]
    return heads if job.emulated else heads[0]
