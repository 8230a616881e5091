"""Weight gradients of megatron-core's linear layers: who is asked for them, and what happens once nobody is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mtpctl.compat.weight_gradients import fill_buffers


def test_upstream_hands_over_states_gradient_and_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)
    monkeypatch.setattr(layers, "get_tensor_model_parallel_group_if_none", lambda group: group)
    weight = torch.randn(3, 5, requires_grad=True)
    weight.main_grad = torch.zeros(3, 5)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    given: list[tuple[torch.Tensor, ...]] = []
    layer = torch.nn.Module()
    vars(layer)["gradient_accumulation_fusion"] = False
    fill_buffers([layer], lambda *arguments: given.append(arguments))
    assert vars(layer)["gradient_accumulation_fusion"]
    x, grad = torch.randn(4, 1, 5, requires_grad=True), torch.randn(4, 1, 3)
    made = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, None, True, False, False, tp_group=SimpleNamespace())
    made.backward(grad)
    ((buffer, of_output, states),) = given
    assert buffer is weight.main_grad  # type: ignore[attr-defined]
    assert torch.equal(of_output, grad.flatten(0, 1)) and torch.equal(states, x.detach().flatten(0, 1))
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_layers_that_no_longer_ask_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no longer take"):
        fill_buffers([torch.nn.Linear(2, 2)], lambda *_: None)
