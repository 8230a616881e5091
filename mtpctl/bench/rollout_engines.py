"""Workloads, engines and the model of `mtpctl bench rollout`, which compares mtpctl's pool with vLLM's offline generation.

The benchmark bounds the ratio of two engines' throughputs. Other load on the host changes throughput by more than those bounds. Therefore
all engines are resident, and each workload is sent to them in turn.

The cycle model is a model of any MiMo shape with known outputs, whose MTP layer predicts a chosen share of tokens correctly. The trunk
predicts `token + 1`. Its attention and MLP have random weights but zero output projections, so it does the computation of a real model
without changing the result. The MTP layer outputs the embedding of its input token, from which the head also predicts `token + 1`. One
element of each embedding is a marker. If the marker is positive, a neuron of the layer's MLP adds the embedding of another token, which
makes the prediction wrong. The marker is positive for a random share of the vocabulary's lower half, and for all of its upper half.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpctl.cluster.deadlines import await_within
from mtpctl.errors import UserError
from mtpctl.families.configs import hub_config, toy_config
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import tensor_shapes
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import SpecStats
from mtpctl.rollout.start import start_pool
from mtpctl.rollout.vllm.settings import VllmSettings, build_engine_settings
from mtpctl.samples import GenerationRequest, Sample


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to send, at most `batch` at a time. lengths: number of tokens of each answer."""

    name: str
    batch: int
    prompts: list[list[int]]
    lengths: list[int]


def make_workload(
    name: str, batch: int, count: int, *, prompt_length: int, mean_answer_length: int, spread: float, vocab: int, wrong_drafts: bool = False
) -> Workload:
    """Make a workload of `count` random prompts for a cycle model.

    Answer lengths are uniform in `mean_answer_length * (1 ± spread)`.
    wrong_drafts: use answers from the upper half of the vocabulary, for which all drafts are wrong.
    """
    draw = random.Random(f"{name} {batch} {count} {wrong_drafts}")
    half_vocab, max_start = vocab // 2, vocab // 2 - 2 * mean_answer_length
    assert max_start > 0, "vocabulary too small: answers would leave their half of it"
    offset = half_vocab if wrong_drafts else 0
    prompts = [[draw.randrange(half_vocab) for _ in range(prompt_length - 1)] + [offset + draw.randrange(max_start)] for _ in range(count)]
    lengths = [max(1, round(mean_answer_length * draw.uniform(1 - spread, 1 + spread))) for _ in range(count)]
    return Workload(name, batch, prompts, lengths)


@dataclass(slots=True)
class Run:
    """The result of sending a workload once. seconds: from the first request to the last answer.

    wrong: number of answers that differ from the expected ones. idle: share of the engine's slots that were empty while requests were
    queued; None if all requests were sent at once.
    """

    seconds: float
    tokens: int
    wrong: int
    idle: float | None = None
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class OfflineEngine:
    """vLLM's `LLM` in a Ray actor."""

    def __init__(self, settings: VllmSettings) -> None:
        os.environ.update(settings.environment)
        import torch
        from vllm import LLM

        if settings.threads:
            torch.set_num_threads(settings.threads)
        mtpctl_args = ("weight_transfer_config", "worker_extension_cls", "per_request_spec_decode_metrics")
        self._llm = LLM(**{name: value for name, value in settings.args.items() if name not in mtpctl_args})

    def send(self, workload: Workload, vocab: int | None, logprobs: bool) -> Run:
        """Send a workload. vocab: the cycle model's vocabulary size, to check its answers; None for another model."""
        from vllm import SamplingParams, TokensPrompt

        settings = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if logprobs else None,
                flat_logprobs=logprobs,
            )
            for seed, length in enumerate(workload.lengths)
        ]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in workload.prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return Run(seconds, sum(map(len, answers)), 0 if vocab is None else count_wrong(workload, answers, vocab))


