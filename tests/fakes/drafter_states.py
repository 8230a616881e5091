"""Checks of an EAGLE-3 or DFlash drafter: states equal those of an engine, and recomputation changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal

import pytest
import torch
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.model.packing import Packing
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import DraftsOnly
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, sequences

DEPTHS = 3
Recompute = Literal["none", "selective", "full"]


def states(trainer: MegatronEngine, samples: list[list[int]]) -> list[list[Tensor]]:
    """The drafter's states of each sample, by depth."""
    lengths = [len(sample) for sample in samples]
    flat = torch.tensor([token for sample in samples for token in sample])
    with torch.no_grad():
        hidden = trainer.module(flat, Packing.of(lengths, "cpu"), depths=DEPTHS)
    return [list(parts) for parts in zip(*(state.split(lengths) for state in hidden.mtp), strict=True)]


def assert_states_equal(folder: HfFolder, drafted: Callable[[list[int], int, int], Iterable[Tensor]]) -> None:
    """At every position from which all drafts can be verified, of a sample alone and packed behind another.

    drafted: the states of the drafts that an engine makes after the token at a position of a sample, by depth. The trainer also exports
    the folder's weights unchanged.
    """
    other, ids = (sequences(3, vocab=256)[index].token_ids.tolist() for index in (1, 2))
    with engine(folder, mtp=MtpConfig(repeat=DEPTHS)) as trainer:
        (alone,), (_, packed) = states(trainer, [ids]), states(trainer, [other, ids])
        folder_weights = ModelWeights(folder.path)
        exported = dict(trainer.export())
    assert exported.keys() == folder_weights.keys() and all(torch.equal(exported[name], folder_weights[name]) for name in exported)
    for position in range(len(ids) - DEPTHS - 1):
        for depth, expected in enumerate(drafted(ids, position, DEPTHS)):
            for trained in (alone, packed):
                torch.testing.assert_close(trained[depth][position].double(), expected, atol=1e-5, rtol=0)


def assert_recomputation_changes_nothing(folder: HfFolder, modes: Sequence[Recompute]) -> None:
    """States are equal, metrics and gradients to 1e-6, and only the drafter has gradients."""
    batch = sequences(5, vocab=256)

    def results(recompute: Recompute) -> tuple[list[Tensor], dict[str, float], dict[str, Tensor]]:
        mtp = MtpConfig(repeat=DEPTHS, loss="soft_ce", clip_grad=0)
        with engine(folder, mtp=mtp, recompute=recompute, tokens_per_microbatch=40) as trainer:
            by_sample = states(trainer, [sequence.token_ids.tolist() for sequence in batch])
            trainer.set_optimizer(GENTLE)
            metrics = trainer.update(batch, DraftsOnly())
            numbers = {name: value for name, value in metrics.items() if not name.startswith("timing_s/")}
            return list(chain(*by_sample)), numbers, gradients(trainer)

    stored, metrics, grads = results("none")
    assert all(bool(grad.any()) == name.startswith("drafter.") for name, grad in grads.items()), "the trunk has no gradient"
    for mode in modes:
        recomputed, recomputed_metrics, recomputed_grads = results(mode)
        assert all(torch.equal(one, other) for one, other in zip(stored, recomputed, strict=True))
        assert recomputed_metrics == pytest.approx(metrics, rel=1e-6)
        assert_close(recomputed_grads, grads, 1e-6)
