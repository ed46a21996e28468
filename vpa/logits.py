"""From hidden states to logits or tokens: what is done to a vocabulary-parallel head's logits, and how they travel.

``LogitsProcessor`` has two ways to a greedy token, and they give the same one: ``compute_logits``, which gathers the
logits of all ranks, and its argmax; or ``get_top_tokens``, which gathers a few candidates. (A ``fused`` processor sums
in an order of its own.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vpa import arrays, kernels, top_tokens
from vpa.comm import agree, check_communicator, solo
from vpa.comm.device import device_name, nccl_version
from vpa.emulate import emulate_top_tokens
from vpa.full_gather import full_argmax, full_logits
from vpa.lm_head import Head, ParallelLMHead, heads_of, one_of
from vpa.pick import pick_from_candidates
from vpa.scan import apply_transform
from vpa.switch import FULL, LOCAL, Choice, Place, SwitchTable, versions
from vpa.transform import Transform
from vpa.vocab import integer

#: Which way ``get_top_tokens`` takes.
_MODES = ("local", "full", "auto")


@dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """What is done to a head's logits, and over which ranks.

    comm: a communicator of as many ranks as the head has shards. With a list of all ranks' heads in place of one head,
        this process plays every rank, and ``comm`` is a solo one.
    scale, soft_cap: see ``vpa.Transform``.
    draft_to_target: int [ids of the head]; draft id ``d`` is id ``d + draft_to_target[d]`` of the target's vocabulary,
        of ``target_vocab_size`` ids. Target ids have to ascend: then ties fall alike in both vocabularies.
    layout, backend: as for ``vpa.get_top_tokens``.
    mode: which way ``get_top_tokens`` goes: ``local``, the local argmax; ``full``, by all logits; ``auto``, the faster
        of the two by ``switch``, a table of ``vpa.calibrate``, for each call. All give the same tokens, but
        for ``fused``, whose sums are its own.
    fused: ``get_top_tokens`` multiplies and scans in one kernel, which reads the head once and never writes logits; for
        GPU arrays, layout ``packed`` and backend ``raw``. It gives the tokens of the two steps, product and scan,
        wherever its fp32 sums, once rounded, are theirs: the order of a sum is the kernel's own, and where one rounds
        to another logit, an id of nearly the largest may be picked: see docs/semantics.md. Made for few rows: from 17
        on the head is read again for each 16; where there are no tensor cores for it (fp32, hidden sizes that 8 does
        not divide, rows that are not aligned to 16 bytes, compute capability below 8.0, AMD) for each 4.

    Raises ``TypeError`` or ``ValueError`` for settings that do not fit. ``compute_logits`` and ``get_top_tokens`` are
    called by every rank, and raise on every rank where one rank's arguments do not fit or ranks' differ.
    """

    comm: Any = field(default_factory=solo)
    scale: float = 1.0
    soft_cap: float | None = None
    draft_to_target: Any = None
    target_vocab_size: int | None = None
    layout: str = "packed"
    backend: str | None = None
    fused: bool = False
    mode: str = "local"
    switch: SwitchTable | None = None
    transform: Transform = field(init=False)
    _targets: Any = field(init=False, repr=False)  # target ids of draft ids, int64 of NumPy; None without a map
    _warmed: set = field(init=False, repr=False, default_factory=set)  # kinds of calls that were warmed up for captures
    _targets_on: dict = field(init=False, repr=False, default_factory=dict)  # device -> the same there

    def __post_init__(self) -> None:
        check_communicator(self.comm)
        arrays.check_layout(self.layout)
        object.__setattr__(self, "transform", Transform(self.scale, self.soft_cap))
        if self.fused and (self.layout != "packed" or self.backend not in (None, "raw")):
            raise ValueError(
                f"fused is set with layout {self.layout!r} and backend {self.backend!r}; a fused product gives packed "
                f"candidates, by backend 'raw' (or None)"
            )
        if self.mode not in _MODES or (self.mode == "auto") != isinstance(self.switch, SwitchTable):
            raise ValueError(
                f"mode is {self.mode!r} with a switch of {type(self.switch).__name__}; 'local' and 'full' without one, "
                f"and 'auto' with a table of vpa.calibrate() are accepted"
            )
        object.__setattr__(self, "_targets", _targets_of(self.draft_to_target, self.target_vocab_size))

    def compute_logits_local(self, head: Head, hidden: Any) -> Any:
        """This rank's transformed logits [B, width], of the head's ids; a list of all ranks' for a list of heads."""
        taken = arrays.given(hidden, "hidden")
        parts = [
            taken.give_back(self._transformed(one.product(taken.array))) for one in heads_of(head, self.comm, self._ids)
        ]
        return parts[0] if isinstance(head, ParallelLMHead) else parts

    def compute_logits(self, head: Head, hidden: Any) -> Any:
        """All logits [B, vocab_size], gathered from all ranks, for hidden states [B, hidden_size].

        With a map they are of the target's ids, [B, target_vocab_size]: -inf for those that no draft id has.
        """
        taken, logits = self._gathered(head, hidden, "compute_logits")
        return taken.give_back(self._scattered(logits))

    def get_top_tokens(self, head: Head, hidden: Any) -> Any:
        """The greedy tokens, int64 [B], for hidden states [B, hidden_size]; no logits travel unless ``mode`` says so.

        They are the argmax of ``compute_logits``, the lowest id of the largest value, for every input, with two
        exceptions: ``fused``, whose sums are its own; and where a map leaves target ids without logits, a row of -inf
        alone gives the first id that has one.
        """
        way, warm_up = self._ways(head, hidden)
        if warm_up is not None:
            self._tokens_by(warm_up, head, hidden)
        return self._tokens_by(way, head, hidden)

    def _tokens_by(self, way: str, head: Head, hidden: Any) -> Any:
        if way == FULL:
            taken, logits = self._gathered(head, hidden, "get_top_tokens by the full gather")
            return taken.give_back(self.target_tokens(full_argmax(logits)))
        if self.fused:
            return self._fused_tokens(head, hidden)
        if isinstance(head, ParallelLMHead):
            taken = None

            def compute() -> Any:
                nonlocal taken
                taken = arrays.given(hidden, "hidden")
                heads_of(head, self.comm, self._ids)
                return head.product(taken.array)

            tokens = top_tokens.tokens_of_computed(
                compute, head.shard, self.comm, self.layout, self.backend, self.transform
            )
        else:
            taken, heads, parts, error = None, None, None, None
            try:
                taken = arrays.given(hidden, "hidden")
                heads = heads_of(head, self.comm, self._ids)
                parts = [one.product(taken.array) for one in heads]
            except Exception as failure:  # told to the other ranks, should there be any: then it is none of a list
                error = failure
            agree(self.comm, {}, error)
            tokens = emulate_top_tokens(
                parts, heads[0].shards, layout=self.layout, backend=self.backend, transform=self.transform
            )
        return taken.give_back(self.target_tokens(tokens))

    def choose(self, head: Head, rows: int) -> Choice:
        """Which way ``get_top_tokens`` goes for so many rows, and why. ``ValueError`` for a switch made elsewhere."""
        one = one_of(head)
        if self.mode != "auto":
            return Choice(FULL if self.mode == "full" else LOCAL, f"mode {self.mode!r} was asked for")
        return self.switch.choose(
            rows, hidden_size=one.hidden_size, vocab_size=one.shard.vocab_size, place=self.place(head),
            captured=bool(_capturing(one.weight)),
        )  # fmt: skip

    def place(self, head: Head) -> Place:
        """What a switch has to be made for to hold for this processor with this head."""
        one = one_of(head)
        host = arrays.is_host(one.weight)
        backend = "fused" if self.fused else self.backend or ("numpy" if host else "raw")
        device = device_name(None if host else one.weight.device.id)
        transport = getattr(self.comm, "transport", type(self.comm).__name__)
        version = versions(nccl_version() if transport == "nccl" else None)
        hosts, gpus = (getattr(self.comm, name, None) for name in ("hosts", "gpus"))
        return Place(
            version, kernels.digest(), device, transport, hosts, gpus, len(one.shards), str(one.weight.dtype), backend,
            self.layout,
        )  # fmt: skip

    def _ways(self, head: Head, hidden: Any) -> tuple[str, str | None]:
        """The way of a call, and one to be gone once before it; the same on every rank, or an error on every rank.

        A call outside a capture is what warms up for the same call inside, whose way may be the other one: at the first
        call of a kind that one's kernels are compiled too, as a capture could not.
        """
        if self.mode == "local":
            return LOCAL, None
        way, other, error = LOCAL, None, None
        try:
            heads_of(head, self.comm, self._ids)
            rows, one = len(hidden), one_of(head)
            way = self.choose(head, rows).way
            kind = rows, one.hidden_size, one.shard.vocab_size
            if self.mode == "auto" and kind not in self._warmed and _capturing(one.weight) is False:
                other = self.switch.captured_way(*kind)
                self._warmed.add(kind)
        except Exception as failure:  # told to the other ranks, then raised
            error = failure
        if error is not None:
            agree(self.comm, {}, error)
        return way, None if other == way else other

    def _gathered(self, head: Head, hidden: Any, function: str) -> tuple[Any, Any]:
        """Hidden states as they were given, and all logits of the head's ids; the checks of ``function`` before."""
        taken, parts, error = None, None, None
        try:
            taken = arrays.given(hidden, "hidden")
            heads = heads_of(head, self.comm, self._ids)
            parts = [self._transformed(one.product(taken.array)) for one in heads]
        except Exception as failure:  # told to the other ranks, then raised
            error = failure
        facts = {}
        if error is None:
            facts = {
                "function": function,
                "rows": len(parts[0]),
                "dtype": str(parts[0].dtype),
                "transform": str(self.transform),
                "vocab_size": heads[0].shard.vocab_size,
                "arrays": arrays.namespace(parts[0]).__name__,
            }
        agree(self.comm, facts, error)
        return taken, full_logits(parts, heads[0].shards, self.comm)

    def _fused_tokens(self, head: Head, hidden: Any) -> Any:
        taken = None

        def compute() -> Any:
            """The candidates of the played ranks, [ranks * B, 1]."""
            nonlocal taken
            taken = arrays.given(hidden, "hidden")
            heads, rows = heads_of(head, self.comm, self._ids), len(taken.array)
            heads[0].check_fused(taken.array)
            gathered = arrays.namespace(taken.array).empty((len(heads) * rows, 1), np.uint64)
            for rank, one in enumerate(heads):
                one.candidates(taken.array, self.transform, gathered[rank * rows : (rank + 1) * rows])
            return gathered

        if isinstance(head, ParallelLMHead):
            dtype = head.weight.dtype
            tokens = top_tokens.tokens_of_candidates(compute, head.shard, self.comm, dtype, self.transform)
        else:
            gathered, error = None, None
            try:
                gathered = compute()
            except Exception as failure:  # told to the other ranks, should there be any: then it is none of a list
                error = failure
            agree(self.comm, {}, error)
            tokens = pick_from_candidates(gathered, len(taken.array))
        return taken.give_back(self.target_tokens(tokens))

    @property
    def _ids(self) -> int | None:
        """Draft ids that the map has; None without one."""
        return None if self._targets is None else len(self._targets)

    def target_tokens(self, tokens: Any) -> Any:
        """The target's ids of a head's ids, int64 [B], NumPy or CuPy; without a map the same."""
        if self._targets is None:
            return tokens
        return arrays.namespace(tokens).take(self._targets_beside(tokens), tokens)

    def _transformed(self, logits: Any) -> Any:
        return logits if self.transform.is_identity else apply_transform(self.transform, logits)

    def _targets_beside(self, array: Any) -> Any:
        """The map in the memory of ``array``, copied there once: a graph could not copy from the host's."""
        if arrays.is_host(array):
            return self._targets
        device, cupy = array.device.id, arrays.namespace(array)
        if device not in self._targets_on:
            with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):  # not in that of a graph under way
                placed = cupy.asarray(self._targets)
            cupy.cuda.get_current_stream().synchronize()  # other streams use it from now on
            self._targets_on[device] = placed
        return self._targets_on[device]

    def _scattered(self, logits: Any) -> Any:
        """Logits of the head's ids as those of the target's."""
        if self._targets is None:
            return logits
        words = f"u{logits.itemsize}"  # not every library copies bf16
        infinity = np.array(-np.inf).astype(logits.dtype).view(words)
        xp = arrays.namespace(logits)
        scattered = xp.full((len(logits), self.target_vocab_size), infinity[()], words)
        scattered[:, self._targets_beside(logits)] = logits.view(words)
        return scattered.view(logits.dtype)


def _capturing(array: Any) -> bool | None:
    """Whether the current stream is being captured; None for host arrays, with which nothing is."""
    return None if arrays.is_host(array) else arrays.is_capturing()


def _targets_of(draft_to_target: Any, target_vocab_size: int | None) -> np.ndarray | None:
    """The target's id of each draft id, int64; None without a map."""
    if (draft_to_target is None) != (target_vocab_size is None):
        raise ValueError("draft_to_target and target_vocab_size go together: a map, and of how many ids it maps to")
    if draft_to_target is None:
        return None
    offsets = np.asarray(draft_to_target.get() if hasattr(draft_to_target, "get") else draft_to_target)
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise TypeError(f"draft_to_target is {offsets.dtype}{list(offsets.shape)}; integers [draft ids] are accepted")
    size = integer("target_vocab_size", target_vocab_size)
    targets = np.arange(len(offsets)) + offsets.astype(np.int64)
    if targets[0] < 0 or targets[-1] >= size or (np.diff(targets) <= 0).any():
        raise ValueError(
            f"draft_to_target leads to ids {targets.min()} to {targets.max()}; ascending ids from 0 to {size - 1} are "
            f"accepted: order the head's rows by target id, or ties would not fall as in the target's vocabulary"
        )
    return targets
