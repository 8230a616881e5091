"""The job of `mtpctl logprob-serve`: starts replicas on a Ray cluster, and serves HTTP until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpctl.cluster.deadlines import await_start
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import freeze_heap
from mtpctl.controller.prepare import open_model, open_tokenizer
from mtpctl.controller.state import find_newest_version
from mtpctl.data.tokenizers import Tokenizer, load_tokenizer
from mtpctl.errors import ClusterResources, MtpctlError, UserError
from mtpctl.families.reading import shape_of
from mtpctl.jobs import print_progress
from mtpctl.jobs.targets import load_recipe_or_run
from mtpctl.logprob.http import make_app
from mtpctl.logprob.server import LogprobServer, start_server
from mtpctl.recipe.model import hf_config
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.section import check_parallel
from mtpctl.telemetry.run_directory import RECIPE
from mtpctl.web.guard import HttpBounds
from mtpctl.web.server import WebServer, address_of, raise_open_file_limit

Report = Callable[[str], None]
FALLBACK_RECIPE = "tiny_mtp"
"""The recipe to serve if none is named and there is no run."""


@dataclass(frozen=True)
class ServedModel:
    """The weights to serve: a model folder and, for a trained run, the run's checkpoint and its weight version.

    `name` describes their origin; `model_id` is the model's name for clients.
    """

    name: str
    model_id: str
    model: Path
    tokenizer: Tokenizer | None
    checkpoint: Path | None = None
    version: int = 0


def serve(recipe: Recipe, served: ServedModel, listener: socket.socket, *, key: str | None, report: Report) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises ClusterResources if the cluster has too few GPUs."""
    raise_open_file_limit()
    ranks = recipe.logprob.parallel.world_size * recipe.logprob.replicas
    with cluster(recipe.cluster, cpus=0, gpus=0), contextlib.closing(listener):
        import ray

        available = ray.cluster_resources().get("GPU", 0)
        cuda = recipe.cluster.device != "cpu" and available >= ranks * recipe.logprob.gpus
        if recipe.cluster.device == "cuda" and not cuda:
            raise ClusterResources(
                f"logprob.parallel: {ranks} rank(s) with {recipe.logprob.gpus:g} GPU each exceed the {available:g} of the cluster"
            )
        asyncio.run(_serve(recipe, served, listener, key, report, cuda=cuda))


async def _serve(recipe: Recipe, served: ServedModel, listener: socket.socket, key: str | None, report: Report, *, cuda: bool) -> None:
    options = recipe.logprob
    layout = ", ".join(f"{name} {getattr(options.parallel, name)}" for name in ("tp", "pp", "dp") if getattr(options.parallel, name) > 1)
    report(
        f"starting {options.replicas} replica(s) of {options.parallel.world_size} rank(s){f' ({layout})' if layout else ''} "
        f"on {'cuda' if cuda else 'cpu'}, {recipe.train.precision}"
    )
    server_start = start_server(
        recipe,
        served.model,
        device="cuda" if cuda else "cpu",
        cpus=float(cuda),
        gpus=options.gpus if cuda else 0.0,
        checkpoint=served.checkpoint,
        version=served.version,
    )
    server = await await_start(server_start, recipe.cluster.actor_deadline_s, "log-prob server")
    server_http = web(server, served.tokenizer, served.model_id, key=key, bounds=HttpBounds())
    freeze_heap()
    watch_task = asyncio.create_task(server.watch())
    routes = "/v1/logprobs, /v1/completions, /v1/models, /health, /version, /metrics, /docs"
    report(f"weights version {server.version}; {address_of(listener)}{routes}")
    try:
        await server_http.serve(sockets=[listener])
    finally:
        watch_task.cancel()
        await server.close()
    report("stopped")


def web(server: LogprobServer, tokenizer: Tokenizer | None, name: str, *, key: str | None, bounds: HttpBounds) -> WebServer:
    """The web server of a log-prob server. Run it with `serve(sockets=[…])` in the log-prob server's event loop."""
    return WebServer(make_app(server, tokenizer, name, key=key, bounds=bounds))


