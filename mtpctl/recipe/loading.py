"""Load a recipe from files, overlays and `--set`, and record where each of its values came from."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mtpctl.errors import MtpctlError, UserError, first_of
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.recipe import yaml12
from mtpctl.recipe.fields import Key, Keys, children, element, find, suggest, type_text, variant
from mtpctl.recipe.model import has_mtp_head, hf_config
from mtpctl.recipe.presets import PRESETS
from mtpctl.recipe.schema import DEFAULT_VARIANTS, Recipe
from mtpctl.recipe.secrets import masked, secrets_in

_PACKAGE = Path(__file__).resolve().parents[1]
RECIPES = packed if (packed := _PACKAGE / "recipes").is_dir() else _PACKAGE.parent / "recipes"
"""Folder of the recipes that come with mtpctl: inside the package in a wheel, beside the package in a checkout."""

FILES = ("data.path", "data.eval_path", "data.sft_path", "evaluation.sets.*.path")
"""Keys that name a file. A `*` stands for any one key, for sections with names of the user's own."""
REFERENCES = (
    "reward.function",
    "evaluation.sets.*.reward.function",
    "rollout.environment",
    "rollout.agent",
    "train.rl.loss",
    "train.rl.advantage",
)
"""Keys that may name something in a file, as FILE.py:NAME."""

MODEL_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")

