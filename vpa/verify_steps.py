"""The steps of a verification, whoever asks for it: scan and finish of one kind of call, and what ranks agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays
from vpa.contribution import FORMS, Contribution
from vpa.order import NAN_RULES
from vpa.plan import Plan
from vpa.requests import Requests
from vpa.vocab import VocabShard
from vpa.workspace import Buffers

#: Tokens int64 [R, K + 1], and how many were sampled and rejected, int32 [R].
Outputs = tuple[Any, Any, Any]


@dataclass(frozen=True)
class VerifySteps:
    """Scan, gather and finish of one kind of call, on checked arguments, with the memory between them.

    scan: (logits, requests, candidates), None where no row has an owner; finish: (gathered, requests, outputs).
    """

    scan: Callable[[Any, Requests, Any], None] | None
    finish: Callable[[Any, Requests, Outputs], None]
    candidates: Any
    gathered: Any

    @classmethod
    def of(
        cls,
        module: ModuleType,
        like: Any,
        shard: VocabShard,
        nan: str,
        contribution: Contribution,
        requests: Requests,
        outputs: Outputs,
        buffers: Callable[[], Buffers] | None = None,
    ) -> VerifySteps:
        """The steps for arrays like these, in the leading parts of ``buffers`` or in fresh memory."""
        lines, width = contribution.shape(len(like), requests.count)
        memory = buffers() if buffers else Buffers.fresh(like, lines * width, shard.tp_size, "packed")
        candidates = memory.candidates[: lines * width].reshape(lines, width)
        gathered = memory.gathered[: shard.tp_size * lines * width].reshape(-1, width)
        scan = None
        if len(like) and requests.count:
            scan = module.prepare_verify_scan(like, shard, contribution, nan, requests, candidates)
        finish = finish_of(module, gathered, len(like), shard.vocab_size, contribution, requests, outputs)
        return cls(scan, finish, candidates, gathered)

    def enqueue(self, logits: Any, comm: Any, requests: Requests, outputs: Outputs) -> None:
        """Write the three outputs."""
        if self.scan is not None:
            self.scan(logits, requests, self.candidates)
            if comm.size > 1:
                comm.all_gather(self.candidates, self.gathered)
        self.finish(self.gathered, requests, outputs)


def finish_of(
    module: ModuleType,
    gathered: Any,
    rows: int,
    vocab_size: int,
    contribution: Contribution,
    requests: Requests,
    outputs: Outputs,
) -> Callable[[Any, Requests, Outputs], None]:
    """The finish of some rows of some requests. Without either, nothing is sampled."""
    if rows and requests.count:
        return module.prepare_verify_finish(gathered, contribution, requests, vocab_size, outputs)

    def nothing(gathered: Any, requests: Requests, outputs: Outputs) -> None:
        for output, value in zip(outputs, (-1, 0, 0), strict=True):
            output[...] = value

    return nothing


def fresh_outputs(like: Any, requests: Requests) -> Outputs:
    """Memory for the results, in the library of ``like``."""
    library = arrays.namespace(like)
    return tuple(library.empty(shape, dtype) for shape, dtype in shapes_of(requests))  # type: ignore[return-value]


def check_form(form: Any, nan: Any) -> None:
    """Raise ``ValueError`` unless ``form`` and ``nan`` are known."""
    for name, value, accepted in (("form", form, FORMS), ("nan", nan, NAN_RULES)):
        if not isinstance(value, str) or value not in accepted:
            raise ValueError(f"{name} is {value!r}; {' and '.join(map(repr, accepted))} are accepted")


def shapes_of(requests: Requests) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    """Shapes and dtypes of the results."""
    numbers = ((requests.count,), np.dtype(np.int32))
    return ((requests.count, requests.num_draft_tokens + 1), np.dtype(np.int64)), numbers, numbers


#: What a rank tells the others of itself: valid columns, multiprocessors, and blocks as ``blocks_of`` counts them.
Told = tuple[int, int, tuple[int, int]]


def plan_of_told(told: list[Told] | None, itemsize: int) -> Plan:
    """What decides on the splits of rows, from what all ranks told; from None, where they could not."""
    return Plan.agreed(None if told is None else [(columns, count) for columns, count, _ in told], itemsize)


def spans_of_told(told: list[Told] | None) -> list[tuple[int, int]] | None:
    """All ranks' blocks, likewise."""
    return None if told is None else [span for _, _, span in told]


def facts_of(function: str, shard: VocabShard, form: str, nan: str, dtype: Any) -> dict[str, Any]:
    """What ranks must have alike, in words that a message can use."""
    return {
        "function": function,
        "dtype": str(dtype),
        "form": form,
        "nan": nan,
        "tp_size": shard.tp_size,
        "vocab_size": shard.vocab_size,
    }


def facts_of_call(logits: Any, requests: Requests) -> dict[str, Any]:
    """What ranks must have alike in one call."""
    return {"rows": len(logits), "arrays": arrays.namespace(logits).__name__, **requests.facts()}