def recipe_to_serve(name: str | None, model: str | None, sets: Sequence[str], overlays: Sequence[str]) -> tuple[Recipe, Path | None]:
    """The recipe to serve, and its run directory if it is the recipe of a run. `model` replaces the recipe's model.

    If neither is named, uses the newest run below `runs`, else `FALLBACK_RECIPE`.
    """
    run = Path(name) if name is not None and _is_run(Path(name)) else None
    if name is None and model is None:
        run = _newest_run()
    recipe = load_recipe_or_run(run / RECIPE if run is not None else name or FALLBACK_RECIPE, overlays, sets).recipe
    if model is not None:
        # The recipe only configures serving: tokenizer and sizes are those of `model`.
        config = recipe.model.model_copy(update={"path": os.path.expanduser(model), "config": None, "tokenizer": None, "init": "weights"})
        return recipe.model_copy(update={"model": config}), None
    if run is None and _is_run(recipe.run_path):
        run = recipe.run_path
    return recipe, run


def _is_run(path: Path) -> bool:
    return (path / RECIPE).is_file()


def _newest_run() -> Path | None:
    runs = [path for path in Path("runs").glob("*") if _is_run(path)]
    return max(runs, key=lambda path: (path / RECIPE).stat().st_mtime, default=None)


def with_divisible_heads(recipe: Recipe, tp: int) -> Recipe:
    """The fallback recipe with a number of attention heads that `tp` divides. Its weights are random, so the number may change."""
    config = dict(recipe.model.config or {})
    shape = shape_of(config)
    hidden, heads = shape.hidden, shape.heads
    new_heads = next((n for n in range(tp, hidden + 1, tp) if n >= heads and hidden % n == 0), heads)
    if heads % tp == 0 or new_heads == heads:
        return recipe
    print(f"{recipe.name}: {new_heads} attention heads instead of {heads}, because tp {tp} must divide them")
    config |= {"num_attention_heads": new_heads, "num_key_value_heads": new_heads, "head_dim": hidden // new_heads}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


def with_layout(recipe: Recipe, tp: int | None, pp: int | None, replicas: int | None) -> Recipe:
    """The recipe with this layout of the server. Raises UserError if it does not fit the model."""
    degrees = {name: value for name, value in (("tp", tp), ("pp", pp)) if value is not None}
    parallel = recipe.logprob.parallel.model_copy(update=degrees)
    changes = {"parallel": parallel} | ({"replicas": replicas} if replicas is not None else {})
    config = hf_config(recipe.model)
    if config is not None and (error := next(iter(check_parallel(parallel, shape_of(config), "logprob.parallel")), None)):
        raise UserError(error)
    return recipe.model_copy(update={"logprob": recipe.logprob.model_copy(update=changes)})


def find_served_model(recipe: Recipe, run: Path | None, scratch: Path) -> ServedModel:
    """The model to serve: the newest checkpoint of the run, else the recipe's model, which is created in `scratch` if necessary."""
    folder = open_model(recipe, run or scratch)
    if recipe.model.path is not None and recipe.model.tokenizer is None:
        try:
            tokenizer = load_tokenizer(folder.path)
        except MtpctlError:
            tokenizer = None
    else:
        tokenizer = open_tokenizer(recipe, folder, run or scratch)
    if run is not None:
        checkpoint, version = find_newest_version(run.absolute() / "checkpoints", print_progress)
        if checkpoint is not None:
            return ServedModel(f"run {run}, checkpoint {checkpoint.name}", run.absolute().name, folder.path, tokenizer, checkpoint, version)
        return ServedModel(f"run {run}, its initial model", run.absolute().name, folder.path, tokenizer)
    if recipe.model.path is not None:
        return ServedModel(f"model {recipe.model.path}", Path(recipe.model.path).absolute().name, folder.path, tokenizer)
    return ServedModel(f"recipe {recipe.name}, its model with random weights", recipe.name, folder.path, tokenizer)
