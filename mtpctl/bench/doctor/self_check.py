"""Compare vLLM's log-probs of its own tokens with the trainer's, on a small MiMo with MTP speculation.

A policy gradient is right only if the engine's `processed_logprobs` and Megatron's log-probs are of one distribution, at the
sampling temperature and with speculation. `sample` and `score` run in two processes, since the patches that let either engine
run on a CPU exclude each other.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mtpctl.errors import ThresholdMissed
from mtpctl.families.toy import toy_config
from mtpctl.samples import GenerationRequest, Logprobs, Sample, ids_of

RESPONSES = 64
TEMPERATURE = 0.7
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
"""Mean absolute difference of log-probs (nats) that passes, by the precision of the weights."""
VOCAB = 16
MODEL = toy_config(vocab_size=VOCAB, max_position_embeddings=256, head_dim=32, initializer_range=0.1, bos_token_id=1, eos_token_id=2)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Difference of the two engines' log-probs over `tokens` response tokens (nats), and the drafts proposed and accepted."""

    responses: int
    tokens: int
    temperature: float
    precision: str
    mean_abs: float
    max_abs: float
    bound: float
    drafted: int
    accepted: int

    def check(self) -> None:
        """Raise ThresholdMissed where the mean difference is beyond the bound."""
        if not self.mean_abs <= self.bound:
            raise ThresholdMissed(
                f"self-check: vLLM's log-probs differ from the trainer's by {self.mean_abs:.2e} in the mean "
                f"(largest {self.max_abs:.2e}), beyond {self.bound:g} for {self.precision}"
            )


def sample(folder: Path) -> dict[str, object]:
    """Make the model in `folder`, sample from it with vLLM, and write the samples beside it."""
    import torch

    from mtpctl.convert.hf_folder import create_hf_folder

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    precision: Literal["fp32", "bf16"] = "bf16" if device == "cuda" else "fp32"
    model = create_hf_folder(MODEL, folder / "model", seed=0)
    samples, seconds = asyncio.run(_responses(model.path, device, precision))
    (folder / "samples.json").write_text(json.dumps({"precision": precision, "samples": [each.to_dict() for each in samples]}))
    return {"tokens": sum(len(each.response_ids) for each in samples), "seconds": seconds}


async def _responses(model: Path, device: Literal["cpu", "cuda"], precision: Literal["fp32", "bf16"]) -> tuple[list[Sample], float]:
    import time

    from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import engine_settings

    rollout = VllmConfig(
        context=128,
        max_in_flight=RESPONSES,
        kv_cache_bytes=64 << 20,
        gpu_memory=0.1,
        eager=True,
        threads=1 if device == "cpu" else 0,
        speculation=SpeculationConfig(num_tokens=1),
    )
    engine = await VllmEngine.start(engine_settings(rollout, model=str(model), precision=precision, device=device))
    began = time.perf_counter()
    # Prompts and responses of many lengths, so that every step of the engine mixes prefill, drafts and single tokens.
    requests = [
        GenerationRequest(
            Sample(f"p{i}", f"g{i}", ids_of((7 * i + 3 * j) % VOCAB for j in range(1 + i % 9))),
            max_tokens=16 + i % 33,
            temperature=TEMPERATURE,
            seed=i,
        )
        for i in range(RESPONSES)
    ]
    try:
        return list(await asyncio.gather(*(engine.generate(request) for request in requests))), time.perf_counter() - began
    finally:
        await engine.shutdown()


def score(folder: Path) -> dict[str, object]:
    """Score the samples in `folder` with the Megatron engine, and compare. Returns an `Agreement` as a dict."""
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.recipe.model import MtpConfig
    from mtpctl.recipe.parallel import ParallelConfig
    from mtpctl.trainer.batch import Sequence
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine

    stored = json.loads((folder / "samples.json").read_text())
    samples = [Sample.from_dict(each) for each in stored["samples"]]
    config = EngineConfig(ParallelConfig(), precision=stored["precision"], mtp=MtpConfig(mode="load"), train=False)
    engine = MegatronEngine(HfFolder.open(folder / "model"), config)
    sequences = [Sequence(each.token_ids, len(each.prompt_ids), each.loss_mask) for each in samples]
    scores = engine.score(sequences, temperature=TEMPERATURE)
    engine.close()
    return asdict(compare(samples, [each.logprobs for each in scores], stored["precision"]))


def compare(samples: list[Sample], logprobs: list[Logprobs], precision: str) -> Agreement:
    """Behaviour log-probs of the samples against `logprobs`, token by token."""
    off = [abs(a - b) for each, row in zip(samples, logprobs, strict=True) for a, b in zip(each.behaviour_logprobs, row, strict=True)]
    return Agreement(
        responses=len(samples),
        tokens=len(off),
        temperature=TEMPERATURE,
        precision=precision,
        mean_abs=sum(off) / len(off),
        max_abs=max(off),
        bound=BOUNDS[precision],
        drafted=sum(each.speculation.drafted for each in samples),
        accepted=sum(each.speculation.accepted for each in samples),
    )
