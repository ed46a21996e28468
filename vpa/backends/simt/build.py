"""Kernel text in, shared object out: compiles behind the prelude, and keeps the result where it cannot go stale."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import cache
from .abi import DYNAMIC_BYTES
from .elf import STT_OBJECT, STT_TLS, ElfFile, Symbol
from .errors import CompileError
from .source import Declaration, declarations, has_includes
from .toolchain import Compiler

_HERE = Path(__file__).resolve().parent
DYNAMIC_SYMBOL = "simt_dynamic_shared"
ANCHOR_SYMBOL = "simt_tls_anchor"
VARIABLES_SECTION = ".simt_variables"


def build(text: str, name: str, options: Sequence[str], warp_size: int, checked: bool, compiler: Compiler) -> Path:
    """The shared object for `text`, compiled now or found in the cache. Raises CompileError."""
    options = _accepted(options)
    defines = ["-DVPA_SIMT=1"] + (["-D__HIP_PLATFORM_AMD__=1"] if warp_size == 64 else [])
    preprocessed = None
    if has_includes(text) or any(o.startswith(("-I", "-include")) for o in options):
        # What is included belongs to the key, and so do its lines' numbers.
        preprocessed = _preprocess(text, name, [*defines, *options], compiler)
    flags = compiler.compile_flags(checked)
    key = _key("kernel", text, name, options, warp_size, checked, flags, preprocessed, compiler.identity)
    if found := cache.find(f"kernel-{key}.so"):
        return found
    if preprocessed is None:
        preprocessed = _preprocess(text, name, [*defines, *options], compiler)
    runtime = _runtime(compiler, checked)
    table = "".join(_table_entry(d) for d in declarations(preprocessed))
    with cache.workspace() as folder:
        source = folder / "kernel.cpp"
        after = f'#line 1 "<simt>"\nSIMT_TEXT_ENDS\nSIMT_KERNEL_TABLE({table})\n'
        source.write_text(f'#line 1 "{_quoted(name)}"\n{text}\n{after}', "utf-8")
        flags += [f"-DSIMT_WARP_SIZE={warp_size}", "-include", str(_HERE / "prelude.h")]
        _run([*compiler.command, *flags, *options, "-c", str(source), "-o", str(folder / "kernel.o")], name)
        (folder / "extra.s").write_text(_extra_assembly(ElfFile(folder / "kernel.o").symbols))
        parts = [str(folder / "kernel.o"), str(runtime), str(folder / "extra.s")]
        _run(compiler.link(parts, str(folder / "kernel.so")), name)
        return cache.keep(folder / "kernel.so", folder.parent / f"kernel-{key}.so")


def _table_entry(declared: Declaration) -> str:
    names = ",".join(declared.parameters)
    return f'SIMT_KERNEL({declared.name}, "{names}", ({declared.max_threads}), {declared.cluster}) '


def _accepted(options: Sequence[str]) -> list[str]:
    """Macro and include options, joined to their values; anything else could undo what the checker relies on."""
    result, rest = [], list(options)
    while rest:
        option = rest.pop(0)
        if option in ("-D", "-U", "-I", "-include") and rest:
            option = option + (" " if option == "-include" else "") + rest.pop(0)
        option = re.sub(r"^--(?:define-macro|include-path)=", lambda m: "-D" if "define" in m[0] else "-I", option)
        if option.startswith("-include "):
            result += option.split(" ", 1)
        elif re.match(r"-[DUI]\S", option):
            result.append(option)
        elif re.match(r"--?std=", option):
            result.append("-std=" + option.split("=", 1)[1])
        else:
            raise ValueError(f"option {option!r}: only -D, -U, -I, -include and -std= are accepted")
    return result


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for name in ("build.py", "cache.py", "source.py", "toolchain.py"):
        digest.update((_HERE / name).read_bytes())
    return digest.hexdigest()


def _key(*parts: object) -> str:
    text = json.dumps([_sources_digest(), platform.machine(), *parts])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _runtime(compiler: Compiler, checked: bool) -> Path:
    flags = compiler.runtime_flags(checked)
    name = f"runtime-{_key('runtime', flags, compiler.identity)}.o"
    if found := cache.find(name):
        return found
    with cache.workspace() as folder:
        output = folder / "runtime.o"
        command = [*compiler.command, *flags, "-c", str(_HERE / "runtime.cpp"), "-o", str(output)]
        _run(command, "the executor's runtime")
        return cache.keep(output, folder.parent / name)


def _preprocess(text: str, name: str, options: list[str], compiler: Compiler) -> str:
    """The text after the preprocessor, with the lines that say where each part comes from."""
    with cache.workspace() as folder:
        source = folder / "kernel.cpp"
        source.write_text(f'#line 1 "{_quoted(name)}"\n{text}\n', "utf-8")
        result = _run([*compiler.command, "-std=c++17", *options, "-E", str(source)], name)
        return result.replace(str(folder), "")


def _run(command: list[str], name: str) -> str:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode == 0:
        return done.stdout
    log = done.stderr.strip() or done.stdout.strip()
    first = re.search(r"^(?:ld\.lld: |.*/ld: )?(.*?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", log, re.MULTILINE)
    shown = "\n".join(log.splitlines()[:40])
    if first is None:
        raise CompileError(f"{name} does not compile:\n{shown}", log)
    raise CompileError(
        f"{name} does not compile: {first[1]}:{first[2]}: {first[3]}\n{shown}", log, first[1], int(first[2])
    )


def _extra_assembly(symbols: Sequence[Symbol]) -> str:
    """Puts all `extern __shared__` arrays at one address, as a GPU does, and notes which variables are the kernels'."""
    at = "@" if platform.machine() in ("x86_64", "AMD64") else "%"
    dynamic = sorted({s.name for s in symbols if s.kind == STT_TLS and s.section is None})
    lines = [f'.section .note.GNU-stack,"",{at}progbits', f'.section {VARIABLES_SECTION},"",{at}progbits']
    for s in symbols:
        if s.kind == STT_OBJECT and s.section is not None and s.size and "simt_" not in s.name:
            lines.append(f'.asciz "{s.name}"')
    if dynamic:
        lines += [f'.section .tbss,"awT",{at}nobits', ".p2align 10"]
        for label in [*dynamic, DYNAMIC_SYMBOL]:
            lines += [f".globl {label}", f".hidden {label}", f".size {label}, {DYNAMIC_BYTES}", f"{label}:"]
        lines.append(f".zero {DYNAMIC_BYTES}")
    return "\n".join([*lines, ""])


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
