"""`mtpctl logprob-serve`: starts replicas on a Ray cluster, and serves HTTP until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import settle_heap
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import ClusterResources
from mtpctl.logprob.http import make_app
from mtpctl.logprob.server import LogprobServer, start_server
from mtpctl.recipe.schema import Recipe
from mtpctl.web.guard import HttpBounds
from mtpctl.web.server import WebServer, address_of, allow_connections

Say = Callable[[str], None]


@dataclass(frozen=True)
class Served:
    """The weights to serve: a model folder and, for a trained run, a checkpoint of it and its version.

    `name` describes their origin; `model_id` is the model's name for clients.
    """

    name: str
    model_id: str
    model: Path
    tokenizer: Tokenizer | None
    checkpoint: Path | None = None
    version: int = 0


def serve(recipe: Recipe, served: Served, bound: socket.socket, *, key: str | None, say: Say) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    allow_connections()
    ranks = recipe.logprob.parallel.world_size * recipe.logprob.replicas
    with cluster(recipe.cluster, cpus=0, gpus=0), contextlib.closing(bound):
        import ray

        there = ray.cluster_resources().get("GPU", 0)
        cuda = recipe.cluster.device != "cpu" and there >= ranks * recipe.logprob.gpus
        if recipe.cluster.device == "cuda" and not cuda:
            raise ClusterResources(
                f"logprob.parallel: {ranks} rank(s) of {recipe.logprob.gpus:g} GPU need more than the {there:g} there are"
            )
        asyncio.run(_serve(recipe, served, bound, key, say, cuda=cuda))


async def _serve(recipe: Recipe, served: Served, bound: socket.socket, key: str | None, say: Say, *, cuda: bool) -> None:
    options = recipe.logprob
    layout = ", ".join(f"{name} {getattr(options.parallel, name)}" for name in ("tp", "pp", "dp") if getattr(options.parallel, name) > 1)
    say(
        f"starting {options.replicas} replica(s) of {options.parallel.world_size} rank(s){f' ({layout})' if layout else ''} "
        f"on {'cuda' if cuda else 'cpu'}, {recipe.train.precision}"
    )
    starting = start_server(
        recipe,
        served.model,
        device="cuda" if cuda else "cpu",
        cpus=float(cuda),
        gpus=options.gpus if cuda else 0.0,
        checkpoint=served.checkpoint,
        version=served.version,
    )
    server = await within(starting, recipe.cluster.actor_deadline_s, "log-prob server, start")
    face = web(server, served.tokenizer, served.model_id, key=key, bounds=HttpBounds())
    settle_heap()
    watching = asyncio.create_task(server.watch())
    routes = "/v1/logprobs, /v1/completions, /v1/models, /health, /version, /metrics, /docs"
    say(f"weights version {server.version}; {address_of(bound)}{routes}")
    try:
        await face.serve(sockets=[bound])
    finally:
        watching.cancel()
        await server.close()
    say("stopped")


def web(server: LogprobServer, tokenizer: Tokenizer | None, name: str, *, key: str | None, bounds: HttpBounds) -> WebServer:
    """The web server for a log-prob server, to be run with `serve(sockets=[…])` in the latter's event loop."""
    return WebServer(make_app(server, tokenizer, name, key=key, bounds=bounds))
