"""`mtpctl bench rollout`: what mtpctl's way to an engine costs, and what speculation is worth on this card.

`path`: the same requests through vLLM's offline `LLM.generate` and through mtpctl's pool and actor, same model, settings and card, one
after the other; and, at full load with a queue, the share of the engine's places that stood empty.

`speculation`: an engine without speculation beside one that may draft up to k tokens, held at 0, 1, … k and then left to choose
(`rollout.speculation.auto`), at every batch size; with a drafter that is right on a chosen share of tokens, and with one that never is.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mtpctl import families
from mtpctl.bench.cycle_model import write_cycle_model
from mtpctl.bench.rollout_load import Load, Run, make_load, send, start_offline
from mtpctl.cluster import cluster, within
from mtpctl.families import hub_config
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe import Recipe, UserError
from mtpctl.recipe.schema import ClusterConfig
from mtpctl.rollout import ReplicaPool, engine_settings, start_pool

PATH_BOUND = 0.95
"""Throughput through mtpctl over vLLM's own, at least."""
IDLE_BOUND = 0.03
AUTO_BOUND = 0.98
"""Throughput of speculation.auto, once it has looked, over no speculation, at least."""
GAIN_BOUND = 0.9
"""Share of `allowed_gain` that one draft reaches up to `GAIN_BATCH` requests, at least."""
GAIN_BATCH = 64
START_S = 420.0
RUN_S = 300.0
TIMER = "the first request sent to the last answer received, prompts' prefill included; engine start and one round of warming up excluded"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `tokens` of an answer, `prompt` tokens before it; `drafts` the most a step may draft."""

    shape: Literal["mimo7b", "tiny"]
    folder: Path
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    drafts: int
    acceptance: float
    rounds: int
    device: Literal["cpu", "cuda"]
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One row: the median of the rounds, beside what it is held against (`ratio`), with the bound that it missed, if any.

    `draft_s`: seconds of device time that a step spends on all its drafts.
    """

    what: str
    load: str
    tokens_per_s: float
    least: float
    most: float
    ratio: float | None = None
    accept_rate: float | None = None
    accept_length: float | None = None
    draft_s: float | None = None
    allowed: float | None = None
    idle: float | None = None
    drafts: int | None = None
    wrong: int = 0
    misses: tuple[str, ...] = ()


TINY: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def allowed_gain(tokens: float, draft_s: float, step_s: float) -> float:
    """What speculation gains where checking drafts is free: `tokens` of a step, over what drafting adds to a step of `step_s` without."""
    return tokens / (1 + draft_s / step_s)


def known_shape(text: str) -> Literal["mimo7b", "tiny"]:
    """A shape by its name on the command line. Raises UserError for another."""
    if text == "mimo7b":
        return "mimo7b"
    if text == "tiny":
        return "tiny"
    raise UserError(f"--shape: must be mimo7b or tiny, got {text}")


def config_of(shape: Literal["mimo7b", "tiny"]) -> dict[str, Any]:
    """config.json fields; `model_type` is one that every vLLM reads without a stand-in."""
    return TINY if shape == "tiny" else hub_config("XiaomiMiMo/MiMo-7B-RL") | {"model_type": "qwen2"}


