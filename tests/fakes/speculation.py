"""Engines that speculate with toy models, and the distribution of their tokens compared with the target's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engine_checkpoints import Tensors, cycle_tensors, tiny_config

CONFIG = tiny_config(vocab_size=128, num_hidden_layers=1, intermediate_size=64)


STEP = 5


def requests(count: int, max_tokens: int, **options: Any) -> list[GenerationRequest]:
    return [GenerationRequest(Sample(f"p{index}", "g", [7, 3]), max_tokens, seed=index, **options) for index in range(count)]


def toy_tensors() -> tuple[Tensors, torch.Tensor]:
    """Weights whose next-token logits depend on the last token alone, and those logits `[128, 128]`.

    Eight tokens are likely; the drafter's guess is right often, not always.
    """
    tensors = cycle_tensors(CONFIG, STEP, STEP)
    generator = torch.Generator().manual_seed(3)
    wanted = torch.full((128, 128), -20.0)
    wanted[:, :8] = torch.randn(128, 8, generator=generator) * 1.2
    embedding = tensors["model.embed_tokens.weight"]
    # Rows of the embedding are orthogonal with squared length 128, so this head gives token t exactly the logits wanted[t].
    tensors["lm_head.weight"] = (wanted.T @ embedding / 128).contiguous()
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros(128, 128), torch.eye(128)], dim=1).contiguous()
    return tensors, wanted


CASES = {
    "T=0.7": {"temperature": 0.7},
    "T=1.0": {"temperature": 1.0},
    "T=1.5": {"temperature": 1.5},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "T=0.5, top-p": {"temperature": 0.5, "top_p": 0.9},
    "T=2.0, top-k": {"temperature": 2.0, "top_k": 5},
}


def exact(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The distribution that the fields ask for."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k:
        keep[order[top_k:]] = False
    before = probs[order].cumsum(0) - probs[order]
    keep[order[before >= top_p]] = False
    retained = torch.where(keep, probs, 0.0)
    return retained / retained.sum()


def total_variation(counts: Counter[int], wanted: torch.Tensor) -> float:
    total = counts.total()
    return 0.5 * sum(abs(counts[token] / total - float(wanted[token])) for token in range(len(wanted)))


def check_distribution(samples: list[Sample], logits: torch.Tensor, case: dict[str, Any]) -> None:
    """Every transition from every likely token, against the exact one; and every log-prob."""
    transitions: dict[int, Counter[int]] = {}
    tables = {token: exact(logits[token], **case) for token in [3, *range(8)]}
    for sample in samples:
        previous = 3
        for token, logprob in zip(sample.response_ids, sample.behaviour_logprobs, strict=True):
            assert abs(logprob - float(tables[previous][token].log())) < 1e-4
            transitions.setdefault(previous, Counter())[token] += 1
            previous = token
    # Exact sampling of n draws from p has an expected total variation of sum sqrt(p (1 - p) / (2 pi n)).
    result = noise = 0.0
    for token, counts in transitions.items():
        n = counts.total()
        result += n * total_variation(counts, tables[token])
        noise += n * float((tables[token] * (1 - tables[token]) / (2 * torch.pi * n)).sqrt().sum())
    assert result < 2 * noise
    drafted = sum(sample.speculation.drafted for sample in samples)
    assert 0.05 < sum(sample.speculation.accepted for sample in samples) / drafted < 0.95


def unlike_tensors() -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """The toy with a drafter that sees the last token through noise; the target's logits by the last token, and the drafter's."""
    tensors, target = toy_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    width = embedding.shape[1]
    mixing = torch.eye(width) + 0.04 * torch.randn(width, width, generator=torch.Generator().manual_seed(5))
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros(width, width), mixing], dim=1).contiguous()

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + CONFIG["rms_norm_eps"])

    return tensors, target, normed(normed(embedding) @ mixing.T) @ tensors["lm_head.weight"].T
