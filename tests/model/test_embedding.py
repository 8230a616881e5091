"""Embeddings: rows of the weight, and their gradients in its buffer alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtpctl.recipe.model import MtpConfig
from tests.fakes.tiny import engine, mimo


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_all_places_of_a_token_are_added_to_its_row(tmp_path: Path, tied: bool) -> None:
    with engine(mimo(tmp_path, tie_word_embeddings=tied), mtp=MtpConfig(mode="off")) as made:
        layer = made.module.embedding.word_embeddings
        weight = layer.weight
        weight.main_grad.fill_(1.0)
        ids = torch.tensor([[3, 1, 3, 0]])
        rows = layer(ids)
        assert torch.equal(rows, weight.detach()[ids])
        grad = torch.arange(float(rows.numel())).view_as(rows)
        rows.backward(grad)
        right = torch.ones_like(weight.main_grad)
        for place, token in enumerate(ids[0].tolist()):
            right[token] += grad[0, place]
        assert torch.equal(weight.main_grad, right) and weight.grad is None
