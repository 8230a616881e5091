#!/usr/bin/env python3
"""Write docs/recipe.md, the reference of all recipe keys, from the schema's types, defaults and descriptions.

Run it after a change of a section in mtpctl/recipe/. `--check` writes nothing and exits 1 where the page is not current.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from annotated_types import Ge, Gt, Le, Lt
from generated_page import write_or_check
from pydantic import BaseModel

from mtpctl.recipe.fields import Key, element_section, section_keys, type_text
from mtpctl.recipe.schema import DEFAULT_VARIANTS, Recipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipe.md"
INTRODUCTION = """\
# Recipe reference

Generated from the sections in `mtpctl/recipe/` by `scripts/generate_recipe_reference.py`.

A recipe is one YAML file; keys that it leaves out have the defaults given here.
`mtpctl recipe show RECIPE --resolved --origin` prints every value of a recipe and where it comes from,
`mtpctl recipe schema` the JSON schema for an editor.

- `--overlay FILE` lays another file over the recipe: mappings merge, everything else is replaced.
- `--set KEY=VALUE` sets one key to a YAML value; `--set KEY+=VALUE` appends to a list.
- Scalars are those of YAML 1.2: `1e-5` is a number, only `true` and `false` are booleans, `no` and `off` are text. A
  key that is given twice, or that does not exist, is an error with its line.
- `train.rl.preset` names a published algorithm ([objectives](objectives.md)), whose values become defaults of
  `train.rl`.
"""


def page() -> str:
    """The whole reference."""
    return "\n".join([INTRODUCTION, *_section(Recipe, (), "Top level", "")]) + "\n"


def _section(model: type[BaseModel], path: tuple[str, ...], title: str, about: str) -> Iterator[str]:
    keys = section_keys(model, path)
    values = [key for key in keys.values() if not key.sections or key.accepts_value]
    if values:
        yield from (f"## {title}", "")
        if about:
            yield from (about, "")
        yield from ("| key | type | default | |", "|---|---|---|---|")
        yield from (_row(key) for key in values)
        yield ""
    for key in keys.values():
        if key.sections:
            yield from _below(key)
        elif (below := element_section(key)) is not None:
            yield from _section(below, (*key.path, "NAME"), f"`{key.dotted}.NAME`", key.field.description or "")


def _below(key: Key) -> Iterator[str]:
    about = "" if key.accepts_value else key.field.description or ""
    if type(None) in getattr(key.field.annotation, "__args__", ()):
        about = f"{about} Default: none.".strip()
    if len(key.sections) == 1:
        model = key.sections[0]
        own = model.__doc__.strip() if model.__doc__ and "Base of all sections" not in model.__doc__ else ""
        yield from _section(model, key.path, f"`{key.dotted}`", about or own)
        return
    tag, default = DEFAULT_VARIANTS[key.path[-1]]
    shared = set.intersection(*({name for name in section_keys(model)} for model in key.sections)) - {tag}
    base = key.sections[0].__mro__[1]
    chosen = ", ".join(f"`{model.model_fields[tag].default}`" for model in key.sections)
    yield from _section(base, key.path, f"`{key.dotted}`", f"`{key.dotted}.{tag}` chooses one of {chosen}; default `{default}`.")
    for model in key.sections:
        name = model.model_fields[tag].default
        own_keys = [found for field, found in section_keys(model, key.path).items() if field not in shared and field != tag]
        yield from (f"### `{key.dotted}` with `{tag}: {name}`", "", model.model_fields[tag].description or "", "")
        if own_keys:
            yield from ("| key | type | default | |", "|---|---|---|---|", *(_row(key) for key in own_keys), "")


def _row(key: Key) -> str:
    cells = (f"`{key.dotted}`", _type(key), f"`{_default(key.default)}`", key.field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(key: Key) -> str:
    signs = {Gt: ">", Ge: "≥", Lt: "<", Le: "≤"}
    limits = [f"{signs[type(item)]} {getattr(item, type(item).__name__.lower())}" for item in key.field.metadata if type(item) in signs]
    return ", ".join([type_text(key.field.annotation), *limits])


def _default(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False).strip('"')


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page, script=Path(__file__).name, about=__doc__))
