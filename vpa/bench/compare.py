"""Every form side by side: backends, existing path and peers, whole and in parts, over sizes, dtypes and strides."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from vpa import backends
from vpa.arrays import namespace
from vpa.backends import launches
from vpa.bench import arms, steps
from vpa.bench.arms import Arm
from vpa.bench.experiment import Progress, Row, inputs_of, row_of
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, copy, to_host
from vpa.bench.settings import Settings
from vpa.bench.steps import Step
from vpa.vocab import VocabShard

#: Makes an arm from a job, logits like those of its timed rank, and a layout of candidates; or says why it cannot run
#: here, as an ``ImportError`` does.
Make = Callable[[Job, Any, str], Arm | str]

#: An arm and one of its parts, "pair", "local" or "finish"; a floor and "".
Key = tuple[str, str]


def _ours(name: str) -> Make:
    def make(job: Job, logits: Any, layout: str) -> Arm:
        return arms.fused(backends.select(name, logits), layout, job.library.__name__, job.plan(logits).splits, name)

    return make


def _without_overlap(job: Job, logits: Any, layout: str) -> Arm:
    raw = backends.select("raw", logits)
    prepare = {name: functools.partial(getattr(raw, name), overlap=False) for name in ("prepare_scan", "prepare_pick")}
    splits = job.plan(logits).splits
    return arms.fused(SimpleNamespace(**prepare), layout, "cupy", splits, "raw (no overlap)")


def _one_kernel(job: Job, logits: Any, layout: str) -> Arm:
    return arms.one_kernel(backends.select("raw", logits), "cupy", "raw (one kernel)")


def _in_cluster(job: Job, logits: Any, layout: str) -> Arm | str:
    """One candidate a row: its blocks agree through a cluster, as many blocks as the plan has splits."""
    from vpa.backends.launcher import is_hopper_or_newer

    if not is_hopper_or_newer(logits.device.id):
        return "clusters begin with compute capability 9.0"
    raw, plan = backends.select("raw", logits), job.plan(logits)

    def scan(logits: Any, shard: VocabShard, layout: str, splits: int, out: Any) -> Any:
        blocks = min(plan.splits(len(logits)), launches.MAX_CLUSTER)
        return raw.prepare_scan_in_cluster(logits, shard, layout, blocks, out)

    module = SimpleNamespace(prepare_scan=scan, prepare_pick=raw.prepare_pick)
    return arms.fused(module, layout, "cupy", lambda rows: 1, "raw (cluster)")


def _triton() -> ModuleType:
    return importlib.import_module("vpa.bench.triton_peer")


#: The arms over each library's arrays, in the order of the tables. Of backends, those in ``OURS`` run, or the one that
#: the settings name.
ARMS: dict[str, dict[str, Make]] = {
    "cupy": {
        "raw": _ours("raw"),
        "raw (no overlap)": _without_overlap,
        "raw (one kernel)": _one_kernel,
        "raw (cluster)": _in_cluster,
        "TopTokens": lambda *_: arms.top_tokens("raw", "cupy"),
        "numba": _ours("numba"),
        "existing (cupy)": lambda *_: arms.existing("cupy"),
        "existing (torch)": lambda *_: arms.existing_torch(),
        "triton": lambda *_: _triton().by_block(),
        "triton (by lane)": lambda *_: _triton().by_lane(),
        "triton (exact)": lambda *_: _triton().exact(),
        "torch.argmax": lambda *_: arms.argmax_torch(),
        "cupy.argmax": lambda *_: arms.argmax_cupy(),
    },
    "numpy": {
        "numpy": _ours("numpy"),
        "simt": _ours("simt"),
        "TopTokens": lambda *_: arms.top_tokens("numpy", "numpy"),
        "existing (numpy)": lambda *_: arms.existing("numpy"),
    },
}

OURS = ("raw", "numba", "numpy")

#: Layouts of the logits in memory. Both strided ones hold NaN where they hold no logit.
STRIDES = ("contiguous", "column-major", "row gap")

#: Elements between rows of "row gap": an odd number, so that nearly every row of 16-bit logits is misaligned otherwise.
GAP = 37

#: Of the batch sizes that are asked for, those at which there is more than contiguous logits of the first dtype and
#: family, captured, with a hot cache: other dtypes and strides; cold caches (not one row: a ring of some thousand
#: inputs) and eager calls; other families; and the host, where a GPU is what the rest is measured on.
FEW = (1, 8, 64, 1024)
COLD_AT = (8, 64, 256, 1024)
EAGER_AT = (1, 8, 64, 256, 1024)
FAMILIES_AT = (8, 64)
HOST_AT = (1, 8, 64)

#: Larger batches have a quarter of the calls in a sample, and half the samples.
LARGE = 512

#: Calls of a sample on the host, and samples, at most.
HOST_CALLS, HOST_ROUNDS = 3, 9


@dataclass(frozen=True)
class Point:
    """What is timed side by side."""

    rows: int
    mode: str
    strides: str = "contiguous"
    cache: str = "hot"


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Rows of the record: of every point each arm, its parts and the floors. With ``check_only`` our arms, untimed."""
    for family, dtype, points in points_of(settings, job.library is not np, source is not None):
        sizes = tuple(sorted({point.rows for point in points}))
        if not sizes:
            continue
        inputs = dataclasses.replace(settings, families=(family,), dtypes=(dtype,), rows=sizes)
        name, _, logits = next(inputs_of(inputs, job, source))
        oracle = job.full_argmax(logits), job.shard_argmax(logits[job.timed])
        for point in points:
            progress(f"{point.rows} rows of {name} {dtype}, {point.strides}, {point.mode}, {point.cache}")
            parts = {rank: array[: point.rows] for rank, array in logits.items()}
            expected = tuple(tokens[: point.rows] for tokens in oracle)
            yield from _measured(settings, job, point, parts, expected, (dtype, name))


