"""The pages: what they show is run, or listed here with the reason; links lead somewhere; every column is defined."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import mpirun

import vpa
from vpa import comparison, record, report, study

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.py"))
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}

#: Languages of blocks: run; shown as what the code before them prints; read only.
LANGUAGES = {"sh", "python", "output", "text"}

#: Commands that are not run here: a pattern, and where they are run, or why they are not.
NOT_HERE = {
    r"^make (run|lint|docs|test|test-hip)( lint| test| test-hip)*$": ".ci/run runs it",
    r"^make head$": "`make test` runs it",
    r"^python3 -m venv |/pip install ": "makes an environment: what `make` does, with the extras that need no GPU",
    r"-m vpa\.(report|predict) mpi_runs/results/": "tests/test_readme.py runs it and compares the tables",
    r"-m pytest (?!-m gpu)": "`make test` runs it",
    r"-m pytest -m gpu|--comm nccl": "needs a GPU",
    r"python docs/(run_notebooks|notebooks/\w+)\.py": "`make docs` runs it, a notebook cell by cell",
    r"^mpi_runs/launch/multi_gpu\.sh": "needs several GPUs; tests/test_launch.py runs it without",
    r"^mpi_runs/launch/hostfile\.sh": "needs several machines; tests/test_launch.py runs it up to the launcher's start",
    r"^sbatch |^srun ": "needs Slurm; tests/test_launch.py runs the script up to srun",
}

#: Commands that are run with further options, since on two cores their own sizes take too long.
SMALLER = {
    r"-m vpa\.run headline": "--vocab 8000",
    r"-m vpa\.run norm": "--check-only --hidden-sizes 96 --vocab 500",
    r"-m vpa\.run verify": "--check-only --vocab 3000",
    r"-m vpa\.run compare": "--rows 1,8 --vocab 8000",
    r"-m vpa\.run break-even": "--rows 1,8,32 --shape 64x3001",
}

#: Python blocks, by their first lines, that are not run here.
NOT_RUN = {
    "captured = top.capture(logits)": "needs a GPU; tests/test_top_tokens.py captures",
    "with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):": "needs a GPU and torch",
    "graph = vpa.capture_drafts(drafter, hidden, 3": "needs a GPU; tests/test_captured_drafts.py captures",
    "captured = verify.capture(logits": "needs a GPU; tests/test_verify_gpu.py captures",
    "with stream:": "needs a GPU; tests/test_norm_prepared.py captures",
}

#: Ranks that run the Python of a page; the others are run by one process, without MPI.
RANKS = {"README.md": 2, "index.md": 2, "user-guide.md": 2, "cluster.md": 2}

_BEGIN = """
import ml_dtypes
import numpy as np
import vpa
"""
_LOGITS = """
from mpi4py import MPI
logits = np.zeros((8, vpa.shard_vocab(131072, MPI.COMM_WORLD.size)[0].width), ml_dtypes.bfloat16)
"""

#: What a page takes for granted before its first block.
GIVEN = {
    "README.md": _LOGITS,
    "index.md": _LOGITS,
    "user-guide.md": _LOGITS,
    "without-a-gpu.md": """
shard, comm = vpa.VocabShard.even(1000, 1)[0], vpa.comm.solo()
numpy_array = np.zeros((2, 1000), np.float16)
""",
}

#: What a block takes for granted besides: by the page and the block's first line.
GIVEN_TO = {
    ("user-guide.md", "candidates = vpa.local_argmax_candidates(logits, shard)"): """
def all_gather(candidates):
    return np.concatenate(comm.exchange(candidates))
""",
    ("user-guide.md", "shards = vpa.shard_vocab(32000, comm.size)"): """
from safetensors.numpy import save_file
rng = np.random.default_rng(0)
if comm.rank == 0:
    save_file({"lm_head.weight": rng.standard_normal((32000, 256), dtype=np.float32)}, "model.safetensors")
comm.barrier()
hidden = np.random.default_rng(1).standard_normal((8, 256), dtype=np.float32)
""",
    ("user-guide.md", "table = vpa.calibrate("): """
import functools
vpa.calibrate = functools.partial(vpa.calibrate, calls=1, pairs=2)  # its own numbers take half a minute on two cores
""",
    ("user-guide.md", "from vpa.drafters import seeded_drafter"): """
hidden = hidden.astype(ml_dtypes.bfloat16)
last_tokens, positions = np.arange(8), np.arange(8)
""",
    ("user-guide.md", "normed, residual = vpa.allreduce_rmsnorm"): """
partial, residual, weight = np.ones((8, 64), np.float16), None, np.ones(64, np.float16)
""",
    ("user-guide.md", "tokens, num_sampled, num_rejected = vpa.greedy_verify("): """
