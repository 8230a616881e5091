"""This project's engine under `benchmarks/mtp_conformance.py`: a MiMo whose transformer layers are the identity, in fp32."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtp_conformance import EPS, HIDDEN, VOCAB, Case, Convention, Result, Trainer
from mtpctl.convert.hf_folder import create_hf_folder
from mtpctl.model.parallel import Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.objective import NextToken
from tests.fakes.forked import run_ranks
from tests.fakes.tiny import GENTLE, MIMO, engine, gradients

NAMES = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}
LAYER_NAMES = {"embedding_norm": "token_layernorm", "state_norm": "hidden_layernorm", "norm": "final_layernorm"}
PROJECTION = "model.mtp_layers.{}.input_proj.weight"
HALVES = ("state_projection", "embedding_projection")


def name_of(tensor: str) -> str:
    layer, _, name = tensor.rpartition(".")
    return f"model.mtp_layers.{int(layer) - 1}.{LAYER_NAMES[name]}.weight" if layer else NAMES[tensor]


class MtpOnly(NextToken):
    """A main loss of weight 0."""

    def token_loss(self, micro: Any) -> Any:
        loss = super().token_loss(micro)
        return lambda *tokens: (0.0 * loss(*tokens)[0], loss(*tokens)[1])


def train(case: Case, rank: Rank, folder: Path) -> tuple[list[float], dict[str, list[Any]]]:
    layers = 1 if case.repeated else case.depths
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_attention_heads": 2, "rms_norm_eps": EPS, "tie_word_embeddings": case.tied}
    model = create_hf_folder({**MIMO, **config, "num_nextn_predict_layers": layers}, folder / str(rank.rank), seed=0)
    file, weights = model.path / "model.safetensors", case.weights()
    tensors = {n: torch.zeros_like(v) if "o_proj" in n or "down_proj" in n else v for n, v in load_file(file).items()}
    projections = {PROJECTION.format(n): torch.cat([weights.pop(f"{n + 1}.{half}") for half in HALVES], dim=1) for n in range(layers)}
    values = {name_of(name): value for name, value in weights.items()} | projections
    assert values.keys() <= tensors.keys()
    save_file(tensors | {name: value.float() for name, value in values.items()}, file, metadata={"format": "pt"})
    parallel = ParallelConfig(dp=len(case.ranks), cp=case.cp)
    mode, repeat = "isolated" if case.detached else "joint", case.depths if case.repeated else 1
    mtp = MtpConfig(mode=mode, repeat=repeat, loss_scale=1.0, clip_grad=0)  # type: ignore[arg-type]
    with engine(model, rank=rank, parallel=parallel, mtp=mtp) as trainer:
        trainer.set_optimizer(GENTLE)
        batch, passes = [], []
        for row in case.rows()[parallel.dp_rank(rank.rank)]:
            passes.append(list(range(len(batch), len(batch) + len(row.samples))))
            batch += [Sequence(s.tokens, start := s.mask.index(1), s.mask[start:]) for s in row.samples]
        metrics = trainer.update(batch, MtpOnly(), microbatches=passes)
        grads = {name: value.tolist() for name, value in gradients(trainer).items() if name in values}
    return [metrics[f"mtp/loss_{depth}"] for depth in range(1, case.depths + 1)], grads


def run(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        answers, error = run_ranks(len(case.ranks) * case.cp, lambda rank: train(case, rank, Path(folder)), 240)
    assert not error, error
    losses, values = answers[0]
    grads = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    result = {name: grads[name_of(name)] for name in case.weights() if "projection" not in name}
    for layer in range(1 if case.repeated else case.depths):
        parts = grads[PROJECTION.format(layer)].chunk(2, dim=1)
        result |= {f"{layer + 1}.{half}": part for half, part in zip(HALVES, parts, strict=True)}
    return Result(losses, result)


TRAINERS = {"mtpctl": Trainer(Convention("chain", "unnormed"), run)}
