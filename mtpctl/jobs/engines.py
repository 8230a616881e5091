"""Rollout engines without a trainer, with the weights of a model folder, a checkpoint or a run: for `rollout` and `eval`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import freeze_heap
from mtpctl.controller.prepare import end_tokens_of, open_model, open_tokenizer, open_version_store
from mtpctl.controller.state import newest_version, resolve_checkpoint
from mtpctl.data.end_tokens import EndTokens
from mtpctl.data.tokenizers import Tokenizer, check_fits_model
from mtpctl.environments.turns import turns_for
from mtpctl.errors import UserError
from mtpctl.plan.placement import Host, Placement, place
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.installed import check_engine
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.start import start_pool
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.store import VersionStore

if TYPE_CHECKING:
    from mtpctl.convert.hf_folder import HfFolder

Report = Callable[[str], None]


@dataclass(frozen=True)
class WeightSource:
    """The weights to sample from: a model folder and, for a trained run, a checkpoint of it."""

    model: HfFolder
    tokenizer: Tokenizer
    ends: EndTokens
    context: int
    checkpoint: Path | None = None
    version: int = 0

    @property
    def name(self) -> str:
        """A description of the weights."""
        if self.checkpoint is None:
            return f"the weights of {self.model.path}"
        return f"checkpoint {self.checkpoint} (weight version {self.version})"


def find_weights(recipe: Recipe, start: str | None, scratch: Path, report: Report) -> WeightSource:
    """Find the weights that `start` names: a run (its newest checkpoint), a checkpoint, or a model folder.

    By default they are those of the recipe's run directory or model. A model or tokenizer that has to be created is written to `scratch`.
    """
    run, checkpoint, version = recipe.run_path.absolute(), None, 0
    if start is not None and (Path(start) / "config.json").is_file():
        model = recipe.model.model_copy(update={"path": str(Path(start).absolute()), "config": None, "init": "weights", "drafter": None})
        recipe = recipe.model_copy(update={"model": model})
    elif start is not None:
        run, checkpoint, version = resolve_checkpoint(start, "a model's folder (config.json)", report=report)
    else:
        checkpoint, version = newest_version(run / "checkpoints", report)
    if recipe.model.randomly_initialized and not (run / "model").is_dir():
        raise UserError(
            f"model.{'init' if recipe.model.config is None else 'config'}: the model is created by training, and {run} is not a run of "
            "this recipe; run mtpctl train first, set run_dir to that of a run, or name weights: --from FOLDER"
        )
    run_dir = run if recipe.model.randomly_initialized or checkpoint is not None else scratch
    model_folder = open_model(recipe, run_dir)
    tokenizer = open_tokenizer(recipe, model_folder, run_dir)
    check_fits_model(tokenizer, model_folder.shape.vocab)
    ends = end_tokens_of(recipe, model_folder, tokenizer)
    return WeightSource(model_folder, tokenizer, ends, recipe.rollout.context or model_folder.shape.max_positions, checkpoint, version)


def without_training(recipe: Recipe) -> Recipe:
    """The recipe without RL, for validation. RL rejects top-p and top-k, but samples that are not trained on may use them."""
    train = recipe.train.model_copy(update={"stages": ["sft"], "sft": recipe.train.sft.model_copy(update={"steps": 1})})
    return recipe.model_copy(update={"train": train})


def with_merged_sync(recipe: Recipe) -> Recipe:
    """The recipe with a weight sync through this host's shared memory that merges an adapter into the weights."""
    sync = recipe.sync.model_copy(update={"transport": "shm", "sections": ["target", "draft"]})
    # If `cluster.device` is not set, the recipe's own transport determines it.
    return recipe.model_copy(update={"sync": sync, "cluster": recipe.cluster.model_copy(update={"device": recipe.device})})


@contextlib.contextmanager
def engine_cluster(recipe: Recipe, source: WeightSource, folder: Path) -> Iterator[VersionStore]:
    """Start or join a cluster with capacity for the recipe's engines. Yields a version store in `folder` for them."""
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
            published=store,
            seed=seed,
            tokenizer=source.tokenizer.name,
            turns=turns_for(recipe.rollout, source.tokenizer),
        )
        pool, manifest = await asyncio.gather(pool_start, _publish(recipe, source, store))
        stack.push_async_callback(pool.close)
        if manifest is not None:
            await within(
                pool.update(manifest, mode=recipe.sync.pause, deadline_s=recipe.sync.deadline_s),
                2 * recipe.sync.deadline_s,
                "loading the checkpoint into the engines",
            )
        freeze_heap()
        yield pool


def _engine_placement(recipe: Recipe) -> Placement:
    """The placement of the engines without a trainer, before the capacity of the cluster is known."""
    train = recipe.train.model_copy(update={"stages": ["rl"]})
    placement = place(recipe.model_copy(update={"train": train}), hosts=[Host(float("inf"), float("inf"))])
    return Placement(placement.device, placement.of("rollout"), 1)


async def _publish(recipe: Recipe, source: WeightSource, store: VersionStore) -> Manifest | None:
    """Publish the checkpoint's weights in `store`. None without a checkpoint: the engines load the folder's weights."""
    if source.checkpoint is None:
        return None
    import ray

    # On the CPU, so that reading a checkpoint takes no GPU from the engines.
    environment = {"env_vars": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}
    actor: Any = ray.remote(CheckpointReader).options(num_cpus=0, runtime_env=environment).remote()
    try:
        publication = actor.publish.remote(
            recipe.model_dump_json(by_alias=True), str(source.model.path), str(source.checkpoint), source.version, str(store.root)
        )
        manifest: Manifest = await within(publication, recipe.cluster.actor_deadline_s, f"checkpoint {source.checkpoint.name}")
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