logits = np.zeros((8, shard.width), ml_dtypes.bfloat16)
draft_ids, positions, cu_num_rows = np.zeros(8, np.int64), np.arange(10, 18), np.array([0, 4, 8], np.int32)
seq_lens, prefill_lens, seeds = np.full(2, 20, np.int32), np.full(2, 5, np.int32), np.arange(2)
""",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0]

    def commands(self) -> Iterator[list[str]]:
        """The commands of a block of shell, word by word, comments left out."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, without those of Sphinx's own."""
    found, lines = [], iter(enumerate(PAGES[page].read_text().splitlines(), 1))
    for number, line in lines:
        opening = re.fullmatch(r"( *)```(.*)", line)
        if opening:
            indent, language = opening.groups()
            inside = itertools.takewhile(lambda one, end=f"{indent}```": one[1] != end, lines)
            text = "\n".join(one.removeprefix(indent) for _, one in inside)
            if not language.startswith("{"):
                found.append(Block(page, number, language, text))
    return found


def entry(table: dict[str, str], words: list[str]) -> str | None:
    """What a table says of a command."""
    return next((said for pattern, said in table.items() if re.search(pattern, shlex.join(words))), None)


ALL = [block for page in PAGES for block in blocks(page)]


def test_every_block_says_its_language_and_none_is_hidden():
    assert {block.language for block in ALL} == LANGUAGES, [block for block in ALL if block.language not in LANGUAGES]
    for page, path in PAGES.items():
        text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        hidden = re.findall(r"\n\n( {4,}\S.*)", text)
        assert not hidden, f"{page}: an indented block is never run, fence it: {hidden[0]}"


def test_every_exception_is_needed():
    commands = [shlex.join(words) for block in ALL if block.language == "sh" for words in block.commands()]
    for pattern in [*NOT_HERE, *SMALLER]:
        assert any(re.search(pattern, command) for command in commands), pattern
    firsts = [block.first for block in ALL if block.language == "python"]
    for beginning in [*NOT_RUN, *(first for _, first in GIVEN_TO)]:
        assert any(first.startswith(beginning) for first in firsts), beginning


def test_make_targets_are_run():
    ci, makefile = (ROOT / ".ci/run").read_text(), (ROOT / "Makefile").read_text()
    targets = {word for block in ALL if block.language == "sh" for words in block.commands() if words[0] == "make"
               for word in words[1:]}  # fmt: skip
    for target in targets - {"head"}:
        assert re.search(rf"^make {target}$", ci, re.MULTILINE), target
    assert re.search(r"^test:.*\n\t-\$\(MAKE\) head$", makefile, re.MULTILINE)


