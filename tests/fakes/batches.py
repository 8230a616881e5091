"""Microbatches of responses with given masks."""

from __future__ import annotations

from mtpctl.trainer.batch import MicroBatch, Sequence, pack


def packed(masks: list[list[int]], *, depths: int) -> MicroBatch:
    """Responses with these masks, each after a prompt of two tokens."""
    sequences = [Sequence([1] * (2 + len(mask)), 2, mask) for mask in masks]
    return pack(sequences, list(range(len(sequences))), depths, "cpu")
