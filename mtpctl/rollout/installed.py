"""Checks, without importing the engine, that it is installed and has the options of a recipe.

Importing vLLM takes seconds, so option names are read from its source, and a wrong name is reported immediately.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.rollout import RolloutBase, SglangConfig
from mtpctl.recipe.schema import Recipe

_ROOTS = {"object", "Struct"}
"""Base classes without options."""


def check_engine(recipe: Recipe) -> None:
    """Raise PrerequisiteMissing if the recipe's engine is not installed, and UserError for an unknown name in `rollout.engine_args`."""
    check_engine_installed(recipe)
    check_engine_args(recipe)


def check_engine_installed(recipe: Recipe) -> None:
    """Raise PrerequisiteMissing if vLLM is not installed, or if rollout.python is not set for SGLang.

    A run that joins a cluster needs no vLLM here.
    """
    rollout = recipe.rollout
    if isinstance(rollout, SglangConfig):
        if rollout.python is None:
            raise PrerequisiteMissing(
                "rollout.python: SGLang needs a separate environment; create one with scripts/sglang_environment.sh, and set its python"
            )
    elif recipe.cluster.address is None and find_spec(rollout.engine) is None:
        raise PrerequisiteMissing(f"rollout.engine: {rollout.engine} is not installed; install mtpctl with the extra [cpu] or [gpu]")


def check_engine_args(recipe: Recipe) -> None:
    """Raise UserError for a name in `rollout.engine_args` that the installed engine does not know.

    Skipped if the engine's source is not found, or if the run joins a cluster. The engine then reports the error at its start.
    """
    rollout = recipe.rollout
    if not rollout.engine_args or recipe.cluster.address is not None:
        return
    if known := read_option_names(rollout):
        check_options(rollout.traits.title, known, rollout.engine_args)


def check_options(engine: str, known: Collection[str], names: Collection[str]) -> None:
    """Raise UserError for the first of `names` that `engine` does not know, with the closest known name."""
    for name in names:
        if name not in known:
            matches = get_close_matches(name, known, 1)
            hint = f"did you mean {matches[0]}?" if matches else "leave it out"
            raise UserError(f"rollout.engine_args.{name}: {engine} has no such option; {hint}")


def read_option_names(rollout: RolloutBase) -> frozenset[str]:
    """Read the names of all options from the source of the installed engine; empty if the source is not found."""
    if isinstance(rollout, SglangConfig):
        # The path is not resolved: packages are next to the environment's link to the interpreter, not next to its target.
        folder = Path(rollout.python or "").parent.parent
        sources = sorted(folder.glob("lib/python3*/site-packages/sglang/srt/server_args.py"))
        return read_fields(sources[0], "ServerArgs") if sources else frozenset()
    spec = find_spec("vllm")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        if (source := Path(location, "engine", "arg_utils.py")).is_file():
            return read_fields(source, "AsyncEngineArgs")
    return frozenset()


@cache
def read_fields(source: Path, name: str) -> frozenset[str]:
    """Read the fields of a dataclass or struct from its source, including those of its base classes in the same file.

    Empty if the class is missing, or has a base class from another file.
    """
    classes = {node.name: node for node in ast.parse(source.read_bytes()).body if isinstance(node, ast.ClassDef)}
    fields: set[str] = set()
    pending = [name]
    while pending:
        if (definition := classes.get(pending.pop())) is None:
            return frozenset()
        bases = [ast.unparse(base).rsplit(".", 1)[-1] for base in definition.bases]
        pending += [base for base in bases if base not in _ROOTS]
        fields |= {
            node.target.id
            for node in definition.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation)
        }
    return frozenset(fields)
