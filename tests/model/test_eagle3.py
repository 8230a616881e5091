"""The states of an EAGLE-3 drafter equal those of an engine that drafts, in every packing and with recomputation."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Literal

import pytest
import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.model.packing import Packing
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import DraftsOnly
from tests.fakes.eagle3_reference import Eagle3Reference
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, sequences
from tests.fakes.toys import EAGLE3, LLAMA_EAGLE3, QWEN3_EAGLE3, QWEN3_MOE_EAGLE3, toy_folder

DEPTHS = 3
MODELS = {
    "llama": LLAMA_EAGLE3,  # reads the states after the first, a middle and the last layer
    "qwen3": QWEN3_EAGLE3,
    "qwen3-moe": QWEN3_MOE_EAGLE3,
    "one boundary": {**LLAMA_EAGLE3, "drafter": {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [3], "num_aux_hidden_states": 1}},
}


def states(trainer: MegatronEngine, samples: list[list[int]]) -> list[list[torch.Tensor]]:
    """The drafter's states of each sample, by depth."""
    lengths = [len(sample) for sample in samples]
    flat = torch.tensor([token for sample in samples for token in sample])
    with torch.no_grad():
        hidden = trainer.module(flat, Packing.of(lengths, "cpu"), depths=DEPTHS)
    return [list(parts) for parts in zip(*(state.split(lengths) for state in hidden.mtp), strict=True)]


@pytest.mark.parametrize("model", MODELS)
def test_states_equal_those_of_an_engine_that_drafts(tmp_path: Path, model: str) -> None:
    """At every position from which all drafts can be verified, of a sample alone and packed behind another."""
    folder = HfFolder.open(toy_folder(MODELS[model], tmp_path / "model", 0, "fp32"))
    reference = Eagle3Reference(dict(ModelWeights(folder.path)), folder.config)
    other, ids = (sequences(3, vocab=256)[index].token_ids.tolist() for index in (1, 2))
    with engine(folder, mtp=MtpConfig(repeat=DEPTHS)) as trainer:
        (alone,), (_, packed) = states(trainer, [ids]), states(trainer, [other, ids])
        folder_weights = ModelWeights(folder.path)
        exported = dict(trainer.export())
    assert exported.keys() == folder_weights.keys() and all(torch.equal(exported[name], folder_weights[name]) for name in exported)
    for position in range(len(ids) - DEPTHS - 1):
        for depth, expected in enumerate(reference.drafted(ids, position, DEPTHS)):
            for found in (alone, packed):
                torch.testing.assert_close(found[depth][position].double(), expected, atol=1e-5, rtol=0)


def test_reference_distinguishes_boundaries_and_positions(tmp_path: Path) -> None:
    """The test above would detect other boundaries and an attention that loses the first keys: both change states by far more."""
    folder = HfFolder.open(toy_folder(LLAMA_EAGLE3, tmp_path / "model", 0, "fp32"))
    reference = Eagle3Reference(dict(ModelWeights(folder.path)), folder.config)
    ids = sequences(1, vocab=256)[0].token_ids.tolist()
    expected = reference.drafted(ids, 4, 2)[1]
    assert (reference.drafted([ids[0] ^ 1, *ids[1:]], 4, 2)[1] - expected).abs().max() > 1e-3
    reference.config = {**folder.config, "drafter": {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    assert (reference.drafted(ids, 4, 2)[1] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_recomputation_changes_neither_states_nor_gradients(tmp_path: Path, model: str) -> None:
    folder = HfFolder.open(toy_folder(MODELS[model], tmp_path / "model", 0, "fp32"))
    batch = sequences(5, vocab=256)

    def results(recompute: Literal["none", "selective", "full"]) -> tuple[list[torch.Tensor], dict[str, float], dict[str, torch.Tensor]]:
        mtp = MtpConfig(repeat=DEPTHS, loss="soft_ce", clip_grad=0)
        with engine(folder, mtp=mtp, recompute=recompute, tokens_per_microbatch=40) as trainer:
            found = states(trainer, [sequence.token_ids.tolist() for sequence in batch])
            trainer.set_optimizer(GENTLE)
            metrics = trainer.update(batch, DraftsOnly())
            return (
                list(chain(*found)),
                {name: value for name, value in metrics.items() if not name.startswith("timing_s/")},
                gradients(trainer),
            )

    found, metrics, grads = results("none")
    assert all(bool(grad.any()) == name.startswith("drafter.") for name, grad in grads.items()), "the trunk has no gradient"
    for recompute in ("selective", "full"):
        again, again_metrics, again_grads = results(recompute)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        assert again_metrics == pytest.approx(metrics, rel=1e-6)
        assert_close(again_grads, grads, 1e-6)
