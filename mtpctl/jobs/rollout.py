"""The job of `mtpctl rollout`: start the recipe's engines without a trainer, and answer a file of prompts."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import settle_heap
from mtpctl.controller.prepare import ends_of, model_of, store_in, tokenizer_of
from mtpctl.controller.state import newest_version, version_named
from mtpctl.data.end_tokens import EndTokens
from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.data.prompts import chatted, encode_prompt
from mtpctl.data.sets import read_problems
from mtpctl.data.tokenizers import Tokenizer, check_fits_model
from mtpctl.environments.agents import playing
from mtpctl.environments.environment import Failures, environment_of
from mtpctl.environments.trial import try_environment
from mtpctl.environments.turns import turns_for
from mtpctl.errors import UserError
from mtpctl.plan.placement import Host, Placement, place
from mtpctl.recipe.checks import validate
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.rollout.installed import check_engine
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import Generator, request_for
from mtpctl.rollout.sample_file import Origin, SampleFile, Tally
from mtpctl.rollout.start import start_pool
from mtpctl.samples import GenerationRequest, Sample, ids_of
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.store import VersionStore

if TYPE_CHECKING:
    from mtpctl.convert.hf_folder import HfFolder

Say = Callable[[str], None]


class Summary(TypedDict):
    """The counts of `rollout`: of this call in `made`, `seconds` and `tokens_per_s`, else of the whole file. None: nothing to count."""

    model: str
    out: str
    samples: int
    made: int
    seconds: float
    tokens_per_s: float | None
    tokens: int
    length_mean: float | None
    reward_mean: float | None
    rewarded: int
    drafted: int
    accepted: int
    accept_rate: float | None
    accept_length: float | None
    finish_reasons: dict[str, int]


@dataclass(frozen=True)
class Source:
    """The weights to sample from: a model folder, and the checkpoint of a run that trained them further."""

    model: HfFolder
    tokenizer: Tokenizer
    ends: EndTokens
    context: int
    checkpoint: Path | None = None
    version: int = 0

    @property
    def name(self) -> str:
        """The weights in a few words."""
        if self.checkpoint is None:
            return f"the weights of {self.model.path}"
        return f"checkpoint {self.checkpoint} (weight version {self.version})"


def rollout(recipe: Recipe, prompts: Path, out: Path, *, n: int, say: Say, progress: Progress, start: str | None = None) -> Summary:
    """Answer every prompt `n` times into `out`, or what is missing there. Returns the summary.

    `start` names the weights: a run (its newest checkpoint), a checkpoint, or a model's folder. Without it they are the newest checkpoint
    of the recipe's run directory, and where that holds none the recipe's model.

    Raises UserError, before anything is started, for prompts, model or file that cannot serve; EnvironmentMissing without
    vLLM, ClusterResources and RuntimeFailure as the cluster and the engines raise them.
    """
    validate(without_training(recipe))
    recipe = with_merged_sync(recipe)
    if n < 1:
        raise UserError(f"--n: must be at least 1, got {n}")
    problems = read_problems(prompts, "--prompts", answers=False, columns=recipe.data.columns)
    if out.exists() and out.samefile(prompts):
        raise UserError(f"--out: {out} holds the prompts; name another file")
    with tempfile.TemporaryDirectory(prefix="mtpctl-rollout-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        source = source_of(recipe, start, folder, say)
        say(f"model: {source.name}")
        if source.ends.disagreement:
            say(source.ends.disagreement)
        environment, chat, deadline_s = environment_of(recipe.rollout), chatted(recipe.data, problems), recipe.rollout.deadline_s
        tools: Sequence[object] = ()
        if environment is not None:
            tried = try_environment(environment, problems, chat=chat, deadline_s=deadline_s)
            tried.check_text(source.tokenizer)
            tools = tried.tools
        asked = [
            Prompt(
                number,
                each.prompt_id,
                each.prompt,
                encode_prompt(source.tokenizer, each, recipe.data, tools),
                None if each.answer == NO_ANSWER else each.answer,
                each,
            )
            for number, each in enumerate(problems)
        ]
        for prompt in asked:
            if len(prompt.ids) >= source.context:
                raise UserError(
                    f"{prompt.prompt_id}: the prompt has {len(prompt.ids)} tokens and the context holds {source.context}; "
                    "shorten or remove it, or raise rollout.context"
                )
        file = stack.enter_context(SampleFile.open(out, origin_of(recipe, source), {prompt.prompt_id: prompt.text for prompt in asked}))
        missing, made_before = wanted(asked, n, file.done), (file.tally.samples, file.tally.tokens)
        seconds = 0.0
        if missing:
            if made_before[0]:
                say(f"{out} holds {made_before[0]} samples; {len(missing)} are missing")
            by_id = {each.prompt_id: each for each in problems}
            seconds = _generate(recipe, source, missing, file, folder, progress, by_id, say)
        else:
            say(f"{out} holds all {made_before[0]} samples; nothing is missing")
        made_now = (file.tally.samples - made_before[0], file.tally.tokens - made_before[1])
        counts = summary(file.tally, made=made_now[0], tokens=made_now[1], seconds=seconds)
        return cast(Summary, counts | {"model": source.name, "out": str(out)})


def without_training(recipe: Recipe) -> Recipe:
    """The recipe to check: without RL, since samples that are not trained on may be drawn with top-p and top-k."""
    train = recipe.train.model_copy(update={"stages": ["sft"], "sft": recipe.train.sft.model_copy(update={"steps": 1})})
    return recipe.model_copy(update={"train": train})


def with_merged_sync(recipe: Recipe) -> Recipe:
    """The recipe with a sync of whole weights, an adapter merged in, through this host's shared memory."""
    sync = recipe.sync.model_copy(update={"transport": "shm", "sections": ["target", "draft"]})
    # A recipe that leaves the device open decides it by its own transport.
    return recipe.model_copy(update={"sync": sync, "cluster": recipe.cluster.model_copy(update={"device": recipe.device})})


