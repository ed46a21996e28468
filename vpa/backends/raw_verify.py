"""Verification by the CUDA/HIP source in ``kernels/``, for backend ``raw``; launches are packed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vpa.backends import verify_launches
from vpa.backends.launcher import Prepared
from vpa.contribution import Contribution
from vpa.requests import Requests
from vpa.vocab import VocabShard


def prepare_verify_scan(
    logits: Any, shard: VocabShard, contribution: Contribution, nan: str, requests: Requests, out: Any
) -> Callable[[Any, Requests, Any], None]:
    """As for backend ``numpy``, for calls with other arrays of the same kind, on CuPy's current stream."""
    prepared = Prepared(verify_launches.scan(logits, shard, contribution, nan, requests.cu_num_rows, out))
    if contribution.form == "candidate":
        return lambda logits, requests, out: prepared(logits, out)
    return lambda logits, requests, out: prepared(logits, out, requests.cu_num_rows)


def prepare_verify_finish(
    gathered: Any, contribution: Contribution, requests: Requests, vocab_size: int, outputs: Any
) -> Callable[[Any, Requests, Any], None]:
    """As for backend ``numpy``, for calls with other arrays of the same kind, on CuPy's current stream."""
    prepared = Prepared(verify_launches.finish(gathered, contribution, requests, vocab_size, outputs))
    return lambda gathered, requests, outputs: prepared(gathered, *verify_launches.inputs(requests), *outputs)
