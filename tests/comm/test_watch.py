"""The watch over enqueued work, with an event of the test's own: late work is told once, and only late work."""

from __future__ import annotations

import threading
import time

from vpa.comm.watch import Watch


class Event:
    """Done when the test says so; recording it makes it undone."""

    def __init__(self) -> None:
        self.done = True

    def record(self, stream) -> None:
        self.done = False


def watched(limit: float) -> tuple[Event, Watch, list[float]]:
    event, told = Event(), []
    watch = Watch(event, lambda event: not event.done, limit, lambda: told.append(time.monotonic()))
    return event, watch, told


def test_work_that_does_not_end_is_told_once_after_the_limit():
    _, watch, told = watched(0.2)
    start = time.monotonic()
    watch.mark("stream")
    time.sleep(0.8)
    assert len(told) == 1 and told[0] - start > 0.2


def test_work_that_ends_is_not_told():
    event, watch, told = watched(0.1)
    for _ in range(5):
        watch.mark("stream")
        event.done = True
        time.sleep(0.1)
    assert told == []
    watch.stop()


def test_new_work_restarts_the_limit():
    _, watch, told = watched(0.4)
    for _ in range(8):
        watch.mark("stream")
        time.sleep(0.1)
    assert told == []
    watch.stop()


def test_a_stopped_watch_tells_nothing():
    _, watch, told = watched(0.1)
    watch.mark("stream")
    watch.stop()
    time.sleep(0.4)
    assert told == []


def test_work_marked_after_a_long_pause_is_never_late_at_once():
    """The thread may run at any point of ``mark``: here it looks all the time, and pauses are over the limit."""
    event, watch, told = watched(0.5)  # longer than a busy machine keeps this thread from running
    watch._stopped.wait = lambda seconds, wait=threading.Event.wait: wait(watch._stopped, 0)
    for _ in range(4):
        watch.mark("stream")
        event.done = True
        time.sleep(0.6)
    assert told == []
    watch.stop()
