"""Log-probs and entropies of responses, against a plain reference, with MTP weights loaded or not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.recipe.model import MtpConfig
from tests.model import mimo_reference
from tests.trainer.tiny import engine, mimo, sequences


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropies(tmp_path, temperature):
    folder = mimo(tmp_path / "model")
    batch = sequences(12)
    weights = load_file(folder.path / "model.safetensors")
    with engine(folder, train=False, tokens_per_microbatch=50) as made:
        scored = made.score(batch, temperature=temperature)
    for sequence, scores in zip(batch, scored, strict=True):
        logits, _ = mimo_reference.forward(weights, folder.config, sequence.token_ids)
        logprobs = (logits / temperature).log_softmax(-1)[sequence.prompt_length - 1 : -1]
        labels = torch.tensor(sequence.token_ids[sequence.prompt_length :])
        torch.testing.assert_close(torch.tensor(scores.logprobs), logprobs.gather(1, labels[:, None])[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(scores.entropy), -(logprobs.exp() * logprobs).sum(-1), atol=1e-5, rtol=0)


def test_mtp_weights_change_no_bit(tmp_path):
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    batch = sequences(12)
    scored = []
    for mode in ("off", "load", "isolated"):
        with engine(folder, mtp=MtpConfig(mode=mode), train=mode == "isolated") as made:
            scored.append(made.score(batch))
    assert scored[0] == scored[1] == scored[2]


def test_nothing_to_score(tmp_path):
    with engine(mimo(tmp_path / "model"), train=False) as made:
        assert made.score([]) == []


def test_scoring_needs_no_optimizer_and_leaves_no_gradient(tmp_path):
    with engine(mimo(tmp_path / "model")) as made:
        made.score(sequences(3))
        assert not any(parameter.main_grad.any() for parameter in made.module.parameters())
