"""Rollout engines without a trainer, with the weights of a model folder, a checkpoint or a run, and the job of `mtpctl eval` on them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from mtpctl.cluster.deadlines import await_within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import freeze_heap
from mtpctl.controller.evaluate import evaluate
from mtpctl.controller.preflight import check_sandbox
from mtpctl.controller.prepare import Prepared, find_end_tokens, open_model, open_tokenizer, open_version_store
from mtpctl.controller.services import start_rewards
from mtpctl.controller.state import find_newest_version, resolve_checkpoint
from mtpctl.data.end_tokens import EndTokens
from mtpctl.data.prompts import check_lengths
from mtpctl.data.sets import load_held_out
from mtpctl.data.tokenizers import Tokenizer, check_fits_model
from mtpctl.environments.agents import open_generator
from mtpctl.environments.turns import load_turns
from mtpctl.errors import UserError
from mtpctl.plan.placement import Host, Placement, place
from mtpctl.recipe.checks import validate
from mtpctl.recipe.data import GeneratedTask, is_dataset_id
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.installed import check_engine
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.start import start_pool
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.store import VersionStore
from mtpctl.telemetry.names import align_columns

if TYPE_CHECKING:
    from mtpctl.convert.hf_folder import HfFolder

Report = Callable[[str], None]


@dataclass(frozen=True)
class WeightSource:
    """The weights to sample from: a model folder and, for a trained run, a checkpoint of it."""

    model: HfFolder
    tokenizer: Tokenizer
    end_tokens: EndTokens
    context: int
    checkpoint: Path | None = None
    version: int = 0

    @property
    def name(self) -> str:
        """A phrase for messages that says which weights these are."""
        if self.checkpoint is None:
            return f"the weights of {self.model.path}"
        return f"checkpoint {self.checkpoint} (weight version {self.version})"


def find_weights(recipe: Recipe, from_weights: str | None, scratch: Path, report: Report) -> WeightSource:
    """Find the weights that `from_weights` names: a run (its newest checkpoint), a checkpoint, or a model folder.

    Default: the newest checkpoint of the recipe's run, or the recipe's model if there is none. A model or tokenizer that has to be created
    is written to the run directory for random weights or a checkpoint, otherwise to `scratch`.
    """
    run, checkpoint, version = recipe.run_path.absolute(), None, 0
    if from_weights is not None and (Path(from_weights) / "config.json").is_file():
        model = recipe.model.model_copy(
            update={"path": str(Path(from_weights).absolute()), "config": None, "init": "weights", "drafter": None}
        )
        recipe = recipe.model_copy(update={"model": model})
    elif from_weights is not None:
        run, checkpoint, version = resolve_checkpoint(from_weights, "a model's folder (config.json)", report=report)
    else:
        checkpoint, version = find_newest_version(run / "checkpoints", report)
    if recipe.model.randomly_initialized and not (run / "model").is_dir():
        raise UserError(
            f"model.{'init' if recipe.model.config is None else 'config'}: the model is created by training, and {run} is not a run of "
            "this recipe; run mtpctl train first, set run_dir to that of a run, or name weights: --from FOLDER"
        )
    run_dir = run if recipe.model.randomly_initialized or checkpoint is not None else scratch
    model_folder = open_model(recipe, run_dir)
    tokenizer = open_tokenizer(recipe, model_folder, run_dir)
    check_fits_model(tokenizer, model_folder.shape.vocab)
    end_tokens = find_end_tokens(recipe, model_folder, tokenizer)
    return WeightSource(
        model_folder, tokenizer, end_tokens, recipe.rollout.context or model_folder.shape.max_positions, checkpoint, version
    )


def scratch_folder(recipe: Recipe, name: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder: in the run directory, which all hosts share, if the recipe joins a cluster and has a run, else on this host."""
    is_shared = recipe.cluster.address is not None and recipe.run_path.is_dir()
    return tempfile.TemporaryDirectory(prefix=f".mtpctl-{name}-", dir=recipe.run_path.absolute() if is_shared else None)


def without_rl(recipe: Recipe) -> Recipe:
    """A copy of the recipe with one SFT step as its only stage, for validation, because RL rejects top-p and top-k."""
    train = recipe.train.model_copy(update={"stages": ["sft"], "sft": recipe.train.sft.model_copy(update={"steps": 1})})
    return recipe.model_copy(update={"train": train})


def with_local_merged_sync(recipe: Recipe) -> Recipe:
    """A copy of the recipe that sends weights through this host's shared memory, with a LoRA adapter merged into them."""
    sync = recipe.sync.model_copy(update={"transport": "shm", "sections": ["target", "draft"]})
    # Set the device: with `auto`, it would be derived from the new transport.
    return recipe.model_copy(update={"sync": sync, "cluster": recipe.cluster.model_copy(update={"device": recipe.device})})


