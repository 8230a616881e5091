"""How much of its cards an update used: model FLOP/s over their peak (MFU, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from mtpctl.engine.batch import Sequence
from mtpctl.families import ModelShape
from mtpctl.plan.flops import card_peak, countable, step_flops


def utilisation(
    shape: ModelShape, sequences: list[Sequence], drafts: list[int], *, isolated: bool, seconds: float, card: str, cards: int
) -> float | None:
    """Share of the bf16 peak of `cards` cards that an update of all weights on `sequences` used in `seconds`; recomputation does not count.

    `drafts`: supervised tokens of each MTP depth that is trained. None for a card whose peak is not known, and for a model whose
    operations are not counted.
    """
    peak = card_peak(card)
    if peak is None or not countable(shape):
        return None
    rows = sum(sum(s.loss_mask) for s in sequences)
    return step_flops(shape, [len(s.token_ids) for s in sequences], rows, drafts, isolated=isolated) / (seconds * cards * peak)
