"""vLLM finds the plugin, and with it MiMo folders and the weight receiver, in engines that are ours and in no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rollout.vllm import plugin
from mtpctl.rollout.vllm.patches.guard import PINNED, installed
from mtpctl.rollout.vllm.plugin import OURS, TRANSFER_BACKEND, install, register
from mtpctl.rollout.vllm.settings import engine_settings
from tests.fakes.engine_checkpoints import random_tensors, tiny_config, write_checkpoint


def test_the_entry_point_is_installed() -> None:
    (result,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "mtpctl")
    assert result.load() is register


def test_the_pinned_release_is_installed() -> None:
    assert installed() == PINNED


@pytest.mark.parametrize(
    ("process", "threads", "method"), [("EngineCore", "1", "fork"), ("EngineCore", "8", "spawn"), ("MainProcess", "1", "spawn")]
)
def test_only_cores_with_one_thread_fork_workers(process: str, threads: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    plugin.fork_workers(process)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == method


PROGRAM = """
import json, sys
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils
from vllm.v1.engine.core import EngineCore
from mtpctl.rollout.vllm.patches import guard

model, ours = sys.argv[1:]
real, found = guard.installed, []
for release, backend in (("0.33.0", None), ("0.33.0", ours), (real(), ours)):
    guard.installed = lambda: release
    transfer = None if backend is None else {"backend": backend}
    try:
        EngineArgs(model, skip_tokenizer_init=True, weight_transfer_config=transfer).create_model_config()
        error = ""
    except Exception as raised:
        error = str(raised)
    kept = hasattr(utils.dispatch_cpu_unquantized_gemm, "__wrapped__")
    found.append([kept, hasattr(EngineCore, "mtpctl_partial_outputs"), "mimo" in CONFIG_MAPPING, error])
print(json.dumps(found))
"""


def test_only_engines_with_our_weight_transfer_are_patched(tmp_path: Path) -> None:
    """Of a process of somebody's, by release and who asks: whether weights stay on a CPU, our calls are there, MiMo is known; the error."""
    config = tiny_config(model_type="qwen2")
    folder = write_checkpoint(tmp_path, config, random_tensors(config, 0))
    outside = {name: value for name, value in os.environ.items() if name != OURS} | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", PROGRAM, str(folder), TRANSFER_BACKEND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=outside)
    others, moved, ours = json.loads(done.stdout.splitlines()[-1])
    assert others[1:] == [False, False, ""]
    assert moved[:3] == others[:3] and f"was written for vLLM {PINNED}, found 0.33.0" in moved[3]
    assert ours[1:] == [True, True, ""]
    if current_platform.is_cpu():
        assert ours[0] and not others[0]


def test_processes_of_our_engines_are_marked_by_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    monkeypatch.setattr(plugin, "install", lambda: done.append(True))
    monkeypatch.setenv(OURS, "1")
    register()
    assert done == [True]
    assert engine_settings(VllmConfig(), model="m", precision="fp32", device="cpu").environment[OURS] == "1"


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
