"""Sizes of published models' heads, hidden size and vocabulary, by name, with where they are stated."""

from __future__ import annotations

from dataclasses import dataclass

from vpa.order import MAX_VOCAB_SIZE

#: The widest hidden state that is accepted for a head of one's own.
MAX_HIDDEN_SIZE = 16384


@dataclass(frozen=True)
class Shape:
    """A head's sizes. hidden_size: None where the source states the vocabulary alone. source: where they are stated."""

    name: str
    hidden_size: int | None
    vocab_size: int
    source: str


#: Each from the ``config.json`` that the model's publisher has on huggingface.co, by the keys ``hidden_size`` and
#: ``vocab_size``, unless the source says otherwise.
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("glm-5.2", 6144, 154880, "zai-org/GLM-5.2"),
        Shape("deepseek-v3", 7168, 129280, "deepseek-ai/DeepSeek-V3"),
        Shape("llama-3-8b", 4096, 128256, "meta-llama/Meta-Llama-3-8B"),
        Shape("qwen3-32b", 5120, 151936, "Qwen/Qwen3-32B"),
        Shape("minimax-m3", None, 200064, "MiniMaxAI/MiniMax-M3's vocabulary; its hidden size is not kept here"),
        Shape(
            "gemma-3-12b", 3840, 262144, "google/gemma-3-12b-pt; the tokenizer's ids, its embedding has 64 rows more"
        ),
    )
}


def shape_of(text: str) -> Shape:
    """The shape of a name, or of ``HIDDENxVOCAB``, as 4096x128256; ``ValueError`` for another text."""
    if text in SHAPES:
        return SHAPES[text]
    hidden, cross, vocab = text.partition("x")
    if cross and all(number.isascii() and number.isdigit() and len(number) < 12 for number in (hidden, vocab)):
        if 1 <= int(hidden) <= MAX_HIDDEN_SIZE and 1 <= int(vocab) <= MAX_VOCAB_SIZE:
            return Shape(text, int(hidden), int(vocab), "given")
        raise ValueError(
            f"shape {text!r}: hidden sizes from 1 to {MAX_HIDDEN_SIZE} and vocabularies from 1 to {MAX_VOCAB_SIZE} are "
            f"accepted"
        )
    raise ValueError(f"shape {text!r} is not known; {', '.join(SHAPES)}, or HIDDENxVOCAB as 4096x128256, are accepted")