async def send_workload(pool: ReplicaPool, workload: Workload, vocab: int) -> Run:
    """Send a workload through a pool with one replica, and wait for all answers."""
    clock = time.perf_counter
    occupied_readings: list[tuple[float, float]] = []

    async def occupied_seconds() -> float:
        return sum(health.occupied_s for health in await pool.health())

    async def requests() -> AsyncIterator[GenerationRequest]:
        for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
            if index == 2 * workload.batch:  # `idle` is measured from here on, after the slots were filled for the first time.
                occupied_readings.append((clock(), await occupied_seconds()))
            yield GenerationRequest(Sample(str(index), str(index), prompt), length, seed=index)
        if occupied_readings:
            occupied_readings.append((clock(), await occupied_seconds()))

    samples: dict[int, Sample] = {}
    began = clock()
    async with aclosing(pool.generate(requests())) as generated:
        async for sample in generated:
            samples[int(sample.prompt_id)] = sample
    seconds = clock() - began
    stats = SpecStats()
    for sample in samples.values():
        stats.add(sample.speculation, len(sample.response_ids))
    answers = [samples[index].response_ids.tolist() for index in range(len(workload.prompts))]
    idle = None
    if len(occupied_readings) == 2:
        (begin_time, begin_occupied), (end_time, end_occupied) = occupied_readings
        idle = 1 - (end_occupied - begin_occupied) / (workload.batch * (end_time - begin_time))
    return Run(seconds, sum(map(len, answers)), count_wrong(workload, answers, vocab), idle, stats)


def count_wrong(workload: Workload, answers: list[list[int]], vocab: int) -> int:
    """The number of answers that differ from those of the cycle model."""
    expected = (expected_answer(prompt[-1], length, vocab) for prompt, length in zip(workload.prompts, workload.lengths, strict=True))
    return sum(ids != expected_ids for ids, expected_ids in zip(answers, expected, strict=True))


def engine_recipe(folder: Path, device: Literal["cpu", "cuda"], rollout: dict[str, object], *, mtp: str = "isolated") -> Recipe:
    """The recipe of engines that serve the model in `folder`. rollout: its section of that name; mtp: `mtp.mode`."""
    return Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "mtp": {"mode": mtp},
            "train": {"precision": "fp32" if device == "cpu" else "bf16"},
            "rollout": rollout,
            "sync": {"transport": "shm"},
            "cluster": {"device": device},
        }
    )


@asynccontextmanager
async def engine_pool(
    recipe: Recipe, folder: Path, context: int, device: Literal["cpu", "cuda"], gpus: float, engines: int = 1
) -> AsyncIterator[ReplicaPool]:
    """A pool with engines of the recipe. gpus: the share of a GPU that each engine gets."""
    actors = tuple(Actor("rollout", index, 0, 0, 1.0, gpus) for index in range(engines))
    pool = await start_pool(recipe, model=str(folder), context=context, placement=Placement(device, actors, 1))
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def offline_actor(recipe: Recipe, folder: Path, context: int, device: Literal["cpu", "cuda"], gpus: float) -> AsyncIterator[Any]:
    """A Ray actor with vLLM's offline engine, with the settings of the recipe's engines. gpus: its share of a GPU."""
    import ray

    settings = build_engine_settings(
        recipe.rollout.model_copy(update={"context": context}),  # type: ignore[arg-type]
        model=str(folder),
        precision=recipe.train.precision,
        device=device,
        immediate_admission=True,
    )
    options = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": settings.environment}}
    actor: Any = ray.remote(OfflineEngine).options(**options).remote(settings)
    try:
        await await_within(actor.__ray_ready__.remote(), recipe.cluster.actor_deadline_s, "vLLM, start")
        yield actor
    finally:
        ray.kill(actor)


@asynccontextmanager
async def enter_all[T](*managers: AbstractAsyncContextManager[T]) -> AsyncIterator[list[T]]:
    """Enter all managers concurrently, because engines take a minute or two to start.

    If some managers fail to enter, exits the others and raises the error of the first one, in the order of the arguments.
    """
    results = await asyncio.gather(*(manager.__aenter__() for manager in managers), return_exceptions=True)
    async with AsyncExitStack() as stack:
        for manager, value in reversed(list(zip(managers, results, strict=True))):
            if not isinstance(value, BaseException):
                stack.push_async_exit(manager)
        values = []
        for value in results:
            if isinstance(value, BaseException):
                raise value
            values.append(value)
        yield values


NUM_WRITERS = 8
"""Number of threads that write files."""
MARKER_MAGNITUDE = 8.0
"""Magnitude of the marker; other elements of an embedding are about 1."""
SEED = 0
TINY = toy_config(vocab_size=1024, max_position_embeddings=1024, torch_dtype="float32")
ZERO_MATRICES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def expected_answer(token: int, count: int, vocab: int) -> list[int]:
    """The `count` tokens that the model generates after `token`."""
    return [(token + 1 + i) % vocab for i in range(count)]


