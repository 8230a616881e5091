"""Arguments and options that several commands share, and their output.

Under `--json`, stdout contains the result and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

if TYPE_CHECKING:
    from mtpctl.recipe.loading import LoadedRecipe


def _recipes(incomplete: str) -> list[str]:
    return _complete_names("recipes", incomplete)


def _overlays(incomplete: str) -> list[str]:
    return _complete_names("recipes/overlays", incomplete)


def _complete_names(folder: str, incomplete: str) -> list[str]:
    """Shell completions: names of the included recipes or overlays, YAML files, and folders."""
    from mtpctl.recipe.loading import RECIPES, list_recipes

    names = [path.stem for path in list_recipes(RECIPES.parent / folder)]
    paths = [path for path in sorted(Path().glob(f"{incomplete}*")) if _is_candidate(path)]
    return [name for name in names if name.startswith(incomplete)] + [f"{path}/" if path.is_dir() else str(path) for path in paths]


def _is_candidate(path: Path) -> bool:
    return not path.name.startswith(".") and (path.is_dir() or path.suffix in (".yaml", ".yml"))


_RECIPE = typer.Argument(metavar="RECIPE|RUN", help="A recipe file, the name of an included one, or a run.", autocompletion=_recipes)
RecipeArgument = Annotated[str, _RECIPE]
OptionalRecipe = Annotated[str | None, _RECIPE]
Overlays = Annotated[
    list[str] | None,
    typer.Option("--overlay", metavar="FILE", help="Lay this file over the recipe; may be repeated.", autocompletion=_overlays),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key to a YAML value, or append to a list with KEY+=VALUE; may be repeated."),
]


def _reserve_stdout(context: typer.Context, as_json: bool) -> bool:
    if as_json:
        context.find_root().with_resource(stdout_is_for_results())
    return as_json


TargetArgument = Annotated[
    str, typer.Argument(metavar="RECIPE|RUN|FOLDER", help="A recipe, a run directory, a checkpoint, or a folder of weights.")
]
FromWeights = Annotated[
    str | None,
    typer.Option("--from", metavar="RUN|CKPT|FOLDER", help="Weights; default: the run directory's newest checkpoint, else the model."),
]
Json = Annotated[bool, typer.Option("--json", callback=_reserve_stdout, help="Print only JSON to stdout, for programs.")]


def load(recipe: str | Path, overlays: list[str] | None, sets: list[str] | None) -> LoadedRecipe:
    """Load a recipe, or the recipe of a run, with the shared options applied. Raises UserError for a wrong value."""
    from mtpctl.jobs.targets import load_recipe_or_run

    return load_recipe_or_run(recipe, overlays or [], sets or []).loaded


def create_folder(folder: Path, option: str) -> Path:
    """Create the folder if it does not exist, and return it. Raises UserError if that fails."""
    from mtpctl.errors import UserError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: the folder {folder} cannot be created ({error.strerror}); name another") from error
    return folder


_results: TextIO | None = None
"""The stream for results while `stdout_is_for_results` is active."""


def print_result(text: str = "", *, end: str = "\n") -> None:
    """Print a part of the command's result to stdout."""
    print(text, file=_results or sys.stdout, end=end, flush=True)


@contextlib.contextmanager
def stdout_is_for_results() -> Iterator[None]:
    """Redirect the output of libraries, native code and child processes from stdout to stderr; `print_result` still writes to stdout."""
    global _results
    stdout = sys.stdout
    _flush(stdout)
    stdout_copy = os.dup(1)
    try:
        # False, or unsupported, if stdout is captured, as in pytest.
        is_descriptor_1 = stdout.fileno() == 1
    except io.UnsupportedOperation:
        is_descriptor_1 = False
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, stdout_copy)
        _results = undo.enter_context(open(os.dup(stdout_copy), "w", encoding=stdout.encoding)) if is_descriptor_1 else stdout
        os.dup2(2, 1)
        undo.callback(os.dup2, stdout_copy, 1)
        undo.callback(_flush, stdout)  # Runs before descriptor 1 is restored: buffered output of libraries belongs to stderr.
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield
        finally:
            _results = None


def _flush(stdout: TextIO) -> None:
    """Flush the buffers of Python and of native code."""
    import ctypes

    stdout.flush()
    ctypes.CDLL(None).fflush(None)
