"""Patches of megatron-core do what they are for, and raise an error if upstream has moved."""

from __future__ import annotations

import importlib
import queue
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.ssm.gated_delta_net import common

from mtpctl.compat import megatron_core
from mtpctl.compat.megatron_core import ROUTER_UPDATE_FUNCTIONS, fuse_gradient_accumulation, without_router_updates

FINALIZE = importlib.import_module("megatron.core.distributed.finalize_model_grads")

IMPORT = """
import sys
import torch
import mtpctl.model
import megatron.core.transformer
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
print("torch._inductor.compile_fx" in sys.modules, hasattr(bias_swiglu, "_torchdynamo_orig_callable"))

@torch.compile(backend="eager")
def own(x):
    return x + 1

print(hasattr(own, "_torchdynamo_orig_callable"), own(torch.ones(1)).item())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU megatron-core's functions are compiled")
def test_only_functions_of_megatron_core_are_not_compiled() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORT], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-2:] == ["False False", "True 2.0"]


def test_checkpoint_results_stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    megatron_core.use_local_queue()
    assert isinstance(filesystem_async.get_write_results_queue(), queue.Queue)


def test_writer_without_its_queue_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(filesystem_async, "_results_queue")
    with pytest.raises(RuntimeError, match="_results_queue"):
        megatron_core.use_local_queue()


def test_flash_linear_attention_is_not_required_within_the_block_only() -> None:
    before = common.HAVE_FLA
    with megatron_core.without_flash_linear_attention():
        assert common.HAVE_FLA is True
    assert common.HAVE_FLA is before


def test_delta_net_without_its_flag_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(common, "HAVE_FLA")
    with pytest.raises(RuntimeError, match="HAVE_FLA"), megatron_core.without_flash_linear_attention():
        pass


@pytest.mark.parametrize("name", ROUTER_UPDATE_FUNCTIONS)
def test_router_search_is_skipped_within_the_block_only(name: str) -> None:
    before = getattr(FINALIZE, name)
    with pytest.raises(KeyError), without_router_updates():
        assert getattr(FINALIZE, name)(None, [object()], tp_dp_cp_group=None) is None
        raise KeyError
    assert getattr(FINALIZE, name) is before


@pytest.mark.parametrize("name", ROUTER_UPDATE_FUNCTIONS)
def test_renamed_router_search_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    upstream = {each: getattr(FINALIZE, each) for each in ROUTER_UPDATE_FUNCTIONS}
    monkeypatch.delattr(FINALIZE, name)
    with pytest.raises(RuntimeError, match=f"no longer updates routers by {name}"), without_router_updates():
        pass
    assert all(getattr(FINALIZE, each) is upstream[each] for each in ROUTER_UPDATE_FUNCTIONS if each != name)


def test_weight_gradients_are_passed_with_states_and_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)
    monkeypatch.setattr(layers, "get_tensor_model_parallel_group_if_none", lambda group: group)
    weight = torch.randn(3, 5, requires_grad=True)
    weight.main_grad = torch.zeros(3, 5)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    calls: list[tuple[torch.Tensor, ...]] = []
    layer = torch.nn.Module()
    vars(layer)["gradient_accumulation_fusion"] = False
    fuse_gradient_accumulation([layer], lambda *arguments: calls.append(arguments))
    assert vars(layer)["gradient_accumulation_fusion"]
    x, grad = torch.randn(4, 1, 5, requires_grad=True), torch.randn(4, 1, 3)
    output = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, None, True, False, False, tp_group=SimpleNamespace())
    output.backward(grad)
    ((buffer, of_output, states),) = calls
    assert buffer is weight.main_grad  # type: ignore[attr-defined]
    assert torch.equal(of_output, grad.flatten(0, 1)) and torch.equal(states, x.detach().flatten(0, 1))
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_layers_without_gradient_fusion_are_rejected() -> None:
    with pytest.raises(RuntimeError, match="no longer use"):
        fuse_gradient_accumulation([torch.nn.Linear(2, 2)], lambda *_: None)
