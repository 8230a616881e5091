"""Sequences of samples, as a trainer rank gets them from its share."""

from __future__ import annotations

from collections.abc import Sequence as Collection

import numpy as np

from mtpctl.samples import Sample
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.share import Share


def sequences_of(samples: Collection[Sample]) -> list[Sequence]:
    """The sequences of a share that has all of these samples."""
    tokens = np.array([sample.num_sampled for sample in samples], np.int32)
    return Share.of(samples, list(range(len(samples))), 0, [], tokens).sequences()
