"""Trunk and MTP logits of MiMo against a plain reference, for packed and single samples; embedding gradients."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.objective import NextToken
from tests.fakes import mimo_reference
from tests.fakes.packed_logits import packed_logits
from tests.fakes.tiny import GENTLE, MIMO, engine, mimo, sequences
from tests.fakes.toys import LLAMA_EAGLE3, toy_folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depths", [1, 2, 3])
def test_trunk_and_mtp_logits_match_the_reference(tmp_path, depths, tied):
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=depths, tie_word_embeddings=tied)
    weights = load_file(folder.path / "model.safetensors")
    ids = [s.token_ids.tolist() for s in sequences(6)]
    with engine(folder) as trainer:
        trunk, *mtp = packed_logits(trainer, ids, depths)
    for number, sample in enumerate(ids):
        logits, drafts = mimo_reference.forward(weights, folder.config, sample, depths)
        torch.testing.assert_close(trunk[number], logits, atol=1e-5, rtol=0)
        for depth, draft in enumerate(drafts, start=1):
            torch.testing.assert_close(mtp[depth - 1][number][: len(sample) - depth], draft, atol=1e-5, rtol=0)


def test_repeated_layer_depths_match_drafting_steps(tmp_path):
    """Also for a sample packed behind another, at every position from which three tokens can be drafted."""
    folder = mimo(tmp_path / "model")
    weights = load_file(folder.path / "model.safetensors")
    other, ids = (sequences(3)[index].token_ids for index in (1, 2))
    with engine(folder, mtp=MtpConfig(mode="load", repeat=3)) as trainer:
        _, *depths = packed_logits(trainer, [other, ids], 3)
    for position in range(len(ids) - 3):
        steps = mimo_reference.drafted(weights, folder.config, ids, position, 3)
        for depth, step in zip(depths, steps, strict=True):
            torch.testing.assert_close(depth[1][position], step, atol=1e-5, rtol=0)


def test_reference_distinguishes_state_and_input_order(tmp_path):
    """The test above would detect MTP reading the normed state, or swapped input halves: either changes logits by far more than 1e-5."""
    folder = mimo(tmp_path / "model")
    weights = load_file(folder.path / "model.safetensors")
    ids = sequences(1)[0].token_ids
    (expected,) = mimo_reference.forward(weights, folder.config, ids, 1)[1]
    swapped = dict(weights)
    swapped["model.mtp_layers.0.input_proj.weight"] = weights["model.mtp_layers.0.input_proj.weight"].roll(32, dims=1)
    assert (mimo_reference.forward(swapped, folder.config, ids, 1)[1][0] - expected).abs().max() > 0.1
    with engine(folder) as trainer:
        trainer.module.mtp_reads_prenorm = False
        _, mtp = packed_logits(trainer, [ids], 1)
    assert (mtp[0][:-1] - expected).abs().max() > 0.1


@pytest.mark.parametrize("model", [MIMO, LLAMA_EAGLE3], ids=["mimo", "eagle3"])
def test_states_of_a_failed_pass_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict) -> None:
    folder = HfFolder.open(toy_folder(model, tmp_path / "model", 0, "fp32"))

    def states() -> int:
        gc.collect()
        return sum(isinstance(x, torch.Tensor) and x.shape[1:] == (1, folder.shape.hidden) for x in gc.get_objects())

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    with engine(folder, mtp=MtpConfig(repeat=1)) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.update(sequences(), NextToken())
        before = states()
        monkeypatch.setattr(trainer.module.decoder.final_layernorm, "forward", fail)
        with pytest.raises(MemoryError):
            trainer.update(sequences(), NextToken())
        assert states() == before


def test_mtp_off_builds_no_mtp(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        assert not [name for name, _ in trainer.module.named_parameters() if "mtp" in name]
        assert not [name for name, _ in trainer.export() if "mtp" in name]


def test_exported_tensors_equal_the_checkpoint(tmp_path):
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    weights = load_file(folder.path / "model.safetensors")
    with engine(folder, mtp=MtpConfig(mode="load")) as trainer:
        exported = dict(trainer.export())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_gradients_of_repeated_tokens_accumulate_in_the_buffer(tmp_path: Path, tied: bool) -> None:
    with engine(mimo(tmp_path, tie_word_embeddings=tied), mtp=MtpConfig(mode="off")) as trainer:
        layer = trainer.module.embedding.word_embeddings
        weight = layer.weight
        weight.main_grad.fill_(1.0)
        ids = torch.tensor([[3, 1, 3, 0]])
        rows = layer(ids)
        assert torch.equal(rows, weight.detach()[ids])
        grad = torch.arange(float(rows.numel())).view_as(rows)
        rows.backward(grad)
        expected = torch.ones_like(weight.main_grad)
        for index, token in enumerate(ids[0].tolist()):
            expected[token] += grad[0, index]
        assert torch.equal(weight.main_grad, expected) and weight.grad is None