class Bench:
    """The pieces that both parts share: model, loads, engines one at a time."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self.say = options, say
        self.config = config_of(options.shape)
        self.shape = families.shape_of(self.config)
        most = self.shape.vocab // 4 - 1
        if options.tokens > most:
            raise UserError(f"--tokens: {options.tokens} is too long for a vocabulary of {self.shape.vocab}; at most {most}")
        self.results: list[Result] = []
        write_cycle_model(options.folder, self.config, acceptance=options.acceptance, device=options.device)
        say(f"model: {options.folder}, {families.count(self.shape)['total']:,} parameters")

    def recipe(self, drafts: int, auto: bool) -> Recipe:
        """One engine for the largest batch. CUDA graphs are captured for the batches used and a few below."""
        options = self.options
        most = max(options.batches)
        rollout: dict[str, Any] = {
            "engine": "vllm",
            "max_in_flight": most,
            "max_tokens": 2 * options.tokens,
            "threads": 1 if options.device == "cpu" else 0,
            "eager": options.eager,
            "speculation": {"num_tokens": drafts, "auto": auto},
        }
        if options.device == "cuda" and not options.eager:
            counts = sorted({1, 2, 4, *options.batches, *range(32, most + 1, 32)})
            widths = range(1, drafts + 2) if auto else [drafts + 1]
            sizes = sorted({count * width for count in counts for width in widths} | set(counts))
            rollout["engine_args"] = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        precision = "fp32" if options.device == "cpu" else "bf16"
        return Recipe.model_validate(
            {
                "model": {"path": str(options.folder)},
                "train": {"precision": precision},
                "rollout": rollout,
                "sync": {"transport": "shm"},
                "cluster": {"device": options.device, "actor_deadline_s": START_S},
            }
        )

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and answer, and a little."""
        return self.options.prompt + 2 * self.options.tokens + 64

    @property
    def seat(self) -> Actor:
        """Where the engine sits."""
        cuda = self.options.device == "cuda"
        return Actor("rollout", 0, 0, 0, 1.0, 1.0 if cuda else 0.0)

    def loads(self, *, hopeless: bool = False) -> list[Load]:
        """All at once, for every batch size."""
        return [self._load(f"batch {batch}", batch, batch, 0.0, hopeless) for batch in self.options.batches]

    def queued(self) -> Load:
        """Four times the largest batch, answers of different lengths: places are refilled all the time."""
        most = max(self.options.batches)
        return self._load(f"{most} in flight, {4 * most} in all", most, 4 * most, 0.5, False)

    def _load(self, name: str, batch: int, count: int, spread: float, hopeless: bool) -> Load:
        options = self.options
        return make_load(
            name, batch, count, prompt=options.prompt, tokens=options.tokens, spread=spread, vocab=self.shape.vocab, hopeless=hopeless
        )

    @asynccontextmanager
    async def pool(self, drafts: int, auto: bool = False) -> Any:
        """A pool of one engine, and its end."""
        recipe = self.recipe(drafts, auto)
        placement = Placement(self.options.device, (self.seat,), 1)
        pool = await start_pool(recipe, model=str(self.options.folder), context=self.context, placement=placement, latest=lambda: None)
        try:
            yield pool
        finally:
            await pool.close()

    async def rounds(self, load: Load, once: Callable[[], Awaitable[Run]], *, warm: bool = True) -> list[Run]:
        """One round to warm up, and the rounds that count."""
        if warm:
            await within(once(), RUN_S, f"{load.name}, warming up")
        return [await within(once(), RUN_S, load.name) for _ in range(self.options.rounds)]

    def add(self, what: str, load: Load, runs: list[Run], against: float | None = None, bound: float | None = None, **more: Any) -> Result:
        """A row from its rounds, and the bounds that it misses."""
        rates = [run.tokens_per_s for run in runs]
        median = statistics.median(rates)
        misses = []
        ratio = None if against is None else median / against
        if ratio is not None and bound is not None and ratio < bound:
            misses.append(f"{ratio:.3f} of {against:,.0f} tokens/s, bound {bound:.3g}")
        wrong = sum(run.wrong for run in runs)
        if wrong:
            misses.append(f"{wrong} answers are not the model's")
        idles = [run.idle for run in runs if run.idle is not None]
        idle = statistics.median(idles) if idles else None
        if idle is not None and idle > IDLE_BOUND:
            misses.append(f"places empty {idle:.1%} of the time, bound {IDLE_BOUND:.0%}")
        stats = runs[-1].stats
        if stats.drafted:
            more |= {"accept_rate": stats.accept_rate, "accept_length": stats.accept_length}
        result = Result(what, load.name, median, min(rates), max(rates), ratio, idle=idle, wrong=wrong, misses=tuple(misses), **more)
        self.results.append(result)
        self.say(line(result))
        return result


async def measure_path(bench: Bench) -> None:
    """vLLM's own offline generation, then the same through the pool."""
    import ray

    options = bench.options
    recipe = bench.recipe(0, False)
    settings = engine_settings(
        recipe.rollout.model_copy(update={"context": bench.context}),  # type: ignore[arg-type]
        model=str(options.folder),
        precision=recipe.train.precision,
        device=options.device,
    )
    loads = [*bench.loads(), bench.queued()]
    actor = start_offline(settings, {"num_cpus": 1, "num_gpus": bench.seat.gpus})
    theirs: dict[str, float] = {}
    first = True
    for load in loads:

        async def offline(load: Load = load, logprobs: bool = True) -> Run:
            run: Run = await actor.send.remote(load, bench.shape.vocab, logprobs)
            return run

        if first:
            await within(offline(), START_S, "vLLM, start and first round")
            first = False
        theirs[load.name] = bench.add("vLLM LLM.generate", load, await bench.rounds(load, offline)).tokens_per_s
    largest = loads[-2]
    bare = await bench.rounds(largest, lambda: offline(largest, False), warm=False)
    bench.add("vLLM LLM.generate, no log-probs", largest, bare, theirs[largest.name])
    ray.kill(actor)
    async with bench.pool(0) as pool:
        for load in loads:
            runs = await bench.rounds(load, lambda load=load: send(pool, load, bench.shape.vocab))  # type: ignore[misc]
            bench.add("mtpctl", load, runs, theirs[load.name], PATH_BOUND)


