"""The draft loop: a drafter's own tokens, one position after another, by either way to a greedy token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vpa import arrays
from vpa.captured import CapturedTokens, check_capturable
from vpa.comm import agree
from vpa.full_gather import full_argmax
from vpa.linear import check_floats
from vpa.vocab import integer


def draft_tokens(
    drafter: Any,
    hidden: Any,
    num_draft_tokens: int,
    *,
    token_ids: Any = None,
    positions: Any = None,
    use_local_argmax_reduction: bool = True,
) -> Any:
    """The greedy drafts of a drafter, int64 [B, num_draft_tokens]; every rank calls, and gets the same.

    hidden: the target's last hidden states [B, hidden], the same on every rank; NumPy, CuPy, or through DLPack.
    token_ids: int64 [B], each row's last token; by default those that the drafter's head gives for ``hidden``.
    positions: int64 [B], where those tokens stand; by default none stands at 0.
    use_local_argmax_reduction: pick by ``get_top_tokens``; else by the argmax of ``compute_logits``, which gathers the
        logits. Both give the same tokens, unless the processor's product is ``fused``.

    Raises ``TypeError`` or ``ValueError`` on every rank where one rank's arguments do not fit or ranks' differ in kind.
    """
    select = drafter.get_top_tokens if use_local_argmax_reduction else full_selection(drafter)
    return draft_by(select, drafter, hidden, num_draft_tokens, token_ids=token_ids, positions=positions)


def capture_drafts(
    drafter: Any,
    hidden: Any,
    num_draft_tokens: int,
    *,
    token_ids: Any = None,
    positions: Any = None,
    use_local_argmax_reduction: bool = True,
) -> CapturedTokens:
    """``draft_tokens`` as one CUDA graph, all positions with their products and gathers; every rank calls it.

    Arguments as for ``draft_tokens``, GPU arrays; the graph reads them at each ``replay()``, so change them in place.
    Its ``tokens`` are the drafts. ``ValueError`` on every rank for host arrays, and for a communicator whose
    collectives pass through the host.
    """
    comm, error = drafter.logits_processor.comm, None
    facts, drafts = {}, None
    try:
        array = arrays.given(hidden, "hidden").array
        if arrays.is_host(array):
            raise ValueError("a CUDA graph is captured from GPU arrays; got NumPy arrays")
        check_capturable(comm)
        if arrays.namespace(array).cuda.runtime.is_hip:
            raise ValueError("CuPy captures no products on AMD's GPUs; call draft_tokens")
        if array.ndim != 2:
            raise ValueError(f"hidden has shape {array.shape}; 2 dimensions are accepted")
        steps = _count(num_draft_tokens)
        kept = [
            None if given is None else arrays.given(given, name).array
            for name, given in (("token_ids", token_ids), ("positions", positions))
        ]
        facts = {"function": "capture_drafts", "rows": len(array), "num_draft_tokens": steps}
        facts["use_local_argmax_reduction"] = bool(use_local_argmax_reduction)
        drafts = arrays.namespace(array).empty((len(array), steps), np.int64)
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    agree(comm, facts if error is None else {}, error)
    select = drafter.get_top_tokens if use_local_argmax_reduction else full_selection(drafter)

    def enqueue() -> None:
        drafts[...] = draft_by(select, drafter, array, steps, token_ids=kept[0], positions=kept[1])

    return CapturedTokens(comm, enqueue, (drafter, array, *kept), drafts)


def full_selection(drafter: Any) -> Callable[[Any, int], Any]:
    """Tokens by the full gather: (hidden, step) -> int64 [B]."""
    return lambda hidden, step=0: full_argmax(drafter.compute_logits(hidden, step))


def draft_by(
    select: Callable[[Any, int], Any],
    drafter: Any,
    hidden: Any,
    num_draft_tokens: int,
    *,
    token_ids: Any = None,
    positions: Any = None,
) -> Any:
    """``draft_tokens`` with a selection of one's own: (hidden for the head, step) -> int64 [B]."""
    taken, error = None, None
    try:
        taken = arrays.given(hidden, "hidden")
        hidden, xp = taken.array, arrays.namespace(taken.array)
        check_floats("hidden", hidden, 2, like=drafter.embedding)
        if hidden.shape[1] != drafter.embedding.shape[1]:
            raise ValueError(f"hidden has {hidden.shape[1]} columns; the drafter takes {drafter.embedding.shape[1]}")
        steps = _count(num_draft_tokens)
        if token_ids is not None:
            token_ids = _integers("token_ids", token_ids, hidden, len(drafter.embedding))
        positions = xp.ones(len(hidden), np.int64) if positions is None else _integers("positions", positions, hidden)
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts = {}
    if error is None:
        facts = {"function": "draft_tokens", "rows": len(hidden), "num_draft_tokens": steps}
        facts["token_ids"] = "given" if token_ids is not None else "none"
    agree(drafter.logits_processor.comm, facts, error)
    if token_ids is None:
        token_ids = select(hidden, 0)
    drafts = xp.empty((len(hidden), steps), np.int64)
    for step in range(steps):
        for_head, hidden = drafter.forward(token_ids, positions, hidden, step)
        token_ids = select(for_head, step)
        drafts[:, step] = token_ids
        positions = positions + 1
    return taken.give_back(drafts)


def _count(num_draft_tokens: int) -> int:
    steps = integer("num_draft_tokens", num_draft_tokens)
    if steps < 0:
        raise ValueError(f"num_draft_tokens is {steps}; it is at least 0")
    return steps


def _integers(name: str, argument: Any, like: Any, below: int | None = None) -> Any:
    """An int64 [B] argument, in the library of ``like`` [B, ...]; values are checked in host arrays."""
    array = arrays.given(argument, name).array
    if arrays.is_host(array) != arrays.is_host(like):
        raise TypeError(f"{name} is of another array library than hidden; copy one of them")
    if array.dtype != np.int64 or array.shape != (len(like),):
        raise ValueError(
            f"{name} is {array.dtype}{list(array.shape)}; int64[{len(like)}] is accepted: one for each row"
        )
    if arrays.is_host(array) and len(array):
        lowest, highest = int(array.min()), int(array.max())
        if lowest < 0 or (below is not None and highest >= below):
            accepted = "0 and above" if below is None else f"0 to {below - 1}"
            raise ValueError(f"{name} has {lowest if lowest < 0 else highest}; {accepted} are accepted")
    return array