Origins = dict[Keys, str]
"""`FILE:LINE` or `--set`, by the path of a key."""
Tree = dict[str, object]
"""A recipe as YAML has it: scalars, lists and mappings."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recipe, the origin of every value by dotted key (`default`, `preset NAME`, `FILE:LINE` or `--set`), and the files read.

    `notes`: defaults that the model or this machine changed, a line each.
    """

    recipe: Recipe
    origins: dict[str, str]
    sources: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def load_recipe(recipe: str | Path, *, overlays: Sequence[str | Path] = (), sets: Sequence[str] = ()) -> Loaded:
    """Load a recipe by path or by name, lay `overlays` over it in order, then apply `sets`.

    Mappings merge key by key, everything else is replaced. A set is `a.b=VALUE` with a YAML value, or `a.b+=VALUE`, which
    appends to a list. Each value is checked here by itself; `checks.validate` checks them together.

    Raises UserError that names file and line, or the set, and what to write instead.
    """
    tree: Tree = {}
    origins: Origins = {}
    sources = [_locate(recipe, RECIPES, "recipe"), *(_locate(overlay, RECIPES / "overlays", "overlay") for overlay in overlays)]
    for source in sources:
        document = yaml12.parse(read_text(source), str(source))
        value: object = {} if document.value is None else document.value
        if not isinstance(value, dict):
            raise UserError(f"{source}:1: a recipe is a mapping of keys to values")
        lines = {tuple(map(str, path)): f"{source}:{line}" for path, line in document.lines.items()}
        _refuse_unknown(value, Recipe, (), lines)
        _merge(tree, value, (), lines, origins)
    for text in sets:
        _apply_set(tree, text, origins)
    _find_files(tree, origins, [source.absolute().parent for source in sources])
    for path, text in secrets_in(tree):
        origin = next((origins[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in origins), None)
        raise UserError(f"{origin}: {text}" if origin else text)
    try:
        checked = Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explained(error, origins, tree) from error
    found = _all_origins(checked, origins)
    checked, notes = filled(checked, lambda key: found[key] != "default")
    return Loaded(checked, found, tuple(sources), tuple(notes))


def dump_resolved(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML that loads back equal."""
    return yaml12.dump(recipe.model_dump(mode="json", by_alias=True))


def flatten(tree: Mapping[str, object], path: Keys = ()) -> dict[Keys, object]:
    """The values of a tree by their paths. Lists and empty mappings count as values."""
    flat: dict[Keys, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, (*path, name)))
        else:
            flat[(*path, name)] = value
    return flat


def locate(name: str | Path) -> Path:
    """The file of a recipe or an overlay that comes with mtpctl. Raises UserError for a name that is neither."""
    overlay = RECIPES / "overlays" / f"{name}.yaml"
    return overlay if overlay.is_file() else _locate(name, RECIPES, "recipe")


def available(folder: Path = RECIPES) -> list[Path]:
    """The recipe files of a folder, sorted by name."""
    return sorted(folder.glob("*.yaml"))


# --------------------------------------------------------------------------------------------------------- reading


def _locate(name: str | Path, folder: Path, what: str) -> Path:
    given = Path(name).expanduser()
    if given.suffix in MODEL_FILES:
        raise UserError(f"{name} is a model's file, not a {what}; name a {what}, and the model's folder by --set model.path=FOLDER")
    if given.is_file():
        return given
    known = folder / f"{name}.yaml"
    if given.name == str(name) and known.is_file():
        return known
    if given.is_dir():
        raise UserError(f"{name} is a folder, not a {what} file")
    names = [path.stem for path in available(folder)]
    close = difflib.get_close_matches(given.stem, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known names: {', '.join(names) or 'none'}"
    raise UserError(f"there is no {what} {str(name)!r}; {hint}")


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


# --------------------------------------------------------------------------------------------------------- merging


def _refuse_unknown(tree: Mapping[str, object], model: type[BaseModel], path: Keys, lines: Mapping[Keys, str]) -> None:
    known = children(model, path)
    for name, value in tree.items():
        here = (*path, name)
        if name not in known:
            raise UserError(f"{lines[here]}: {'.'.join(here)} is not a key{suggest(here, tuple(known))}")
        if isinstance(value, Mapping) and known[name].models:
            # Which variant holds is known only after merging: here a key of any of them will do.
            _refuse_unknown_below(value, known[name], here, lines)
        elif isinstance(value, Mapping) and (below := element(known[name])) is not None:
            for own, inner in value.items():
                if isinstance(inner, Mapping):
                    _refuse_unknown(inner, below, (*here, own), lines)


def _refuse_unknown_below(tree: Mapping[str, object], key: Key, path: Keys, lines: Mapping[Keys, str]) -> None:
    names = {name: model for model in reversed(key.models) for name in children(model)}
    for name in tree:
        if name not in names:
            raise UserError(f"{lines[(*path, name)]}: {'.'.join((*path, name))} is not a key{suggest((*path, name), tuple(names))}")
    for model in dict.fromkeys(names.values()):
        _refuse_unknown({name: value for name, value in tree.items() if names[name] is model}, model, path, lines)


def _merge(tree: Tree, over: Mapping[str, object], path: Keys, lines: Mapping[Keys, str], origins: Origins) -> None:
    for name, value in over.items():
        here, below = (*path, name), tree.get(name)
        if isinstance(value, Mapping) and isinstance(below, dict):
            _merge(below, value, here, lines, origins)
        else:
            _forget(origins, here)
            tree[name] = deepcopy(value)
            origins[here] = lines[here]
            leaves = flatten(value) if isinstance(value, Mapping) else {}
            origins.update({(*here, *leaf): lines[(*here, *leaf)] for leaf in leaves})


def _forget(origins: Origins, path: Keys) -> None:
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]


def _apply_set(tree: Tree, text: str, origins: Origins) -> None:
    name, equals, raw = text.partition("=")
    append = name.endswith("+")
    path = tuple(name.removesuffix("+").strip().split("."))
    if not equals or not all(path):
        raise UserError(f"--set {masked(text)!r}: write KEY=VALUE, or KEY+=VALUE to append to a list")
    key = find(path)
    if key is None:
        known = next(depth for depth in range(len(path), -1, -1) if depth == 0 or find(path[:depth]))
        above = find(path[:known])
        siblings = tuple(name for model in (above.models if above else (Recipe,)) for name in children(model))
        hint = suggest(path, siblings if known == len(path) - 1 else ()) or suggest(path[: known + 1], siblings)
        raise UserError(f"--set {masked(text)}: {'.'.join(path)} is not a key{hint}")
    value = yaml12.parse_value(raw)
    if append:
        value = _appended(tree, path, key, value, text)
    elif isinstance(value, dict) and key.models:
        below = [(*path, *leaf[:depth]) for leaf in flatten(value) for depth in range(1, len(leaf) + 1)]
        _refuse_unknown_below(value, key, path, dict.fromkeys(below, f"--set {text}"))
    at = tree
    for step in path[:-1]:
        inner = at.get(step)
        if not isinstance(inner, dict):
            inner = at[step] = {}
        at = inner
    _forget(origins, path)
    at[path[-1]] = value
    origins[path] = "--set"
    origins.update({(*path, *leaf): "--set" for leaf in flatten(value)} if isinstance(value, dict) else {})


def _appended(tree: Tree, path: Keys, key: Key, value: object, text: str) -> list[object]:
    current: object = tree
    for step in path:
        current = current.get(step) if isinstance(current, Mapping) else None
    if current is None and key.path == path:
        current = key.default
    if not isinstance(current, list) and current is not None:
        raise UserError(f"--set {masked(text)}: {'.'.join(path)} is not a list; write {'.'.join(path)}=VALUE")
    return [*(current or []), *(value if isinstance(value, list) else [value])]


# ----------------------------------------------------------------------------------------------------------- files


def _find_files(tree: Tree, origins: Origins, beside: Sequence[Path]) -> None:
    """Make paths absolute, so that a run can be resumed from another working directory.

    A relative path is looked for in the working directory, and after that in the folder of the recipe file that names it, or for `--set` in
    the folders `beside`, those of the recipe and its overlays. A path that is in none of them is not changed: it is a module or a hub
    id, or the recipe's checks report it.
    """
    for keys, value in flatten(tree).items():
        if not isinstance(value, str):
            continue
        if _named(keys, FILES):
            source, colon, name = value, "", ""
        elif _named(keys, REFERENCES) and ".py:" in value:
            source, colon, name = value.rpartition(":")
        else:
            continue
        origin = origins.get(keys, "--set")
        folders = [Path.cwd(), *(beside if origin == "--set" else [Path(origin.rpartition(":")[0]).absolute().parent])]
        given = Path(source).expanduser()
        if (found := next((folder / given for folder in folders if (folder / given).exists()), None)) is not None:
            at = tree
            for step in keys[:-1]:
                at = cast(Tree, at[step])
            at[keys[-1]] = f"{found}{colon}{name}"


def _named(keys: Keys, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(".".join(keys), pattern) for pattern in patterns)


# ---------------------------------------------------------------------------------------------- origins and messages


def _all_origins(recipe: Recipe, origins: Origins) -> dict[str, str]:
    found = {}
    if recipe.data.checker is not None and ("reward", "function") not in origins:
        origins = {**origins, ("reward", "function"): origins["data", "checker"]}
    preset = recipe.train.rl.preset
    by_preset = {("train", "rl", *path) for path in flatten(PRESETS[preset])} if preset else set()
    for path in flatten(recipe.model_dump(mode="json", by_alias=True)):
        near = next((origins[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in origins), None)
        unsaid = f"preset {preset}" if path in by_preset else "default"
        found[".".join(path)] = near if near and (path in origins or _inside_value(path, origins)) else unsaid
    return found


def _inside_value(path: Keys, origins: Origins) -> bool:
    key = find(path)
    return key is not None and key.free and key.path in origins


def _explained(error: ValidationError, origins: Origins, tree: Tree) -> MtpctlError:
    """An error of the first mistake: its origin, its key and what is wrong. Its notes say the same of further keys."""
    mistakes: dict[Keys, UserError] = {}
    for item in error.errors(include_url=False):
        path = _yaml_path(item["loc"], tree)
        if item["type"] == "union_tag_invalid":
            path = (*path, DEFAULT_VARIANTS[path[-1]][0])
        elif item["type"] == "missing":  # of a list that is too short: every key has a default
            path = path[:-1]
        origin = next((origins[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in origins), None)
        said = f"{origin}: " if origin else ""
        mistakes.setdefault(path, UserError(masked(f"{said}{'.'.join(path)} {_sentence(item, path, tree)}")))
    return first_of(list(mistakes.values()))


def _yaml_path(loc: Iterable[str | int], tree: Tree) -> Keys:
    """The path of pydantic's location `loc`, without the names of variants and of forms."""
    path: Keys = ()
    key: Key | None = None
    models: tuple[type[BaseModel], ...] = (Recipe,)
    value: object = tree
    free = False
    for step in map(str, loc):
        if len(models) > 1 and not any(step in children(m) for m in models):
            continue
        if key is not None and step in key.forms:
            continue
        path = (*path, step)
        key = None if free else next((found[step] for m in models if step in (found := children(m, path[:-1]))), None)
        value = value.get(step) if isinstance(value, Mapping) else None
        free = free or key is None
        models = variant(key, value) if key else ()
        if key and len(key.models) > 1:
            models = key.models
    return path


def _sentence(item: ErrorDetails, path: Keys, tree: Tree) -> str:
    kind, got, limits = item["type"], item.get("input"), item.get("ctx", {})
    shown = "null" if got is None else str(got).lower() if isinstance(got, bool) else repr(got)
    match kind:
        case "extra_forbidden" if path[0] not in DEFAULT_VARIANTS:
            return f"is not a key of {'.'.join(path[:-1])}"
        case "extra_forbidden":
            tag, default = DEFAULT_VARIANTS[path[0]]
            section = tree[path[0]]
            return f"is not a key of {path[0]} with {tag}: {section.get(tag, default) if isinstance(section, dict) else default}"
        case "literal_error":
            return f"must be {limits['expected']}, got {shown}{_nearest(got, limits['expected'])}"
        case "union_tag_invalid":
            return f"must be one of {limits['expected_tags']}, got {limits['tag']!r}{_nearest(limits['tag'], limits['expected_tags'])}"
        case "string_type":
            return f"must be text, got {shown}" + (": put it in quotes" if isinstance(got, (int, float)) else "")
        case "int_type" | "int_parsing" | "int_from_float":
            return f"must be an integer, got {shown}"
        case "float_type" | "float_parsing":
            return f"must be a number, got {shown}"
        case "finite_number":
            return f"must be a finite number, got {shown}"
        case "bool_type" | "bool_parsing":
            return f"must be true or false, got {shown}"
        case "greater_than":
            return f"must be greater than {limits['gt']}, got {shown}"
        case "greater_than_equal":
            return f"must be at least {limits['ge']}, got {shown}"
        case "less_than_equal":
            return f"must be at most {limits['le']}, got {shown}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a mapping of keys to values, got {shown}"
        case "list_type" | "tuple_type":
            return f"must be a list, got {shown}; write [{got}]"
        case "missing" | "too_long" if (key := find(path)) is not None:
            return f"must be a list of {type_text(key.field.annotation)}, got {shown}"
        case "less_than":
            return f"must be below {limits['lt']}, got {shown}"
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch":
            return f"may hold letters, digits, dots, dashes and underscores only, got {shown}"
    return f"{item['msg'].removeprefix('Value error, ').lower()}, got {shown}" if kind != "value_error" else str(limits["error"])


def _nearest(got: object, expected: str) -> str:
    choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
    close = difflib.get_close_matches(str(got), choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# Defaults that depend on the model and the machine. They are filled in when a recipe is loaded, unless the recipe sets the value.

CPU_INFO = Path("/proc/cpuinfo")
AMX = {"amx_tile", "amx_bf16"}
"""CPU flags with which matrix products are faster in bf16 than in fp32. Without them they are 5 to 10 times slower."""


def filled(recipe: Recipe, given: Callable[[str], bool]) -> tuple[Recipe, list[str]]:
    """The recipe with these defaults, and a line for each that differs from the schema's.

    given: whether the recipe sets a dotted key. Unreadable models are reported by the recipe's checks.
    """
    try:
        config = hf_config(recipe.model, fetch=False)
        shape = None if config is None else shape_of(config)
    except UserError:
        return recipe, []
    notes: list[str] = []
    recipe = _without_head(recipe, shape, given, notes)
    return _in_precision(recipe, shape, given, notes), notes


def _without_head(recipe: Recipe, shape: ModelShape | None, given: Callable[[str], bool], notes: list[str]) -> Recipe:
    """If there is no MTP head, turn speculation and MTP training off."""
    drafts = "rollout.speculation.num_tokens"
    headless = shape is not None and not has_mtp_head(recipe.model, shape)
    if headless and not given("mtp.mode"):
        recipe = recipe.model_copy(update={"mtp": recipe.mtp.model_copy(update={"mode": "off"})})
    if (headless or recipe.mtp.mode == "off") and recipe.rollout.speculation.num_tokens and not given(drafts):
        speculation = recipe.rollout.speculation.model_copy(update={"num_tokens": 0})
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"speculation": speculation})})
        notes.append(f"{drafts}: 0, because {'the model has no MTP head' if headless else 'mtp.mode is off'}: speculation is off")
    return recipe


def _in_precision(recipe: Recipe, shape: ModelShape | None, given: Callable[[str], bool], notes: list[str]) -> Recipe:
    """bf16 on a card, on a CPU with AMX, and for linear attention, which vLLM computes on a CPU in bf16 alone; else fp32."""
    linear = shape is not None and "linear_attention" in shape.layer_kinds
    if given("train.precision") or recipe.device == "cuda" or linear or has_amx():
        return recipe
    notes.append("train.precision: fp32, because this CPU has no AMX, without which bf16 is slower")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "fp32"})})


def has_amx() -> bool:
    """Whether this machine's CPU multiplies matrices of bf16 by AMX."""
    try:
        flags = next((line for line in CPU_INFO.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return False
    return set(flags.split()) >= AMX
