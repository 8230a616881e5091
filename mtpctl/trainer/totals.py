"""The counts over all sequences of an update, those of other ranks included, by which losses are divided."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from mtpctl.model.parallel import summed
from mtpctl.trainer.batch import Sequence


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over all sequences of an update. `trained`: response tokens that are trained on; `drafted`: those of them that each MTP depth
    can be asked to draft."""

    sequences: int
    tokens: int
    trained: int
    drafted: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Rows[Sequence], depths: int) -> Totals:
        """The counts over these sequences alone. depths: MTP layers."""
        drafted = tuple(sum(s.drafted(depth) for s in sequences) for depth in range(1, depths + 1))
        return cls(len(sequences), sum(len(s.token_ids) for s in sequences), sum(s.trained for s in sequences), drafted)

    def over_ranks(self) -> Totals:
        """The counts summed over the data-parallel ranks, each of which has sequences of its own. A collective: all ranks call it."""
        sequences, tokens, trained, *drafted = map(int, summed([self.sequences, self.tokens, self.trained, *self.drafted]))
        return Totals(sequences, tokens, trained, tuple(drafted))
