"""Logits of several samples in one packed forward pass."""

from __future__ import annotations

import torch

from mtpctl.model.packing import Packing


def packed_logits(trainer, ids, depths):
    """Logits of the trunk and of each depth, split into samples."""
    flat = torch.tensor([token for sample in ids for token in sample])
    with torch.no_grad():
        hidden = trainer.module(flat, Packing.of([len(sample) for sample in ids], "cpu"), depths=depths)
        return [(state @ hidden.head.T).split([len(sample) for sample in ids]) for state in (hidden.trunk, *hidden.mtp)]