def source_of(recipe: Recipe, start: str | None, made: Path, say: Say) -> Source:
    """Find model, tokenizer and checkpoint. A model or tokenizer that has to be made is written to the folder `made`."""
    run, checkpoint, version = recipe.run_path.absolute(), None, 0
    if start is not None and (Path(start) / "config.json").is_file():
        model = recipe.model.model_copy(update={"path": str(Path(start).absolute()), "config": None, "init": "weights"})
        recipe = recipe.model_copy(update={"model": model})
    elif start is not None:
        run, checkpoint, version = version_named(start, "a model's folder (config.json)", tell=say)
    else:
        checkpoint, version = newest_version(run / "checkpoints", say)
    if recipe.model.drawn and not (run / "model").is_dir():
        raise UserError(
            f"model.{'init' if recipe.model.config is None else 'config'}: this recipe makes its model when it trains, and "
            f"{run} holds no run of it yet; run mtpctl train first, set run_dir to that of a run, or name weights: --from FOLDER"
        )
    home = run if recipe.model.drawn or checkpoint is not None else made
    model_folder = model_of(recipe, home)
    tokenizer = tokenizer_of(recipe, model_folder, home)
    check_fits_model(tokenizer, model_folder.shape.vocab)
    ends = ends_of(recipe, model_folder, tokenizer)
    return Source(model_folder, tokenizer, ends, recipe.rollout.context or model_folder.shape.max_positions, checkpoint, version)


def origin_of(recipe: Recipe, source: Source) -> Origin:
    """What samples of this recipe and these weights come from."""
    rollout, data = recipe.rollout, recipe.data
    return Origin(
        recipe.name,
        {
            "model": str(source.model.path.resolve()),
            "checkpoint": None if source.checkpoint is None else str(source.checkpoint.resolve()),
            "version": source.version,
            "tokenizer": recipe.model.tokenizer,
            "precision": [recipe.train.precision, rollout.dtype],
            "context": source.context,
            "seed": recipe.seed,
            "sampling": [rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens, rollout.stop, _other_ends(source)],
            "environment": _environment(rollout),
            "prompt": [data.chat_template, data.system_prompt],
            "checker": recipe.reward.function,
            **({"reward": recipe.reward.args} if recipe.reward.args else {}),
        },
    )


def _other_ends(source: Source) -> list[int]:
    """The end tokens other than the tokenizer's EOS token; if that is not an end token, -1 and all of them."""
    eos, ids = source.tokenizer.eos_id, list(source.ends.ids)
    return [token for token in ids if token != eos] if eos in ids else [-1, *ids]


def _environment(rollout: RolloutBase) -> list[object]:
    if rollout.agents_play and rollout.verifiers is None:  # None: agents that come over the network
        return [rollout.agent, rollout.max_turns, rollout.agent_args]
    if rollout.environment == "single":
        return []
    return [rollout.environment, rollout.max_turns, *([rollout.environment_args] if rollout.environment_args else [])]