def cycle_config(shape: Literal["mimo7b", "tiny"]) -> dict[str, object]:
    """The `config.json` fields of a shape, with a `model_type` that vLLM supports without `mtpctl.compat.transformers.register_mimo`."""
    return TINY if shape == "tiny" else hub_config("XiaomiMiMo/MiMo-7B-RL") | {"model_type": "qwen2"}


def write_cycle_model(folder: Path, config: dict[str, object], *, acceptance: float, device: str) -> Path:
    """Write the model into `folder`, unless the folder already contains it.

    acceptance: share of the tokens in the vocabulary's lower half after which the draft is correct.

    Raises UserError if the shape is not MiMo's with one MTP layer, or if the folder contains another model.
    """
    shape = shape_of(config)
    if shape.family != "mimo" or shape.mtp_layers != 1:
        raise UserError(f"--model: needs a MiMo shape with one MTP layer, this is {shape.family} with {shape.mtp_layers}")
    document = json.dumps(config | {"mtpctl_cycle": {"acceptance": acceptance, "seed": SEED}}, indent=1)
    if (folder / "config.json").is_file():
        existing = (folder / "config.json").read_text()
        if existing == document:
            return folder
        if "mtpctl_cycle" not in existing:
            raise UserError(f"{folder}: contains another model, which is not overwritten; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    # The config is written last, so that an incomplete folder is not used as a model.
    (folder / "config.json").unlink(missing_ok=True)
    files: dict[str, str] = {}

    def write(index: int, tensors: dict[str, Tensor]) -> None:
        name = f"model-{index:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        for future in [pool.submit(write, index, part) for index, part in enumerate(_tensor_files(shape, config, acceptance, device))]:
            future.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(document)
    return folder


def _tensor_files(shape: ModelShape, config: dict[str, object], acceptance: float, device: str) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file (about 0.5 GiB), on the CPU and in the config's dtype."""
    dtype = getattr(torch, str(config["torch_dtype"]))
    predicting = _predicting_tensors(shape, acceptance, device)
    generator = torch.Generator(device).manual_seed(SEED + 1)
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, dimensions in tensor_shapes(shape).items():
        if name in predicting:
            tensor = predicting[name]
        elif "norm" in name:
            tensor = torch.ones(dimensions, device=device)
        elif name.endswith(ZERO_MATRICES) or name.endswith("bias"):
            tensor = torch.zeros(dimensions, device=device)
        else:
            tensor = torch.empty(dimensions, device=device).normal_(0, 0.02, generator=generator)
        tensors[name] = tensor.to(dtype).cpu().contiguous()
        size += tensors[name].nbytes
        if size > 1 << 29:
            yield tensors
            tensors, size = {}, 0
    if tensors:
        yield tensors


def _predicting_tensors(shape: ModelShape, acceptance: float, device: str) -> dict[str, Tensor]:
    """The tensors that determine the predictions."""
    assert shape.mtp is not None
    generator = torch.Generator(device).manual_seed(SEED)
    vocab, hidden, layer = shape.vocab, shape.hidden, shape.mtp.layer.format(k=0)
    embedding = torch.randn(vocab, hidden, device=device, generator=generator)
    wrong = torch.rand(vocab, device=device, generator=generator) >= acceptance
    wrong[vocab // 2 :] = True
    # The marker is element 0 of every embedding.
    embedding[:, 0] = torch.where(wrong, MARKER_MAGNITUDE, -MARKER_MAGNITUDE)
    gate = torch.zeros(shape.ffn, hidden, device=device)
    gate[0, 0] = 4.0
    down = torch.zeros(hidden, shape.ffn, device=device)
    # With M = MARKER_MAGNITUDE: if the marker is positive, the neuron outputs M * silu(4 M) ≈ 4 M², which `down` converts to four times
    # the embedding of token vocab - 1. If the marker is negative, the output is almost 0.
    down[:, 0] = 4 * embedding[vocab - 1] / (4 * MARKER_MAGNITUDE * MARKER_MAGNITUDE)
    projection = torch.zeros(hidden, 2 * hidden, device=device)
    projection[:, hidden:] = torch.eye(hidden, device=device)
    up = torch.zeros(shape.ffn, hidden, device=device)
    up[0, 0] = 1.0
    return {
        shape.embedding_name: embedding,
        "lm_head.weight": embedding.roll(1, 0),
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": down,
        f"{layer}self_attn.o_proj.weight": torch.zeros(hidden, shape.heads * shape.head_dim, device=device),
        shape.mtp.name(shape.mtp.projection, 0, shape.layers): projection,
    }
