"""Finds a C++ compiler (g++, clang++, or the one in the ziglang package) and knows the flags that each needs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import CompilerNotFoundError

NAMES = ("g++", "clang++", "zig")
_OLDEST = {"g++": 11, "clang++": 16}  # volatile accesses told apart; copies of structures that call the checker
_HOW = (
    f"The simt backend compiles kernel texts for the CPU and needs one of: g++ ({_OLDEST['g++']} or later; "
    f"`apt install g++`), clang++ ({_OLDEST['clang++']} or later; `apt install clang`), or zig, which is called as "
    "`python -m ziglang c++` (`pip install ziglang`, no system package needed)"
)

# Type-based aliasing rules are off because kernels read rows through wider types; contraction is off so that a*b+c
# rounds as it is written. Tail calls are off because a return address would then name the wrong line.
_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    "-fstack-clash-protection",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-optimize-sibling-calls",
    "-fno-finite-loops",
    "-w",
)
_DEBUG = ("-gdwarf-4", "-g1")
_UNDEFINED = "alignment,signed-integer-overflow,shift-exponent,integer-divide-by-zero"
_GCC = ("-fno-gnu-unique", "-fno-extern-tls-init")
# Merged calls would give one line to two places; loads that are hoisted out of a condition would be made by threads
# that do not make them, which looks like a race.
_GCC_CHECKED = (
    "--param=tsan-distinguish-volatile=1",
    "-fno-crossjumping",
    "-fno-ipa-icf",
    "-fno-tree-tail-merge",
    "-fno-thread-jumps",
    "-fno-split-paths",
    "-fno-unswitch-loops",
    "-fno-hoist-adjacent-loads",
    "-fno-code-hoisting",
    "-fno-ssa-phiopt",
    "-fno-tree-loop-if-convert",
    "-fno-tree-loop-im",
    "-fno-tree-pre",
    "-fno-tree-sink",
    # A copy or a fill that is expanded in place is no access to the checker; a call is.
    "-fno-builtin-memcpy",
    "-fno-builtin-memmove",
    "-fno-builtin-memset",
    # A structure that is passed by value is read where the call is, unchecked, unless the call is inlined before the
    # hooks are placed: so all that may be inlined is.
    "-finline-functions",
    "-finline-small-functions",
    "--param=early-inlining-insns=100000",
    "--param=max-inline-insns-auto=100000",
    "--param=large-function-insns=1000000",
)
# Functions of the kernel text may synchronise: none may be moved into or out of a branch.
_CLANG = ("-Xclang", "-fconvergent-functions")
_CLANG_CHECKED = ("-mllvm", "-tsan-distinguish-volatile=1", "-mllvm", "-tsan-instrument-read-before-write=1")


@dataclass(frozen=True)
class Compiler:
    """`command` runs it on C++; `identity` is the text that tells one version from another."""

    name: str
    command: tuple[str, ...]
    family: str  # "gcc" or "clang"
    identity: str

    def compile_flags(self, checked: bool) -> list[str]:
        flags = [*_COMMON, *_DEBUG, "-O1" if checked else "-O2"]
        flags += _GCC if self.family == "gcc" else _CLANG
        if self.name == "zig":
            flags += ["-fno-sanitize=undefined"]  # its own default
        if checked:
            # clang's "bounds" would include a pass that traps instead of calling a handler.
            bounds = "bounds" if self.family == "gcc" else "array-bounds"
            flags += ["-fsanitize=thread", f"-fsanitize={_UNDEFINED},{bounds},unreachable,return"]
            flags += [f"-fsanitize-recover={_UNDEFINED},{bounds}"]
            flags += _GCC_CHECKED if self.family == "gcc" else _CLANG_CHECKED
        return flags

    def runtime_flags(self, checked: bool) -> list[str]:
        flags = [*_COMMON, "-O2"]
        if self.name == "zig":
            flags += ["-fno-sanitize=all"]
        return [*flags, "-DSIMT_CHECKED"] if checked else flags

    def link(self, parts: list[str], output: str) -> list[str]:
        """The command that makes a shared object; undefined names are errors then, not when it is loaded."""
        command, libraries = [*self.command], ["-lm"]
        if self.name == "zig":
            # Unless told otherwise zig first builds its own C and C++ libraries (half a minute), which nothing here
            # needs.
            command, libraries = [*self.command[:-1], "cc"], ["-nostdlib", "-lc", "-lm"]
        return [*command, "-shared", "-Wl,-z,now", "-Wl,-z,defs", *parts, *libraries, "-o", output]


def find_compiler(name: str | None = None) -> Compiler:
    """The compiler called `name` ("g++", "clang++", "zig", or a path), or the first of the three that is installed.

    Raises CompilerNotFoundError, which says what to install.
    """
    found, problems = None, []
    for candidate in NAMES if name is None else (name,):
        found, problem = _find(candidate, os.environ.get("PATH", ""))
        if found is not None:
            return found
        problems.append(problem)
    raise CompilerNotFoundError(f"{'; '.join(problems)}. {_HOW}")


@functools.cache
def _find(name: str, search_path: str) -> tuple[Compiler | None, str]:
    """The compiler, or why there is none."""
    if name == "zig":
        if importlib.util.find_spec("ziglang") is None:
            return None, "the package ziglang is not installed"
        identity = f"zig {importlib.metadata.version('ziglang')}"
        command = (sys.executable, "-m", "ziglang", "c++")
        if not _checks_copies(command):
            return None, f"{identity} is too old (it leaves copies of structures unchecked)"
        return Compiler("zig", command, "clang", identity), ""
    problem = f"{name} is not installed"
    versions = range(30, 10, -1) if name in _OLDEST else ()  # distributions also install them as clang++-19 and so on
    for command in (name, *(f"{name}-{version}" for version in versions)):
        path = shutil.which(command, path=search_path)
        if path is None:
            continue
        try:
            version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"{path} does not run ({error})"
            continue
        family = "clang" if "clang" in version else "gcc"
        number = re.search(r"(\d+)\.\d+", version)
        new_enough = number is None or int(number[1]) >= _OLDEST["clang++" if family == "clang" else "g++"]
        if new_enough and (family == "gcc" or _checks_copies((path,))):
            return Compiler(name, (path,), family, version), ""
        problem = f"{path} is too old ({version.splitlines()[0]})"
    return None, problem


def _checks_copies(command: tuple[str, ...]) -> bool:
    """Whether a clang makes a call to the checker of a structure's copy: else the copy would go unseen."""
    with tempfile.TemporaryDirectory(prefix="vpa-simt-") as folder:
        source, output = Path(folder) / "probe.cpp", Path(folder) / "probe.s"
        source.write_text("struct S { int a[8]; };\nvoid copy(S* to, const S* from) { *to = *from; }\n")
        arguments = [*command, "-O1", "-fsanitize=thread", "-S", str(source), "-o", str(output)]
        try:
            subprocess.run(arguments, capture_output=True, timeout=120, check=True)
            return "__tsan_memcpy" in output.read_text()
        except (OSError, subprocess.SubprocessError):
            return False
