"""The plan of a scan: how many candidates a row gives, as a pure function of facts that all ranks have alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Candidates of one rank's row where no plan is made: on the CPU, and by default in ``local_argmax_candidates``.
SPLITS = 8

#: Threads of a block that takes a split, and 16-byte loads that each has in flight at most. On one H200 a block that
#: holds its split in registers, 256 x 4 loads, 16 KiB, was the fastest or within 3 % of it from 64 rows on.
THREADS = 256
LOADS = 4

#: The most threads of a block: where a block takes a whole row.
MAX_THREADS = 1024

#: Blocks of a multiprocessor among which rows and splits are spread thin, before a thread takes more than one load. Few
#: rows leave most of a GPU idle: bf16 [1, 32768] took 1.79 us in 16 blocks of one load a thread, 1.87 in 8 of two.
BLOCKS_PER_MULTIPROCESSOR = 4

#: Splits end here: the pick and the gather take more candidates per row from then on, and the scan gains nothing.
MAX_SPLITS = 64


@dataclass(frozen=True)
class Plan:
    """What decides on splits. columns: valid columns of the widest shard. itemsize: bytes of a logit.
    multiprocessors: the fewest of any rank's GPU; 0 where a rank has none, and then all rows are cut in ``SPLITS``."""

    columns: int
    itemsize: int
    multiprocessors: int

    @classmethod
    def agreed(cls, ranks: Sequence[tuple[int, int]] | None, itemsize: int) -> Plan:
        """The plan from all ranks' (valid columns, multiprocessors); from None, where ranks could not tell each other,
        the one that needs neither."""
        if ranks is None:
            return cls(0, itemsize, 0)
        return cls(max(columns for columns, _ in ranks), itemsize, min(count for _, count in ranks))

    def splits(self, rows: int) -> int:
        """Candidates that each of ``rows`` rows gives.

        The fewest loads a thread, 1, 2 or 4, with which the blocks of all rows stay within
        ``BLOCKS_PER_MULTIPROCESSOR``; 4 where none does.
        """
        if not self.multiprocessors:
            return SPLITS
        for loads in (1, 2):
            splits = self._splits(loads)
            if rows * splits <= BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors:
                return splits
        return self._splits(LOADS)

    def in_one_kernel(self) -> bool:
        """Whether a block takes a whole row and holds it in registers: then one rank needs no pick. On one H200, bf16
        [1, 32768], that took 1.8 us, and the scan and the pick 1.3 and 0.8; a row of twice the bytes took 2.5."""
        return self.multiprocessors > 0 and self.columns * self.itemsize <= 16 * LOADS * MAX_THREADS

    def most_candidates(self, max_rows: int) -> int:
        """The most candidates that any number of rows up to ``max_rows`` gives."""
        if not self.multiprocessors:
            return max_rows * SPLITS
        few_rows = min(BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors, max_rows * self._splits(1))
        return max(few_rows, max_rows * self._splits(LOADS))

    def _splits(self, loads: int) -> int:
        words = -(-self.columns * self.itemsize // 16)
        return min(max(-(-words // (THREADS * loads)), 1), MAX_SPLITS)
