"""``python -m vpa.run``: run an experiment in this process or on all ranks of an MPI job, and print its tables."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import vpa
from vpa import backends, record, report
from vpa.bench import settings as bench_settings
from vpa.bench.inputs import HeadInput, open_head
from vpa.bench.job import Job, shards_of
from vpa.bench.settings import Settings, UsageError
from vpa.comm.mpi import abort, start_mpi
from vpa.shapes import SHAPES

RIGHT, WRONG, USAGE = 0, 1, 2

#: Variables by which launchers (MPICH, Open MPI, PMIx, Cray's PALS, Flux, Slurm's srun) tell a process its rank before
#: MPI starts. Slurm sets the last one in a batch script too, which is no step and starts no ranks.
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "SLURM_PROCID")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for. Returns the exit code: 0 all tokens right, 1 any wrong, 2 bad usage.

    In a job of several ranks, an exception or a ``sys.exit`` on one of them ends them all.
    """
    return _all_ranks_or_none(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    given: dict[str, Any] = {}
    try:
        options = _parser().parse_args(arguments)
        given = _given(options)
    except _HelpShown:
        return RIGHT
    except UsageError as error:
        return _run("", given, None, error)
    if options.experiment == "list":
        return _list()
    if options.experiment == "env":
        return _env()
    return _run(options.experiment, given, options.json)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The command line together with the files that it names."""

    name: str
    contents: dict[str, Any]
    given: dict[str, Any]
    source: HeadInput | None
    json: str | None

    @classmethod
    def of(cls, experiment: str, given: dict[str, Any], json: str | None) -> _Plan:
        """Read and check the files; ``UsageError`` for one that is missing here, or does not fit."""
        name, contents = bench_settings.load(experiment)
        settings = bench_settings.settle(name, contents, given, gpu=False)
        if json is not None:
            try:
                record.check_new(json)
            except ValueError as error:
                raise UsageError(f"--json: {error}") from error
        source = open_head(settings.lm_head, settings.hidden)
        if source is not None:
            if given["vocab"] not in (None, source.head.vocab_size):
                raise UsageError(
                    f"--vocab is {given['vocab']}; the head has {source.head.vocab_size} rows: leave it out"
                )
            given = {**given, "vocab": source.head.vocab_size}
            if source.rows is not None:
                given["rows"] = given["rows"] or [source.rows]
            if contents.get("kind") == "norm":
                if given["hidden_sizes"] not in (None, [source.head.hidden_size]):
                    raise UsageError(f"--hidden-sizes goes without a head; this one's is {source.head.hidden_size}")
                given["hidden_sizes"] = [source.head.hidden_size]
        plan = cls(name, contents, given, source, json)
        plan.settle(gpu=True)
        plan.settle(gpu=False)
        return plan

    def settle(self, gpu: bool) -> Settings:
        """The settings where all ranks have a GPU, or where not all have one."""
        settings = bench_settings.settle(self.name, self.contents, self.given, gpu)
        if self.source is not None and self.source.rows is not None and max(settings.rows) > self.source.rows:
            raise UsageError(f"--rows up to {max(settings.rows)}, but --hidden has {self.source.rows} rows")
        return settings


def _run(experiment: str, given: dict[str, Any], json: str | None, error: UsageError | None = None) -> int:
    plan, contents = None, None
    try:
        if error is None:
            plan = _Plan.of(experiment, given, json)
            contents = plan.contents
    except UsageError as failure:
        error = failure
    if _launched_rank() is None:
        return _usage(error) if error else _with_communicator(plan)
    # A command line may be wrong, a file missing, on one rank only: all are told, and none waits for the others.
    with vpa.comm.from_mpi("mpi") as everyone:
        told = [(rank, text) for rank, text in enumerate(everyone.exchange(error and str(error))) if text]
        if told:
            rank, text = told[0]
            return _usage(UsageError(text if rank == 0 else f"rank {rank}: {text}"))
        try:
            vpa.comm.agree(everyone, {"experiment": experiment, "settings in its file": contents, **given})
        except ValueError as difference:
            return _usage(UsageError(str(difference)))
    return _with_communicator(plan)


def _with_communicator(plan: _Plan) -> int:
    settings = plan.settle(gpu=False)
    try:
        comm = _communicator(settings.comm, host_only=settings.backend in backends.HOST)
        settings, job, sharding = _settled(plan, comm)
    except UsageError as error:  # the same on every rank: it comes of what all ranks have alike
        return _usage(error)
    with comm:
        return _experiment(plan, settings, job, sharding)


def _communicator(wanted: str, host_only: bool) -> Any:
    """The job's communicator; a solo one for a process that runs alone and was not asked to communicate."""
    if _launched_rank() is not None or wanted in ("mpi", "nccl"):
        transport = {"auto": "mpi" if host_only else "auto", "emulated": "mpi"}.get(wanted, wanted)
        try:
            comm = vpa.comm.from_mpi(transport)
        except ValueError as error:
            raise UsageError(f"--comm: {error}") from error
        if comm.size > 1 and wanted == "emulated":
            raise UsageError(f"--comm emulated is for one process; this job has {comm.size} ranks")
        if comm.size > 1 or wanted in ("mpi", "nccl"):
            return comm
        comm.close()
    return vpa.comm.solo()


def _settled(plan: _Plan, comm: Any) -> tuple[Settings, Job, str]:
    """What will be run by whom, the same on every rank, and how the vocabulary is cut, in words."""
    emulates = comm.transport == "solo"
    on_gpu = _gpu_is_visible() if emulates else comm.device is not None
    gpu = all(comm.exchange(on_gpu)) and plan.settle(gpu=False).backend not in backends.HOST
    settings = plan.settle(gpu)
    if not emulates and plan.given["tp"] not in (None, comm.size):
        raise UsageError(f"--tp is {settings.tp}, the job has {comm.size} ranks; --tp is for one process that emulates")
    if settings.kind in bench_settings.ONE_PROCESS and comm.size > 1:
        raise UsageError(f"{settings.experiment} is for one process, which emulates ranks; this job has {comm.size}")
    if settings.backend in ("raw", "numba") and not gpu:
        raise UsageError(f"--backend {settings.backend} needs a GPU on every rank, and there is none; numpy does not")
    if settings.backend in backends.HOST and comm.transport == "nccl":
        raise UsageError(f"--backend {settings.backend} with --comm nccl: NCCL carries GPU arrays; use --comm mpi")
    ranks = _emulated_ranks(plan, settings) if emulates else comm.size
    shards = shards_of(settings.vocab, ranks)[0]
    sharding = "; ".join(shards_of(vocab, ranks)[1] for vocab in settings.vocabs)
    backend = settings.backend or ("raw" if gpu else "numpy")
    library = importlib.import_module("numpy" if backend in backends.HOST else "cupy")
    return settings, Job(comm, shards, library, backend), sharding


def _experiment(plan: _Plan, settings: Settings, job: Job, sharding: str) -> int:
    comm, gpu = job.comm, job.library.__name__ == "cupy"
    rank0 = comm.rank == 0
    say: Callable[[str], None] = print if rank0 else lambda line: None
    say(f"{settings.experiment}: {settings.question}")
    say(f"{job.describe()}; backend {job.backend}, layout {settings.layout}, seed {settings.seed}")
    say(sharding + ("" if plan.source is None else f"; head {plan.source.head.tensor} of {plan.source.head.path}"))
    if not gpu and "cpu" in plan.contents:
        smaller = ", ".join(f"{key} {_words(value)}" for key, value in plan.contents["cpu"].items())
        say(f"no GPU in use, so the defaults are smaller: {smaller}")
    say("")

    progress = _progress(rank0 and sys.stderr.isatty())
    experiment = importlib.import_module(f"vpa.bench.{settings.kind}")
    rows = list(experiment.run(settings, job, plan.source, progress))
    progress("")
    env = record.environment(comm, on_gpu=gpu)  # after the work: clocks as they were for it
    wrong = sum(row["wrong"] or 0 for row in rows if not row["external"])
    if rank0:
        report.print_rows(rows)
        if plan.json:
            written = record.write(plan.json, settings.experiment, env, rows)
            if written != plan.json:
                print(f"vpa.run: {plan.json} could not be made; the record is in {written}", file=sys.stderr)
    say(f"{wrong} wrong rows" if wrong else "all tokens right")
    return WRONG if wrong else RIGHT


def _emulated_ranks(plan: _Plan, settings: Settings) -> int:
    """How many ranks a process alone plays: as many as asked for, else the experiment's; one under a launcher."""
    return 1 if plan.given["tp"] is None and _launched_rank() is not None else settings.tp


def _all_ranks_or_none(body: Callable[[], int]) -> int:
    """The result of ``body``. If it ends by an exception or ``sys.exit`` in a job, the whole job ends, non-zero, now.

    A rank that just left would let the others wait for it for ever.
    """
    try:
        return body()
    except BaseException as error:
        if _launched_rank() is None:
            raise
        # Also where this rank failed before MPI started: the others are on their way to it, and would wait.
        MPI = start_mpi()
        if MPI.Is_finalized() or MPI.COMM_WORLD.Get_size() == 1:
            raise
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        abort(f"rank {MPI.COMM_WORLD.Get_rank()} failed, so the job ends", code % 256 or 1)


def _list() -> int:
    if _launched_rank() in (None, 0):
        found = bench_settings.experiments()
        width = max(map(len, found))
        for name, contents in found.items():
            print(f"{name:{width}}  {contents['question']}")
    return RIGHT


def _env() -> int:
    mpi = _mpi_version()  # on every rank: importing MPI waits for all of them
    if _launched_rank() in (None, 0):
        env = record.environment()
        git = env["git"] or {"revision": "unknown", "dirty": False}
        print(f"vpa       {vpa.__version__}, revision {git['revision'][:12]}{' (changed)' if git['dirty'] else ''}")
        print(f"python    {env['python']} on {env['system']}")
        print(f"packages  {', '.join(f'{name} {version}' for name, version in env['packages'].items())}")
        print(f"cpu       {env['ranks'][0]['cpu']}, {env['ranks'][0]['cores']} cores in use")
        gpu = env["ranks"][0]["gpu"]
        print(f"gpu       {gpu['name'] + ', ' + str(gpu['smi']) if gpu else _no_gpu()}")
        print(f"nccl      {env['nccl'] or 'none'}")
        print(f"mpi       {mpi}")
    return RIGHT


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m vpa.run",
        description="Run an experiment in this process, or under mpirun on all ranks of a job.",
        epilog="Exit code: 0 all tokens right, 1 any wrong, 2 bad usage. `python -m vpa.run list` lists the "
        "experiments, `python -m vpa.run env` says what this machine has.",
    )
    add = parser.add_argument
    add("experiment", nargs="?", default="headline", metavar="NAME | FILE.toml", help="what to run (default: headline)")
    add("--rows", metavar="N,N,...", help="batch sizes")
    add("--vocab", type=int, metavar="N", help="vocabulary size")
    add("--dtype", metavar="NAME,...", help="bf16, fp16, fp32: dtypes to check; the first is timed")
    add("--backend", choices=backends.BACKENDS, help="default: raw with a GPU, numpy without")
    add("--comm", choices=bench_settings.COMMS, help="how ranks communicate (default: auto)")
    add("--tp", type=int, metavar="N", help="ranks that one process emulates, if it runs without mpirun")
    add("--layout", choices=("packed", "pairs"), help="of the candidates (default: packed)")
    add("--lm-head", metavar="FILE.safetensors[:TENSOR]", help="scan the logits of a real head [vocabulary, hidden]")
    add("--hidden", metavar="FILE.npy", help="hidden states [rows, hidden] for the head; default: near its own rows")
    add("--family", metavar="NAME,...", help="of draft: nemotron-h, deepseek, deepseek-v3.2 (default: all)")
    add(
        "--draft-tokens",
        metavar="N,...",
        help="of draft: one number, of a loop (default: 7 for nemotron-h, 3 else); of verify: drafts of a request",
    )
    add("--hidden-sizes", metavar="N,N,...", help="of norm: elements of a row")
    add("--shape", metavar="NAME,...", help=f"of break-even: {', '.join(SHAPES)}, or HIDDENxVOCAB")
    add("--from", dest="source", choices=("head", "logits"), help="of break-even: with the product, or without it")
    add("--seed", type=int, metavar="N", help="of the inputs (default: 0)")
    add("--check-only", action="store_true", help="check all tokens, time nothing")
    add("--json", metavar="PATH", help="write a record to this new file")
    return parser


