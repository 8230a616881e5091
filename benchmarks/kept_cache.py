"""`sync.kv: keep` against `recompute`: log-probs and learning in RL runs, and the speed of generation after a sync.

    python benchmarks/kept_cache.py learn --recipe mimo_small_mtp --seeds 0 1 --set train.rl.steps=100
    python benchmarks/kept_cache.py learn --recipe tiny_mtp --set train.rl.steps=40                      # on a CPU
    python benchmarks/kept_cache.py speed --requests 64 --prompt 2048 --tokens 1024
    python benchmarks/kept_cache.py speed --requests 8 --prompt 128 --tokens 256 --shape tiny            # on a CPU

`compare_learning` trains RECIPE from one warm start with both settings. Reported are means over the updates: the difference between trainer
and engine at equal weights, of tokens without and with a stale KV cache, the share of the latter, the update's seconds, tokens/s, and the
time for which a sync stalls generation; and the mean held-out accuracy of the last four evaluations. Runs in --out are reused. --arm runs
only one of the settings.

`compare_speed` pauses an engine under load when its requests are at half of their responses, as a sync does, and resumes it at once.
Reported are the seconds until every request has sampled 8 more tokens, and the tokens/s until then, alternating with undisturbed phases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness import parser, print_environment
from mtpctl.bench.arms import Arm, Experiment, Outcome
from mtpctl.bench.report import format_spread, markdown_table
from mtpctl.bench.rollout_engines import cycle_config
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ARMS = [
    Arm("recompute", "the new weights compute the cache again", ("sync.kv=recompute",)),
    Arm("keep", "requests keep the cache of the old weights", ("sync.kv=keep",)),
]
MEANS = {
    "rollout_corr/abs_diff_same_version": ("same weights, nats", ".2g"),
    "rollout_corr/abs_diff_stale_kv": ("stale cache, nats", ".2g"),
    "rollout_corr/stale_kv_fraction": ("tokens with it", ".1%"),
    "rollout_corr/abs_diff": ("all tokens, nats", ".2g"),
    "async/partial_ratio": ("responses across a sync", ".0%"),
    "sync/stall_seconds": ("stall, s", ".3f"),
    "rollout/tokens_per_s": ("rollout, tokens/s", ",.0f"),
    "timing_s/step": ("update, s", ".2f"),
    "reward/mean": ("reward", ".3f"),
}
PHASE_TOKENS = 8
"""Tokens that each request samples in a phase of `compare_speed`."""


def mean_metric(outcome: Outcome, name: str) -> float | None:
    values = [row.metrics[name] for row in outcome.history.rows if row.phase == "rl" and name in row.metrics]
    return statistics.fmean(values) if values else None


def compare_learning(options: argparse.Namespace) -> None:
    experiment = Experiment(options.recipe, (), tuple(options.sets), options.out)
    arms = [arm for arm in ARMS if options.arm in (None, arm.name)]
    if options.measured_only:
        outcomes = experiment.load_outcomes(arms, options.seeds, report=print)
    else:
        outcomes = experiment.run(arms, options.seeds, report=print)
    rows = []
    for outcome in outcomes:
        figures = [(mean_metric(outcome, name), form) for name, (_, form) in MEANS.items()]
        accuracy = [value for _, value in outcome.history.series("eval/accuracy", "rl")][-4:]
        cells = ["–" if value is None else format(value, form) for value, form in figures]
        rows.append([outcome.arm.name, outcome.seed, outcome.updates, *cells, f"{statistics.fmean(accuracy):.1%}" if accuracy else "–"])
    print()
    print(markdown_table(["sync.kv", "seed", "updates", *(heading for heading, _ in MEANS.values()), "held-out, last 4"], rows))


class Progress:
    """Requests in flight, and the number of tokens that each has sampled."""

    def __init__(self, llm: AsyncLLM, options: argparse.Namespace, turn: int) -> None:
        self._llm, self._options, self._turn = llm, options, turn
        self.counts = [0] * options.requests
        self.arrived = asyncio.Event()
        self.tasks = [asyncio.create_task(self._send(slot)) for slot in range(options.requests)]

    async def _send(self, slot: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        # A different prompt in each turn, so that the prefix cache does not have it.
        prompt = [3 + (slot * 7 + self._turn * 11 + position * (1 + slot % 5)) % 200 for position in range(self._options.prompt)]
        sampling = SamplingParams(
            max_tokens=self._options.tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, logprobs=0
        )
        async for step in self._llm.generate(tokens_input(prompt), sampling, f"{self._turn}-{slot}"):
            self.counts[slot] += len(step.outputs[0].token_ids)
            self.arrived.set()

    async def until(self, targets: list[int]) -> None:
        """Wait until each request has sampled so many tokens."""
        while any(count < target for count, target in zip(self.counts, targets, strict=True)):
            for task in self.tasks:
                if task.done():
                    task.result()
            self.arrived.clear()
            await self.arrived.wait()


async def measure_phase(llm: AsyncLLM, options: argparse.Namespace, turn: int, mode: str) -> tuple[float, float]:
    """Seconds until each request has sampled `PHASE_TOKENS` more tokens, and tokens/s until then."""
    from mtpctl.rollout.vllm.patches import pauses

    progress = Progress(llm, options, turn)
    await progress.until([options.tokens // 2] * options.requests)
    counts_before, began = progress.counts[:], time.perf_counter()
    if mode != "undisturbed":
        await pauses.pause(llm, "keep", clear_cache=mode == "recompute")
        await llm.resume_generation()
    await progress.until([count + PHASE_TOKENS for count in counts_before])
    seconds = time.perf_counter() - began
    rate = (sum(progress.counts) - sum(counts_before)) / seconds
    await asyncio.gather(*progress.tasks)
    return seconds, rate


async def compare_speed(options: argparse.Namespace) -> None:
    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import build_engine_settings

    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="mtpctl-kept-cache-") as temporary:
        model = Path(temporary)
        config = cycle_config(options.shape) | {"max_position_embeddings": options.prompt + options.tokens + 8}
        (model / "config.json").write_text(json.dumps(config))
        index = {"weight_map": dict.fromkeys(tensor_shapes(shape_of(config)), "model.safetensors")}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        rollout = VllmConfig(
            max_in_flight=options.requests,
            context=options.prompt + options.tokens + 8,
            threads=0 if cuda else 1,
            kv_cache_bytes=None if cuda else 256 << 20,
            gpu_memory=0.8 if cuda else None,
            speculation=SpeculationConfig(num_tokens=1),
            engine_args={"load_format": "dummy", "enable_prefix_caching": True},
        )
        settings = build_engine_settings(
            rollout, model=temporary, precision="bf16" if cuda else "fp32", device="cuda" if cuda else "cpu", immediate_admission=True
        )
        engine = await VllmEngine.start(settings)
        try:
            figures: dict[str, list[tuple[float, float]]] = {mode: [] for mode in ("undisturbed", "recompute", "keep")}
            turn = 0
            for round_number in range(-1, options.rounds):
                for mode, results in figures.items():
                    turn += 1
                    figure = await measure_phase(engine._llm, options, turn, mode)
                    if round_number >= 0:
                        results.append(figure)
                        print(f"{mode}: {figure[0]:.3f} s, {figure[1]:,.0f} tokens/s", flush=True)
        finally:
            await engine.shutdown()
    rows = [
        [mode, *(format_spread(column, form) for column, form in zip(zip(*f, strict=True), (".3f", ",.0f"), strict=True))]
        for mode, f in figures.items()
    ]
    print()
    print(markdown_table(["sync.kv", f"seconds for {PHASE_TOKENS} tokens each", "tokens/s"], rows))


def main() -> None:
    arguments = parser(__doc__)
    parts = arguments.add_subparsers(dest="part", required=True)
    learning = parts.add_parser("learn")
    learning.add_argument("--recipe", default="mimo_small_mtp")
    learning.add_argument("--seeds", nargs="+", type=int, default=[0])
    learning.add_argument("--arm", choices=[arm.name for arm in ARMS])
    learning.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    learning.add_argument("--out", type=Path, default=Path("runs/kept-cache"))
    learning.add_argument("--measured-only", action="store_true")
    speeding = parts.add_parser("speed")
    speeding.add_argument("--shape", choices=("mimo7b", "tiny"), default="mimo7b")
    speeding.add_argument("--requests", type=int, default=64)
    speeding.add_argument("--prompt", type=int, default=2048)
    speeding.add_argument("--tokens", type=int, default=1024)
    speeding.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    print_environment()
    if options.part == "learn":
        compare_learning(options)
    else:
        asyncio.run(compare_speed(options))


if __name__ == "__main__":
    main()
