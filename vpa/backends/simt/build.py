"""Kernel text in, shared object out: compiles behind the prelude, and keeps the result where it cannot go stale."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .abi import DYNAMIC_BYTES
from .elf import STT_OBJECT, STT_TLS, ElfFile, Symbol
from .errors import CompileError
from .source import Declaration, declarations, has_includes
from .toolchain import Compiler

_HERE = Path(__file__).resolve().parent
_KEEP_SECONDS = 60 * 24 * 3600
DYNAMIC_SYMBOL = "simt_dynamic_shared"
ANCHOR_SYMBOL = "simt_tls_anchor"
VARIABLES_SECTION = ".simt_variables"


def build(text: str, name: str, options: Sequence[str], warp_size: int, checked: bool, compiler: Compiler) -> Path:
    """The shared object for `text`, compiled now or found in the cache. Raises CompileError."""
    options = _accepted(options)
    defines = ["-DVPA_SIMT=1"] + (["-D__HIP_PLATFORM_AMD__=1"] if warp_size == 64 else [])
    preprocessed = None
    if has_includes(text) or any(o.startswith(("-I", "-include")) for o in options):
        preprocessed = _preprocess(text, name, [*defines, *options], compiler)  # what is included belongs to the key
    key = _key(
        "kernel",
        text,
        name,
        options,
        warp_size,
        checked,
        compiler.compile_flags(checked),
        preprocessed,
        compiler.identity,
    )
    target = cache_folder() / f"kernel-{key}.so"
    if _present(target):
        return target
    if preprocessed is None:
        preprocessed = _preprocess(text, name, [*defines, *options], compiler)
    runtime = _runtime(compiler, checked)
    table = "".join(_table_entry(d) for d in declarations(preprocessed))
    with _workspace(target.parent) as folder:
        source = folder / "kernel.cpp"
        after = f'#line 1 "<simt>"\nSIMT_TEXT_ENDS\nSIMT_KERNEL_TABLE({table})\n'
        source.write_text(f'#line 1 "{_quoted(name)}"\n{text}\n{after}', "utf-8")
        flags = [
            *compiler.compile_flags(checked),
            f"-DSIMT_WARP_SIZE={warp_size}",
            "-include",
            str(_HERE / "prelude.h"),
        ]
        _run([*compiler.command, *flags, *options, "-c", str(source), "-o", str(folder / "kernel.o")], name)
        (folder / "extra.s").write_text(_extra_assembly(ElfFile(folder / "kernel.o").symbols))
        parts = [str(folder / "kernel.o"), str(runtime), str(folder / "extra.s")]
        _run(compiler.link(parts, str(folder / "kernel.so")), name)
        os.replace(folder / "kernel.so", target)
    _prune(target.parent)
    return target


def _table_entry(declared: Declaration) -> str:
    names = ",".join(declared.parameters)
    return f'SIMT_KERNEL({declared.name}, "{names}", ({declared.max_threads})) '


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/vpa/simt, by default under ~/.cache; a folder of this process where that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "vpa" / "simt"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="vpa-simt-"))


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
    for name in ("build.py", "source.py", "toolchain.py"):
        digest.update((_HERE / name).read_bytes())
    return digest.hexdigest()


def _key(*parts: object) -> str:
    text = json.dumps([_sources_digest(), platform.machine(), *parts])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _present(path: Path) -> bool:
    try:
        os.utime(path)  # still in use: not to be pruned
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return path.exists()


def _runtime(compiler: Compiler, checked: bool) -> Path:
    flags = compiler.runtime_flags(checked)
    target = cache_folder() / f"runtime-{_key('runtime', flags, compiler.identity)}.o"
    if not _present(target):
        with _workspace(target.parent) as folder:
            output = folder / "runtime.o"
            _run(
                [*compiler.command, *flags, "-c", str(_HERE / "runtime.cpp"), "-o", str(output)],
                "the executor's runtime",
            )
            os.replace(output, target)
    return target


class _workspace:
    """A folder beside the target, so that the finished file can be moved into place in one step."""

    def __init__(self, parent: Path):
        self._folder = Path(tempfile.mkdtemp(prefix="build-", dir=parent))

    def __enter__(self) -> Path:
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _preprocess(text: str, name: str, options: list[str], compiler: Compiler) -> str:
    with _workspace(cache_folder()) as folder:
        source = folder / "kernel.cpp"
        source.write_text(f'#line 1 "{_quoted(name)}"\n{text}\n', "utf-8")
        return _run([*compiler.command, "-std=c++17", *options, "-E", "-P", str(source)], name)


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


def _prune(folder: Path) -> None:
    oldest = time.time() - _KEEP_SECONDS
    for path in folder.iterdir():
        try:
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError:
            continue  # another process was faster
