"""A toy MiMo, sequences for it, and engines that are closed after use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtpctl.compat import cpu_device
from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
from mtpctl.model.parallel import Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.routes import Routes, RouteShape
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine

MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "rope_theta": 640000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": True,
    "initializer_range": 0.2,
}


def mimo(path: Path, **fields: Any) -> HfFolder:
    """A folder with a toy MiMo whose random weights, norms and biases are large enough for logits to differ."""
    return varied(create_hf_folder({**MIMO, **fields}, path, seed=0))


def varied(folder: HfFolder) -> HfFolder:
    """Randomize norms and biases too, so that tests detect swapped ones."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(1)
    for file in sorted(folder.path.rglob("*.safetensors")):
        tensors = {
            name: value + 0.2 * torch.randn(value.shape, generator=generator) if value.dim() == 1 else value
            for name, value in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def sequences(count: int = 7, *, seed: int = 0, vocab: int = 64, low: int = 5, high: int = 20) -> list[Sequence]:
    """Random prompts and responses; every sixth response token is masked."""
    draw = random.Random(seed)
    batch = []
    for _ in range(count):
        length = draw.randint(low, high)
        prompt = draw.randint(1, length - 4)
        mask = [int((i + length) % 6 > 0) for i in range(length - prompt)]
        batch.append(Sequence([draw.randrange(vocab) for _ in range(length)], prompt, mask))
    return batch


def drawn_routes(shape: RouteShape, tokens: int, seed: int = 0) -> Routes:
    """Random routes."""
    draw = np.random.default_rng(seed)
    keys = draw.random((tokens, len(shape.layers), shape.experts))
    return keys.argsort(-1)[..., : shape.per_token].astype(shape.dtype)


@contextmanager
def engine(
    folder: HfFolder, *, rank: Rank | None = None, parallel: ParallelConfig | None = None, **fields: Any
) -> Iterator[MegatronEngine]:
    """An fp32 engine, closed at the end. fields: of `EngineConfig`."""
    cpu_device.install()
    torch.set_num_threads(1)
    fields.setdefault("mtp", MtpConfig(mode="isolated"))
    trainer = MegatronEngine(folder, EngineConfig(parallel=parallel or ParallelConfig(), **fields), rank)
    try:
        yield trainer
    finally:
        trainer.close()


def gradients(trainer: MegatronEngine) -> dict[str, torch.Tensor]:
    """The last update's gradients under Hugging Face names (PEFT's for adapters). Overwrites the engine's weights."""
    with trainer.resident(), torch.no_grad():
        for parameter in trainer.module.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.main_grad)
    if trainer.config.lora is None:
        return {name: value.clone() for name, value in trainer.export()}
    return {name: value.clone() for stream in (trainer.export(["draft"]), trainer.export_adapter()) for name, value in stream}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    """Every tensor within `bound` of the expected one, relative to its norm, or to a thousandth of the largest norm if that is more."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(value.norm()) for value in expected.values())
    errors = {name: float((found[name] - value).norm()) / max(float(value.norm()), floor) for name, value in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= bound, f"{worst}: {errors[worst]:.2e}"


GENTLE = OptimizerConfig(lr=1e-3, clip_grad=0.0)
"""Without clipping, so that gradients can be compared after a step."""
