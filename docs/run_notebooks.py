"""Runs the notebooks as plain Python, cell by cell, and writes each as a page with what its cells printed and drew.

    python docs/run_notebooks.py [NAME ...]       all of docs/notebooks by default

No Jupyter is needed: jupytext reads the cells, and a process of the notebook's own runs them in one namespace, within
``LIMIT`` seconds. A page, ``NAME.md``, and its figures are written beside ``NAME.py``, where Sphinx finds them; git
ignores them. The exit code is 1 if any fails.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent / "notebooks"

#: Seconds that a notebook may take.
LIMIT = 120


def main(names: list[str]) -> int:
    """Run the notebooks ``names``, all by default, two at a time."""
    paths = [FOLDER / f"{name}.py" for name in names] or sorted(FOLDER.glob("*.py"))
    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(in_own_process, paths))


def in_own_process(path: Path) -> int:
    """Run one notebook in a process of its own; say how it went, and return 1 if it failed."""
    began = time.monotonic()
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS")}  # two notebooks run side by side
    environment = {**os.environ, "MPLBACKEND": "agg", **threads}
    command = [sys.executable, __file__, "--here", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it may have started
            print(f"{path.stem}: did not end within {LIMIT} s", file=sys.stderr)
            return 1
    if process.returncode:
        print(f"{path.stem}: failed\n{out}{errors}", file=sys.stderr)
        return 1
    print(f"{path.stem}: {time.monotonic() - began:.1f} s")
    return 0


def write_page(path: Path) -> None:
    """Run one notebook in this process and write its page; an exception of a cell is let through."""
    for old in (path.with_suffix(".md"), *path.parent.glob(f"{path.stem}-*.png")):
        old.unlink(missing_ok=True)
    page = "\n\n".join(parts_of_page(path))
    path.with_suffix(".md").write_text(f"{page}\n")


def parts_of_page(path: Path) -> Iterator[str]:
    """The parts of a notebook's page, as MyST: each cell, then what it printed, then what it drew."""
    import jupytext
    import matplotlib.pyplot as plt

    namespace: dict[str, Any] = {"__name__": "__main__"}
    figures = 0
    for number, cell in enumerate(jupytext.read(path, fmt="py:percent").cells):
        if cell.cell_type != "code":
            yield cell.source
            continue
        yield fenced("python", cell.source)
        name = f"<{path.name}, cell {number}>"
        linecache.cache[name] = len(cell.source), None, cell.source.splitlines(keepends=True), name  # for tracebacks
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell.source, name, "exec"), namespace)
        if printed.getvalue():
            yield fenced("text", printed.getvalue().rstrip())
        for figure in map(plt.figure, plt.get_fignums()):
            figures += 1
            yield drawn(plt, figure, path.with_name(f"{path.stem}-{figures}.png"))


def fenced(language: str, text: str) -> str:
    """A block of code or output."""
    return f"```{language}\n{text}\n```"


def drawn(plt: ModuleType, figure: Any, path: Path) -> str:
    """Save a figure, close it, and return what shows it; its title, which it must have, is what a reader without
    images gets."""
    title = figure.get_suptitle()
    if not title:
        raise ValueError(f"figure {path.stem} has no title: call its suptitle")
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return f"![{' '.join(title.split())}]({path.name})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        try:
            write_page(Path(sys.argv[2]))
        except Exception:
            traceback.print_exc()  # the interpreter's own does not know the cells' lines
            sys.exit(1)
    else:
        sys.exit(main(sys.argv[1:]))
