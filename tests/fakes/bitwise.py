"""Responses of a real engine in every situation that changes the shape of its steps, and their log-probs by the trainer.

Run as a program, it prints a table: `python -m tests.fakes.bitwise --responses 500 --drafts 3 --method greedy`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from mtpctl.cluster.rendezvous import address_of, host_store
from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
from mtpctl.families.reading import DRAFTER
from mtpctl.model.parallel import Rank
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.rollout.protocol import ABORTED
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.plugin import install
from mtpctl.rollout.vllm.settings import build_engine_settings
from mtpctl.routes import RouteShape
from mtpctl.samples import GenerationRequest, Sample, ids_of
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.config import ScoreOptions, TokenScores
from tests.fakes import tiny
from tests.fakes.toys import LLAMA_EAGLE3, QWEN3_5, QWEN3_EAGLE3, QWEN3_MOE_EAGLE3

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 112,
    "max_position_embeddings": 256,
}
EVEN = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_QWEN2: dict[str, Any] = {**LLAMA_EAGLE3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_ROPE = {"rope_parameters": _LLAMA3 | {"rope_theta": 10000.0}}
FAMILIES: dict[str, dict[str, Any]] = {
    "mimo": {**tiny.MIMO, **SIZES},
    "qwen2": {name: value for name, value in _QWEN2.items() if name != "drafter"},
    "qwen3": {**QWEN3_EAGLE3, "tie_word_embeddings": True},
    "qwen3-moe": QWEN3_MOE_EAGLE3 | {"num_experts": 6, "num_experts_per_tok": 3},
    "qwen3.5": QWEN3_5 | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20},
    "llama": {**LLAMA_EAGLE3, **_ROPE, "drafter": LLAMA_EAGLE3["drafter"] | _ROPE},
}
"""Configs of toys, by family: MiMo has an MTP head, Qwen2 no drafter, and the others an EAGLE-3 drafter."""
TOKENS, SHARED = 40, 96
"""Maximum length of responses, and length of the prefix that every second prompt shares: three blocks."""
ENGINE_ARGS: dict[str, object] = {
    "block_size": 32,
    "enable_prefix_caching": True,
    # Prompts take several steps, in which other requests decode.
    "max_num_batched_tokens": 72,
}
PRECISIONS: dict[str, Literal["fp32", "bf16"]] = {"cpu": "fp32", "cuda": "bf16"}
KV_CACHE_BYTES = 24 * 32 * 3 * 2 * 32 * 4
"""Room for 24 blocks of three layers, fewer than 16 requests need, so that some are preempted."""


def folder_of(family: str, path: Path, *, even: bool = False) -> HfFolder:
    """A toy of this family with random weights, norms and biases. No token ends a response. even: with sizes that two ranks can divide."""
    config = {name: value for name, value in FAMILIES[family].items() if name not in ("bos_token_id", "eos_token_id")}
    if even:
        config |= EVEN | ({"drafter": config["drafter"] | EVEN} if "drafter" in config else {})
    folder = tiny.varied(create_hf_folder(config | {"initializer_range": 0.2}, path, seed=0))
    return _predictable(folder)


def _predictable(folder: HfFolder) -> HfFolder:
    """Let drafts of Qwen3.5's MTP head be accepted: logits mostly depend on the last token's embedding, which the head reads."""
    for file in folder.path.rglob("*.safetensors") if folder.shape.delta else ():
        tensors = load_file(file)
        for name, x in tensors.items():
            if name == "mtp.fc.weight":
                tensors[name] = torch.eye(*x.shape)
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensors[name] = x * (0.002 / x.std())
            elif name == "lm_head.weight":
                tensors[name] = x * (0.4 / x.std())
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@dataclass
class Counts:
    """How often each situation occurred."""

    preempted: int = 0
    cached: int = 0
    aborted: int = 0
    chunked: int = 0
    drafted: int = 0
    accepted: int = 0


def versions(root: Path, count: int, family: str = "mimo", *, even: bool = False) -> list[HfFolder]:
    """Folders of one toy model with different weights."""
    folders = []
    for version in range(count):
        folder = folder_of(family, root / f"v{version}", even=even)
        generator = torch.Generator().manual_seed(version)
        for file in folder.path.rglob("*.safetensors"):
            tensors = {name: x + 0.03 * torch.randn(x.shape, generator=generator) for name, x in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
        folders.append(_predictable(folder))
    return folders


def weights_of(folder: HfFolder) -> list[tuple[str, torch.Tensor]]:
    """All tensors, those of a drafter's folder with its prefix."""
    files = {file: f"{DRAFTER}." if file.parent.name == DRAFTER else "" for file in folder.path.rglob("*.safetensors")}
    return [(prefix + name, tensor) for file, prefix in files.items() for name, tensor in load_file(file).items()]