@contextlib.contextmanager
def engine_cluster(recipe: Recipe, source: WeightSource, folder: Path) -> Iterator[VersionStore]:
    """Start or join a cluster that fits the recipe's engines. Yields their version store, in shared memory if it fits, else in `folder`."""
    check_engine(recipe)
    placement = _engine_placement(recipe)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster(recipe.cluster, cpus=placement.cpus, gpus=placement.gpus))
        store = open_version_store(folder, recipe, source.model.shape)
        store.claim()
        stack.callback(store.close)
        yield store


@contextlib.asynccontextmanager
async def serving(recipe: Recipe, source: WeightSource, store: VersionStore, seed: int) -> AsyncIterator[ReplicaPool]:
    """Start the recipe's engines with the weights of `source`. They are closed at the end of the block."""
    async with contextlib.AsyncExitStack() as stack:
        pool_start = start_pool(
            recipe,
            model=str(source.model.path),
            context=source.context,
            placement=_engine_placement(recipe),
            store=store,
            seed=seed,
            tokenizer=source.tokenizer.name,
            turn_runner=load_turns(recipe.rollout, source.tokenizer),
        )
        pool, manifest = await asyncio.gather(pool_start, _publish(recipe, source, store))
        stack.push_async_callback(pool.close)
        if manifest is not None:
            await await_within(
                pool.update(manifest, mode=recipe.sync.pause, deadline_s=recipe.sync.deadline_s),
                2 * recipe.sync.deadline_s,
                "loading the checkpoint into the engines",
            )
        freeze_heap()
        yield pool


def _engine_placement(recipe: Recipe) -> Placement:
    """The placement of the engines alone, on one host of unlimited capacity, because the cluster's capacity is not known yet."""
    train = recipe.train.model_copy(update={"stages": ["rl"]})
    placement = place(recipe.model_copy(update={"train": train}), hosts=[Host(float("inf"), float("inf"))])
    return Placement(placement.device, placement.of("rollout"), 1)


async def _publish(recipe: Recipe, source: WeightSource, store: VersionStore) -> Manifest | None:
    """Publish the checkpoint's weights in `store`. None without a checkpoint: the engines load the folder's weights."""
    if source.checkpoint is None:
        return None
    import ray

    # On the CPU, so that reading a checkpoint takes no GPU memory from the engines.
    environment = {"env_vars": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}
    actor: Any = ray.remote(CheckpointReader).options(num_cpus=0, runtime_env=environment).remote()
    try:
        publication = actor.publish.remote(
            recipe.model_dump_json(by_alias=True), str(source.model.path), str(source.checkpoint), source.version, str(store.root)
        )
        manifest: Manifest = await await_within(publication, recipe.cluster.actor_deadline_s, f"checkpoint {source.checkpoint.name}")
        return manifest
    finally:
        ray.kill(actor)


class CheckpointReader:
    """Ray actor that reads a trainer's checkpoint, of any parallel layout, in one process."""

    def publish(self, recipe_json: str, folder: str, checkpoint: str, version: int, store: str) -> Manifest:
        """Publish the checkpoint's weights as `version`. Raises UserError for a checkpoint of another model."""
        from mtpctl.convert.hf_folder import HfFolder
        from mtpctl.recipe.section import ParallelConfig
        from mtpctl.trainer.config import EngineConfig
        from mtpctl.trainer.engine import MegatronEngine
        from mtpctl.trainer.sending import WeightExporter

        recipe = Recipe.model_validate_json(recipe_json)
        config = EngineConfig(ParallelConfig(), precision=recipe.train.precision, mtp=recipe.mtp, train=False, lora=recipe.train.lora)
        engine = MegatronEngine(HfFolder.open(folder), config)
        engine.restore(Path(checkpoint))
        manifest = WeightExporter(recipe, 0, engine).plan_weights(version, store, [], False, tuple(recipe.sync.sections))
        engine.close()
        assert manifest is not None
        return manifest


UNNAMED_LABEL = "held-out"
"""Key and printed name of the unnamed held-out set: `data.eval_path`, a generated task, or the tasks of an environment."""


class Evaluation(TypedDict):
    """The result of `evaluate_weights`.

    sets: the metrics of each held-out set, with `n`, its responses per problem. seen: the number of held-out problems whose prompt a
    training row has; None if the training rows cannot be read.
    """

    model: str
    version: int
    seconds: float
    seen: int | None
    sets: dict[str, dict[str, float]]