class _HelpShown(Exception):
    """--help was asked for and is answered."""


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as ``UsageError``, so that one rank speaks for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")

    def print_help(self, file: Any = None) -> None:
        if _launched_rank() in (None, 0):
            super().print_help(file)
        raise _HelpShown


def _usage(error: UsageError) -> int:
    if _launched_rank() in (None, 0):
        print(f"vpa.run: {error}", file=sys.stderr)
    return USAGE


def _launched_rank() -> int | None:
    """This process's rank as its launcher tells it; None where no launcher did."""
    for variable in _RANK_VARIABLES:
        in_batch_script = variable == "SLURM_PROCID" and not os.environ.get("SLURM_STEP_ID", "").isdigit()
        if os.environ.get(variable, "").isdigit() and not in_batch_script:
            return int(os.environ[variable])
    return None


def _gpu_is_visible() -> bool:
    return not _no_gpu()


def _no_gpu() -> str:
    from vpa.comm.device import visible_gpus

    return visible_gpus()[1]


def _mpi_version() -> str:
    try:
        MPI = start_mpi()
    except RuntimeError as error:
        return f"none ({error})"
    return " ".join(MPI.Get_library_version().splitlines()[0].split())


def _progress(shown: bool) -> Callable[[str], None]:
    """Writes what is being done over the last line of a terminal's stderr; nothing elsewhere."""

    def progress(doing: str) -> None:
        if shown:
            print(f"\r\x1b[K{doing}", end="", file=sys.stderr, flush=True)

    return progress


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives; None for those that it leaves to the experiment."""
    return {
        "rows": _integers("--rows", options.rows),
        "vocab": options.vocab,
        "dtypes": None if options.dtype is None else options.dtype.split(","),
        "backend": options.backend,
        "comm": options.comm,
        "tp": options.tp,
        "layout": options.layout,
        "lm_head": options.lm_head,
        "hidden": options.hidden,
        "drafters": None if options.family is None else options.family.split(","),
        "draft_tokens": _integers("--draft-tokens", options.draft_tokens),
        "hidden_sizes": _integers("--hidden-sizes", options.hidden_sizes),
        "shapes": None if options.shape is None else options.shape.split(","),
        "source": options.source,
        "seed": options.seed,
        "check_only": options.check_only or None,
    }


def _integers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} is {text!r}; integers with commas between are accepted, as 1,8,64") from None


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
