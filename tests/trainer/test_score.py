"""Log-probs and entropies of responses match a plain reference, with and without MTP weights."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.objective import NextToken
from tests.fakes import mimo_reference
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences
from tests.fakes.trainer_cases import MODELS


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropies_match_the_reference(tmp_path, temperature):
    folder = mimo(tmp_path / "model")
    batch = sequences(12)
    weights = load_file(folder.path / "model.safetensors")
    with engine(folder, train=False, tokens_per_microbatch=50) as trainer:
        scored = trainer.score(batch, temperature=temperature)
    for sequence, scores in zip(batch, scored, strict=True):
        logits, _ = mimo_reference.forward(weights, folder.config, sequence.token_ids)
        logprobs = (logits / temperature).log_softmax(-1)[sequence.prompt_length - 1 : -1]
        labels = torch.tensor(sequence.token_ids[sequence.prompt_length :])
        torch.testing.assert_close(torch.tensor(scores.logprobs), logprobs.gather(1, labels[:, None])[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(scores.entropy), -(logprobs.exp() * logprobs).sum(-1), atol=1e-5, rtol=0)


def test_mtp_weights_do_not_change_scores(tmp_path):
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    batch = sequences(12)
    scored = []
    for mode in ("off", "load", "isolated"):
        with engine(folder, mtp=MtpConfig(mode=mode), train=mode == "isolated") as trainer:
            scored.append(trainer.score(batch))
    assert scored[0] == scored[1] == scored[2]


def test_scoring_no_sequence_returns_nothing(tmp_path):
    with engine(mimo(tmp_path / "model"), train=False) as trainer:
        assert trainer.score([]) == []


def test_scoring_needs_no_optimizer_and_creates_no_gradient(tmp_path):
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.score(sequences(3))
        assert not any(parameter.main_grad.any() for parameter in trainer.module.parameters())


def test_linear_attention_state_does_not_leak_between_samples(tmp_path):
    """Log-probs and gradients of packed samples, including MTP layers, match those of separate samples."""
    folder = mimo(tmp_path / "model", **MODELS["qwen3.5"], max_position_embeddings=256)
    draw = random.Random(2)
    batch = [Sequence([draw.randrange(61) for _ in range(length)], 1, [1] * (length - 1)) for length in (5, 64, 3, 129)]
    result = []
    for budget in (1, 4096):
        mtp = MtpConfig(mode="joint", loss_scale=0.3, clip_grad=0)
        with engine(folder, mtp=mtp, tokens_per_microbatch=budget) as trainer:
            assert len(trainer._micro_batches(batch, 0)) == (4 if budget == 1 else 1)
            scored = [scores.logprobs.tolist() for scores in trainer.score(batch)]
            trainer.set_optimizer(GENTLE)
            trainer.update(batch, NextToken())
            result.append((scored, gradients(trainer)))
    for alone, packed in zip(result[0][0], result[1][0], strict=True):
        assert packed == pytest.approx(alone, abs=2e-5)
    assert_close(result[1][1], result[0][1], 5e-5)
