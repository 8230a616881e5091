"""What the guides name is there: files, sections of other pages, commands, and keys of the recipe."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpctl.cli.app import COMMANDS
from mtpctl.recipe.fields import find_key
from mtpctl.recipe.schema import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = {field.alias or name for name, field in Recipe.model_fields.items()} - {"name", "seed", "run_dir"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(page: Path) -> Iterator[str]:
    """The text between backticks in the prose of a page."""
    return (" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(page)))


@pages
def test_links_in_the_docs_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pages
def test_mentioned_files_exist(page: Path) -> None:
    for text in code(page):
        if re.fullmatch(r"(mtpctl|tests|scripts|recipes|docs|benchmarks)/[\w./-]+", text):
            assert (ROOT / text).exists(), text


def test_names_in_the_architecture_are_defined() -> None:
    sources = [file.read_text() for folder in ("mtpctl", "tests/fakes") for file in (ROOT / folder).rglob("*.py")]
    defined = {
        name for text in sources for name in re.findall(r"^ *(?:async )?(?:(?:def|class) )?(\w+)(?=[\[(]| ?[:=])", text, re.MULTILINE)
    }
    for text in code(ROOT / "docs/architecture.md"):
        # Python's names, not recipe keys or files: with capitals or an underscore.
        if re.fullmatch(r"(?!NAME\b)\w*[A-Z]\w*(\.\w+)?|[a-z]+(_[a-z]+)+", text):
            assert defined.issuperset(text.split(".")) or hasattr(builtins, text), text


@pages
def test_commands_in_the_docs_exist(page: Path) -> None:
    for text in code(page):
        if named := re.match(r"mtpctl ([a-z][a-z-]*)", text):
            assert named[1] in COMMANDS, text


@pages
def test_keys_of_the_recipe_are_keys(page: Path) -> None:
    for text in code(page):
        path = re.match(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?=[:=]|$)", text)
        if path and path[1].split(".")[0] in SECTIONS and not path[1].endswith((".md", ".py", ".json", ".jsonl", ".log", ".yaml")):
            assert find_key(tuple(path[1].split("."))) is not None, text