@contextmanager
def counted() -> Iterator[Counts]:
    """Count preemptions and prompts that take several steps in the block."""
    from vllm.v1.core.sched.scheduler import Scheduler

    install()  # now, or the end of the block would remove the patches that the engine installs when it starts
    counts, preempt, schedule = Counts(), Scheduler._preempt_request, Scheduler.schedule

    def _preempt_request(self: Any, *args: Any, **kwargs: Any) -> None:
        counts.preempted += 1
        preempt(self, *args, **kwargs)

    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        counts.chunked += sum(each.num_prompt_tokens > each.num_computed_tokens > 0 for each in self.running)
        return output

    Scheduler._preempt_request, Scheduler.schedule = _preempt_request, scheduled
    try:
        yield counts
    finally:
        Scheduler._preempt_request, Scheduler.schedule = preempt, schedule


async def generate(
    folders: list[HfFolder],
    store: Path,
    responses: int,
    *,
    k: int,
    method: str = "greedy",
    numerics: Numerics = "bitwise",
    device: Literal["cpu", "cuda"] = "cpu",
    tp: int = 1,
) -> tuple[list[Sample], Counts]:
    """Responses to prompts of many lengths, with a sync whenever a share of them has ended. Every second sync aborts the responses.

    On CUDA, or with several ranks, the engine core runs in another process, in which preemptions and chunks are not counted.
    """
    speculation = SpeculationConfig(num_tokens=k, draft_method=method) if k else SpeculationConfig(num_tokens=0)  # type: ignore[arg-type]
    # vLLM on a CPU has no prefix cache for linear attention with drafts.
    has_cache = device == "cuda" or not k or folders[0].shape.delta is None
    rollout = VllmConfig(
        max_in_flight=16,
        tp=tp,
        context=256,
        threads=1,
        kv_cache_bytes=KV_CACHE_BYTES,
        gpu_memory=0.1 if device == "cuda" else None,
        speculation=speculation,
        engine_args=ENGINE_ARGS | {"enable_prefix_caching": has_cache},
    )
    routes = RouteShape.of(folders[0].shape)
    settings = build_engine_settings(
        rollout,
        model=str(folders[0].path),
        precision=PRECISIONS[device],
        device=device,
        numerics=numerics,
        routes=routes.layers if routes else (),
    )
    draw = random.Random(k)
    vocab = folders[0].shape.vocab
    shared = [draw.randrange(vocab) for _ in range(SHARED)]
    lengths = [draw.choice((1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 120)) for _ in range(responses)]
    prompts = [(shared if index % 2 else []) + [draw.randrange(vocab) for _ in range(length)] for index, length in enumerate(lengths)]
    publisher = Publisher(VersionStore(store), bucket_bytes=1 << 20)
    ended = 0

    with counted() as counts:
        engine = await VllmEngine.start(settings)
        slots = asyncio.Semaphore(24)

        async def respond(index: int) -> Sample:
            nonlocal ended
            request = GenerationRequest(Sample(f"p{index}", "g", ids_of(prompts[index])), TOKENS, temperature=1.0)
            async with slots:
                sample = await engine.generate(request)
                while sample.finish_reason == ABORTED:
                    counts.aborted += 1
                    sample = await engine.generate(replace(request, sample=sample))
            ended += 1
            return sample

        async def sync() -> None:
            for version in range(1, len(folders)):
                while ended < responses * version // len(folders):
                    await asyncio.sleep(0.01)
                manifest = publisher.publish(weights_of(folders[version]), version)
                await engine.update(manifest, mode="abort" if version % 2 else "keep")

        try:
            samples, _ = await asyncio.gather(asyncio.gather(*map(respond, range(responses))), sync())
        finally:
            await engine.shutdown()
    counts.cached = sum(sample.cached_tokens or 0 for sample in samples)
    counts.drafted = sum(sample.speculation.drafted for sample in samples)
    counts.accepted = sum(sample.speculation.accepted for sample in samples)
    return samples, counts