def evaluate_weights(recipe: Recipe, *, n: int | None, report: Report, from_weights: str | None = None) -> Evaluation:
    """Evaluate weights on the recipe's held-out sets, with `n` responses to each problem, or as many as each set configures.

    `from_weights`: as in `find_weights`. Before anything starts, raises UserError if there is no held-out set, and for unsuitable problems,
    rewards or weights. Errors of the cluster and the engines are raised unchanged.
    """
    recipe = with_local_merged_sync(recipe)
    validate(_for_validation(recipe))
    problems = load_held_out(recipe.data, recipe.seed, recipe.evaluation, recipe.rollout, stages=recipe.train.stages)
    if not problems.held_out:
        raise UserError("evaluation.sets: the recipe has no held-out problems; name a set, or data.eval_path")
    check_sandbox(recipe)
    with scratch_folder(recipe, "eval") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        source = find_weights(recipe, from_weights, folder, report)
        for held_out in problems.held_out.values():
            check_lengths(source.tokenizer, held_out, recipe.data, context=source.context)
        counts = {name: (n or recipe.evaluation.of(name).n) for name in problems.held_out}
        total = sum(len(held_out) * counts[name] for name, held_out in problems.held_out.items())
        report(f"model: {source.name}; {total} responses to {sum(map(len, problems.held_out.values()))} held-out problems")
        if source.end_tokens.disagreement:
            report(source.end_tokens.disagreement)
        if problems.seen_prompts is None and recipe.data.path is not None:
            report("data.path: the training rows cannot be read, so the accuracy on unseen prompts is unknown")
        store = stack.enter_context(engine_cluster(recipe, source, folder))
        prepared = Prepared(source.model, source.tokenizer, problems, source.context, end_tokens=source.end_tokens)
        started_at = time.perf_counter()
        metrics = asyncio.run(_evaluate(recipe, source, store, prepared, n, report))
        seconds = time.perf_counter() - started_at
    return {
        "model": source.name,
        "version": source.version,
        "seconds": seconds,
        "seen": None if problems.seen_prompts is None else problems.count_seen(),
        "sets": {name or UNNAMED_LABEL: {"n": counts[name], **_set_metrics(metrics, name)} for name in problems.held_out},
    }


async def _evaluate(
    recipe: Recipe, source: WeightSource, store: VersionStore, prepared: Prepared, n: int | None, report: Report
) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        rewards = await start_rewards(recipe, stack, report=report)
        pool = await stack.enter_async_context(serving(recipe, source, store, recipe.seed))
        name, context = recipe.name, prepared.context
        generator_context = open_generator(recipe.rollout, pool, source.tokenizer, context=context, name=name, report=report)
        return await evaluate(recipe, prepared, await stack.enter_async_context(generator_context), rewards, version=source.version, n=n)


def _for_validation(recipe: Recipe) -> Recipe:
    """A copy of the recipe for validation, without RL. An evaluation needs no training rows, so a generated task replaces missing ones."""
    recipe, data = without_rl(recipe), recipe.data
    if data.path is not None or data.task is not None or recipe.rollout.verifiers is not None:
        return recipe
    held_out = data.eval_path if data.eval_path and is_dataset_id(data.eval_path) else None
    return recipe.model_copy(update={"data": data.model_copy(update={"task": GeneratedTask(), "eval_path": held_out})})


def _set_metrics(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The metrics of one set, without their prefix. Excludes those of the whole evaluation, which have the unnamed set's prefix."""
    prefix = f"eval/{name}/" if name else "eval/"
    set_values = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {key: value for key, value in set_values.items() if "/" not in key and (name or key not in ("version", "mixed_fraction"))}


def render_evaluation(evaluation: Evaluation) -> str:
    rows = [["set", "problems", "n", "avg@n", *(["unseen"] if evaluation["seen"] else []), "pass@k", "length", "cut off", "acceptance"]]
    for name, metrics in evaluation["sets"].items():
        n = int(metrics["n"])
        mean = metrics.get(f"avg@{n}", metrics.get("accuracy", 0.0))
        pass_at_k = "  ".join(f"@{key[5:]} {value:.1%}" for key, value in metrics.items() if key.startswith("pass@"))
        acceptance = f"{metrics['spec_accept_rate']:.1%}" if "spec_accept_rate" in metrics else "–"
        cells = [f"{metrics['problems']:.0f}", str(n), f"{mean:.3f}"]
        if evaluation["seen"]:
            cells.append(_format_unseen(metrics, mean))
        cells += [pass_at_k or "–", f"{metrics['length_mean']:.1f}"]
        rows.append([name, *cells, f"{metrics['truncated_fraction']:.1%}", acceptance])
    lines = align_columns(rows)
    if evaluation["seen"]:
        lines.append("unseen: avg@n of the problems whose prompt no training row has, and their number")
    elif evaluation["seen"] == 0:
        lines.append("no training row has a held-out prompt")
    return "\n".join([*lines, f"{evaluation['model']}; {evaluation['seconds']:.1f} s including the start of the engines"])


def _format_unseen(metrics: Mapping[str, float], mean: float) -> str:
    """`avg@n` of the unseen problems of a set and their number, such as `0.121 (362)`; `mean` is that of all problems."""
    if (count := metrics.get("unseen_problems", metrics["problems"])) == 0:
        return "– (0)"
    value = next((value for key, value in metrics.items() if key.startswith(("unseen_accuracy", "unseen_avg@"))), mean)
    return f"{value:.3f} ({count:.0f})"
