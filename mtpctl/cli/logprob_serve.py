"""`mtpctl logprob-serve`: per-token log-probs of a model over HTTP, from a forward-only Megatron engine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.options import Overlays, Sets, load
from mtpctl.jobs.progress import print_progress

if TYPE_CHECKING:
    from mtpctl.jobs.logprob_serve import Served
    from mtpctl.recipe.schema import Recipe

KEY_VARIABLE = "MTPCTL_API_KEY"
FALLBACK = "tiny_mtp"
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
    host: Annotated[str, typer.Option("--host", help="Where to listen; anything but loopback is reachable from elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8338,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help=f"File with the key that clients must send; or set {KEY_VARIABLE}.")
    ] = None,
    sets: Sets = None,
    overlay: Overlays = None,
) -> None:
    """Serve per-token log-probs, entropy and MTP scores of a model over HTTP, until Ctrl-C."""
    from mtpctl.jobs.logprob_serve import serve
    from mtpctl.web.server import listen

    key = _key(key_file)
    if key is None and host not in LOOPBACK:
        print(f"warning: {host} can be reached from elsewhere, and no key is asked for; set {KEY_VARIABLE} or --key-file", flush=True)
    chosen, run = _recipe(recipe, model, sets, overlay)
    if recipe is None and model is None and run is None and tp is not None:
        chosen = _with_heads_for(chosen, tp)
    chosen = _laid_out(chosen, tp, pp, replicas)
    bound = listen(host, port)
    with tempfile.TemporaryDirectory(prefix="mtpctl-logprob-") as scratch:
        served = _served(chosen, run, Path(scratch))
        print(f"serving {served.name}, as {served.model_id}", flush=True)
        serve(chosen, served, bound, key=key, say=lambda text: print(text, flush=True))


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


def _recipe(given: str | None, model: str | None, sets: list[str] | None, overlays: list[str] | None) -> tuple[Recipe, Path | None]:
    """The recipe to serve by, and the directory of its run where there is one."""
    run = Path(given) if given is not None and _is_run(Path(given)) else None
    if given is None and model is None:
        run = _newest_run()
    source = str(run / "recipe.resolved.yaml") if run is not None else given or FALLBACK
    loaded = load(source, overlays, sets).recipe
    if model is not None:
        # The recipe says only how to serve: the model has its own tokenizer and sizes.
        named = loaded.model.model_copy(update={"path": os.path.expanduser(model), "config": None, "tokenizer": None, "init": "weights"})
        return loaded.model_copy(update={"model": named}), None
    if run is None and _is_run(loaded.run_path):
        run = loaded.run_path
    return loaded, run


def _is_run(path: Path) -> bool:
    return (path / "recipe.resolved.yaml").is_file()


def _newest_run() -> Path | None:
    runs = [path for path in Path("runs").glob("*") if _is_run(path)]
    return max(runs, key=lambda path: (path / "recipe.resolved.yaml").stat().st_mtime, default=None)


def _with_heads_for(recipe: Recipe, tp: int) -> Recipe:
    """The fallback recipe with a number of attention heads that `tp` divides; its weights are random in any case."""
    from mtpctl.families.reading import shape_of

    config = dict(recipe.model.config or {})
    shape = shape_of(config)
    hidden, heads = shape.hidden, shape.heads
    fits = next((n for n in range(tp, hidden + 1, tp) if n >= heads and hidden % n == 0), heads)
    if heads % tp == 0 or fits == heads:
        return recipe
    print(f"{recipe.name}: {fits} attention heads instead of {heads}, so that tp {tp} fits")
    config |= {"num_attention_heads": fits, "num_key_value_heads": fits, "head_dim": hidden // fits}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


def _laid_out(recipe: Recipe, tp: int | None, pp: int | None, replicas: int | None) -> Recipe:
    """The recipe with the layout of the command line. Raises UserError where it does not fit the model."""
    from mtpctl.errors import UserError
    from mtpctl.families.reading import shape_of
    from mtpctl.recipe.model import hf_config
    from mtpctl.recipe.parallel import check_parallel

    asked = {name: value for name, value in (("tp", tp), ("pp", pp)) if value is not None}
    parallel = recipe.logprob.parallel.model_copy(update=asked)
    changes = {"parallel": parallel} | ({"replicas": replicas} if replicas is not None else {})
    config = hf_config(recipe.model)
    if config is not None and (wrong := next(iter(check_parallel(parallel, shape_of(config), "logprob.parallel")), None)):
        raise UserError(wrong)
    return recipe.model_copy(update={"logprob": recipe.logprob.model_copy(update=changes)})


def _served(recipe: Recipe, run: Path | None, scratch: Path) -> Served:
    """The model to serve: the newest checkpoint of the run, else the recipe's model, made in `scratch` where it has to be."""
    from mtpctl.controller.prepare import model_of, tokenizer_of
    from mtpctl.controller.state import newest_version
    from mtpctl.data.tokenizers import load_tokenizer
    from mtpctl.errors import MtpctlError
    from mtpctl.jobs.logprob_serve import Served

    folder = model_of(recipe, run or scratch)
    if recipe.model.path is not None and recipe.model.tokenizer is None:
        try:
            tokenizer = load_tokenizer(folder.path)
        except MtpctlError:
            tokenizer = None
    else:
        tokenizer = tokenizer_of(recipe, folder, run or scratch)
    if run is not None:
        checkpoint, version = newest_version(run.absolute() / "checkpoints", print_progress)
        if checkpoint is not None:
            return Served(f"run {run}, checkpoint {checkpoint.name}", run.absolute().name, folder.path, tokenizer, checkpoint, version)
        return Served(f"run {run}, the model it starts from", run.absolute().name, folder.path, tokenizer)
    if recipe.model.path is not None:
        return Served(f"model {recipe.model.path}", Path(recipe.model.path).absolute().name, folder.path, tokenizer)
    return Served(f"recipe {recipe.name}, its model with fresh weights", recipe.name, folder.path, tokenizer)
