"""Acceptance and speed of a model with an added drafter: one engine without drafts and one for each number of drafts, on one GPU.

    python benchmarks/added_drafter.py --model smollm2-d --prompts held_out.jsonl --drafts 1 3 --in-flight 8 64
    python benchmarks/added_drafter.py --model toy-d --prompts rows.jsonl --in-flight 4 --requests 16 --tokens 24     # on a CPU

The prompts are those of the rows, rendered with the tokenizer's chat template if it has one. Responses are sampled at --temperature and end
as the model ends them. The engines run one after the other, each in a separate process, and all get the same requests. Printed are
tokens/s, the share of accepted drafts by position, and the mean tokens per step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness import parser, print_environment
from mtpctl.data.tokenizers import load_tokenizer
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.protocol import SpecStats
from mtpctl.rollout.vllm.settings import build_engine_settings
from mtpctl.samples import GenerationRequest, Sample

if TYPE_CHECKING:
    from mtpctl.rollout.vllm.engine import VllmEngine


@dataclass(frozen=True)
class Options:
    model: str
    prompts: list[list[int]]
    ends: list[int]
    in_flight: list[int]
    requests: int
    tokens: int
    temperature: float
    context: int
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    gpu_memory: float


@dataclass(frozen=True)
class LoadResult:
    """Seconds and counts of one load."""

    in_flight: int
    seconds: float
    counts: SpecStats

    @property
    def rates(self) -> list[float]:
        """Accepted drafts per step, by position."""
        return [count / max(1, self.counts.steps) for count in self.counts.accepted_by_position]


async def measure(options: Options, drafts: int, method: Literal["greedy", "probabilistic"]) -> list[LoadResult]:
    from mtpctl.rollout.vllm.engine import VllmEngine

    config = VllmConfig(
        max_in_flight=max(options.in_flight),
        context=options.context,
        gpu_memory=options.gpu_memory,
        threads=1 if options.device == "cpu" else 0,
        speculation=SpeculationConfig(num_tokens=drafts, draft_method=method),
    )
    engine = await VllmEngine.start(build_engine_settings(config, model=options.model, precision=options.precision, device=options.device))
    try:
        await send_load(engine, options, max(options.in_flight), warm=True)
        return [await send_load(engine, options, in_flight) for in_flight in options.in_flight]
    finally:
        await engine.shutdown()


async def send_load(engine: VllmEngine, options: Options, in_flight: int, *, warm: bool = False) -> LoadResult:
    slots, counts = asyncio.Semaphore(in_flight), SpecStats()
    count = in_flight if warm else max(options.requests, 2 * in_flight)

    async def answer(index: int) -> None:
        async with slots:
            sample = Sample("p", "g", options.prompts[index % len(options.prompts)], index=index)
            result = await engine.generate(
                GenerationRequest(sample, options.tokens, temperature=options.temperature, seed=index, stop_token_ids=options.ends)
            )
        counts.add(result.speculation, len(result.response_ids))

    began = time.perf_counter()
    await asyncio.gather(*(answer(index) for index in range(count)))
    return LoadResult(in_flight, time.perf_counter() - began, counts)


def _child(options: Options, drafts: int, method: Literal["greedy", "probabilistic"], out: multiprocessing.Queue[list[LoadResult]]) -> None:
    out.put(asyncio.run(measure(options, drafts, method)))


def measure_in_process(options: Options, drafts: int, method: Literal["greedy", "probabilistic"]) -> list[LoadResult]:
    context = multiprocessing.get_context("spawn")
    out: multiprocessing.Queue[list[LoadResult]] = context.Queue()
    process = context.Process(target=_child, args=(options, drafts, method, out))
    process.start()
    result = out.get()
    process.join()
    return result


def format_row(name: str, measured: LoadResult, baseline: LoadResult) -> str:
    speed, baseline_speed = measured.counts.tokens / measured.seconds, baseline.counts.tokens / baseline.seconds
    rates = " ".join(f"{rate:.1%}" for rate in measured.rates) or "-"
    per_step = 1 + sum(measured.rates)
    return f"| {name} | {measured.in_flight} | {speed:,.0f} | {speed / baseline_speed:.2f} | {rates} | {per_step:.2f} |"


def parse_load_options(arguments: argparse.Namespace, model: str) -> Options:
    """The options of a script with `add_load_options`, for a model folder."""
    import torch

    cuda, folder = torch.cuda.is_available(), Path(model)
    tokenizer = load_tokenizer(folder)
    questions = [json.loads(line)[arguments.column] for line in arguments.prompts.read_text().splitlines()]
    has_chat_template = (folder / "chat_template.jinja").is_file()
    return Options(
        model=model,
        prompts=[
            tokenizer.chat([{"role": "user", "content": question}]) if has_chat_template else tokenizer.encode(question)
            for question in questions
        ],
        ends=[tokenizer.eos_id],
        in_flight=arguments.in_flight,
        requests=arguments.requests,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        context=arguments.context,
        device="cuda" if cuda else "cpu",
        precision="bf16" if cuda else "fp32",
        gpu_memory=arguments.gpu_memory,
    )


def add_load_options(options_parser: argparse.ArgumentParser) -> None:
    options_parser.add_argument("--prompts", required=True, type=Path, help="rows (.jsonl) with a prompt column")
    options_parser.add_argument("--column", default="prompt")
    options_parser.add_argument("--in-flight", type=int, nargs="+", default=[8, 64])
    options_parser.add_argument("--requests", type=int, default=256)
    options_parser.add_argument("--tokens", type=int, default=128)
    options_parser.add_argument("--temperature", type=float, default=1.0)
    options_parser.add_argument("--context", type=int, default=512)
    options_parser.add_argument("--gpu-memory", type=float, default=0.5)


def print_table_heading(options: Options) -> None:
    print_environment()
    lengths = [len(prompt) for prompt in options.prompts]
    print(f"{len(lengths)} prompts of {statistics.median(lengths):.0f} tokens (median), at temperature {options.temperature:g}\n")
    print("| drafts | in flight | tokens/s | against none | accepted by position, per step | tokens per step |")
    print("|---|---|---|---|---|---|", flush=True)


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--model", required=True, help="folder with a drafter")
    options_parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3])
    options_parser.add_argument("--methods", nargs="+", choices=["greedy", "probabilistic"], default=["greedy", "probabilistic"])
    add_load_options(options_parser)
    arguments = options_parser.parse_args()
    options = parse_load_options(arguments, arguments.model)
    print_table_heading(options)
    baselines = measure_in_process(options, 0, "greedy")
    for load_result in baselines:
        print(format_row("none", load_result, load_result), flush=True)
    for drafts in arguments.drafts:
        for method in arguments.methods:
            for measured, baseline in zip(measure_in_process(options, drafts, method), baselines, strict=True):
                print(format_row(f"{drafts}, {method}", measured, baseline), flush=True)


if __name__ == "__main__":
    main()
