"""A calibrated switch between local argmax and full gather: a small table, made by ``vpa.calibrate``, kept as JSON."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import sys
from dataclasses import dataclass
from typing import Any

from vpa.crossover import COSTS, PAYS, UNCLEAR
from vpa.vocab import integer

LOCAL, FULL = "local argmax", "full gather"

#: 2: tables know their interconnect, their kernels and their noise.
SCHEMA = 2


@dataclass(frozen=True)
class Place:
    """Where and for what a table holds; it is refused where any of this differs.

    version: of this package and NCCL. kernels: a digest of their text. device: the GPU's or CPU's name. transport: of
    the communicator; hosts, gpus: how many machines its ranks are on and how many GPUs they use, one that ranks share
    counted once, None where a communicator of the caller's does not say. tp: ranks. dtype: of the head. backend,
    layout: of the local argmax.
    """

    version: str
    kernels: str
    device: str
    transport: str
    hosts: int | None
    gpus: int | None
    tp: int
    dtype: str
    backend: str
    layout: str


@dataclass(frozen=True)
class Entry:
    """One head's measurements. rows: batch sizes, ascending; saved_us: what the local argmax saves a call at each,
    below 0 where it loses; verdicts: whether that is clear, ``pays``, ``costs`` or ``within noise``, as
    ``vpa.crossover`` has it. captured: in a CUDA graph, or called. pays_from: the fewest rows for which the local
    argmax is taken, as it does not clearly cost from there on, None for none in range."""

    hidden_size: int
    vocab_size: int
    captured: bool
    rows: tuple[int, ...]
    saved_us: tuple[float, ...]
    verdicts: tuple[str, ...]
    pays_from: int | None

    def way(self, rows: int) -> str:
        """The way for so many rows."""
        return LOCAL if self.pays_from is not None and rows >= self.pays_from else FULL

    def why(self, rows: int) -> str:
        """The reason for ``way``, and what was measured at the sizes next to ``rows``."""
        clauses = []
        costs = [size for size, verdict in zip(self.rows, self.verdicts, strict=True) if verdict == COSTS]
        if self.way(rows) == FULL and costs:
            clauses.append(f"still costs at {_rows(costs[-1])}")
        if self.pays_from is None:
            clauses.append("pays from no size on")
        else:
            taken = [verdict for size, verdict in zip(self.rows, self.verdicts, strict=True) if size >= self.pays_from]
            pays = "pays" if set(taken) == {PAYS} else "does not clearly cost"
            clauses.append(f"{pays} from {_rows(self.pays_from)} on")
        below = max((i for i, size in enumerate(self.rows) if size <= rows), default=0)
        above = min((i for i, size in enumerate(self.rows) if size >= rows), default=len(self.rows) - 1)
        measured = ", ".join(map(self._measured, dict.fromkeys((below, above))))
        how = f"{'captured' if self.captured else 'called'}, calibrated at {self.rows[0]} to {_rows(self.rows[-1])}"
        return f"the {LOCAL} {' and '.join(clauses)} ({measured}; {how})"

    def _measured(self, number: int) -> str:
        size, saved = _rows(self.rows[number]), self.saved_us[number]
        if self.verdicts[number] == UNCLEAR:
            return f"its {'gain' if saved >= 0 else 'loss'} at {size} is within noise, {abs(saved):.1f} us"
        return f"{abs(saved):.1f} us {'saved' if saved >= 0 else 'lost'} by it at {size}"


@dataclass(frozen=True)
class Choice:
    """A way, ``LOCAL`` or ``FULL``, and in a sentence why it was chosen."""

    way: str
    why: str


@dataclass(frozen=True)
class SwitchTable:
    """Which way to a greedy token is the faster one, by head and batch size; alike on all ranks."""

    place: Place
    entries: tuple[Entry, ...]

    def choose(self, rows: int, *, hidden_size: int, vocab_size: int, captured: bool, place: Place) -> Choice:
        """The faster way for ``rows`` rows of a head. ``ValueError`` where the table is of another place or head, or
        rows are fewer than 0; ``TypeError`` where they are no integer."""
        rows = integer("rows", rows)
        if rows < 0:
            raise ValueError(f"rows is {rows}; it is at least 0")
        for field in dataclasses.fields(Place):
            ours, here = getattr(self.place, field.name), getattr(place, field.name)
            if ours != here:
                raise ValueError(
                    f"this switch table is of {field.name} {ours!r}, here it is {here!r}"
                    f"{_MEANINGS.get(field.name, '')}: {_AGAIN}"
                )
        entry = self._entry(hidden_size, vocab_size, captured)
        way = entry.way(rows)
        shape = f"{_rows(rows)}, {hidden_size} x {vocab_size} over {place.tp} rank{'s' if place.tp > 1 else ''}"
        return Choice(way, f"{shape}: {way}, as {entry.why(rows)}")

    def captured_way(self, rows: int, hidden_size: int, vocab_size: int) -> str | None:
        """The way inside a capture; None where captured calls of the head were not measured."""
        for one in self.entries:
            if (one.hidden_size, one.vocab_size, one.captured) == (hidden_size, vocab_size, True):
                return one.way(rows)
        return None

    def save(self, path: str) -> None:
        """Write a new file, never over an old one: ``FileExistsError`` for one that exists."""
        text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n"
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)

    @classmethod
    def load(cls, path: str) -> SwitchTable:
        """The table of a file; ``ValueError`` in one line for a file that is none."""
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            if content.get("schema") != SCHEMA:
                raise ValueError(f"schema is {content.get('schema')!r}; {SCHEMA} is accepted: {_AGAIN}")
            entries = [
                {key: tuple(value) if type(value) is list else value for key, value in one.items()}
                for one in content["entries"]
            ]
            table = cls(_made(Place, content["place"]), tuple(_made(Entry, one) for one in entries))
            table._check()
            return table
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"cannot read switch table {path}: {reason}") from error

    def _entry(self, hidden_size: int, vocab_size: int, captured: bool) -> Entry:
        heads = [one for one in self.entries if (one.hidden_size, one.vocab_size) == (hidden_size, vocab_size)]
        for one in heads:
            if one.captured == captured:
                return one
        there = ", ".join(dict.fromkeys(f"{one.hidden_size} x {one.vocab_size}" for one in self.entries)) or "none"
        kind = f"{'captured' if captured else 'uncaptured'} calls with " if heads else ""
        raise ValueError(
            f"this switch table has no measurements of {kind}a head of {hidden_size} x {vocab_size}; it has {there}: "
            f"{_AGAIN}"
        )

    def _check(self) -> None:
        """Raise ``ValueError`` unless all values of the entries can be."""
        heads = set()
        for entry in self.entries:
            head = entry.hidden_size, entry.vocab_size, entry.captured
            if min(head[:2]) < 1 or head in heads:
                raise ValueError(f"entries have a head of {head[0]} x {head[1]}; each is of sizes from 1 on, and once")
            heads.add(head)
            counts = {len(entry.rows), len(entry.saved_us), len(entry.verdicts)}
            if not entry.rows or list(entry.rows) != sorted(set(entry.rows)) or len(counts) > 1:
                raise ValueError(
                    f"an entry has rows {list(entry.rows)}, {len(entry.saved_us)} times and {len(entry.verdicts)} "
                    f"verdicts; they do not fit"
                )
            if entry.rows[0] < 1 or (entry.pays_from is not None and entry.pays_from < 1):
                raise ValueError(
                    f"an entry has rows {list(entry.rows)} and pays_from {entry.pays_from}; numbers from 1 on are "
                    f"accepted"
                )
            if not all(abs(one) <= sys.float_info.max for one in entry.saved_us):  # NaN is not
                raise ValueError(f"an entry has saved_us {list(entry.saved_us)}; finite numbers are accepted")
            if not set(entry.verdicts) <= {PAYS, COSTS, UNCLEAR}:
                raise ValueError(
                    f"an entry has verdicts {list(entry.verdicts)}; {PAYS!r}, {COSTS!r}, {UNCLEAR!r} are accepted"
                )


#: What to do about a table that does not hold.
_AGAIN = "calibrate again, by vpa.calibrate()"

#: What fields of a place are, where their names do not say it.
_MEANINGS = {
    "kernels": " (a digest of the kernels' text: they changed since)",
    "hosts": " (machines that the ranks are on: other links lie between them)",
    "gpus": " (GPUs of all ranks: where ranks share one, no link is measured)",
}

#: Types of fields, as JSON gives them, and of the parts of a list.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "int | None": (int, type(None)), "tuple[int, ...]": (tuple,),
    "tuple[float, ...]": (tuple,), "tuple[str, ...]": (tuple,),
}  # fmt: skip
_PARTS: dict[str, tuple[type, ...]] = {
    "tuple[int, ...]": (int,), "tuple[float, ...]": (int, float), "tuple[str, ...]": (str,),
}  # fmt: skip


def _made(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass of plain values, each of the type that its field has."""
    for field in dataclasses.fields(kind):
        if field.name not in values:
            raise ValueError(f"its {kind.__name__.lower()} has no {field.name}: {_AGAIN}")
        value, inner = values[field.name], _PARTS.get(field.type, ())
        if type(value) not in _TYPES[field.type] or (inner and not all(type(one) in inner for one in value)):
            raise ValueError(f"{field.name} is {value!r}; {field.type} is accepted")
    return kind(**values)


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


@functools.cache
def versions(nccl: int | None) -> str:
    """What a table's version says: this package's, and NCCL's where there is one."""
    try:
        own = importlib.metadata.version("vpa")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return f"vpa {own}" + ("" if nccl is None else f", nccl {nccl}")