def differences(
    folders: list[HfFolder],
    samples: list[Sample],
    *,
    numerics: Numerics = "bitwise",
    device: Literal["cpu", "cuda"] = "cpu",
    parallel: ParallelConfig | None = None,
) -> np.ndarray:
    """|difference| of the engine's log-probs from the trainer's and the log-prob server's, under the version that sampled each token.

    parallel: of the trainer; None for a single process, which is this one.
    """
    result = []
    inputs = [Sequence(list(sample.token_ids), len(sample.prompt_ids), list(sample.loss_mask)) for sample in samples]
    for version, folder in enumerate(folders):
        if parallel is None:
            passes = _scores(folder, inputs, numerics, device)
        else:
            meeting, out = host_store("127.0.0.1"), folder.path / "scores.pt"
            arguments = parallel, address_of(meeting), out, folder, inputs, numerics, device
            mp.spawn(_score_on_rank, args=arguments, nprocs=parallel.world_size)
            passes = torch.load(out, weights_only=False)
        if len(folders) == 1 and numerics == "bitwise":
            for sample, score in zip(samples, passes[0], strict=True):
                assert (sample.routes is None) == (score.routes is None)
                assert sample.routes is None or np.array_equal(sample.routes, score.routes[: len(sample.routes)])
        for scores in passes:
            for sample, score in zip(samples, scores, strict=True):
                own, behaviour = np.asarray(score.logprobs, np.float32), np.asarray(sample.behaviour_logprobs, np.float32)
                result += [np.abs(own - behaviour)[span.start : span.end] for span in sample.version_spans if span.version == version]
    return np.concatenate(result)


def _scores(
    folder: HfFolder,
    inputs: list[Sequence],
    numerics: Numerics,
    device: Literal["cpu", "cuda"],
    rank: Rank | None = None,
    parallel: ParallelConfig | None = None,
) -> tuple[list[TokenScores], list[TokenScores]]:
    """Scores of the trainer's pass, and of the log-prob server's, which has the sequences in the opposite order."""
    fields: dict[str, Any] = {"numerics": numerics, "tokens_per_microbatch": 1500, "precision": PRECISIONS[device]}
    with tiny.engine(folder, rank=rank, parallel=parallel, **fields) as trainer:
        return trainer.score(inputs, record_routes=True), trainer.score(inputs[::-1], options=[ScoreOptions()] * len(inputs))[::-1]


def _score_on_rank(number: int, parallel: ParallelConfig, address: str, out: Path, *arguments: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(number)
    rank = Rank(number, parallel.world_size, address, number, deadline_s=300)
    scores = _scores(*arguments, rank=rank, parallel=parallel)
    if number == 0:
        torch.save(scores, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=500)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--method", choices=("greedy", "probabilistic"), default="greedy")
    parser.add_argument("--numerics", choices=("bitwise", "default"), default="bitwise")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = versions(Path(scratch), 4)
        began = time.monotonic()
        sampling = generate(
            folders, Path(scratch) / "store", options.responses, k=options.drafts, method=options.method, numerics=options.numerics
        )
        samples, counts = asyncio.run(sampling)
        sampled = time.monotonic()
        errors = differences(folders, samples, numerics=options.numerics)
    tokens = sum(len(sample.response_ids) for sample in samples)
    print(f"{options.numerics}, {options.drafts} drafts, {options.method}: {len(samples)} responses, {tokens} tokens; {counts}")
    print(f"  engine {sampled - began:.0f} s, trainer {time.monotonic() - sampled:.0f} s")
    print(f"  {len(errors)} comparisons, {int((errors != 0).sum())} differ, largest difference {errors.max():.3g}")


if __name__ == "__main__":
    main()