async def measure_speculation(bench: Bench) -> None:
    """No speculation in one engine; 0 to k drafts, and the engine's own choice, in another."""
    options = bench.options
    vocab = bench.shape.vocab
    off: dict[str, float] = {}
    async with bench.pool(0) as pool:
        for load in bench.loads():
            runs = await bench.rounds(load, lambda load=load: send(pool, load, vocab))  # type: ignore[misc]
            off[load.name] = bench.add("no speculation", load, runs).tokens_per_s
    async with bench.pool(options.drafts, auto=True) as pool:
        for load in bench.loads():
            for drafts in range(options.drafts + 1):
                await pool.speculate(drafts)
                runs = await bench.rounds(load, lambda load=load: send(pool, load, vocab))  # type: ignore[misc]
                draft_s = (await pool.speculate())[0]["draft_s"][drafts] if drafts else 0.0
                allowed = allowed_gain(runs[-1].stats.accept_length, draft_s, load.batch / off[load.name])
                bound = GAIN_BOUND * allowed if drafts == 1 and load.batch <= GAIN_BATCH else None
                bench.add(f"{drafts} drafts", load, runs, off[load.name], bound, allowed=allowed, draft_s=draft_s, drafts=drafts)
        for hopeless in (False, True):
            for load in bench.loads(hopeless=hopeless):
                await _auto(bench, pool, load, off[load.name], hopeless)


async def _auto(bench: Bench, pool: ReplicaPool, load: Load, off: float, hopeless: bool) -> None:
    """The engine's own choice: the round in which it looks, then what it settles on."""
    await pool.speculate(-1)
    what = "auto, no draft right" if hopeless else "auto"
    looking = await within(send(pool, load, bench.shape.vocab), RUN_S, load.name)
    bench.add(f"{what}, looking", load, [looking], off)
    runs = await bench.rounds(load, lambda: send(pool, load, bench.shape.vocab), warm=False)
    state = (await pool.speculate())[0]
    bench.add(what, load, runs, off, AUTO_BOUND, drafts=state["drafts"])
    if state["told"]:
        bench.say(f"  {state['told']}")


def run(options: Options, parts: list[str], say: Say) -> list[Result]:
    """Measure the parts that are named. Every row is said as it is measured."""
    bench = Bench(options, say)
    with _cluster(options):
        for part, measure in (("path", measure_path), ("speculation", measure_speculation)):
            if part in parts:
                asyncio.run(measure(bench))
    return bench.results


@contextmanager
def _cluster(options: Options) -> Iterator[None]:
    gpus = 1 if options.device == "cuda" else 0
    with cluster(ClusterConfig(device=options.device, num_cpus=None if gpus else 2), cpus=1, gpus=gpus):
        yield


HEAD = "| what | load | tokens/s (least – most) | ratio | accepted | tokens a step | drafting, ms a step | allowed gain | places empty |"
RULE = "|---" * HEAD.count(" | ") + "|---|"


def line(result: Result) -> str:
    """A row of the table."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    r = result
    chosen = f" → {r.drafts} drafts" if r.what.startswith("auto") and r.drafts is not None else ""
    return (
        f"| {r.what}{chosen} | {r.load} | {r.tokens_per_s:,.0f} ({r.least:,.0f} – {r.most:,.0f}) | {number(r.ratio, '.3f')} "
        f"| {number(r.accept_rate, '.1%')} | {number(r.accept_length, '.2f')} "
        f"| {number(r.draft_s and r.draft_s * 1e3, '.2f')} | {number(r.allowed, '.2f')} | {number(r.idle, '.2%')} |"
    )


def verdict(results: list[Result]) -> list[str]:
    """The best number of drafts at each load, and every bound that was missed."""
    lines = []
    for load in dict.fromkeys(r.load for r in results if r.what.endswith(" drafts")):
        best = max((r for r in results if r.load == load and r.what.endswith(" drafts")), key=lambda r: r.tokens_per_s)
        lines.append(f"{load}: best with {best.what}, {best.ratio:.2f} of no speculation")
    lines += [f"MISSED {r.what}, {r.load}: {'; '.join(r.misses)}" for r in results if r.misses]
    return lines


def as_dict(options: Options, results: list[Result]) -> dict[str, Any]:
    """Everything that was measured."""
    return {"options": {**asdict(options), "folder": str(options.folder)}, "timer": TIMER, "results": [asdict(r) for r in results]}
