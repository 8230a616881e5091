"""MiMo's logits and its MTP logits against a plain reference, packed and alone."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.model.packing import Packing
from mtpctl.recipe.model import MtpConfig
from tests.fakes import mimo_reference
from tests.fakes.tiny import engine, mimo, sequences


def packed_logits(made, ids, depths):
    """Logits of the trunk and of each depth, split into samples again."""
    flat = torch.tensor([token for sample in ids for token in sample])
    with torch.no_grad():
        hidden = made.module(flat, Packing.of([len(sample) for sample in ids], "cpu"), depths=depths)
        return [(state @ hidden.head.T).split([len(sample) for sample in ids]) for state in (hidden.trunk, *hidden.mtp)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depths", [1, 2, 3])
def test_logits_of_trunk_and_every_depth(tmp_path, depths, tied):
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=depths, tie_word_embeddings=tied)
    weights = load_file(folder.path / "model.safetensors")
    ids = [s.token_ids.tolist() for s in sequences(6)]
    with engine(folder) as made:
        trunk, *mtp = packed_logits(made, ids, depths)
    for number, sample in enumerate(ids):
        logits, drafts = mimo_reference.forward(weights, folder.config, sample, depths)
        torch.testing.assert_close(trunk[number], logits, atol=1e-5, rtol=0)
        for depth, draft in enumerate(drafts, start=1):
            torch.testing.assert_close(mtp[depth - 1][number][: len(sample) - depth], draft, atol=1e-5, rtol=0)


def test_depths_of_a_repeated_layer_are_the_steps_of_a_drafter(tmp_path):
    """Also where a sample is packed behind another one, and at every position from which it can draft three tokens."""
    folder = mimo(tmp_path / "model")
    weights = load_file(folder.path / "model.safetensors")
    other, ids = (sequences(3)[place].token_ids for place in (1, 2))
    with engine(folder, mtp=MtpConfig(mode="load", repeat=3)) as made:
        _, *depths = packed_logits(made, [other, ids], 3)
    for position in range(len(ids) - 3):
        steps = mimo_reference.drafted(weights, folder.config, ids, position, 3)
        for depth, step in zip(depths, steps, strict=True):
            torch.testing.assert_close(depth[1][position], step, atol=1e-5, rtol=0)


def test_reference_tells_the_two_states_and_orders_apart(tmp_path):
    """The test above would see MTP fed the normed state, or its halves swapped: either moves the logits by far more than 1e-5."""
    folder = mimo(tmp_path / "model")
    weights = load_file(folder.path / "model.safetensors")
    ids = sequences(1)[0].token_ids
    (right,) = mimo_reference.forward(weights, folder.config, ids, 1)[1]
    swapped = dict(weights)
    swapped["model.mtp_layers.0.input_proj.weight"] = weights["model.mtp_layers.0.input_proj.weight"].roll(32, dims=1)
    assert (mimo_reference.forward(swapped, folder.config, ids, 1)[1][0] - right).abs().max() > 0.1
    with engine(folder) as made:
        made.module.mtp_reads_prenorm = False
        _, mtp = packed_logits(made, [ids], 1)
    assert (mtp[0][:-1] - right).abs().max() > 0.1


def test_mtp_off_builds_no_mtp(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder, mtp=MtpConfig(mode="off")) as made:
        assert not [name for name, _ in made.module.named_parameters() if "mtp" in name]
        assert not [name for name, _ in made.export() if "mtp" in name]


def test_exported_tensors_are_those_of_the_folder(tmp_path):
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    weights = load_file(folder.path / "model.safetensors")
    with engine(folder, mtp=MtpConfig(mode="load")) as made:
        exported = dict(made.export())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
