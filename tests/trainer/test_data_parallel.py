"""Gradient buffers: what they hold of an earlier update reaches no later one, whether it is zeroed or replaced."""

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
"""Tokens of a micro-batch: several an update, and some experts without a row."""


def folder(path: Path, family: str, **fields: object) -> HfFolder:
    return HfFolder.open(toy_folder(TOYS[family] | fields, path, 0, "fp32"))


def poisoned(made: MegatronEngine) -> None:
    """An update that leaves gradients behind, and then NaN wherever gradients lie."""
    made.forward_backward(sequences(seed=3), NextToken())
    for parameter in made.module.parameters():
        parameter.main_grad.fill_(torch.nan)  # type: ignore[attr-defined]


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("tokens", [FEW, 4096])
@pytest.mark.parametrize("family", ["glm4-moe", "mimo"])
def test_second_update_has_the_gradients_of_a_first_one(tmp_path: Path, family: str, tokens: int, distributed_optimizer: bool) -> None:
    found = []
    for again in (False, True):
        options = {"tokens_per_microbatch": tokens, "distributed_optimizer": distributed_optimizer}
        with engine(folder(tmp_path / f"{again}", family), mtp=MtpConfig(mode="joint"), **options) as made:
            made.set_optimizer(GENTLE)
            if again:
                poisoned(made)
            made.forward_backward(sequences(), NextToken())
            found.append(gradients(made))
    assert_close(found[1], found[0], 1e-7)


def test_experts_of_unused_layers_have_no_gradient(tmp_path: Path) -> None:
    with engine(folder(tmp_path / "model", "glm4-moe"), mtp=MtpConfig(mode="isolated")) as made:
        made.trains_mtp = False
        made.set_optimizer(GENTLE)
        poisoned(made)
        made.forward_backward(sequences(), NextToken())
        grads = {name: p.main_grad for name, p in made.module.named_parameters()}
    resting: dict[str, Tensor] = {name: grad for name, grad in grads.items() if name.startswith("mtp.")}
    assert any(".experts." in name for name in resting)
    assert all(not grad.any() for grad in resting.values())
    assert all(torch.isfinite(grad).all() for grad in grads.values())


def test_closed_engine_is_freed_after_training_and_export(tmp_path: Path) -> None:
    """Process groups go with it, whose threads would take more time than the tests."""
    with engine(folder(tmp_path / "model", "mimo"), mtp=MtpConfig(mode="joint")) as made:
        made.set_optimizer(GENTLE)
        made.update(sequences(), NextToken())
        gradients(made)
        model = weakref.ref(made.gradients.model)
    del made
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("family", ["glm4-moe", "mimo"])
def test_only_buffers_that_are_not_overwritten_are_zeroed(tmp_path: Path, family: str) -> None:
    with engine(folder(tmp_path / "model", family), mtp=MtpConfig(mode="joint")) as made:
        made.set_optimizer(GENTLE)
        sizes = []
        for _ in range(2):
            made.forward_backward(sequences(), NextToken())
            made.gradients.clear()
            sizes.append(sum(part.numel() for part in made.gradients._zeroed))
        weights = dict(made.module.named_parameters())
    zeroed = [name for name, p in weights.items() if p.dim() == 1 or name.endswith(("word_embeddings.weight", "router.weight"))]
    assert sizes[0] == sizes[1] == sum(weights[name].numel() for name in zeroed)
