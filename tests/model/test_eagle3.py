"""The states of an EAGLE-3 drafter equal those of an engine that drafts, in every packing and with recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from tests.fakes.drafter_states import assert_recomputation_changes_nothing, assert_states_equal
from tests.fakes.eagle3_reference import Eagle3Reference
from tests.fakes.tiny import sequences
from tests.fakes.toys import EAGLE3, LLAMA_EAGLE3, QWEN3_EAGLE3, QWEN3_MOE_EAGLE3, toy_folder

MODELS = {
    "llama": LLAMA_EAGLE3,  # reads the states after the first, a middle and the last layer
    "qwen3": QWEN3_EAGLE3,
    "qwen3-moe": QWEN3_MOE_EAGLE3,
    "one boundary": {**LLAMA_EAGLE3, "drafter": {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [3], "num_aux_hidden_states": 1}},
}


@pytest.mark.parametrize("model", MODELS)
def test_states_equal_those_of_an_engine_that_drafts(tmp_path: Path, model: str) -> None:
    folder = HfFolder.open(toy_folder(MODELS[model], tmp_path / "model", 0, "fp32"))
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
def test_recomputation_changes_neither_states_nor_gradients(tmp_path: Path, model: str) -> None:
    folder = HfFolder.open(toy_folder(MODELS[model], tmp_path / "model", 0, "fp32"))
    assert_recomputation_changes_nothing(folder, ("selective", "full"))
