"""Random weights: ranks that share a part of a parameter get equal values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from megatron.core import parallel_state

from mtpctl.model.build import init_random_weights

RANKS = {
    "get_tensor_model_parallel_rank": "tp",
    "get_pipeline_model_parallel_rank": "pp",
    "get_expert_tensor_parallel_rank": "etp",
    "get_expert_model_parallel_rank": "ep",
}


def drawn(monkeypatch: pytest.MonkeyPatch, **at: int) -> dict[str, torch.Tensor]:
    """The weights of a rank, for a model with a parameter of every kind. `at`: rank per axis."""
    for function, axis in RANKS.items():
        monkeypatch.setattr(parallel_state, function, partial(at.get, axis, 0))
    model = torch.nn.Module()
    model.embedding = torch.nn.Module()
    model.embedding.word_embeddings = torch.nn.Embedding(6, 4)
    model.split, model.router, model.expert = (torch.nn.Linear(4, 6) for _ in range(3))
    for linear in (model.embedding.word_embeddings, model.split, model.expert):
        linear.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    # As megatron-core marks it with expert parallelism.
    model.expert.weight.allreduce = False  # type: ignore[attr-defined]
    init_random_weights(model, seed=3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    return {name.split(".")[0] for name in a if name.endswith("weight") and torch.equal(a[name], b[name])}


def test_ranks_that_share_a_part_draw_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn(monkeypatch)
    assert alike(first, drawn(monkeypatch)) == {"embedding", "split", "router", "expert"}
    assert alike(first, drawn(monkeypatch, tp=1, ep=1)) == {"router"}
    # With tp 4, dp 2 and ep 2 the third rank has the first one's experts.
    assert alike(first, drawn(monkeypatch, tp=2)) == {"router", "expert"}
    assert alike(first, drawn(monkeypatch, ep=1)) == {"embedding", "split", "router"}
    assert alike(first, drawn(monkeypatch, pp=1)) == {"embedding"}


def test_biases_are_zero_and_matrices_small_and_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = drawn(monkeypatch)
    assert not actual["split.bias"].any()
    matrices = [value for name, value in actual.items() if name.endswith("weight")]
    assert len({matrix.flatten()[0].item() for matrix in matrices}) == len(matrices)
    assert 0 < actual["router.weight"].abs().max() < 0.2
