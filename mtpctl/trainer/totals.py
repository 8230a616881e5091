"""What an update's sequences come to, those of other ranks included: what losses are divided by."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from mtpctl.model.parallel import summed
from mtpctl.trainer.batch import Sequence


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over all sequences of an update: their tokens, the response tokens that are trained on, and of these those that each MTP
    depth can be asked to draft."""

    sequences: int
    tokens: int
    trained: int
    drafted: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Rows[Sequence], depths: int) -> Totals:
        """Those of these sequences."""
        drafted = tuple(sum(s.drafted(depth) for s in sequences) for depth in range(1, depths + 1))
        return cls(len(sequences), sum(len(s.token_ids) for s in sequences), sum(s.trained for s in sequences), drafted)

    def over_ranks(self) -> Totals:
        """The sums over the data-parallel ranks, each of which has its own sequences. All ranks call together."""
        sequences, tokens, trained, *drafted = map(int, summed([self.sequences, self.tokens, self.trained, *self.drafted]))
        return Totals(sequences, tokens, trained, tuple(drafted))
