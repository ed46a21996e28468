"""A calibrated switch between local argmax and full gather: a small table, made by ``vpa.calibrate``, kept as JSON."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from dataclasses import dataclass
from typing import Any

LOCAL, FULL = "local argmax", "full gather"

SCHEMA = 1


@dataclass(frozen=True)
class Place:
    """Where and for what a table holds; it is refused where any of this differs.

    version: of this package and NCCL. device: the GPU's or CPU's name. transport: of the communicator. tp: ranks.
    dtype: of the head. backend, layout: of the local argmax.
    """

    version: str
    device: str
    transport: str
    tp: int
    dtype: str
    backend: str
    layout: str


@dataclass(frozen=True)
class Entry:
    """One head's measurements. rows: batch sizes, ascending; saved_us: what the local argmax saves a call at each,
    below 0 where it costs. captured: in a CUDA graph, or called. pays_from: the fewest rows for which the local argmax
    is taken, None for none in range."""

    hidden_size: int
    vocab_size: int
    captured: bool
    rows: tuple[int, ...]
    saved_us: tuple[float, ...]
    pays_from: int | None

    def way(self, rows: int) -> str:
        """The way for so many rows."""
        return LOCAL if self.pays_from is not None and rows >= self.pays_from else FULL


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
        """The faster way for ``rows`` rows of a head. ``ValueError`` where the table is of another place or head."""
        for field in dataclasses.fields(Place):
            ours, here = getattr(self.place, field.name), getattr(place, field.name)
            if ours != here:
                raise ValueError(
                    f"this switch table is of {field.name} {ours!r}, here it is {here!r}: make another by "
                    f"vpa.calibrate()"
                )
        entry = self._entry(hidden_size, vocab_size, captured)
        shape = f"{rows} rows, {hidden_size} x {vocab_size} over {place.tp} ranks"
        how = f"{'captured' if entry.captured else 'called'}, calibrated at {entry.rows[0]} to {entry.rows[-1]} rows"
        way = entry.way(rows)
        if entry.pays_from is None:
            return Choice(way, f"{shape}: {way}, as the {LOCAL} pays at no size ({how})")
        near = min(range(len(entry.rows)), key=lambda i: abs(entry.rows[i] - rows))
        saved = entry.saved_us[near]
        measured = f"{abs(saved):.1f} us {'saved' if saved >= 0 else 'lost'} by it at {entry.rows[near]}"
        return Choice(way, f"{shape}: {way}, as the {LOCAL} pays from {entry.pays_from} rows on ({measured}; {how})")

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
                raise ValueError(f"schema is {content.get('schema')!r}; {SCHEMA} is accepted")
            entries = [
                {**one, "rows": tuple(one["rows"]), "saved_us": tuple(one["saved_us"])} for one in content["entries"]
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
            f"make another by vpa.calibrate()"
        )

    def _check(self) -> None:
        for entry in self.entries:
            if not entry.rows or list(entry.rows) != sorted(set(entry.rows)) or len(entry.rows) != len(entry.saved_us):
                raise ValueError(
                    f"an entry has rows {list(entry.rows)} and {len(entry.saved_us)} times; they do not fit"
                )


#: Types of fields, as JSON gives them.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "int | None": (int, type(None)), "tuple[int, ...]": (tuple,),
    "tuple[float, ...]": (tuple,),
}  # fmt: skip


def _made(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass of plain values, each of the type that its field has."""
    for field in dataclasses.fields(kind):
        value, inner = values[field.name], {"rows": (int,), "saved_us": (int, float)}.get(field.name, ())
        if type(value) not in _TYPES[field.type] or (inner and not all(type(one) in inner for one in value)):
            raise ValueError(f"{field.name} is {value!r}; {field.type} is accepted")
    return kind(**values)


@functools.cache
def versions(nccl: int | None) -> str:
    """What a table's version says: this package's, and NCCL's where there is one."""
    try:
        own = importlib.metadata.version("vpa")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return f"vpa {own}" + ("" if nccl is None else f", nccl {nccl}")
