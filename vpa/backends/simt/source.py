"""The kernel text itself: which kernels it declares, their parameters' names, and its lines as #line counts them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Declaration:
    """One `extern "C" __global__` function: its name, its parameters' names (empty strings where they have none), and,
    as they are written, the first argument of its `__launch_bounds__` ("0" without one) and the arguments of its
    `__cluster_dims__` ("1" without)."""

    name: str
    parameters: tuple[str, ...]
    max_threads: str = "0"
    cluster: str = "1"
    start: int = field(default=0, compare=False)  # of the parameter list


_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def _blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def declarations(preprocessed: str) -> tuple[Declaration, ...]:
    """The kernels that can be launched by name, in order: `extern "C"` ones, no templates. `preprocessed`: after the
    preprocessor has run, with `__global__` left as it is."""
    text = re.sub(r"^#.*$", "", preprocessed, flags=re.MULTILINE)
    text = re.sub(r'\bextern\s+"C"', "extern_C", text)
    text = _NOISE.sub(_blank, text)
    blocks = [(m.end(), _closing(text, m.end() - 1, "{}")) for m in re.finditer(r"\bextern_C\s*\{", text)]
    found: dict[str, Declaration] = {}
    for match in re.finditer(r"\b__global__\b", text):
        head = text[max(text.rfind(c, 0, match.start()) for c in ";}{") + 1 : match.start()]
        if "template" in head.split():
            continue
        if "extern_C" in head or any(low <= match.start() < high for low, high in blocks):
            declared = _declared(text, match.end())
            if declared is None or (declared.name in found and not any(declared.parameters)):
                continue
            qualifiers = text[match.start() - len(head) : declared.start]
            if bounds := _arguments("__launch_bounds__", qualifiers):
                declared = replace(declared, max_threads=bounds[0])
            if sizes := _arguments("__cluster_dims__", qualifiers):
                declared = replace(declared, cluster=", ".join(sizes))
            found[declared.name] = declared
    return tuple(found.values())


def _declared(text: str, position: int) -> Declaration | None:
    # Return type and attributes come before the name, some with parentheses of their own.
    for match in re.compile(r"\s*(\w+|[*&])\s*").finditer(text, position):
        if match.start() != position:
            return None
        position = match.end()
        if text[position : position + 1] != "(":
            continue
        end = _closing(text, position, "()")
        word = match[1]
        if not (word.startswith("__") or word in ("alignas", "decltype")):
            return Declaration(word, _parameter_names(text[position + 1 : end]), start=position)
        return _declared(text, end + 1)
    return None


def _arguments(name: str, qualifiers: str) -> list[str]:
    found = re.search(name + r"\s*\(", qualifiers)
    if found is None:
        return []
    inside = qualifiers[found.end() : _closing(qualifiers, found.end() - 1, "()")]
    return [" ".join(part.split()) for part in _split(inside)]


def _closing(text: str, position: int, pair: str) -> int:
    depth = 0
    for i in range(position, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if not depth:
            return i
    return len(text)


def _split(inside: str) -> list[str]:
    """At the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(inside):
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and not depth:
            parts.append(inside[start:i])
            start = i + 1
    return [*parts, inside[start:]]


def _parameter_names(inside: str) -> tuple[str, ...]:
    parts = _split(inside)
    if inside.strip() in ("", "void"):
        return ()
    names = []
    for part in parts:
        words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[[^\]]*\]|=.*", "", part))
        names.append(words[-1] if len(words) > 1 else "")
    return tuple(names)


def has_includes(text: str) -> bool:
    return re.search(r"^[ \t]*#[ \t]*include\b", text, re.MULTILINE) is not None


class SourceLines:
    """The text's lines by the file and line that its #line directives give them."""

    def __init__(self, text: str, name: str):
        self._lines: dict[tuple[str, int], str] = {}
        file, number = name, 1
        for line in text.splitlines():
            directive = re.match(r'\s*#\s*(?:line\s+)?(\d+)(?:\s+"([^"]*)")?', line)
            if directive:
                file, number = directive[2] or file, int(directive[1])
                continue
            self._lines[file, number] = line
            number += 1

    def __call__(self, file: str, line: int) -> str | None:
        text = self._lines.get((file, line))
        return text.strip() if text is not None else None
