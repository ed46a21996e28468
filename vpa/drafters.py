"""Drafters: what each family does between its step and its head, for both ways to a greedy token.

A drafter has a step and two hooks, all of which every rank calls:

    forward(token_ids, positions, hidden, step) -> (for the head, for the next step), both [B, hidden]
    compute_logits(hidden, step)                -> logits [B, vocabulary]
    get_top_tokens(hidden, step)                -> int64 [B], the argmax of compute_logits without gathering logits

``hidden`` of the hooks is the first of the two. The families differ in which norm that has had:

    family          step gives                     the head is applied to    token at position 0
    DeepSeek        pre-norm, norm(pre-norm)       norm(hidden)              embedded as zero
    DeepSeek-V3.2   norm(pre-norm), the same       hidden                    embedded as zero
    Nemotron-H      norm(pre-norm), the same       hidden                    as any other

A hook of the wrong form raises nothing and drafts other tokens: ``validate_local_argmax_reduction`` refuses what can be
seen from outside. Layers are those of ``vpa.mtp``: attention is out of scope.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa import arrays
from vpa.comm import agree
from vpa.linear import check_floats
from vpa.lm_head import Head, ParallelLMHead, gathered_bytes, one_of
from vpa.logits import LogitsProcessor
from vpa.mtp import MTPLayer, mixed, seeded_embedding
from vpa.plan import SPLITS
from vpa.vocab import VocabShard

#: Families of drafters.
FAMILIES = ("nemotron-h", "deepseek", "deepseek-v3.2")

#: Layers of DeepSeek-V3 before its MTP layers, whose numbers follow on.
DEEPSEEK_LAYERS = 61

#: Entries of a Nemotron-H pattern that an MTP step may have.
PATTERN = {"*": "attention", "E": "MoE"}


class FlatHeadMixin:
    """The hooks of a drafter whose step gives what its head takes: it owns ``lm_head`` and ``logits_processor``.

    Where the processor has a draft-to-target map, both hooks are in the target's ids.
    """

    lm_head: Head
    logits_processor: LogitsProcessor

    def head_of(self, step: int = 0) -> Head:
        """The head of a step."""
        return self.lm_head

    def compute_logits(self, hidden: Any, step: int = 0) -> Any:
        """Logits of all ids, [B, vocabulary]."""
        return self.logits_processor.compute_logits(self.lm_head, hidden)

    def compute_logits_local(self, hidden: Any, step: int = 0) -> Any:
        """This rank's part of the logits; a list of all ranks' where one process plays them."""
        return self.logits_processor.compute_logits_local(self.lm_head, hidden)

    def get_top_tokens(self, hidden: Any, step: int = 0) -> Any:
        """The argmax of ``compute_logits``, int64 [B]."""
        return self.logits_processor.get_top_tokens(self.lm_head, hidden)


@dataclass(frozen=True, eq=False)
class NemotronHMTP(FlatHeadMixin):
    """Nemotron-H's MTP drafter: its final norm is inside the step, and head and embedding are the target's.

    pattern: the layers of a step, ``*`` attention (left out here) and ``E`` MoE (here one expert, which takes every
        token), in order. layer: with one block for each ``E``. embedding: [vocabulary, hidden], whole on every rank.
    """

    pattern: str
    layer: MTPLayer
    embedding: Any
    lm_head: Head
    logits_processor: LogitsProcessor

    def __post_init__(self) -> None:
        experts = parse_mtp_pattern(self.pattern).count("MoE")
        if len(self.layer.blocks) != experts:
            raise ValueError(
                f"pattern {self.pattern!r} has {experts} MoE layers, the layer {len(self.layer.blocks)} blocks"
            )
        _check_parts(self.embedding, {0: self.layer}, {0: self.lm_head}, self.logits_processor)

    def forward(self, token_ids: Any, positions: Any, hidden: Any, step: int = 0) -> tuple[Any, Any]:
        """One step for token_ids and positions int64 [B] and the last hidden states [B, hidden]."""
        normed = self.layer.normed(self.layer(_rows_of(self.embedding, token_ids), hidden))
        return normed, normed


@dataclass(frozen=True, eq=False)
class _DeepSeek:
    """What DeepSeek's drafters share: step s uses layer ``start_layer + s % len(layers)``, and that layer's head.

    layers, heads: by number, from ``start_layer`` on. embedding: [vocabulary, hidden], whole on every rank.
    """

    start_layer: int
    layers: Mapping[int, MTPLayer]
    heads: Mapping[int, Head]
    embedding: Any
    logits_processor: LogitsProcessor

    def __post_init__(self) -> None:
        numbers = list(range(self.start_layer, self.start_layer + len(self.layers)))
        if not numbers or sorted(self.layers) != numbers or sorted(self.heads) != numbers:
            raise ValueError(
                f"layers {sorted(self.layers)} and heads {sorted(self.heads)}; both are numbered from start_layer "
                f"{self.start_layer} on, at least one"
            )
        _check_parts(self.embedding, self.layers, self.heads, self.logits_processor)

    def layer_of(self, step: int = 0) -> int:
        """The number of a step's layer."""
        return self.start_layer + step % len(self.layers)

    def head_of(self, step: int = 0) -> Head:
        """The head of a step."""
        return self.heads[self.layer_of(step)]

    def _pre_norm(self, token_ids: Any, positions: Any, hidden: Any, step: int) -> Any:
        embedding = _rows_of(self.embedding, token_ids)
        words = embedding.view(f"u{embedding.itemsize}")
        words *= (positions != 0)[:, None]  # the first token has no hidden state before it
        return self.layers[self.layer_of(step)](embedding, hidden)


