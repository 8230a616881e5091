"""Gradients of one update never reach a later one, whether buffers are zeroed or overwritten."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, sequences
from tests.fakes.toys import TOYS, toy_folder

FEW = 21
"""Tokens per microbatch: several microbatches per update, and some experts without a row."""


def folder(path: Path, family: str, **fields: object) -> HfFolder:
    return HfFolder.open(toy_folder(TOYS[family] | fields, path, 0, "fp32"))


def poisoned(trainer: MegatronEngine) -> None:
    """Run an update, and fill all gradient buffers with NaN."""
    trainer.forward_backward(sequences(seed=3), NextToken())
    for parameter in trainer.module.parameters():
        parameter.main_grad.fill_(torch.nan)  # type: ignore[attr-defined]


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("tokens", [FEW, 4096])
@pytest.mark.parametrize("family", ["glm4-moe", "mimo"])
def test_second_update_has_the_gradients_of_a_first_one(tmp_path: Path, family: str, tokens: int, distributed_optimizer: bool) -> None:
    result = []
    for again in (False, True):
        options = {"tokens_per_microbatch": tokens, "distributed_optimizer": distributed_optimizer}
        with engine(folder(tmp_path / f"{again}", family), mtp=MtpConfig(mode="joint"), **options) as trainer:
            trainer.set_optimizer(GENTLE)
            if again:
                poisoned(trainer)
            trainer.forward_backward(sequences(), NextToken())
            result.append(gradients(trainer))
    assert_close(result[1], result[0], 1e-7)


def test_experts_of_unused_layers_have_no_gradient(tmp_path: Path) -> None:
    with engine(folder(tmp_path / "model", "glm4-moe"), mtp=MtpConfig(mode="isolated")) as trainer:
        trainer.trains_mtp = False
        trainer.set_optimizer(GENTLE)
        poisoned(trainer)
        trainer.forward_backward(sequences(), NextToken())
        grads = {name: p.main_grad for name, p in trainer.module.named_parameters()}
    resting: dict[str, Tensor] = {name: grad for name, grad in grads.items() if name.startswith("mtp.")}
    assert any(".experts." in name for name in resting)
    assert all(not grad.any() for grad in resting.values())
    assert all(torch.isfinite(grad).all() for grad in grads.values())


def test_closed_engine_is_freed_after_training_and_export(tmp_path: Path) -> None:
    """Its process groups are freed too, whose threads would otherwise slow down later tests."""
    with engine(folder(tmp_path / "model", "mimo"), mtp=MtpConfig(mode="joint")) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.update(sequences(), NextToken())
        gradients(trainer)
        model = weakref.ref(trainer.gradients.model)
    del trainer
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("family", ["glm4-moe", "mimo"])
def test_only_buffers_that_are_not_overwritten_are_zeroed(tmp_path: Path, family: str) -> None:
    with engine(folder(tmp_path / "model", family), mtp=MtpConfig(mode="joint")) as trainer:
        trainer.set_optimizer(GENTLE)
        sizes = []
        for _ in range(2):
            trainer.forward_backward(sequences(), NextToken())
            trainer.gradients.clear(1)
            sizes.append(sum(part.numel() for part in trainer.gradients._zeroed))
        weights = dict(trainer.module.named_parameters())
    zeroed = [name for name, p in weights.items() if p.dim() == 1 or name.endswith(("word_embeddings.weight", "router.weight"))]
    assert sizes[0] == sizes[1] == sum(weights[name].numel() for name in zeroed)
