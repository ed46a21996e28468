"""Verification by the source of the ``raw`` backend, run and checked on the CPU, for backend ``simt``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vpa.backends import verify_launches
from vpa.backends.simt_ import run
from vpa.contribution import Contribution
from vpa.requests import Requests
from vpa.vocab import VocabShard


def prepare_verify_scan(
    logits: Any, shard: VocabShard, contribution: Contribution, nan: str, requests: Requests, out: Any
) -> Callable[[Any, Requests, Any], None]:
    """As for backend ``numpy``."""
    return lambda logits, requests, out: run(
        verify_launches.scan(logits, shard, contribution, nan, requests.cu_num_rows, out)
    )


def prepare_verify_finish(
    gathered: Any, contribution: Contribution, requests: Requests, vocab_size: int, outputs: Any
) -> Callable[[Any, Requests, Any], None]:
    """As for backend ``numpy``."""
    return lambda gathered, requests, outputs: run(
        verify_launches.finish(gathered, contribution, requests, vocab_size, outputs)
    )
