"""A time limit on work that was enqueued and cannot be given up: a thread that watches an event behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Watch:
    """Calls ``expired`` once, from a thread, if work marked on a stream does not end within ``limit`` seconds.

    ``event`` is recorded behind the work by each ``mark`` (``event.record(stream)``). ``pending(event)`` says whether
    it has not been reached; it is asked only about marks older than the limit, since the question itself breaks a
    capture that another library has under way in its strictest mode. Work enqueued before a mark counts too.
    """

    def __init__(self, event: Any, pending: Callable[[Any], bool], limit: float, expired: Callable[[], None]) -> None:
        self._event, self._pending, self._limit, self._expired = event, pending, limit, expired
        self._marked_at = 0.0
        self._ended_at = 0.0  # the mark that was seen to have ended: an event is not asked twice
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, stream: Any) -> None:
        """Start the limit anew, for all that was enqueued on ``stream`` so far."""
        self._marked_at = time.monotonic()  # first: an old time must never be seen beside the new, unfinished event
        self._event.record(stream)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(min(0.25, self._limit / 4)):
            marked_at = self._marked_at
            if marked_at == self._ended_at or time.monotonic() - marked_at <= self._limit:
                continue
            if not self._pending(self._event):
                self._ended_at = marked_at
            elif marked_at == self._marked_at and not self._stopped.is_set():
                self._expired()
                return
