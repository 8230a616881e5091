"""The states of EAGLE-3 and DFlash drafters equal those of an engine that drafts, in every packing and with recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.objective import DraftsOnly
from tests.fakes.dflash_reference import DFlashReference
from tests.fakes.drafter_states import DEPTHS, assert_recomputation_changes_nothing, assert_states_equal, states
from tests.fakes.eagle3_reference import Eagle3Reference
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, sequences
from tests.fakes.toys import (
    DFLASH,
    EAGLE3,
    LLAMA_DFLASH,
    LLAMA_EAGLE3,
    QWEN3_DFLASH,
    QWEN3_EAGLE3,
    QWEN3_MOE_DFLASH,
    QWEN3_MOE_EAGLE3,
    toy_folder,
)

EAGLE3_MODELS = {
    "llama": LLAMA_EAGLE3,  # reads the states after the first, a middle and the last layer
    "qwen3": QWEN3_EAGLE3,
    "qwen3-moe": QWEN3_MOE_EAGLE3,
    "one boundary": {**LLAMA_EAGLE3, "drafter": {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [3], "num_aux_hidden_states": 1}},
}


@pytest.mark.parametrize("model", EAGLE3_MODELS)
def test_eagle3_states_equal_those_of_an_engine_that_drafts(tmp_path: Path, model: str) -> None:
    folder = HfFolder.open(toy_folder(EAGLE3_MODELS[model], tmp_path / "model", 0, "fp32"))
    assert_states_equal(folder, Eagle3Reference(dict(ModelWeights(folder.path)), folder.config).drafted)


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
def test_eagle3_recomputation_changes_neither_states_nor_gradients(tmp_path: Path, model: str) -> None:
    folder = HfFolder.open(toy_folder(EAGLE3_MODELS[model], tmp_path / "model", 0, "fp32"))
    assert_recomputation_changes_nothing(folder, ("selective", "full"))


DFLASH_MODELS = {
    "llama": LLAMA_DFLASH,  # reads the states after the first, a middle and the last layer
    "qwen3": QWEN3_DFLASH,
    "qwen3-moe": QWEN3_MOE_DFLASH,
    "one layer, one boundary": {
        **LLAMA_DFLASH,
        "drafter": {**DFLASH, "num_hidden_layers": 1, "dflash_config": {"mask_token_id": 9, "target_layer_ids": [2]}},
    },
}


@pytest.mark.parametrize("model", DFLASH_MODELS)
def test_dflash_states_equal_those_of_an_engine_that_drafts(tmp_path: Path, model: str) -> None:
    folder = HfFolder.open(toy_folder(DFLASH_MODELS[model], tmp_path / "model", 0, "fp32"))
    assert_states_equal(folder, DFlashReference(dict(ModelWeights(folder.path)), folder.config).block)


def test_reference_distinguishes_blocks_masks_and_boundaries(tmp_path: Path) -> None:
    """The test above would detect another number of drafts, another mask token, other boundaries and a lost first key."""
    folder = HfFolder.open(toy_folder(LLAMA_DFLASH, tmp_path / "model", 0, "fp32"))
    reference = DFlashReference(dict(ModelWeights(folder.path)), folder.config)
    ids = sequences(1, vocab=256)[0].token_ids.tolist()
    expected = reference.block(ids, 4, 2)[0]
    assert (reference.block(ids, 4, 3)[0] - expected).abs().max() > 1e-3
    assert (reference.block([ids[0] ^ 1, *ids[1:]], 4, 2)[0] - expected).abs().max() > 1e-3
    for own in ({"mask_token_id": 3, "target_layer_ids": [0, 1, 3]}, {"mask_token_id": 2, "target_layer_ids": [0, 2, 3]}):
        reference.config = {**folder.config, "drafter": {**DFLASH, "dflash_config": own}}
        assert (reference.block(ids, 4, 2)[0] - expected).abs().max() > 1e-2


def test_draft_does_not_see_the_tokens_that_it_predicts(tmp_path: Path) -> None:
    """Blocks at neighboring tokens overlap, but none sees states or inputs behind its first token."""
    folder = HfFolder.open(toy_folder(QWEN3_DFLASH, tmp_path / "model", 0, "fp32"))
    ids = sequences(1, vocab=256)[0].token_ids.tolist()
    position = 3
    others = [*ids[: position + 2], *(token ^ 1 for token in ids[position + 2 :])]
    with engine(folder, mtp=MtpConfig(repeat=DEPTHS)) as trainer:
        (first,), (second,) = states(trainer, [ids]), states(trainer, [others])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[: position + 1], other[: position + 1])
        assert (one[position + 1] - other[position + 1]).abs().max() > 1e-3


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_dflash_recomputation_changes_neither_states_nor_gradients(tmp_path: Path, model: str) -> None:
    folder = HfFolder.open(toy_folder(DFLASH_MODELS[model], tmp_path / "model", 0, "fp32"))
    assert_recomputation_changes_nothing(folder, ("full",))


def test_gradients_equal_those_of_the_reference(tmp_path: Path) -> None:
    """Cross-entropy of all drafts of two samples, in float64."""
    folder = HfFolder.open(toy_folder(LLAMA_DFLASH, tmp_path / "model", 0, "fp32"))
    batch = sequences(2, vocab=256)
    reference = DFlashReference(dict(ModelWeights(folder.path)), folder.config)
    drafter = {name: value.requires_grad_() for name, value in reference.weights.items() if name.startswith("drafter.")}
    losses: list[list[torch.Tensor]] = [[] for _ in range(DEPTHS)]
    for sample in batch:
        ids = sample.token_ids.tolist()
        trained = [False] * sample.prompt_length + sample.loss_mask.tolist()
        for position in range(len(ids) - 2):
            for draft, state in enumerate(reference.block(ids, position, DEPTHS)):
                target = position + 2 + draft
                if all(trained[position + 1 : target + 1]) and target < len(ids):
                    losses[draft].append(-(reference.weights["lm_head.weight"] @ state).log_softmax(-1)[ids[target]])
    means = [torch.stack(each).mean() for each in losses]
    torch.stack(means).mean().backward()
    with engine(folder, mtp=MtpConfig(repeat=DEPTHS, loss="ce", loss_scale=1.0, clip_grad=0)) as trainer:
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update(batch, DraftsOnly())
        grads = gradients(trainer)
    assert [metrics[f"mtp/loss_{depth}"] for depth in range(1, DEPTHS + 1)] == pytest.approx([each.item() for each in means], rel=1e-5)
    expected = {name: value.grad.float() for name, value in drafter.items() if value.grad is not None}
    assert expected.keys() == drafter.keys()
    assert_close({name: grads[name] for name in expected}, expected, 1e-5)
