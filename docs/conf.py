"""Sphinx builds the site from the pages beside this file: ``make docs``."""

from __future__ import annotations

import inspect
import re
from typing import Any

import vpa

project = "vpa"
version = release = vpa.__version__
html_title = f"vpa {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
highlight_language = "none"
default_role = "code"
html_theme = "furo"
html_show_copyright = False
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_preserve_defaults = True  # as written: a default that is a module has the path of this machine in it
autodoc_typehints = "none"  # signatures without types: docstrings give shapes and dtypes, which say more than "Any"
autodoc_class_signature = "mixed"

#: ``name: text`` or ``name, other: text`` where a line or a sentence begins: what a docstring says of parameters.
_ENTRY = re.compile(r"(?:^|(?<=\. ))((?:\w+, )*\w+): (?=\S)")


def _as_rst(_app: Any, _what: str, _name: str, described: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are plain text that reads well in an editor; mark it up for Sphinx.

    An indented block behind an empty line is shown as it is. A paragraph that begins with a parameter and a colon is a
    list of parameters, whatever line or sentence a further one begins with. In other text, a trailing underscore is no
    link and a star no emphasis.
    """
    try:
        parameters = set(inspect.signature(described).parameters)
    except (TypeError, ValueError):  # modules, constants
        parameters = set()
    marked: list[str] = []
    for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
        marked += [*_paragraph(paragraph.split("\n"), parameters), ""]
    lines[:] = marked


def _paragraph(lines: list[str], parameters: set[str]) -> list[str]:
    if all(line.startswith("    ") for line in lines if line):
        return ["::", "", *lines]
    text = " ".join(line.strip() for line in lines)
    entries = [entry for entry in _ENTRY.finditer(text) if parameters.issuperset(entry[1].split(", "))]
    if not entries or entries[0].start():
        return [_plain(line) for line in lines]
    ends = [*(entry.start() for entry in entries[1:]), len(text)]
    return [
        f"- {', '.join(f'**{name}**' for name in entry[1].split(', '))}: {_plain(text[entry.end() : end])}"
        for entry, end in zip(entries, ends, strict=True)
    ]


def _plain(text: str) -> str:
    """Text whose words mean what they say: outside of literals, no stars, bars or underscores that mark up."""
    parts = re.split(r"(``.+?``)", text)
    return "".join(
        part if part.startswith("``") else re.sub(r"(?<=\w)_(?!\w)|[*|]", r"\\\g<0>", part) for part in parts
    )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _as_rst)