@pytest.mark.mpi
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "sh" for b in blocks(page))])
def test_commands(page, tmp_path):
    for name in (".models", "docs", "mpi_runs"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "MPLBACKEND": "agg"}
    for words in (words for block in blocks(page) if block.language == "sh" for words in block.commands()):
        if entry(NOT_HERE, words):
            continue
        needs_head = "--lm-head" in words and not Path(tmp_path, words[-1].partition(":")[0]).exists()
        if needs_head or (words[0].endswith("jupytext") and not (Path(sys.executable).parent / "jupytext").exists()):
            continue  # `make head` found no network; `make docs` was not run before
        command = [*map(here, words), *(entry(SMALLER, words) or "").split()]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{page}: {shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def here(word: str) -> str:
    """A word of a command as it is run here: this Python, and the programs beside it."""
    if word in ("python", ".venv/bin/python"):
        return sys.executable
    if word in ("mpirun", ".venv/bin/mpirun"):
        return mpirun()
    return str(Path(sys.executable).parent / "jupytext") if word == ".venv/bin/jupytext" else word


@pytest.mark.mpi
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" for b in blocks(page))])
def test_python(page, tmp_path):
    parts = [_BEGIN, GIVEN.get(page, "")]
    for block in blocks(page):
        if block.language == "python" and not any(block.first.startswith(one) for one in NOT_RUN):
            ast.parse(block.text)
            given = (code for (name, first), code in GIVEN_TO.items() if name == page and block.first.startswith(first))
            parts += [*given, f"# {page}, line {block.line}", block.text]
    script = tmp_path / "page.py"
    script.write_text("\n".join(parts) + "\n")
    launch = [mpirun(), "-n", str(RANKS[page])] if page in RANKS else []
    command = [*launch, sys.executable, "-m", "mpi4py", script] if launch else [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    for block in blocks(page):
        if block.language == "output":
            before, found, printed = printed.partition(block.text + "\n")
            assert found and not before, f"{page}, line {block.line}: printed is\n{before}"
    assert page in RANKS or not printed


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = PAGES[page].read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        path = PAGES[page].parent / target
        made = path.with_suffix(".py") in NOTEBOOKS  # a page that is written from a notebook
        assert "://" in target or made or path.exists(), target


def test_every_page_and_notebook_is_in_the_site():
    listed = set()
    for path in PAGES.values():
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            listed |= {line for line in tree.splitlines() if line and not line.startswith(":")}
    pages = {Path(page).stem for page in PAGES} - {"README", "index"}
    assert listed == pages | {f"notebooks/{path.stem}" for path in NOTEBOOKS}


def test_the_reference_has_the_module_of_every_public_name():
    text = (ROOT / "docs/api.md").read_text()
    modules = re.findall(r"^\.\. automodule:: (\S+)$", text, re.MULTILINE)
    headings = re.findall(r"^### (\S+)$", text, re.MULTILINE)
    assert modules == headings, "each module has its heading"
    assert all(importlib.import_module(module) for module in modules)
    for name in vpa.__all__:
        if name != "comm":
            where = getattr(vpa, name).__module__
            assert where in modules, f"vpa.{name}: add '.. automodule:: {where}' to docs/api.md"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_script_in_percent_form(path):
    text = path.read_text()
    assert text.startswith("# ---\n# jupyter:\n#   jupytext:\n"), "jupytext's header"
    cells = re.findall(r"^# %%.*$", text, re.MULTILINE)
    assert cells and set(cells) == {"# %%", "# %% [markdown]"}
    first = text[text.index("# %%") :].splitlines()[1]
    assert first.startswith("# # "), "the first cell is text, and begins with the title"


@pytest.fixture
def run_notebooks():
    pytest.importorskip("jupytext", reason="jupytext is not installed; it is in the extra `docs`")
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "docs/run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_notebook_becomes_a_page(run_notebooks, tmp_path):
    path = tmp_path / "small.py"
    path.write_text(
        "# %% [markdown]\n# # Small\n\n# %%\nfrom matplotlib import pyplot as plt\n\nprint(1 + 1)\n\n"
        "# %%\nplt.figure().suptitle('A line')\nplt.plot([1, 2])\n"
    )
    assert run_notebooks.in_own_process(path) == 0
    page = (tmp_path / "small.md").read_text()
    assert page.startswith("# Small\n") and "```text\n2\n```" in page and "![A line](small-1.png)" in page
    assert (tmp_path / "small-1.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("x = 1\nassert x == 2, 'not two'", "assert x == 2, 'not two'"),
        ("from matplotlib import pyplot as plt\nplt.plot([1, 2])", "figure small-1 has no title"),
    ],
)
def test_a_notebook_that_fails_is_told_with_its_line_and_leaves_no_page(run_notebooks, tmp_path, capfd, cell, said):
    path = tmp_path / "small.py"
    path.write_text(f"# %% [markdown]\n# # Small\n\n# %%\n{cell}\n")
    path.with_suffix(".md").write_text("of an earlier run")
    assert run_notebooks.in_own_process(path) == 1
    assert said in capfd.readouterr().err
    assert not path.with_suffix(".md").exists()


def test_a_notebook_that_does_not_end_is_given_up(run_notebooks, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(run_notebooks, "LIMIT", 3)
    path = tmp_path / "small.py"
    path.write_text("# %%\nimport subprocess\n\nsubprocess.run(['sleep', '60'])\n")
    assert run_notebooks.in_own_process(path) == 1
    assert "did not end within 3 s" in capfd.readouterr().err


#: Columns whose names have a part of their own: a batch size, arms, a position.
_PATTERNS = {
    r".+ / .+": "A / B",
    r"wrong at .+": "wrong at N",
    r".+, us": "..., us",
    r".+, bytes": "... bytes",
    r"\d+% of it": "95% of it",
}


def test_every_column_of_a_report_is_defined():
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs/measuring.md").read_text(), re.MULTILINE)
    defined = {name for line in rows for name in line.split(", ")} | set(rows)
    for path in sorted((ROOT / "mpi_runs/results").glob("*.json")):
        taken = record.read(path)["rows"]
        tables = [report.check_table(taken), report.position_table(taken), report.verification_table(taken)]
        tables += [report.time_table(taken), *(one.table() for one in study.studies(taken))]
        if comparison.has_parts(taken):
            tables += comparison.tables(taken).values()
        for heading in {heading for table in tables for heading in table[0]}:
            general = next((name for pattern, name in _PATTERNS.items() if re.fullmatch(pattern, heading)), heading)
            assert heading in defined or general in defined, f"{path.name}: docs/measuring.md lacks {heading!r}"