def _generate(
    recipe: Recipe,
    source: Source,
    missing: list[tuple[Prompt, int]],
    file: SampleFile,
    folder: Path,
    progress: Progress,
    problems: Mapping[str, Problem],
    say: Say,
) -> float:
    """Start the engines, generate `missing`, and end the engines. Returns the seconds of generation alone."""
    # The engines must not repeat the random numbers of the samples that the file holds.
    seed = recipe.seed + 7919 * file.tally.samples

    async def drive(store: VersionStore) -> float:
        async with (
            serving(recipe, source, store, seed) as pool,
            Rewarder(recipe.reward, report=say) as rewarder,
            playing(recipe.rollout, pool, source.tokenizer, context=source.context, name=recipe.name, tell=say, trains=False) as agents,
        ):

            async def reward(text: str, sample: Sample) -> float | None:
                outcome = await rewarder(text, problems[sample.prompt_id], sample)
                sample.reward_parts = outcome.parts
                return outcome.reward

            return await answer_all(
                agents,
                missing,
                file,
                recipe.rollout,
                context=source.context,
                end_ids=source.ends.ids,
                decode=source.tokenizer.decode,
                reward=reward,
                seed=recipe.seed if recipe.async_.deterministic else None,
                progress=progress,
                tell=say,
            )

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(room_for_engines(recipe, source, folder))
        return asyncio.run(drive(store))


@contextlib.contextmanager
def room_for_engines(recipe: Recipe, source: Source, folder: Path) -> Iterator[VersionStore]:
    """A cluster with room for the recipe's engines, and a version store in `folder` to feed them from."""
    check_engine(recipe)
    placement = _engines(recipe)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster(recipe.cluster, cpus=placement.cpus, gpus=placement.gpus))
        store = store_in(folder, recipe, source.model.shape)
        store.claim()
        stack.callback(store.close)
        yield store


@contextlib.asynccontextmanager
async def serving(recipe: Recipe, source: Source, store: VersionStore, seed: int) -> AsyncIterator[ReplicaPool]:
    """The recipe's engines with the weights of `source`, which are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        starting = start_pool(
            recipe,
            model=str(source.model.path),
            context=source.context,
            placement=_engines(recipe),
            published=store,
            seed=seed,
            tokenizer=source.tokenizer.name,
            turns=turns_for(recipe.rollout, source.tokenizer),
        )
        pool, manifest = await asyncio.gather(starting, _published(recipe, source, store))
        stack.push_async_callback(pool.close)
        if manifest is not None:
            await within(
                pool.update(manifest, mode=recipe.sync.pause, deadline_s=recipe.sync.deadline_s),
                2 * recipe.sync.deadline_s,
                "loading the checkpoint into the engines",
            )
        settle_heap()
        yield pool


def _engines(recipe: Recipe) -> Placement:
    """The placement of the engines without a trainer. Whether the cluster has room shows once it is started."""
    train = recipe.train.model_copy(update={"stages": ["rl"]})
    alone = place(recipe.model_copy(update={"train": train}), hosts=[Host(float("inf"), float("inf"))])
    return Placement(alone.device, alone.of("rollout"), 1)


async def _published(recipe: Recipe, source: Source, store: VersionStore) -> Manifest | None:
    """Publish the checkpoint's weights in `store`. None without a checkpoint: the folder's weights are used."""
    if source.checkpoint is None:
        return None
    import ray

    # On the CPU, so that reading a checkpoint takes no card from the engines.
    environment = {"env_vars": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}
    actor: Any = ray.remote(CheckpointReader).options(num_cpus=0, runtime_env=environment).remote()
    try:
        publishing = actor.publish.remote(
            recipe.model_dump_json(by_alias=True), str(source.model.path), str(source.checkpoint), source.version, str(store.root)
        )
        manifest: Manifest = await within(publishing, recipe.cluster.actor_deadline_s, f"checkpoint {source.checkpoint.name}")
        return manifest
    finally:
        ray.kill(actor)


class CheckpointReader:
    """Reads a trainer's checkpoint, of any parallel layout, in one process. `_published` runs it as a Ray actor."""

    def publish(self, recipe_json: str, folder: str, checkpoint: str, version: int, store: str) -> Manifest:
        """Publish the checkpoint's weights as `version`. Raises UserError for a checkpoint of another model."""
        from mtpctl.convert.hf_folder import HfFolder
        from mtpctl.recipe.parallel import ParallelConfig
        from mtpctl.trainer.config import EngineConfig
        from mtpctl.trainer.engine import MegatronEngine
        from mtpctl.trainer.sending import WeightSource

        recipe = Recipe.model_validate_json(recipe_json)
        config = EngineConfig(ParallelConfig(), precision=recipe.train.precision, mtp=recipe.mtp, train=False, lora=recipe.train.lora)
        engine = MegatronEngine(HfFolder.open(folder), config)
        engine.restore(Path(checkpoint))
        manifest = WeightSource(recipe, 0, engine).plan_weights(version, store, [], False, tuple(recipe.sync.sections))
        engine.close()
        assert manifest is not None
        return manifest


