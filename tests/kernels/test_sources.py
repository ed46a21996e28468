"""Kernel sources as text: the catalogue is whole, a file has one entry, and a source changes with its defines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vpa import kernels

FOLDER = Path(kernels.__file__).parent
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
HEADERS = sorted(path.name for path in FOLDER.glob("*.cuh"))


def test_every_file_is_in_the_catalogue_and_every_kernel_has_one():
    used = [file for files in kernels.CATALOGUE.values() for file in files]
    assert sorted(set(used)) == sorted(SOURCES + HEADERS)
    assert sorted(file for file in used if file.endswith(".cu")) == SOURCES


@pytest.mark.parametrize("name", kernels.CATALOGUE)
def test_a_source_is_one_string_with_one_entry_of_its_name(name):
    text = kernels.source(name, threads=64, loads=2).text
    text = re.sub(r"(__launch_bounds__|VPA_LAUNCH_BOUNDS)\([^)]*\)|\bCLUSTER\b", "", text)
    assert re.findall(r'extern "C" __global__ void\s+(\w+)\(', text) == [name]
    assert "#include" not in text
    assert text.startswith("#define VPA_LOADS 2\n#define VPA_THREADS 64\n")


def test_a_source_changes_with_its_defines_alone():
    one, two = (kernels.source("pick_from_candidates", pairs=pairs, threads=128) for pairs in (0, 1))
    assert one.digest != two.digest
    assert one == kernels.source("pick_from_candidates", threads=128, pairs=0)


def test_one_digest_is_of_every_kernels_text(monkeypatch):
    texts = {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in (".cu", ".cuh", ".py")}
    digest = kernels.digest()
    assert len(texts) > 20 and re.fullmatch("[0-9a-f]{64}", digest)
    try:
        for name, text in texts.items():
            monkeypatch.setattr(kernels, "read", {**texts, name: text + " "}.__getitem__)
            kernels.digest.cache_clear()
            assert (kernels.digest() == digest) == (name == "__init__.py"), name
    finally:
        kernels.digest.cache_clear()


def test_an_unknown_kernel_is_refused():
    with pytest.raises(KeyError):
        kernels.source("no_such_kernel")


@pytest.mark.parametrize("file", SOURCES + HEADERS)
def test_a_file_says_what_it_is_and_lines_are_named(file):
    assert (FOLDER / file).read_text().startswith(f"// {file}: ")
    name = next(name for name, files in kernels.CATALOGUE.items() if file in files)
    assert f'#line 1 "{file}"\n' in kernels.source(name).text
