"""What a run is asked to do: an experiment's TOML file, with the command line on top."""

from __future__ import annotations

import dataclasses
import importlib.resources
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vpa import drafters
from vpa.arrays import LAYOUTS, check_layout
from vpa.backends import BACKENDS
from vpa.bench.families import FAMILIES
from vpa.norm import MAX_HIDDEN
from vpa.order import LOGITS_DTYPES, MAX_VOCAB_SIZE
from vpa.requests import MAX_DRAFT_TOKENS
from vpa.shapes import SHAPES, shape_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Names of dtypes on the command line and in TOML files.
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", **{name: name for name in LOGITS_DTYPES}}


#: Kinds of experiment: modules of ``vpa.bench`` with a function ``run``.
KINDS = ("headline", "numpy_backend", "compare", "draft", "head", "norm", "verify", "break_even")

#: Kinds that one process runs, which emulates the ranks.
ONE_PROCESS = ("compare",)

#: How ranks communicate; ``emulated``: one process plays them.
COMMS = ("auto", "nccl", "mpi", "emulated")

#: Logits of one input, padding and all: 4 GiB in fp32, of which a process that emulates all ranks holds a few copies.
#: A fixed number, not the memory that is free: every rank has to decide alike.
MAX_LOGITS = 2**30

#: Settings that only some kinds have: those kinds, the option of the command line, and what others have instead.
_OF_KINDS: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "families": (("headline", "numpy_backend", "compare", "verify"), "", ()),
    "drafters": (("draft",), " (--family)", ()),
    "draft_tokens": (("draft", "verify"), " (--draft-tokens)", ()),
    "hidden_sizes": (("norm",), " (--hidden-sizes)", ()),
    "shapes": (("break_even",), " (--shape)", ()),
    "source": (("break_even",), " (--from)", "head"),
}

#: Drafts of a request that is verified, where none are asked for.
DRAFT_TOKENS = (3,)


@dataclass(frozen=True)
class Settings:
    """Everything that decides what an experiment does.

    rows: batch sizes; of verify, requests. vocab: vocabulary size. dtypes: of the logits; the first one has the most
    times. tp: ranks that one process emulates, if it runs alone. calls: calls of a timed sample. rounds: samples.
    families: see ``vpa.bench.families``. drafters, draft_tokens, hidden_size, intermediate_size: see
    ``vpa.bench.draft``, which takes one number; draft_tokens of verify: numbers of drafts of a request. hidden_sizes:
    see ``vpa.bench.norm``. shapes: see ``vpa.shapes``; source: ``head`` multiplies, ``logits`` starts behind the
    product; see ``vpa.bench.break_even``. The rest: see ``python -m vpa.run --help``.
    """

    experiment: str
    kind: str
    question: str
    rows: tuple[int, ...]
    vocab: int
    dtypes: tuple[str, ...]
    families: tuple[str, ...]
    drafters: tuple[str, ...]
    hidden_sizes: tuple[int, ...]
    shapes: tuple[str, ...]
    tp: int
    calls: int
    rounds: int
    layout: str = "packed"
    seed: int = 0
    backend: str | None = None
    comm: str = "auto"
    check_only: bool = False
    lm_head: str | None = None
    hidden: str | None = None
    draft_tokens: tuple[int, ...] = ()
    hidden_size: int = 256
    intermediate_size: int = 512
    source: str = "head"

    @property
    def vocabs(self) -> tuple[int, ...]:
        """Every vocabulary size of the experiment."""
        return tuple(shape_of(name).vocab_size for name in self.shapes) or (self.vocab,)


class UsageError(ValueError):
    """A mistake in what the user asked for, found before anything ran: exit code 2."""


def experiments() -> dict[str, dict[str, Any]]:
    """The experiments that come with the package: name -> contents of ``mpi_runs/<name>.toml``."""
    folder = importlib.resources.files("vpa.mpi_runs")
    found = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml").replace("_", "-")
            found[name] = tomllib.loads(file.read_text(encoding="utf-8"))
    return found


def load(name: str) -> tuple[str, dict[str, Any]]:
    """The name and contents of an experiment, by its name or by the path of a TOML file; ``UsageError`` without one."""
    if name.endswith(".toml"):
        try:
            with open(name, "rb") as file:
                contents = tomllib.load(file)
            repr(contents)  # a hexadecimal integer may have more digits than Python prints: found before a message does
            return name.rpartition("/")[2].removesuffix(".toml"), contents
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"experiment file {name}: {error}") from error
    known = experiments()
    if name not in known:
        raise UsageError(f"no experiment {name!r}; there are {', '.join(known)}, or give a .toml file")
    return name, known[name]