# Generation without training: n responses to every prompt, written to a file, and a summary of them.

Reward = Callable[[str, Sample], Awaitable[float | None]]
"""Rewards one response, given as text and with its sample; None where the reward function failed on it."""
Progress = Callable[[int, int, Tally], None]
"""Called after every sample with the number of samples in the file, the number there will be, and their sums."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as text and as token ids; `number` is its position, `answer` the reference that the reward needs, or None.

    `problem` is what an environment is made with.
    """

    number: int
    prompt_id: str
    text: str
    ids: list[int]
    answer: str | None = None
    problem: object = None


def wanted(prompts: Iterable[Prompt], n: int, done: set[tuple[str, int]]) -> list[tuple[Prompt, int]]:
    """The responses that are still missing, as prompt and number of the response, in the prompts' order."""
    return [(prompt, index) for prompt in prompts for index in range(n) if (prompt.prompt_id, index) not in done]


async def answer_all(
    generator: Generator,
    missing: list[tuple[Prompt, int]],
    out: SampleFile,
    rollout: RolloutBase,
    *,
    context: int,
    end_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    reward: Reward,
    seed: int | None = None,
    progress: Progress = lambda done, total, tally: None,
    tell: Callable[[str], None] = lambda line: None,
) -> float:
    """Generate the `missing` responses with the sampling settings of `rollout`, and write each when it is finished. Returns seconds.

    `seed` gives every request a seed of its own, so that a response is the same whatever else is generated. `tell` takes what fails in
    the user's environment. An error or an interrupt leaves the finished samples in the file.
    """
    prompts = {prompt.prompt_id: prompt for prompt, _ in missing}
    failures = Failures()
    total, began = len(out.done) + len(missing), time.perf_counter()

    async def requests() -> AsyncIterator[GenerationRequest]:
        for prompt, index in missing:
            sample = Sample(prompt.prompt_id, prompt.prompt_id, ids_of(prompt.ids), index=index)
            own = None if seed is None else (seed * 1_000_003 + prompt.number) * 65_537 + index
            yield request_for(rollout, sample, context=context, end_ids=end_ids, seed=own, problem=prompt.problem)

    async def keep(sample: Sample) -> None:
        prompt, text = prompts[sample.prompt_id], decode(sample.response_ids)
        if prompt.answer is not None:
            sample.reward = await reward(text, sample)
        out.append(sample, prompt.text, text)
        progress(len(out.done), total, out.tally)

    keeping: list[asyncio.Task[None]] = []
    try:
        async with contextlib.aclosing(generator.generate(requests())) as samples:
            async for sample in samples:
                if (failure := failures.first(sample)) is not None:
                    tell(failure)
                keeping.append(asyncio.create_task(keep(sample)))
    finally:
        # Also after an error or an interrupt: what is finished is worth its reward.
        await asyncio.gather(*keeping)
    return time.perf_counter() - began


def summary(tally: Tally, *, made: int, tokens: int, seconds: float) -> dict[str, object]:
    """The JSON summary of a rollout: over the whole file, but `made`, `tokens_per_s` and `seconds` over this call alone.

    `tokens` are those generated in `seconds`. A mean over nothing is None.
    """
    speculation = tally.speculation
    return {
        "samples": tally.samples,
        "made": made,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "tokens": tally.tokens,
        "length_mean": tally.tokens / tally.samples if tally.samples else None,
        "reward_mean": tally.reward / tally.rewards if tally.rewards else None,
        "rewarded": tally.rewards,
        "drafted": speculation.drafted,
        "accepted": speculation.accepted,
        "accept_rate": speculation.accept_rate if speculation.drafted else None,
        "accept_length": speculation.accept_length if speculation.drafted else None,
        "finish_reasons": dict(sorted(tally.finish_reasons.items())),
    }
