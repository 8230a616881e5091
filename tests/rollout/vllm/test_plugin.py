"""vLLM finds the plugin, and with it MiMo folders and the weight receiver, in engines that are ours and in no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rollout.vllm import plugin
from mtpctl.rollout.vllm.patches import PINNED, installed_release
from mtpctl.rollout.vllm.plugin import ENGINE_MARKER, TRANSFER_BACKEND, install, register
from mtpctl.rollout.vllm.settings import build_engine_settings
from tests.environment import TREE
from tests.fakes.engine_checkpoints import random_tensors, tiny_config, write_checkpoint


def test_the_entry_point_is_installed() -> None:
    (result,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "mtpctl")
    assert result.load() is register


def test_the_pinned_release_is_installed() -> None:
    assert installed_release() == PINNED


@pytest.mark.parametrize(
    ("process", "threads", "method"), [("EngineCore", "1", "fork"), ("EngineCore", "8", "spawn"), ("MainProcess", "1", "spawn")]
)
def test_only_cores_with_one_thread_fork_workers(process: str, threads: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    plugin.fork_workers(process)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == method


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `tests.fakes.patched_process` prints, in a process that vLLM's plugins have not patched before."""
    config = tiny_config(model_type="qwen2")
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), config, random_tensors(config, 0))
    outside = {name: value for name, value in os.environ.items() if name != ENGINE_MARKER} | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, "-m", "tests.fakes.patched_process", str(folder), TRANSFER_BACKEND]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=280, check=False, env=outside)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_only_engines_with_our_weight_transfer_are_patched(outputs: Any) -> None:
    others, moved, ours = outputs[0]
    assert others[1:] == [False, False, ""]
    assert moved[:3] == others[:3] and f"was written for vLLM {PINNED}, found 0.33.0" in moved[3]
    assert ours[1:] == [True, True, ""]
    if current_platform.is_cpu():
        assert ours[0] and not others[0]


def test_all_patches_apply_together_as_on_a_gpu(outputs: Any) -> None:
    """A patch that wraps what another one has wrapped still finds its arguments."""
    assert len(outputs[1]) == 2
    for parameters, answer, buffer in outputs[1]:
        assert {"input_batch", "seeds", "dummy_run", "num_speculative_tokens"} <= set(parameters)
        assert answer == [[-1] * 3] * 2
        assert buffer == [[-1] * 3] * 2 + [[0] * 3] * 2


def test_processes_of_our_engines_are_marked_by_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    monkeypatch.setattr(plugin, "install", lambda: done.append(True))
    monkeypatch.setenv(ENGINE_MARKER, "1")
    register()
    assert done == [True]
    assert build_engine_settings(VllmConfig(), model="m", precision="fp32", device="cpu").environment[ENGINE_MARKER] == "1"


def test_installing_twice_is_harmless() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    install()
    install()
    from mtpctl.rollout.vllm.receiver import ManifestTransferEngine

    assert WeightTransferEngineFactory._registry[TRANSFER_BACKEND]() is ManifestTransferEngine


@pytest.mark.parametrize("model_type", ["mimo", "qwen2"])
def test_mimo_folders_have_a_configuration(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig

    config = tiny_config(model_type=model_type)
    install()
    folder = write_checkpoint(tmp_path, config, random_tensors(config, 0))
    read = AutoConfig.from_pretrained(folder)
    assert (read.model_type, read.num_nextn_predict_layers, read.architectures) == (model_type, 1, ["MiMoForCausalLM"])