def settle(name: str, contents: dict[str, Any], given: dict[str, Any], gpu: bool) -> Settings:
    """The settings of a run. ``contents`` may hold a table ``cpu``, which replaces its values where there is no GPU;
    ``given``, from the command line, replaces both. Raises ``UsageError`` for what does not fit."""
    merged = {key: value for key, value in contents.items() if key != "cpu"}
    without_gpu = contents.get("cpu", {})
    if not isinstance(without_gpu, dict):
        raise UsageError(f"{name}: cpu is {without_gpu!r}; a table of settings is accepted")
    if not gpu:
        merged.update(without_gpu)
    merged.update({key: value for key, value in given.items() if value is not None})
    fields = {field.name: field for field in dataclasses.fields(Settings) if field.name != "experiment"}
    for key, value in merged.items():
        if key not in fields:
            raise UsageError(f"{name}: no setting {key!r}; there are {', '.join(fields)}")
        merged[key] = _checked(key, value)
    if merged.get("kind") in KINDS:
        _check_of_kinds(name, merged)
    if merged.get("kind") == "break_even" and merged.get("shapes"):
        _settle_shapes(name, merged, given)
    missing = [key for key, field in fields.items() if key not in merged and field.default is dataclasses.MISSING]
    if missing:
        raise UsageError(f"{name}: {', '.join(missing)} missing")
    settings = Settings(name, **merged)
    try:
        check_layout(settings.layout, settings.vocab)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if settings.kind == "verify" and (settings.layout != "packed" or settings.hidden is not None):
        raise UsageError("verify has packed candidates, and hidden states of its own: leave --layout and --hidden out")
    # A rank pads by less than 64 columns, and its candidates take less memory than so many logits.
    rows, columns = max(settings.rows), settings.vocab + 64 * settings.tp
    if settings.kind == "verify":  # there they are requests
        rows *= max(settings.draft_tokens or DRAFT_TOKENS) + 1
    if rows * columns > MAX_LOGITS:
        raise UsageError(
            f"{rows} rows of vocabulary {settings.vocab}, padded for {settings.tp} ranks, are up to {rows * columns} "
            f"logits; at most {MAX_LOGITS} are accepted: give fewer rows or a smaller vocabulary"
        )
    if (
        settings.kind in ("draft", "head")
        and settings.lm_head is None
        and settings.vocab * settings.hidden_size > MAX_LOGITS
    ):
        raise UsageError(
            f"an embedding or head of {settings.vocab} ids and hidden size {settings.hidden_size} has "
            f"{settings.vocab * settings.hidden_size} numbers; at most {MAX_LOGITS} are accepted: give fewer ids"
        )
    for shape in map(shape_of, settings.shapes):
        if settings.source == "head" and shape.hidden_size * shape.vocab_size > MAX_LOGITS:
            raise UsageError(
                f"a head of shape {shape.name} has {shape.hidden_size * shape.vocab_size} numbers; at most "
                f"{MAX_LOGITS} are accepted: give a smaller shape, or --from logits"
            )
    _check_norm(settings)
    if settings.hidden is not None and settings.lm_head is None:
        raise UsageError("--hidden goes with --lm-head: hidden states are multiplied by a head")
    return dataclasses.replace(settings, dtypes=tuple(DTYPE_NAMES[dtype] for dtype in settings.dtypes))


def _check_norm(settings: Settings) -> None:
    """Refuse a norm whose partial sums of all ranks, residual and results, or whose head, would not fit."""
    for hidden in settings.hidden_sizes:
        numbers = max(settings.rows) * hidden * (settings.tp + 3)
        if numbers > MAX_LOGITS:
            raise UsageError(
                f"{max(settings.rows)} rows of hidden size {hidden} on {settings.tp} ranks are {numbers} numbers; at "
                f"most {MAX_LOGITS} are accepted: give fewer rows"
            )
        if settings.lm_head is None and settings.vocab * hidden > MAX_LOGITS:
            raise UsageError(
                f"a head of {settings.vocab} ids and hidden size {hidden} has {settings.vocab * hidden} numbers; at "
                f"most {MAX_LOGITS} are accepted: give fewer ids"
            )


def _check_of_kinds(name: str, merged: dict[str, Any]) -> None:
    """Refuse settings that the experiment's kind has no use for, and let it be without them."""
    for key, (kinds, option, default) in _OF_KINDS.items():
        if merged["kind"] in kinds:
            continue
        if key in merged:
            raise UsageError(f"{name}: {key}{option} goes with {', '.join(kinds)}; this is {merged['kind']}")
        merged[key] = default
    drafts = merged.get("draft_tokens")
    if merged["kind"] == "draft" and drafts and (len(drafts) > 1 or drafts[0] == 0):
        asked = ",".join(map(str, drafts))
        raise UsageError(
            f"{name}: draft_tokens (--draft-tokens) is {asked}; of draft one number, at least 1, is accepted"
        )