def points_of(settings: Settings, gpu: bool, head: bool) -> Iterator[tuple[str, str, list[Point]]]:
    """What is timed, and on which input: (family, dtype, points). The first family and dtype have the most points."""
    mode = "captured" if gpu else "host"
    sizes = [rows for rows in settings.rows if rows]

    def at(chosen: tuple[int, ...], mode: str = mode, **more: str) -> list[Point]:
        return [Point(rows, mode, **more) for rows in sizes if rows in chosen]

    main = [Point(rows, mode) for rows in sizes]
    main += [point for strides in STRIDES[1:] for point in at(FEW, strides=strides)]
    if gpu:
        main += at(COLD_AT, cache="cold") + at(EAGER_AT, mode="eager")
    if gpu and settings.backend is None:
        main += at(HOST_AT, mode="host")
    family, *others = settings.families
    dtype, *narrower = settings.dtypes
    yield family, dtype, main
    for other in narrower:
        yield family, other, at(FEW)
    for other in others if not head else ():
        yield other, dtype, at(FAMILIES_AT)


def _measured(
    settings: Settings,
    job: Job,
    point: Point,
    parts: dict[int, Any],
    expected: tuple[np.ndarray, np.ndarray],
    names: tuple[str, str],
) -> Iterator[Row]:
    """The rows of one point. parts: contiguous logits. expected: tokens, and those of the timed rank's shard alone."""
    if point.mode == "host" and job.library is not np:
        parts = {rank: to_host(array) for rank, array in parts.items()}
        job = dataclasses.replace(job, library=np, backend="numpy")
    laid = {rank: laid_out(array, point.strides) for rank, array in parts.items()}
    if point.strides != "contiguous":
        expected = job.full_argmax(laid), job.shard_argmax(laid[job.timed])
    able, unable = _arms_of(settings, job, laid[job.timed])
    ring = steps.ring_of(laid[job.timed], point.cache)
    found: dict[Key, Step] = {}
    for arm in able:
        try:
            found.update(_steps_of(arm, job, laid, ring, expected, finish=point == Point(point.rows, point.mode)))
        except Exception as error:  # others' code may not take a dtype or a stride, each saying so in its own way
            if not arm.external:
                raise
            unable[arm.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    place = {"strides": point.strides, "mode": point.mode, "cache": point.cache, "gather": "excluded"}
    for arm, reason in unable.items():
        yield row_of(settings, job, point.rows, *names, arm, None, skipped=reason, **place)
    if not found:
        return
    if settings.check_only:
        ours = {key: step for key, step in found.items() if not step.external}
        for (arm, part), wrong in steps.checked(job, ours).items():
            yield row_of(settings, job, point.rows, *names, arm, wrong, part=part, **place)
        return
    noise = next(key for key in found if key[1] == "pair")  # once more: what a difference must exceed
    found[f"{noise[0]} (again)", "pair"] = found[noise]
    floors = steps.floor_steps(ring if point.strides == "contiguous" else [parts[job.timed]], job.library.__name__)
    floors.update(_copy_floor(able[0], job, point.rows))
    found.update({(floor, ""): step for floor, step in floors.items()})
    calls, rounds = _samples(settings, point, len(ring))
    wrong, kernels, samples = steps.timed(job, found, point.mode, calls, rounds)
    for key, step in found.items():
        yield row_of(
            settings, job, point.rows, *names, key[0], wrong[key], part=key[1], external=step.external, calls=calls,
            kernels=kernels.get(key), samples=samples[key], **place,
        )  # fmt: skip


def _arms_of(settings: Settings, job: Job, logits: Any) -> tuple[list[Arm], dict[str, str]]:
    """The arms that can run over these logits, and why others cannot. The first one is ours."""
    wanted = OURS if settings.backend is None else (settings.backend,)
    able, unable = [], {}
    for name, make in ARMS[job.library.__name__].items():
        if name in backends.BACKENDS and name not in wanted:
            continue
        arm = arms.if_installed(lambda make=make: make(job, logits, settings.layout))
        reason = arm if isinstance(arm, str) else steps.unable(arm, job)
        if reason:
            unable[name] = reason
        else:
            able.append(arm)
    return able, unable


def _steps_of(
    arm: Arm, job: Job, parts: dict[int, Any], ring: list[Any], expected: tuple[np.ndarray, np.ndarray], finish: bool
) -> dict[Key, Step]:
    """An arm and its parts. Each is called once, so that what a library cannot do is known before any is timed."""
    found = {}
    if arm.finish is not None:
        found[arm.name, "pair"] = steps.pair(arm, job, parts, ring, expected[0], "excluded")
    found[arm.name, "local"] = steps.local(arm, job, ring, expected[1])
    if arm.finish is not None and finish:
        found[arm.name, "finish"] = steps.finish(arm, job, parts, expected[0])
    for step in found.values():
        step.calls[0]()
    return found


def _copy_floor(arm: Arm, job: Job, rows: int) -> dict[str, Step]:
    """A copy of as many bytes as the arm gathers: what stands for the gather."""
    if job.tp_size == 1:
        return {}
    shape, dtype = arm.contribution(rows)
    source = job.library.zeros((job.tp_size * shape[0], *shape[1:]), dtype)
    target = job.library.empty_like(source)
    return {"floor: copy": Step([lambda: copy(source, target)], job.library.__name__)}


def _samples(settings: Settings, point: Point, ring: int) -> tuple[int, int]:
    """Calls of a sample, and samples. A cold sample has a call for each input of the ring."""
    if point.mode == "host":
        return min(settings.calls, HOST_CALLS), min(settings.rounds, HOST_ROUNDS)
    large = point.rows > LARGE
    rounds = -(-settings.rounds // 2) if large else settings.rounds
    if point.cache == "cold":
        return ring, min(rounds, steps.COLD_ROUNDS)
    return -(-settings.calls // 4) if large else settings.calls, rounds


def laid_out(logits: Any, strides: str) -> Any:
    """Contiguous logits [rows, width], copied to the layout of memory that ``strides`` names; NaN lies between them."""
    if strides == "contiguous":
        return logits
    xp, (rows, width) = namespace(logits), logits.shape
    words = logits.view(f"u{logits.itemsize}")  # not every library copies bf16
    if strides == "column-major":
        return xp.asfortranarray(words).view(logits.dtype)
    memory = xp.full(1 + rows * (width + GAP), ~words.dtype.type(0), words.dtype)
    gapped = memory[1:].reshape(rows, width + GAP)[:, :width]  # begins at an odd element
    gapped[...] = words
    return gapped.view(logits.dtype)
