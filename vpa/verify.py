"""Greedy verification of drafts with one small gather: scan, gather, and one finish that also accepts.

The scan gives candidates of each row, or statistics of blocks of ids (``vpa.contribution``); the finish picks each
row's argmax from what all ranks gave, and applies the rules of ``vpa.acceptance``. No logits travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vpa import arrays, backends
from vpa.comm import agree, check_communicator
from vpa.contribution import Contribution, blocks_of
from vpa.emulate import check_all_ranks, plan_of
from vpa.requests import Requests, check_names
from vpa.scan import check
from vpa.verify_steps import (
    Outputs,
    VerifySteps,
    check_form,
    facts_of,
    facts_of_call,
    finish_of,
    fresh_outputs,
    plan_of_told,
    spans_of_told,
)
from vpa.vocab import VocabShard
from vpa.workspace import check_comm


def greedy_verify(
    logits: Any,
    shard: VocabShard,
    comm: Any,
    *,
    draft_ids: Any,
    cu_num_rows: Any,
    num_draft_tokens: int,
    positions: Any,
    seq_lens: Any,
    prefill_lens: Any,
    seeds: Any,
    acceptance: Any = None,
    form: str = "candidate",
    nan: str = "first",
    backend: str | None = None,
) -> Outputs:
    """Which drafts greedy decoding accepts, and the token after them; every rank calls and gets the same.

    logits: this rank's [N, shard.width] of all requests' rows, bf16, fp16 or fp32, any strides, scaled and soft-capped
        already, as ``LogitsProcessor.compute_logits_local`` gives them. Request ``r`` owns rows ``cu_num_rows[r] ..
        cu_num_rows[r + 1] - 1``: one that follows its last known token, and one for each draft.
    comm: a communicator of ``shard.tp_size`` ranks.
    draft_ids, positions: int64 [N]; the draft at a row is judged against the argmax of the row before. The first of a
        request's rows has none, whatever stands there. An id outside the vocabulary, as -1, is never accepted.
        Positions are at least -2^63 + 1024, so that kernels can take a draft's place from them.
    cu_num_rows: int32 [R + 1], from 0 on; rows from ``cu_num_rows[R]`` on are padding. num_draft_tokens: the most
        drafts of a request, K, at most 1024; a request may have fewer, or none, or no rows.
    seq_lens, prefill_lens: int32 [R]. A request whose ``seq_len < prefill_len`` samples nothing; a draft whose position
        less its place among the request's rows is below ``prefill_len`` is a placeholder.
    seeds: int64 [R], of the draws of synthetic acceptance.
    acceptance: float32 [K] of conditional rates (``vpa.conditional_acceptance``): a draft is accepted by a draw, not
        because it is the argmax. None: by the argmax. An array on the host is copied to the logits' GPU at each call.
    form: ``"candidate"``, or ``"blocks"``, the best of each block of 8192 ids (of 1024 in a request's last row), which
        begin at multiples of that in the vocabulary. Both give the same.
    nan: ``"first"``, NaN precedes every number; ``"ignore"``, NaN is -inf, so that a row of NaN alone gives id 0.
    backend: as for ``get_top_tokens``.

    Returns ``(tokens, num_sampled, num_rejected)``: int64 [R, K + 1], the accepted drafts of each request, then one
    token more, -1 beyond; int32 [R] each. All arrays are of one library, the logits'.

    Raises ``TypeError`` or ``ValueError`` on every rank where one rank's arguments do not fit or ranks' differ: their
    sizes, and what arrays on the host hold. What arrays on a GPU hold is trusted, since a check would wait for it: that
    ``cu_num_rows`` is as above, that rates lie in [0, 1], and that all ranks have the same. Whatever they hold, nothing
    outside the arrays is read or written.
    """
    check_communicator(comm)
    taken, module, requests, error = None, None, None, None
    try:
        taken = arrays.given(logits, "logits")
        check_form(form, nan)
        check(taken.array, shard, "packed", backend)
        module = backends.verification(backend, taken.array)
        check_comm(shard, comm, taken.array)
        requests = Requests.given(
            taken.array, num_draft_tokens, acceptance, draft_ids=draft_ids, cu_num_rows=cu_num_rows,
            positions=positions, seq_lens=seq_lens, prefill_lens=prefill_lens, seeds=seeds,
        )  # fmt: skip
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts, own = {}, None
    if error is None:
        facts = facts_of("greedy_verify", shard, form, nan, taken.array.dtype) | facts_of_call(taken.array, requests)
        own = (shard.num_valid, 0 if arrays.is_host(taken.array) else arrays.multiprocessors(), blocks_of(shard))
    told = agree(comm, facts, error, own)
    splits = plan_of_told(told, taken.array.dtype.itemsize).splits(len(taken.array))
    contribution = Contribution.agreed(form, requests.num_draft_tokens, splits, spans_of_told(told), shard.vocab_size)
    outputs = fresh_outputs(taken.array, requests)
    steps = VerifySteps.of(module, taken.array, shard, nan, contribution, requests, outputs)
    steps.enqueue(taken.array, comm, requests, outputs)
    return tuple(map(taken.give_back, outputs))  # type: ignore[return-value]


def emulate_greedy_verify(
    shards_of_logits: Sequence[Any],
    shards: Sequence[VocabShard],
    *,
    num_draft_tokens: int,
    acceptance: Any = None,
    form: str = "candidate",
    nan: str = "first",
    backend: str | None = None,
    **requests_arguments: Any,
) -> Outputs:
    """What ``greedy_verify`` gives on every rank, computed by one process that has all ranks' logits.

    shards_of_logits: one [N, width] array per shard, all of one library, dtype and N. Other arguments, the result and
    the errors are those of ``greedy_verify``.
    """
    check_names("emulate_greedy_verify()", requests_arguments)
    taken, shards = check_all_ranks(shards_of_logits, shards)
    first = taken[0].array
    check_form(form, nan)
    for one, shard in zip(taken, shards, strict=True):
        check(one.array, shard, "packed", backend)
    module = backends.verification(backend, first)
    requests = Requests.given(first, num_draft_tokens, acceptance, **requests_arguments)
    splits = plan_of(first, shards).splits(len(first))
    spans = [blocks_of(shard) for shard in shards]
    contribution = Contribution.agreed(form, requests.num_draft_tokens, splits, spans, shards[0].vocab_size)
    outputs = fresh_outputs(first, requests)
    lines, width = contribution.shape(len(first), requests.count)
    gathered = arrays.namespace(first).empty((len(shards) * lines, width), np.uint64)
    if len(first) and lines:
        for rank, (one, shard) in enumerate(zip(taken, shards, strict=True)):
            part = gathered[rank * lines : (rank + 1) * lines]
            module.prepare_verify_scan(one.array, shard, contribution, nan, requests, part)(one.array, requests, part)
    finish = finish_of(module, gathered, len(first), shards[0].vocab_size, contribution, requests, outputs)
    finish(gathered, requests, outputs)
    return tuple(map(taken[0].give_back, outputs))  # type: ignore[return-value]
