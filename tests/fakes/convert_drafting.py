"""Trains, saves and converts a tiny MiMo, and counts the correct drafts of its MTP head.

`python -m tests.fakes.convert_drafting train ROOT` leaves the trainer's checkpoint and the converted folder; `… accept ROOT` prints the
trainer's acceptance metric on the samples in `ROOT/samples.json`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch

from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.config import ScoreOptions
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken
from tests.fakes.convert_models import converted
from tests.fakes.engine_checkpoints import tiny_config
from tests.fakes.tiny import engine

JOINT = MtpConfig(mode="joint", loss_scale=1.0, clip_grad=0)
UPDATES, BATCH, LENGTH, VOCAB = 25, 32, 32, 128


def text(draw: random.Random) -> list[int]:
    """Steps of 5, with occasional random tokens."""
    tokens = [draw.randrange(VOCAB)]
    while len(tokens) < LENGTH:
        tokens.append((tokens[-1] + 5) % VOCAB if draw.random() < 0.9 else draw.randrange(VOCAB))
    return tokens


def train(root: Path) -> None:
    config = tiny_config(vocab_size=VOCAB, num_hidden_layers=1, intermediate_size=64) | {"model_type": "mimo"}
    folder = create_hf_folder(config, root / "hf", seed=0)
    draw = random.Random(0)
    with engine(folder, mtp=JOINT) as trainer:
        trainer.set_optimizer(OptimizerConfig(lr=3e-3, clip_grad=1.0))
        for _ in range(UPDATES):
            trainer.update([Sequence(text(draw), 1, [1] * (LENGTH - 1)) for _ in range(BATCH)], NextToken())
        spoil(trainer, [Sequence(text(draw), 1, [1] * (LENGTH - 1)) for _ in range(BATCH)])
        trainer.save(root / "step")
    converted(root / "step", root / "converted", model=folder.path, verify=True)


@torch.no_grad()
def spoil(trainer: MegatronEngine, batch: list[Sequence]) -> None:
    """Add noise to the MTP head's projection until about half of its drafts are correct."""
    weight = next(value for name, value in trainer.module.named_parameters() if name.endswith("eh_proj.weight"))
    generator = torch.Generator().manual_seed(0)
    accepted = 1.0
    while accepted > 0.6:
        weight.add_(0.25 * weight.std() * torch.randn(weight.shape, generator=generator))
        with torch.enable_grad():
            accepted = trainer.forward_backward(batch, NextToken())["mtp/accept_1"]


def accept(root: Path) -> None:
    """The share of correct drafts of one token per step: after a correct draft, one token is skipped."""
    samples = json.loads((root / "samples.json").read_text())
    with engine(HfFolder.open(root / "hf"), mtp=JOINT, train=False) as trainer:
        trainer.restore(root / "step")
        batch = [Sequence(prompt + response, len(prompt), [1] * len(response)) for prompt, response in samples]
        result = trainer.score(batch, options=[ScoreOptions(mtp=True)] * len(batch))
    requested = right = 0
    for score in result:
        hits, at = score.drafts[0].hits, 1
        while at < len(hits):
            requested, right = requested + 1, right + bool(hits[at])
            at += 2 if hits[at] else 1
    print("\nmtp/accept_1", right / requested)


if __name__ == "__main__":
    {"train": train, "accept": accept}[sys.argv[1]](Path(sys.argv[2]))
