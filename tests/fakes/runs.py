"""Small recipes, run directories, prompts and model folders for jobs and commands."""

from __future__ import annotations

import asyncio
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cluster.bundles import Bundles
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from mtpctl.plan.placement import Placement
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.checkpoint_folders import write_checkpoint
from tests.fakes.tiny import MIMO

CONFIG: dict[str, Any] = {**MIMO, "vocab_size": 320}


def sparse_folder(path: Path, config: dict[str, Any] = CONFIG, **sizes: tuple[int, ...]) -> Path:
    """A folder whose weights have headers of the right sizes and take no room on the disk; `sizes` replace shapes of the config."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in {**tensor_shapes(shape_of(config)), **sizes}.items():
        nbytes = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return path


SMALL = (
    "model.config={architectures: [MiMoForCausalLM], model_type: qwen2, hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 32, intermediate_size: 128, vocab_size: 320, rms_norm_eps: 1e-6, hidden_act: silu, "
    "initializer_range: 0.1, max_position_embeddings: 64, num_nextn_predict_layers: 1, tie_word_embeddings: false, rope_theta: 10000.0}",
    "rollout.max_tokens=16",
    "rollout.temperature=0.7",
    "cluster.num_cpus=1",
)


def recipe(run: Path, *sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=[*SMALL, f"run_dir={run}", *sets]).recipe


def write_prompts(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def silent(*_: Any) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with an untrained model."""
    from mtpctl.convert.hf_folder import create_hf_folder

    folder = tmp_path / "run"
    folder.mkdir()
    config = recipe(folder).model.config
    assert config is not None
    create_hf_folder(config, folder / "model", seed=0)
    return folder


def leave_checkpoint(run: Path, name: str, version: int) -> Path:
    """The files of a checkpoint without its tensors."""
    return write_checkpoint(run, name, version=version)


RECIPE = "train:\n  stages: [sft, rl]\n  sft: {steps: 5}\n  rl: {steps: 10}\n"


async def anywhere(recipe: Recipe, waits: Any, stop_requested: asyncio.Event) -> tuple[Placement, Bundles]:
    """No cluster is started or joined."""
    return Placement("cpu", (), 1), Bundles()