class DeepSeekMTP(_DeepSeek):
    """DeepSeek's MTP drafter: the shared head of a step's layer is its final norm and then the head."""

    def forward(self, token_ids: Any, positions: Any, hidden: Any, step: int = 0) -> tuple[Any, Any]:
        """One step for token_ids and positions int64 [B] and the last hidden states [B, hidden]."""
        pre_norm = self._pre_norm(token_ids, positions, hidden, step)
        return pre_norm, self.layers[self.layer_of(step)].normed(pre_norm)

    def compute_logits(self, hidden: Any, step: int = 0) -> Any:
        """Logits of all ids, [B, vocabulary], from pre-norm hidden states."""
        return self.logits_processor.compute_logits(self.head_of(step), self._shared_norm(hidden, step))

    def compute_logits_local(self, hidden: Any, step: int = 0) -> Any:
        """This rank's part of the logits; a list of all ranks' where one process plays them."""
        return self.logits_processor.compute_logits_local(self.head_of(step), self._shared_norm(hidden, step))

    def get_top_tokens(self, hidden: Any, step: int = 0) -> Any:
        """The argmax of ``compute_logits``, int64 [B], from pre-norm hidden states."""
        return self.logits_processor.get_top_tokens(self.head_of(step), self._shared_norm(hidden, step))

    def _shared_norm(self, hidden: Any, step: int) -> Any:
        return self.layers[self.layer_of(step)].normed(hidden)


class DeepSeekV32MTP(_DeepSeek):
    """DeepSeek-V3.2's and GLM's MTP drafter on the fused path: its step ends with the final norm, its head has none."""

    def forward(self, token_ids: Any, positions: Any, hidden: Any, step: int = 0) -> tuple[Any, Any]:
        """One step for token_ids and positions int64 [B] and the last hidden states [B, hidden]."""
        normed = self.layers[self.layer_of(step)].normed(self._pre_norm(token_ids, positions, hidden, step))
        return normed, normed

    def compute_logits(self, hidden: Any, step: int = 0) -> Any:
        """Logits of all ids, [B, vocabulary], from post-norm hidden states."""
        return self.logits_processor.compute_logits(self.head_of(step), hidden)

    def compute_logits_local(self, hidden: Any, step: int = 0) -> Any:
        """This rank's part of the logits; a list of all ranks' where one process plays them."""
        return self.logits_processor.compute_logits_local(self.head_of(step), hidden)

    def get_top_tokens(self, hidden: Any, step: int = 0) -> Any:
        """The argmax of ``compute_logits``, int64 [B], from post-norm hidden states."""
        return self.logits_processor.get_top_tokens(self.head_of(step), hidden)


