"""Invalid input is rejected in one line; an update that is not finite is skipped and changes nothing."""

from __future__ import annotations

import math

import pytest
import torch

from mtpctl.errors import UserError
from mtpctl.kernels.candidates import CandidateTerm
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.rl.losses import candidate_kl
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.objective import NextToken
from tests.fakes.tiny import GENTLE, engine, mimo, sequences


@pytest.mark.parametrize(
    ("ids", "prompt", "mask", "message"),
    [
        ([1, 2, 3], 3, [], "a prompt and a response; it has 3 and 0 tokens"),
        ([1, 2, 3], 0, [1, 1, 1], "a prompt and a response; it has 0 and 3 tokens"),
        ([1, 2, 3], 1, [1], "loss_mask has 1 entries for 2 response tokens"),
    ],
)
def test_sequence_without_prompt_or_response_is_rejected(ids, prompt, mask, message):
    with pytest.raises(UserError, match=message):
        Sequence(ids, prompt, mask)


def test_column_of_wrong_length_is_rejected():
    with pytest.raises(UserError, match="old has 3 entries for 2"):
        Sequence([1, 2, 3], 1, [1, 1], {"old": [0.0, 0.0, 0.0]})


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (Sequence([1, 2, 64], 1, [1, 1]), "sequence 1 has token id 64, but the vocabulary has 64; check that model.tokenizer"),
        (Sequence([-1, 2, 3], 1, [1, 1]), "sequence 1 has token id -1"),
        (Sequence([1] * 129, 1, [1] * 128), "sequence 1 has 129 tokens, but the model's max_position_embeddings is 128"),
    ],
)
def test_tokens_outside_the_model_are_rejected(tmp_path, sequence, message):
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.set_optimizer(GENTLE)
        before = {name: value.clone() for name, value in trainer.export()}
        for call in (lambda batch: trainer.update(batch, NextToken()), trainer.score):
            with pytest.raises(UserError, match=message):
                call([*sequences(1), sequence])
        assert all(value.equal(before[name]) for name, value in trainer.export())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3, "dp": 1}, r"train.parallel.tp: 3 does not fit mimo's 4 attention heads and 2 key-value heads; these do: \[1, 2, 4\]"),
        ({"pp": 2, "pp_layout": [1, 2]}, r"pp_layout: \[1, 2\] must list 2 stages with 2 layers"),
        ({"pp": 3}, "train.parallel.pp: 3 stages for 2 layers; set it to at most 2"),
        ({"ep": 2, "dp": 2}, "train.parallel.ep: 2 does not divide the 0 experts of mimo"),
    ],
)
def test_layout_that_does_not_divide_the_model_is_rejected(tmp_path, layout, message):
    from types import SimpleNamespace

    from mtpctl.model.build import complete_config

    shape = mimo(tmp_path / "model").shape
    with pytest.raises(UserError, match=message):
        complete_config(
            SimpleNamespace(moe_router_num_groups=None), shape, parallel=ParallelConfig(**layout), precision="fp32", mtp=MtpConfig()
        )


class TestNonFiniteUpdate:
    """NaN in the forward pass, in the loss, or in a gradient."""

    def test_nan_weight_skips_the_step(self, tmp_path):
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.set_optimizer(GENTLE)
            with torch.no_grad():
                trainer.module.decoder.layers[0].mlp.linear_fc2.weight[0, 0] = torch.nan
            assert skipped(trainer, NextToken())

    def test_nan_loss_skips_the_step(self, tmp_path):
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.set_optimizer(GENTLE)
            assert skipped(trainer, Broken())

    @pytest.mark.parametrize("mode", ["off", "isolated"])
    def test_infinite_loss_with_finite_gradients_skips_the_step(self, tmp_path, mode):
        with engine(mimo(tmp_path / "model"), mtp=MtpConfig(mode=mode)) as trainer:
            trainer.set_optimizer(GENTLE)
            assert skipped(trainer, InfiniteConstant())

    def test_nan_candidate_loss_with_finite_gradients_skips_the_step(self, tmp_path):
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.set_optimizer(GENTLE)
            assert skipped(trainer, ImpossibleCandidate())

    def test_infinite_mtp_weight_skips_the_step(self, tmp_path):
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.set_optimizer(GENTLE)
            with torch.no_grad():
                trainer.module.mtp.layers[0].eh_proj.weight[0, 0] = torch.inf
            assert skipped(trainer, NextToken())

    def test_skipped_update_does_not_affect_later_ones(self, tmp_path):
        """A skipped update does not affect later ones."""
        folder, losses = mimo(tmp_path / "model"), []
        for broken in (False, True):
            with engine(folder) as trainer:
                trainer.set_optimizer(GENTLE)
                trainer.update(sequences(), NextToken())
                if broken:
                    assert trainer.update(sequences(seed=1), Broken())["skipped"] == 1.0
                losses.append([trainer.update(sequences(), NextToken())["sft/loss"] for _ in range(3)])
        assert losses[0] == losses[1]


class Broken(NextToken):
    def token_loss(self, micro):
        loss = super().token_loss(micro)

        def broken(*tokens):
            value, sums = loss(*tokens)
            return value * math.nan, sums

        return broken


class InfiniteConstant(NextToken):
    def token_loss(self, micro):
        loss = super().token_loss(micro)

        def infinite(*tokens):
            value, sums = loss(*tokens)
            return value + math.inf, sums

        return infinite


class ImpossibleCandidate(NextToken):
    """Forward KL to a teacher that gives its only candidate the probability 0: the loss is NaN, and the gradient is that of the rest."""

    def candidates(self, micro):
        ids = torch.ones(len(micro.labels), 1, dtype=torch.long)
        return CandidateTerm(
            ids, micro.mask, lambda named, rest, rows: candidate_kl("forward", named, rest, torch.full_like(named, -math.inf))
        )

    def metrics(self, sums):
        return {"actor/teacher_kl": sums["teacher_kl"]}


def skipped(trainer, objective):
    """Whether an update reports finite metrics, takes no step, and changes no weight."""
    before = {name: value.clone() for name, value in trainer.module.named_parameters()}
    metrics = trainer.update(sequences(), objective)
    retained = all(torch.equal(value.nan_to_num(), before[name].nan_to_num()) for name, value in trainer.module.named_parameters())
    finite = all(math.isfinite(value) for value in metrics.values())
    return metrics["skipped"] == 1.0 and trainer.optimizer.steps == 0 and retained and finite
