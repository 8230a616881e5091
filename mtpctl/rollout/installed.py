"""Look at the engine that is installed here without importing it: whether it is there, and which options it has.

An import of vLLM takes seconds. Option names are read from its source instead, so that a wrong one is told at once.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.recipe.rollout import RolloutBase, SglangConfig
from mtpctl.recipe.schema import Recipe

_ROOTS = {"object", "Struct"}
"""Base classes that have no options."""


def check_engine(recipe: Recipe) -> None:
    """Raise EnvironmentMissing where the recipe's engine is not installed, UserError for a name in `rollout.engine_args` that it lacks."""
    check_engine_installed(recipe)
    check_engine_args(recipe)


def check_engine_installed(recipe: Recipe) -> None:
    """Raise EnvironmentMissing where this machine is to run the engine and its package, or SGLang's Python environment, is not there."""
    rollout = recipe.rollout
    if isinstance(rollout, SglangConfig):
        if rollout.python is None:
            raise EnvironmentMissing(
                "rollout.python: SGLang lives in an environment of its own; scripts/sglang_environment.sh makes one; name its python"
            )
    elif recipe.cluster.address is None and find_spec(rollout.engine) is None:
        raise EnvironmentMissing(f"rollout.engine: {rollout.engine} is not installed; install mtpctl with the extra [cpu] or [gpu]")


def check_engine_args(recipe: Recipe) -> None:
    """Raise UserError for a name in `rollout.engine_args` that the engine installed here does not know.

    Nothing is raised where its source is not found here, or the engine runs in a cluster that is joined: the engine itself tells then.
    """
    rollout = recipe.rollout
    if not rollout.engine_args or recipe.cluster.address is not None:
        return
    if known := installed_options(rollout):
        check_options("SGLang" if isinstance(rollout, SglangConfig) else "vLLM", known, rollout.engine_args)


def check_options(engine: str, known: Collection[str], asked: Collection[str]) -> None:
    """Raise UserError for an option in `asked` that `engine` does not know, naming the most similar one that it knows."""
    for name in asked:
        if name not in known:
            near = get_close_matches(name, known, 1)
            mend = f"did you mean {near[0]}?" if near else "leave it out"
            raise UserError(f"rollout.engine_args.{name}: {engine} has no such option; {mend}")


def installed_options(rollout: RolloutBase) -> frozenset[str]:
    """Names of all options of the engine that is installed here; empty where its source is not found."""
    if isinstance(rollout, SglangConfig):
        # The links of a virtual environment lead out of it: its packages lie beside the link, not beside what it points to.
        folder = Path(rollout.python or "").parent.parent
        sources = sorted(folder.glob("lib/python3*/site-packages/sglang/srt/server_args.py"))
        return fields_of(sources[0], "ServerArgs") if sources else frozenset()
    spec = find_spec("vllm")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        if (source := Path(location, "engine", "arg_utils.py")).is_file():
            return fields_of(source, "AsyncEngineArgs")
    return frozenset()


@cache
def fields_of(source: Path, name: str) -> frozenset[str]:
    """Fields of a dataclass or struct by its source, those of its bases in the same file included.

    Empty where the class is not there, or has a base from elsewhere, whose fields this file does not tell.
    """
    classes = {node.name: node for node in ast.parse(source.read_bytes()).body if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    pending = [name]
    while pending:
        if (here := classes.get(pending.pop())) is None:
            return frozenset()
        bases = [ast.unparse(base).rsplit(".", 1)[-1] for base in here.bases]
        pending += [base for base in bases if base not in _ROOTS]
        found |= {
            node.target.id
            for node in here.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation)
        }
    return frozenset(found)
