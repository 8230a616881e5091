"""Checkpoints with adapters, and a writer that damages one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.hf_writer import HfWriter
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.trainer.objective import NextToken
from tests.fakes.tiny import engine, sequences

LORA = LoraConfig(rank=4, alpha=8.0)


def trained(root: Path, folder: HfFolder, mode: str = "joint") -> dict[str, Tensor]:
    """Save a checkpoint with nonzero adapters at `root / "step-1"`; returns the tensors that the trainer would publish."""
    with engine(folder, lora=LORA, mtp=MtpConfig(mode=mode)) as trainer:  # type: ignore[arg-type]
        trainer.set_optimizer(OptimizerConfig(lr=3e-2, clip_grad=0.0))
        for seed in range(2):
            trainer.update(sequences(4, seed=seed, vocab=40), NextToken())
        trainer.save(root / "step-1")
        return {name: value.clone() for name, value in trainer.export()}


def spoiled(put: Callable[[HfWriter, str, Tensor], None], ending: str) -> Callable[[HfWriter, str, Tensor], None]:
    """A writer that changes one tensor by one bit."""

    def write(writer: HfWriter, name: str, tensor: Tensor) -> None:
        if name.endswith(ending):
            tensor = tensor.clone()
            tensor.view(torch.uint8)[0, 0] ^= 1
        put(writer, name, tensor)

    return write
