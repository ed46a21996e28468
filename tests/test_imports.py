"""The layers: imports point downwards only, and `import vpa` needs neither a GPU nor MPI nor Numba."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: From the lowest layer up. A module may import those of lower layers, and those of its own layer's package.
LAYERS = [
    ["vpa.kernels"],
    ["vpa.order"],
    ["vpa.vocab", "vpa.plan", "vpa.shapes", "vpa.crossover"],
    ["vpa.acceptance"],
    ["vpa.rmsnorm"],
    ["vpa.dlpack"],
    ["vpa.arrays"],
    ["vpa.contribution", "vpa.requests"],
    ["vpa.transform"],
    ["vpa.backends"],
    ["vpa.scan", "vpa.pick"],
    ["vpa.comm"],
    ["vpa.captured", "vpa.workspace"],
    ["vpa.top_tokens"],
    ["vpa.emulate"],
    ["vpa.verify_steps", "vpa.gate"],
    ["vpa.verify", "vpa.verifier"],
    ["vpa.weights", "vpa.linear"],
    ["vpa.norm_steps", "vpa.norm_plan"],
    ["vpa.norm"],
    ["vpa.full_gather", "vpa.switch"],
    ["vpa.lm_head"],
    ["vpa.logits"],
    ["vpa.bench.timing"],
    ["vpa.calibrate"],
    ["vpa.mtp"],
    ["vpa.drafters"],
    ["vpa.draft"],
    ["vpa"],
    ["vpa.bench"],
    ["vpa.mpi_runs"],
    ["vpa.record"],
    ["vpa.tables"],
    ["vpa.comparison", "vpa.study", "vpa.moved"],
    ["vpa.figures"],
    ["vpa.report"],
    ["vpa.predict"],
    ["vpa.run"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: Found at run time, imported where they are used.
LAZY = {"cupy", "cupyx", "cupy_backends", "numba", "mpi4py", "matplotlib", "torch", "triton", "safetensors", "cuda"}

#: Modules that exist for one of those, and are themselves imported only when it is used.
OF_ONE_LIBRARY = {
    "vpa.backends.cublas",
    "vpa.backends.launcher",
    "vpa.backends.raw",
    "vpa.backends.raw_verify",
    "vpa.backends.numba_",
    "vpa.backends.numba_verify",
    "vpa.bench.triton_peer",
    "vpa.comm.nccl",
    "vpa.kernels.numba_argmax",
    "vpa.kernels.numba_device",
    "vpa.kernels.numba_norm",
    "vpa.kernels.numba_order",
    "vpa.kernels.numba_scan",
    "vpa.kernels.numba_verify",
}


def modules() -> dict[str, Path]:
    found = {}
    for folder, prefix in (("vpa", "vpa"), ("kernels", "vpa.kernels"), ("mpi_runs", "vpa.mpi_runs")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


def layer(name: str) -> str:
    """The layer a module belongs to: the longest known prefix of its name."""
    while name not in LEVEL:
        name = name.rpartition(".")[0]
    return name


def imports(path: Path, top_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & set(modules()) or {node.module}
    return found


@pytest.mark.parametrize("name", modules())
def test_imports_point_downwards(name):
    for imported in imports(modules()[name], top_only=False):
        if not imported.startswith("vpa"):
            continue
        same = layer(imported) == layer(name)
        assert same or LEVEL[layer(imported)] < LEVEL[layer(name)], f"{name} imports {imported}, which stands above it"


@pytest.mark.parametrize("name", modules())
def test_heavy_libraries_are_imported_where_they_are_used(name):
    if name in OF_ONE_LIBRARY:
        return
    for imported in imports(modules()[name], top_only=True):
        assert imported.partition(".")[0] not in LAZY, f"{name} imports {imported} at the top"
        assert imported not in OF_ONE_LIBRARY, f"{name} imports {imported} at the top"


def test_every_module_says_in_its_first_line_what_it_owns():
    for name, path in modules().items():
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        assert len(first) > 20 and first[-1] in ".:;?", name


def test_import_vpa_loads_none_of_them():
    program = f"import sys, vpa; print(sorted({LAZY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_is_imported_only_to_be_measured_against():
    users = {
        name
        for name, path in modules().items()
        if {"torch", "triton"} & {i.partition(".")[0] for i in imports(path, False)}
    }
    assert users <= {"vpa.bench.arms", "vpa.bench.timing", "vpa.bench.triton_peer"}