def parse_mtp_pattern(pattern: str) -> tuple[str, ...]:
    """The layers of a Nemotron-H MTP step, "attention" or "MoE"; ``ValueError`` for a pattern with others, or none."""
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"pattern is {pattern!r}; a text of '*' (attention) and 'E' (MoE) is accepted")
    for place, letter in enumerate(pattern):
        if letter not in PATTERN:
            raise ValueError(
                f"pattern {pattern!r} has {letter!r} at place {place}; an MTP step has '*' (attention) and 'E' (MoE), "
                f"no other layer"
            )
    return tuple(PATTERN[letter] for letter in pattern)


def seeded_drafter(
    family: str,
    shards: Sequence[VocabShard],
    processor: LogitsProcessor,
    *,
    rank: int | None = None,
    seed: int = 0,
    hidden_size: int = 256,
    intermediate_size: int = 512,
    num_layers: int = 1,
    dtype: Any = "bfloat16",
    library: Any = np,
    head: Head | None = None,
    embedding: Any = None,
) -> NemotronHMTP | DeepSeekMTP | DeepSeekV32MTP:
    """A drafter of seeded weights, which are the same however the vocabulary is cut.

    rank: whose head to make; None makes all ranks', for one process that plays them. num_layers: MTP layers of
    DeepSeek's families; Nemotron-H has one, of pattern ``*E``. head, embedding: for all layers, not seeded ones.
    ``ValueError`` for a family that is not in ``FAMILIES``.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; {', '.join(FAMILIES)} are accepted")
    sizes = {"hidden_size": hidden_size, "dtype": dtype, "library": library}

    def head_of(number: int) -> Head:
        if head is not None:
            return head
        made = [
            ParallelLMHead.seeded(mixed(seed, 0, number), shards, one, **sizes)
            for one in (range(len(shards)) if rank is None else (rank,))
        ]
        return made if rank is None else made[0]

    def layer(number: int) -> MTPLayer:
        return MTPLayer.seeded(mixed(seed, 1, number), intermediate_size=intermediate_size, **sizes)

    if embedding is None:
        ids = processor.target_vocab_size or shards[0].vocab_size
        embedding = seeded_embedding(mixed(seed, 2), ids, hidden_size, dtype, library)
    if family == "nemotron-h":
        return NemotronHMTP("*E", layer(0), embedding, head_of(0), processor)
    kind = DeepSeekMTP if family == "deepseek" else DeepSeekV32MTP
    numbers = range(DEEPSEEK_LAYERS, DEEPSEEK_LAYERS + num_layers)
    layers, heads = {number: layer(number) for number in numbers}, {number: head_of(number) for number in numbers}
    return kind(DEEPSEEK_LAYERS, layers, heads, embedding, processor)


@dataclass(frozen=True)
class DraftSettings:
    """What a local argmax for drafts depends on; what has a value other than these is refused.

    temperature: of drafts. tokens_per_position: more than one in a tree of drafts. The rest say what else is asked of
    draft logits: that verification or the user sees them; a LoRA over the head; anything that changes them by request
    (penalties, biases, bad or allowed words, grammars, custom processors).
    """

    temperature: float = 0.0
    tokens_per_position: int = 1
    draft_logits_needed: bool = False
    lora_on_head: bool = False
    request_logits_processing: bool = False


#: Below this temperature a request is greedy.
GREEDY_TEMPERATURE = 1e-5


def refusal(settings: DraftSettings) -> str:
    """Why drafts cannot be picked by the local argmax under these settings; empty if they can."""
    if settings.temperature >= GREEDY_TEMPERATURE:
        return f"drafts are sampled at temperature {settings.temperature:g}, which takes the logits of every id"
    if settings.tokens_per_position != 1:
        return f"{settings.tokens_per_position} tokens are drafted for a position; candidates name one"
    if settings.draft_logits_needed:
        return "draft logits are needed, by verification or for log probabilities, and are not gathered"
    if settings.lora_on_head:
        return "a LoRA adapts the head, and adds to logits that the hook does not see"
    if settings.request_logits_processing:
        return "requests change draft logits (penalties, biases, grammars), which no rank has whole"
    return ""


def validate_local_argmax_reduction(drafter: Any, settings: DraftSettings | None = None) -> None:
    """Raise ``ValueError`` unless the local argmax may pick this drafter's tokens; else log one line on this rank.

    Refused are a class without ``get_top_tokens``, one that changes ``compute_logits`` and inherits the hook, which
    then does not do the same before the head, and settings for which ``refusal`` has a reason. Every rank calls it.
    """
    processor = getattr(drafter, "logits_processor", None)
    error, name = None, type(drafter).__name__
    try:
        _check_hook(type(drafter))
        settings = DraftSettings() if settings is None else settings
        if not isinstance(settings, DraftSettings):
            raise TypeError(f"settings is a {type(settings).__name__}; a DraftSettings or None is accepted")
        reason = refusal(settings)
        if reason:
            raise ValueError(f"local argmax reduction cannot be used with {name}: {reason}; switch it off")
    except (TypeError, ValueError) as failure:
        error = failure
    if processor is None:
        if error is not None:
            raise error
        logging.getLogger("vpa").info("local argmax reduction in use for the drafts of %s", name)
        return
    agree(processor.comm, {"drafter": name, "settings": str(settings)}, error)
    logging.getLogger("vpa").info("rank %d: %s", processor.comm.rank, _in_use(drafter, name, processor))


def _check_hook(kind: type) -> None:
    """Raise unless a class has a hook of its own that is at least as far down as its ``compute_logits``."""
    depths = {}
    for hook in ("compute_logits", "get_top_tokens"):
        found = [depth for depth, base in enumerate(kind.__mro__) if callable(vars(base).get(hook))]
        if not found:
            raise ValueError(
                f"local argmax reduction needs {kind.__name__}.{hook}(hidden, step), which the class lacks; add it, or "
                f"switch local argmax reduction off"
            )
        depths[hook] = found[0]
    if depths["compute_logits"] < depths["get_top_tokens"]:
        changed, inherited = (kind.__mro__[depths[hook]].__name__ for hook in ("compute_logits", "get_top_tokens"))
        raise ValueError(
            f"{changed} has a compute_logits of its own and inherits get_top_tokens from {inherited}, which need not "
            f"do the same before the head: give {changed} its own get_top_tokens, or switch local argmax reduction off"
        )


def _in_use(drafter: Any, name: str, processor: LogitsProcessor) -> str:
    if not hasattr(drafter, "head_of"):
        return f"local argmax reduction in use for the drafts of {name}"
    head = drafter.head_of(0)
    one = one_of(head)
    numbers, dtype = arrays.LAYOUTS[processor.layout]
    splits, product = (1, " (fused product)") if processor.fused else (SPLITS, "")
    few, many = len(one.shards) * splits * numbers * dtype.itemsize, gathered_bytes(head, 1)
    return (
        f"local argmax reduction in use for the drafts of {name}{product}, "
        f"communication O(ranks) instead of O(vocabulary): about {few} bytes a row instead of {many}"
    )


def _rows_of(embedding: Any, token_ids: Any) -> Any:
    """A fresh [B, hidden] of the embedding's rows."""
    words = embedding.view(f"u{embedding.itemsize}")  # not every library indexes bf16
    return words[token_ids].view(embedding.dtype)


def _check_parts(
    embedding: Any, layers: Mapping[int, MTPLayer], heads: Mapping[int, Head], processor: LogitsProcessor
) -> None:
    """Raise unless embedding, layers and heads have one hidden size, one library, and ids that are all embedded."""
    check_floats("embedding", embedding, 2)
    if not isinstance(processor, LogitsProcessor):
        raise TypeError(f"logits_processor is a {type(processor).__name__}; a LogitsProcessor is accepted")
    vocab_size, hidden_size = embedding.shape
    for number, layer in layers.items():
        check_floats(f"layer {number}", layer.final_norm, 1, like=embedding)
        played = [heads[number]] if isinstance(heads[number], ParallelLMHead) else list(heads[number])
        sizes = [("layer", layer.hidden_size), *(("head", head.hidden_size) for head in played)]
        for what, size in sizes:
            if size != hidden_size:
                raise ValueError(f"{what} {number} has hidden size {size}, the embedding {hidden_size}")
        ids = processor.target_vocab_size or played[0].shard.vocab_size
        if ids > vocab_size:
            raise ValueError(f"head {number} drafts {ids} ids; the embedding has {vocab_size} rows, one for each id")
