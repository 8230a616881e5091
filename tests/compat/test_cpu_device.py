"""Without a GPU, calls for the CUDA device return the CPU."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from mtpctl.compat import cpu_device
from mtpctl.model.parallel import ProcessGroups, Rank
from mtpctl.recipe.section import ParallelConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is replaced")


def test_factories_create_cpu_tensors():
    cpu_device.install()
    tensors = [torch.zeros(2, device="cuda"), torch.tensor([1.0], device=0), torch.empty(1, device=torch.device("cuda"), pin_memory=True)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert torch.zeros(1, device="meta").device.type == "meta"


def test_moves_to_cuda_return_the_object_itself():
    cpu_device.install()
    tensor, layer = torch.ones(1), torch.nn.Linear(1, 1)
    assert tensor.cuda() is tensor
    assert layer.cuda() is layer
    assert torch.cuda.current_device() == torch.device("cpu")


def test_installing_twice_wraps_once():
    cpu_device.install()
    zeros = torch.zeros
    cpu_device.install()
    assert torch.zeros is zeros


def test_cuda_streams_are_no_ops_on_a_cpu():
    cpu_device.install()
    with torch.cuda.stream(torch.cuda.Stream()) as stream:
        stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()


def test_cuda_type_names_apply_within_the_block_only():
    with cpu_device.use_cuda_type_names():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.int64).dtype == torch.int64
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_purposes_of_a_single_rank_share_a_group():
    with ProcessGroups(Rank(), ParallelConfig()):
        groups = [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group(with_context_parallel=True)]
        assert groups[0] is groups[1] is not torch.distributed.group.WORLD
        first = groups[0]
    with ProcessGroups(Rank(), ParallelConfig()):
        assert parallel_state.get_tensor_model_parallel_group() is not first
        total = torch.ones(2)
        torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        assert total.tolist() == [1, 1]


def test_megatron_core_without_create_group_is_rejected(monkeypatch):
    monkeypatch.delattr(parallel_state, "create_group")
    with pytest.raises(RuntimeError, match="create_group"), cpu_device.share_single_rank_groups():
        pass


def test_dispatcher_without_its_function_is_rejected(monkeypatch):
    from megatron.core.transformer.moe import token_dispatcher

    monkeypatch.delattr(token_dispatcher, "maybe_move_tensor_to_cpu")
    with pytest.raises(RuntimeError, match="maybe_move_tensor_to_cpu"):
        cpu_device._patch_split_sizes()


def test_device_contexts_apply_after_the_installation():
    cpu_device.install()
    with torch.device("meta"):
        assert torch.empty(1).device.type == torch.nn.Linear(1, 1).weight.device.type == "meta"
