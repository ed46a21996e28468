"""The compilers that are installed here: most tests use the first, those of `any_compiler` run once with each."""

from __future__ import annotations

import pytest

from vpa.backends.simt import CompilerNotFoundError
from vpa.backends.simt.toolchain import NAMES, find_compiler


def available(name: str) -> bool:
    try:
        find_compiler(name)
    except CompilerNotFoundError:
        return False
    return True


@pytest.fixture(scope="session")
def compiler() -> str:
    for name in NAMES:
        if available(name):
            return name
    pytest.skip("no C++ compiler: install g++, clang++ or ziglang")


@pytest.fixture(scope="session", params=NAMES)
def any_compiler(request) -> str:
    if not available(request.param):
        pytest.skip(f"{request.param} is not installed")
    return request.param
