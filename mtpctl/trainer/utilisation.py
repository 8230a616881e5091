"""How much of its cards an update used: model FLOP/s over their peak (MFU, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from mtpctl.families.shape import ModelShape
from mtpctl.plan.flops import card_peak, step_flops
from mtpctl.trainer.batch import Sequence


def utilisation(
    shape: ModelShape, sequences: list[Sequence], depths: int, *, isolated: bool, seconds: float, card: str, cards: int
) -> float | None:
    """Share of the bf16 peak of `cards` cards that an update of all weights on `sequences` used in `seconds`; recomputation does not count.

    `depths`: MTP depths that are trained. None for a card whose peak is not known.
    """
    peak = card_peak(card)
    if peak is None:
        return None
    return update_flops(shape, sequences, depths, isolated=isolated) / (seconds * cards * peak)


def update_flops(shape: ModelShape, sequences: list[Sequence], depths: int, *, isolated: bool) -> int:
    """Operations of a forward and backward pass over these sequences, with so many MTP depths trained. See `step_flops`."""
    rows, *drafts = (sum(s.drafted(depth) for s in sequences) for depth in range(depths + 1))
    return step_flops(shape, [len(s.token_ids) for s in sequences], rows, drafts, isolated=isolated)
