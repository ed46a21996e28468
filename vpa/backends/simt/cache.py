"""Compiled objects kept between processes: where they lie, that they are whole, and how long.

Each file ends in the digest of what comes before it (no reader of ELF looks behind the last section), so one that was
cut short or overwritten is as good as absent and is made again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

_KEEP_SECONDS = 60 * 24 * 3600
_DIGEST_BYTES = hashlib.sha256().digest_size


def usual_folder() -> Path:
    """$XDG_CACHE_HOME/vpa/simt, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "vpa" / "simt"


def writable_folder() -> Path:
    """The usual folder; where that cannot be written, one that goes when the process ends."""
    usual = usual_folder()
    try:
        usual.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(usual, os.W_OK | os.X_OK):
            return usual
    except OSError:
        pass
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vpa-simt-"))
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)


def find(name: str) -> Path | None:
    """The whole file called `name`, if there is one: a usual folder that can only be read serves, too."""
    path = usual_folder() / name
    if not _whole(path):
        path = writable_folder() / name
        if not _whole(path):
            return None
    with contextlib.suppress(OSError):  # somebody else's cache
        os.utime(path)  # still in use: not to be pruned
    return path


def _whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def keep(made: Path, target: Path) -> Path:
    """Moves a file that was made in a `workspace` to its place, in one step: others see all of it or nothing."""
    data = made.read_bytes()
    made.write_bytes(data + hashlib.sha256(data).digest())
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(made, target)
    _prune(target.parent)
    return target


class workspace:
    """A folder in the cache, so that the finished file can be moved into place."""

    def __init__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="build-", dir=writable_folder()))

    def __enter__(self) -> Path:
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _prune(folder: Path) -> None:
    oldest = time.time() - _KEEP_SECONDS
    for path in folder.iterdir():
        try:
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError:
            continue  # another process was faster
