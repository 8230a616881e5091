"""Every mtpctl command of every guide: its options exist, and its recipe takes its overlays and values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer._click import Command, Context

from mtpctl.cli.app import _import_command
from mtpctl.recipe.checks import validate
from mtpctl.recipe.loading import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
SAMPLE_VALUES = {"N": "1", "P": "8100", "H": "127.0.0.1"}
"""Placeholders for numbers, which the parser converts."""


def command_lines(page: Path) -> Iterator[list[str]]:
    """The arguments of each mtpctl command in the blocks of code of a page, without those that list a command's options in brackets."""
    blocks = re.findall(r"^```(?:console|bash|sh)?\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:&&|\||;|>)\s", line.removeprefix("$ ")):
                if part.startswith("mtpctl ") and not re.search(r"[\[<{…]\S*[A-Z]+\]|\[--|…", part):
                    yield [SAMPLE_VALUES.get(word, word) for word in shlex.split(part, comments=True)[1:]]


COMMANDS = [(page, arguments) for page in PAGES for arguments in command_lines(page)]


def parse(arguments: list[str]) -> Context:
    """The parsed command line, down to the subcommand; nothing is run."""
    name, *rest = [argument for argument in arguments if argument not in ("--debug", "--verbose")]
    command: Command = _import_command(name)
    context = command.make_context(name, rest)
    while (group := getattr(context.command, "commands", None)) and context._protected_args:
        name, *rest = [*context._protected_args, *context.args]
        context = group[name].make_context(name, rest, parent=context)
    return context


def test_guides_have_commands() -> None:
    assert len(COMMANDS) > 80


@pytest.mark.parametrize(("page", "arguments"), COMMANDS, ids=lambda value: value.name if isinstance(value, Path) else " ".join(value)[:60])
def test_command_of_a_guide_parses_and_its_recipe_is_valid(page: Path, arguments: list[str]) -> None:
    options = parse(arguments).params
    recipe = str(options.get("recipe") or "")
    name = Path(recipe).stem if recipe.startswith("recipes/") else recipe
    if name not in RECIPES:
        return
    sets = [each for each in options.get("sets") or () if not re.search(r"=[A-Z]+$|\$HOME|=auto$", each)]
    loaded = load_recipe(name, overlays=list(options.get("overlay") or ()), sets=sets)
    # The others need an environment, a store or a folder of the user.
    if all(needed not in " ".join(arguments) for needed in ("sglang", "s3://", "teacher.path")):
        validate(loaded.recipe)
