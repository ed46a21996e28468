"""The protocol of timing, with a clock of its own: order alternates, warm-ups are dropped, rounds wait for all."""

from __future__ import annotations

import numpy as np

from vpa.bench import timing


def test_rounds_take_every_arm_forwards_and_backwards_after_a_barrier():
    log = []

    def once(name: str) -> float:
        log.append(name)
        return float(len(log))

    samples = timing.interleaved(["a", "b", "c"], once, rounds=4, barrier=lambda: log.append("|"), warm_up=1)
    assert "".join(log) == "|a|b|c" + "|c|b|a" + "|a|b|c" + "|c|b|a" + "|a|b|c"
    assert {name: len(values) for name, values in samples.items()} == {"a": 4, "b": 4, "c": 4}
    assert samples["c"][0] == 8.0  # the first entry behind the warm-up round


def test_called_steps_are_timed_by_the_hosts_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    waits = []

    def step(seconds: float):
        def call() -> None:
            now[0] += seconds

        return call

    steps = {"slow": step(3e-6), "fast": step(1e-6)}
    samples = timing.time_called(steps, calls=5, rounds=3, barrier=lambda: None, finish=lambda: waits.append(0))
    assert np.allclose(samples["slow"], 3.0) and np.allclose(samples["fast"], 1.0)
    assert len(waits) == 2 * (3 + 2)