def _settle_shapes(name: str, merged: dict[str, Any], given: dict[str, Any]) -> None:
    """The shapes of a break-even study, and the largest vocabulary: of a head's file, of --vocab, or as named."""
    vocab, asked = given.get("vocab"), given.get("shapes")
    if merged.get("lm_head") is not None:
        if asked or merged.get("source") == "logits":
            raise UsageError(f"{name}: --lm-head gives shape and product; leave --shape and --from logits out")
        merged["shapes"] = ()
        merged.setdefault("vocab", 1)  # until the file is read
        return
    if vocab is not None:
        if asked:
            raise UsageError(f"{name}: --vocab {vocab} and --shape {','.join(asked)}; give one: --shape HIDDENxVOCAB")
        merged["shapes"] = (f"{merged.get('hidden_size', Settings.hidden_size)}x{vocab}",)
    shapes = [shape_of(shape) for shape in merged["shapes"]]
    unknown = [shape for shape in shapes if shape.hidden_size is None]
    if unknown and merged.get("source") != "logits":
        raise UsageError(
            f"{name}: shape {unknown[0].name} has no hidden size here; give HIDDENx{unknown[0].vocab_size}, or --from "
            f"logits"
        )
    merged["vocab"] = max(shape.vocab_size for shape in shapes)


#: Settings that are one of a few words, and those words.
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "kind": KINDS,
    "layout": tuple(LAYOUTS),
    "backend": (*BACKENDS, None),
    "comm": COMMS,
    "source": ("head", "logits"),
}

#: Settings that are counts, and the most of each. tp: ranks that one process plays one after another. calls: nodes of
#: one CUDA graph, each with memory of its own. rounds: samples that a record holds. hidden_size, intermediate_size: of
#: a drafter's step, whose matrices every rank has whole.
_COUNTS = {
    "vocab": MAX_VOCAB_SIZE, "tp": 1024, "calls": 10_000, "rounds": 10_000, "hidden_size": 16384,
    "intermediate_size": 65536,
}  # fmt: skip


def _is_shape(entry: Any) -> bool:
    try:
        return bool(shape_of(entry)) if isinstance(entry, str) else False
    except ValueError:
        return False


#: Settings that are lists, and the test and description of an entry.
_LISTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rows": (lambda entry: _is_integer(entry) and 0 <= entry <= MAX_LOGITS, f"integers from 0 to {MAX_LOGITS}"),
    "dtypes": (lambda entry: entry in DTYPE_NAMES, ", ".join(DTYPE_NAMES)),
    "families": (lambda entry: entry in FAMILIES, ", ".join(FAMILIES)),
    "drafters": (lambda entry: entry in drafters.FAMILIES, ", ".join(drafters.FAMILIES)),
    "draft_tokens": (
        lambda entry: _is_integer(entry) and 0 <= entry <= MAX_DRAFT_TOKENS,
        f"integers from 0 to {MAX_DRAFT_TOKENS}",
    ),
    "hidden_sizes": (lambda entry: _is_integer(entry) and 1 <= entry <= MAX_HIDDEN, f"integers from 1 to {MAX_HIDDEN}"),
    "shapes": (_is_shape, f"{', '.join(SHAPES)}, or HIDDENxVOCAB as 4096x128256"),
}


def _checked(key: str, value: Any) -> Any:
    """A setting's value, lists as tuples; ``UsageError`` if it is not of the setting's kind."""
    if key == "draft_tokens" and _is_integer(value):
        value = [value]
    if key in _LISTS:
        fits, accepted = _LISTS[key]
        if not isinstance(value, (list, tuple)) or not value:
            raise UsageError(f"{key} is {value!r}; a list of {accepted} is accepted")
        for entry in value:
            if not isinstance(entry, (str, int)) or not fits(entry):
                raise UsageError(f"{key} has {entry!r}; {accepted} are accepted")
        return tuple(value)
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise UsageError(f"{key} is {value!r}; {', '.join(filter(None, _CHOICES[key]))} are accepted")
    elif key in _COUNTS:
        if not _is_integer(value) or not 1 <= value <= _COUNTS[key]:
            raise UsageError(f"{key} is {value!r}; an integer from 1 to {_COUNTS[key]} is accepted")
    elif key == "seed":
        if not _is_integer(value):
            raise UsageError(f"seed is {value!r}; an integer is accepted")
    elif key == "check_only":
        if not isinstance(value, bool):
            raise UsageError(f"check_only is {value!r}; true or false is accepted")
    elif not isinstance(value, str) or not value:
        raise UsageError(f"{key} is {value!r}; a text of at least one character is accepted")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
