"""What each rank gives to the gather of a verification, as a pure function of facts that all ranks have alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vpa.vocab import VocabShard, block_span

#: ``candidate``: the candidates of a scan, of every row. ``blocks``: the best of each block of ids, of every draft
#: position and bonus row. Blocks lie at multiples of their size in the vocabulary, whatever the shards are.
FORMS = ("candidate", "blocks")

#: Ids of a block, for the row that a draft is judged against, and for the bonus row.
DRAFT_BLOCK = 8192
BONUS_BLOCK = 1024


@dataclass(frozen=True)
class Contribution:
    """The candidates, 8 bytes each, that a rank gives for some rows and requests.

    draft_width: for a row that a draft is judged against. bonus_width: for a request's last row. In the form
    ``candidate`` a line is a row of logits; in ``blocks`` it is a request, with ``num_draft_tokens`` draft positions
    one after another, then its bonus row: drafts that it has not are "no candidate".
    """

    form: str
    num_draft_tokens: int
    draft_width: int
    bonus_width: int

    @classmethod
    def agreed(
        cls, form: str, num_draft_tokens: int, splits: int, spans: Sequence[tuple[int, int]] | None, vocab_size: int
    ) -> Contribution:
        """splits: candidates of a row, as planned. spans: of all ranks, as ``blocks_of`` gives them; None where ranks
        could not tell each other, and then there is room for the whole vocabulary's blocks."""
        if form == "candidate":
            return cls(form, num_draft_tokens, splits, splits)
        if spans is None:
            spans = [(-(-vocab_size // DRAFT_BLOCK), -(-vocab_size // BONUS_BLOCK))]
        draft_width, bonus_width = (max(1, *counts) for counts in zip(*spans, strict=True))
        return cls(form, num_draft_tokens, draft_width, bonus_width)

    @property
    def line(self) -> int:
        """Candidates of a line."""
        if self.form == "candidate":
            return self.draft_width
        return self.num_draft_tokens * self.draft_width + self.bonus_width

    def shape(self, rows: int, requests: int) -> tuple[int, int]:
        """[lines, candidates of a line] of one rank."""
        return rows if self.form == "candidate" else requests, self.line


def blocks_of(shard: VocabShard) -> tuple[int, int]:
    """Blocks that a shard's ids lie in: of a draft position, and of a bonus row."""
    return block_span(shard, DRAFT_BLOCK)[1], block_span(shard, BONUS_BLOCK)[1]
