"""`mtpctl logprob-serve`: serves per-token log-probs of a model over HTTP."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mtpctl.cli.options import Overlays, Sets

KEY_VARIABLE = "MTPCTL_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def logprob_serve(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe, or a run directory; default: the newest run here, else the tiny recipe."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A Hugging Face folder or hub id to serve instead.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks of a replica.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline-parallel ranks of a replica.")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=1, help="Replicas.")] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; other machines can reach any address but loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8338,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help=f"File with the key that clients must send; or set {KEY_VARIABLE}.")
    ] = None,
    sets: Sets = None,
    overlay: Overlays = None,
) -> None:
    """Serve per-token log-probs, entropy and MTP scores of a model over HTTP, until Ctrl-C."""
    from mtpctl.jobs.logprob_serve import recipe_to_serve, serve, served_model, with_heads_for, with_layout
    from mtpctl.web.server import listen

    key = _key(key_file)
    if key is None and host not in LOOPBACK:
        print(f"warning: {host} is reachable from other machines, and no API key is required; set {KEY_VARIABLE} or --key-file", flush=True)
    chosen, run = recipe_to_serve(recipe, model, sets or [], overlay or [])
    if recipe is None and model is None and run is None and tp is not None:
        chosen = with_heads_for(chosen, tp)
    chosen = with_layout(chosen, tp, pp, replicas)
    bound = listen(host, port)
    with tempfile.TemporaryDirectory(prefix="mtpctl-logprob-") as scratch:
        served = served_model(chosen, run, Path(scratch))
        print(f"serving {served.name}, as {served.model_id}", flush=True)
        serve(chosen, served, bound, key=key, report=lambda text: print(text, flush=True))


def _key(file: Path | None) -> str | None:
    from mtpctl.errors import UserError

    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file: {file} cannot be read: {error}") from error
    if not key:
        raise UserError(f"--key-file: {file} is empty; write the key into it")
    return key
