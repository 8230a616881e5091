"""The schema as a tree of keys with types and defaults: for lookups, for suggestions in messages, and for the reference page."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from mtpctl.recipe.aliases import ours
from mtpctl.recipe.schema import DEFAULT_VARIANTS, Recipe

Keys = tuple[str, ...]
_SCALARS: dict[object, str] = {str: "text", int: "integer", float: "number", bool: "true | false"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the recipe. `models` are the sections below it: none for a value, several where a variant is chosen.

    A key such as `rollout.replicas` may have a section or a value.
    """

    path: Keys
    field: FieldInfo
    models: tuple[type[BaseModel], ...]

    @property
    def dotted(self) -> str:
        """The key as `--set` takes it: `train.rl.steps`."""
        return ".".join(self.path)

    @property
    def default(self) -> object:
        """The value of the key where no file and no `--set` gives one."""
        return self.field.get_default(call_default_factory=True)

    @property
    def valued(self) -> bool:
        """Whether the key may have a value that is no section."""
        parts = [part for part in _alternatives(self.field.annotation) if part is not type(None)]
        return len(parts) > len(self.models)

    @property
    def forms(self) -> frozenset[str]:
        """The names that pydantic's locations have for a section or a value at this key; empty where it can have one of them alone."""
        parts = get_args(self.field.annotation) if get_origin(self.field.annotation) in (Union, UnionType) else ()
        tags = [note for part in parts if get_origin(part) is Annotated for note in get_args(part)[1:] if isinstance(note, Tag)]
        return frozenset(tag.tag for tag in tags)

    @property
    def free(self) -> bool:
        """Whether the value is a mapping of any keys (`model.config`, `rollout.engine_args`)."""
        return any((get_origin(part) or part) is dict for part in _alternatives(self.field.annotation))


def _alternatives(annotation: object) -> tuple[object, ...]:
    """The types of a union, or the one type, without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for arg in get_args(annotation) for part in _alternatives(arg))
    return (annotation,)


def element(key: Key) -> type[BaseModel] | None:
    """The section that stands below each name of the user's own in a mapping such as `evaluation.sets`; None for any other key."""
    for part in _alternatives(key.field.annotation):
        if get_origin(part) is dict and isinstance(below := get_args(part)[1], type) and issubclass(below, BaseModel):
            return below
    return None


def children(model: type[BaseModel], path: Keys = ()) -> dict[str, Key]:
    """Keys of one section, by the name they have in YAML."""
    return {name: Key((*path, name), field, models) for name, (field, models) in _fields(model).items()}


@cache
def _fields(model: type[BaseModel]) -> dict[str, tuple[FieldInfo, tuple[type[BaseModel], ...]]]:
    """The fields of a section by their names in YAML, each with the sections that its type holds."""
    found = {}
    for attribute, field in model.model_fields.items():
        models = tuple(part for part in _alternatives(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel))
        found[field.alias or attribute] = (field, models)
    return found


def variant(key: Key, value: object) -> tuple[type[BaseModel], ...]:
    """The sections that may stand below `key` given the value it has: the one chosen, or all where the choice is not valid."""
    if len(key.models) < 2:
        return key.models
    tag, default = DEFAULT_VARIANTS[key.path[-1]]
    chosen = value.get(tag, default) if isinstance(value, Mapping) else default
    return tuple(m for m in key.models if m.model_fields[tag].default == chosen) or key.models


def walk(model: type[BaseModel] = Recipe, path: Keys = ()) -> Iterator[Key]:
    """Every key, sections before what they hold. A key that several variants share comes once."""
    seen: set[Keys] = set()
    for key in children(model, path).values():
        yield key
        for below in key.models:
            for deeper in walk(below, key.path):
                if deeper.path not in seen:
                    seen.add(deeper.path)
                    yield deeper


@cache
def dotted_keys() -> tuple[str, ...]:
    return tuple(key.dotted for key in walk())


def find(path: Keys) -> Key | None:
    """The key at `path`, None where there is none. Below a free mapping every path leads to that mapping's key."""
    models: tuple[type[BaseModel], ...] = (Recipe,)
    key = None
    for depth, name in enumerate(path):
        if key is not None and key.free:
            return key
        found = next((fields[name] for model in models if name in (fields := _fields(model))), None)
        if found is None:
            return None
        field, models = found
        key = Key(path[: depth + 1], field, models)
    return key


def suggest(path: Keys, siblings: tuple[str, ...] = ()) -> str:
    """What a message about an unknown key ends with: `; did you mean ...?`, searched first among its siblings, then
    among the names that other frameworks have, then among all keys.

    Where nothing is like it: the siblings' names, or an empty text without siblings. A key with its value stuck to it is told so.
    """
    prefix = ".".join(path[:-1])
    name, colon, value = path[-1].partition(":")
    if colon and name in siblings:
        return f"; YAML wants a space behind the colon: {name}: {value}"
    known = ours(path)
    # A name of another framework's is no misspelling, unless it is one by a letter.
    close = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.85 if known else 0.7)
    if close:
        return f"; did you mean {'.'.join((*path[:-1], close[0]))}?"
    if known:
        return f"; did you mean {known}?"
    dotted = ".".join(path)
    like = [key for key in dotted_keys() if difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], path[-1]).ratio() >= 0.7]
    same = [key for key in like if key.rsplit(".", 1)[-1] == path[-1]]
    close = difflib.get_close_matches(dotted, same, n=1, cutoff=0.0) or difflib.get_close_matches(dotted, like, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; keys of {prefix or 'a recipe'}: {', '.join(siblings)}" if siblings else ""


def type_text(annotation: object) -> str:
    """A type in words, for whoever writes YAML."""
    parts = []
    for part in _alternatives(annotation):
        origin = get_origin(part)
        if origin is Literal:
            parts += [str(choice) for choice in get_args(part)]
        elif origin is list:
            parts.append(f"list of {type_text(get_args(part)[0])}")
        elif origin is tuple:
            parts.append(f"{len(get_args(part))} × {type_text(get_args(part)[0])}")
        elif origin is dict:
            parts.append("mapping")
        elif part is type(None):
            parts.append("null")
        elif isinstance(part, type) and issubclass(part, BaseModel):
            parts.append("section")
        else:
            parts.append(_SCALARS[part])
    return " | ".join(dict.fromkeys(parts))
