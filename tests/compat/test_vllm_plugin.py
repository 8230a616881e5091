"""vLLM finds the plugin, and with it MiMo folders and the weight receiver."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from mtpctl.compat.vllm_plugin import TRANSFER_BACKEND, register
from mtpctl.compat.vllm_version import PINNED, installed


def test_the_entry_point_is_installed() -> None:
    (found,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "mtpctl")
    assert found.load() is register


def test_the_pinned_release_is_installed() -> None:
    assert installed() == PINNED


def test_registering_twice_is_harmless() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    from mtpctl.sync.vllm_receiver import ManifestTransferEngine

    assert WeightTransferEngineFactory._registry[TRANSFER_BACKEND]() is ManifestTransferEngine


@pytest.mark.parametrize("model_type", ["mimo", "qwen2"])
def test_mimo_folders_have_a_configuration(tmp_path: object, model_type: str) -> None:
    from pathlib import Path

    from transformers import AutoConfig

    from tests.rollout.checkpoints import random_tensors, tiny_config, write_checkpoint

    config = tiny_config(model_type=model_type)
    register()
    folder = write_checkpoint(Path(str(tmp_path)), config, random_tensors(config, 0))
    read = AutoConfig.from_pretrained(folder)
    assert (read.model_type, read.num_nextn_predict_layers, read.architectures) == (model_type, 1, ["MiMoForCausalLM"])
