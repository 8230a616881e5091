"""Load a recipe from files, overlays and `--set`, and record the origin of each value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.recipe import yaml12
from mtpctl.recipe.fields import (
    Key,
    KeyPath,
    Origins,
    Tree,
    element_section,
    find_key,
    find_secrets,
    mask_secrets,
    origin_of,
    section_keys,
    to_user_error,
    unknown_key_hint,
)
from mtpctl.recipe.model import has_mtp_head, hf_config
from mtpctl.recipe.rl import PRESETS
from mtpctl.recipe.schema import Recipe

_PACKAGE = Path(__file__).resolve().parents[1]
RECIPES = in_wheel if (in_wheel := _PACKAGE / "recipes").is_dir() else _PACKAGE.parent / "recipes"
"""Folder of the recipes that ship with mtpctl: inside the package in a wheel, next to the package in a checkout."""

FILE_KEYS = ("data.path", "data.eval_path", "data.sft_path", "evaluation.sets.*.path")
"""Keys that name a file. `*` matches one user-defined key."""
REFERENCE_KEYS = (
    "reward.function",
    "evaluation.sets.*.reward.function",
    "rollout.environment",
    "rollout.agent",
    "train.rl.loss",
    "train.rl.advantage",
)
"""Keys that may name an object in a file, as FILE.py:NAME."""

MODEL_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")

CPU_INFO = Path("/proc/cpuinfo")
AMX_FLAGS = {"amx_tile", "amx_bf16"}
"""CPU flags of fast bf16 matrix products. Without them bf16 is 5 to 10 times slower than fp32."""


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe with the origin of every value by dotted key (`default`, `preset NAME`, `FILE:LINE` or `--set`), and its files.

    notes: one line for each default that depends on the model or on this machine.
    """

    recipe: Recipe
    origins: dict[str, str]
    sources: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def load_recipe(recipe: str | Path, *, overlays: Sequence[str | Path] = (), sets: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe by path or name, merge `overlays` into it in order, then apply `sets`.

    Mappings merge key by key; other values are replaced. A set is `a.b=VALUE` with a YAML value, or `a.b+=VALUE`, which appends to a list.
    `checks.validate` checks combinations of keys. Raises UserError with the file and line, or the set, and the fix.
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
        _reject_unknown(value, Recipe, (), lines)
        _merge(tree, value, (), lines, origins)
    for text in sets:
        _apply_set(tree, text, origins)
    _resolve_files(tree, origins, [source.absolute().parent for source in sources])
    for path, text in find_secrets(tree):
        origin = origin_of(path, origins)
        raise UserError(f"{origin}: {text}" if origin else text)
    try:
        validated = Recipe.model_validate(tree)
    except ValidationError as error:
        raise to_user_error(error, origins, tree) from error
    all_origins = _all_origins(validated, origins)
    validated, notes = with_model_defaults(validated, lambda key: all_origins[key] != "default")
    return LoadedRecipe(validated, all_origins, tuple(sources), tuple(notes))


def dump_resolved(recipe: Recipe) -> str:
    """The recipe with all defaults, as YAML that loads as an equal recipe."""
    return yaml12.dump(recipe.model_dump(mode="json", by_alias=True))


def flatten(tree: Mapping[str, object], path: KeyPath = ()) -> dict[KeyPath, object]:
    """The values of a tree by path. Lists and empty mappings count as values."""
    flat: dict[KeyPath, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, (*path, name)))
        else:
            flat[(*path, name)] = value
    return flat


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe or overlay, by the name of one that ships with mtpctl, or by path. Raises UserError if there is none."""
    overlay = RECIPES / "overlays" / f"{name}.yaml"
    return overlay if overlay.is_file() else _locate(name, RECIPES, "recipe")


def list_recipes(folder: Path = RECIPES) -> list[Path]:
    """The recipe files of a folder, sorted by name."""
    return sorted(folder.glob("*.yaml"))


def _locate(name: str | Path, folder: Path, kind: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix in MODEL_FILES:
        raise UserError(f"{name} is a model file, not a {kind}; name a {kind}, and pass the model's folder as --set model.path=FOLDER")
    if path.is_file():
        return path
    path_by_name = folder / f"{name}.yaml"
    if path.name == str(name) and path_by_name.is_file():
        return path_by_name
    if path.is_dir():
        raise UserError(f"{name} is a folder, not a {kind} file")
    names = [path.stem for path in list_recipes(folder)]
    matches = difflib.get_close_matches(path.stem, names, n=1)
    hint = f"did you mean {matches[0]}?" if matches else f"known names: {', '.join(names) or 'none'}"
    raise UserError(f"there is no {kind} {str(name)!r}; {hint}")


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _reject_unknown(tree: Mapping[str, object], model: type[BaseModel], path: KeyPath, lines: Mapping[KeyPath, str]) -> None:
    keys = section_keys(model, path)
    for name, value in tree.items():
        key_path = (*path, name)
        if name not in keys:
            raise UserError(f"{lines[key_path]}: {'.'.join(key_path)} is not a key{unknown_key_hint(key_path, tuple(keys))}")
        if isinstance(value, Mapping) and keys[name].sections:
            # The variant is only known after merging: keys of all variants are accepted here.
            _reject_unknown_in_variants(value, keys[name], key_path, lines)
        elif isinstance(value, Mapping) and (section := element_section(keys[name])) is not None:
            for item_name, item in value.items():
                if isinstance(item, Mapping):
                    _reject_unknown(item, section, (*key_path, item_name), lines)


def _reject_unknown_in_variants(tree: Mapping[str, object], key: Key, path: KeyPath, lines: Mapping[KeyPath, str]) -> None:
    names = {name: model for model in reversed(key.sections) for name in section_keys(model)}
    for name in tree:
        if name not in names:
            raise UserError(
                f"{lines[(*path, name)]}: {'.'.join((*path, name))} is not a key{unknown_key_hint((*path, name), tuple(names))}"
            )
    for model in dict.fromkeys(names.values()):
        _reject_unknown({name: value for name, value in tree.items() if names[name] is model}, model, path, lines)


def _merge(tree: Tree, overlay: Mapping[str, object], path: KeyPath, lines: Mapping[KeyPath, str], origins: Origins) -> None:
    for name, value in overlay.items():
        key_path, current = (*path, name), tree.get(name)
        if isinstance(value, Mapping) and isinstance(current, dict):
            _merge(current, value, key_path, lines, origins)
        else:
            _delete_origins(origins, key_path)
            tree[name] = deepcopy(value)
            origins[key_path] = lines[key_path]
            leaves = flatten(value) if isinstance(value, Mapping) else {}
            origins.update({(*key_path, *leaf): lines[(*key_path, *leaf)] for leaf in leaves})


def _delete_origins(origins: Origins, path: KeyPath) -> None:
    for key_path in [key_path for key_path in origins if key_path[: len(path)] == path]:
        del origins[key_path]


def _apply_set(tree: Tree, text: str, origins: Origins) -> None:
    name, equals, raw = text.partition("=")
    append = name.endswith("+")
    path = tuple(name.removesuffix("+").strip().split("."))
    if not equals or not all(path):
        raise UserError(f"--set {mask_secrets(text)!r}: write KEY=VALUE, or KEY+=VALUE to append to a list")
    key = find_key(path)
    if key is None:
        known_depth = next(depth for depth in range(len(path), -1, -1) if depth == 0 or find_key(path[:depth]))
        parent = find_key(path[:known_depth])
        siblings = tuple(name for model in (parent.sections if parent else (Recipe,)) for name in section_keys(model))
        hint = unknown_key_hint(path, siblings if known_depth == len(path) - 1 else ()) or unknown_key_hint(
            path[: known_depth + 1], siblings
        )
        raise UserError(f"--set {mask_secrets(text)}: {'.'.join(path)} is not a key{hint}")
    value = yaml12.parse_value(raw)
    if append:
        value = _append_to_list(tree, path, key, value, text)
    elif isinstance(value, dict) and key.sections:
        new_paths = [(*path, *leaf[:depth]) for leaf in flatten(value) for depth in range(1, len(leaf) + 1)]
        _reject_unknown_in_variants(value, key, path, dict.fromkeys(new_paths, f"--set {text}"))
    section = tree
    for step in path[:-1]:
        child = section.get(step)
        if not isinstance(child, dict):
            child = section[step] = {}
        section = child
    _delete_origins(origins, path)
    section[path[-1]] = value
    origins[path] = "--set"
    if isinstance(value, dict):
        origins.update({(*path, *leaf): "--set" for leaf in flatten(value)})


def _append_to_list(tree: Tree, path: KeyPath, key: Key, value: object, text: str) -> list[object]:
    current: object = tree
    for step in path:
        current = current.get(step) if isinstance(current, Mapping) else None
    if current is None and key.path == path:
        current = key.default
    if not isinstance(current, list) and current is not None:
        raise UserError(f"--set {mask_secrets(text)}: {'.'.join(path)} is not a list; write {'.'.join(path)}=VALUE")
    return [*(current or []), *(value if isinstance(value, list) else [value])]


def _resolve_files(tree: Tree, origins: Origins, set_folders: Sequence[Path]) -> None:
    """Make paths absolute, so that a run can be resumed from another working directory.

    A relative path is looked up in the working directory, then in the folder of the recipe file that contains it, or for `--set` in
    `set_folders`: the folders of the recipe and its overlays. Paths of missing files are not changed: they may be modules or hub ids.
    """
    for key_path, value in flatten(tree).items():
        if not isinstance(value, str):
            continue
        if _matches(key_path, FILE_KEYS):
            source, colon, name = value, "", ""
        elif _matches(key_path, REFERENCE_KEYS) and ".py:" in value:
            source, colon, name = value.rpartition(":")
        else:
            continue
        origin = origins.get(key_path, "--set")
        folders = [Path.cwd(), *(set_folders if origin == "--set" else [Path(origin.rpartition(":")[0]).absolute().parent])]
        candidates = [folder / Path(source).expanduser() for folder in folders]
        if (file := next((candidate for candidate in candidates if candidate.exists()), None)) is not None:
            section = tree
            for step in key_path[:-1]:
                section = cast(Tree, section[step])
            section[key_path[-1]] = f"{file}{colon}{name}"


def _matches(key_path: KeyPath, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(".".join(key_path), pattern) for pattern in patterns)


def _all_origins(recipe: Recipe, origins: Origins) -> dict[str, str]:
    all_origins = {}
    if recipe.data.checker is not None and ("reward", "function") not in origins:
        origins = {**origins, ("reward", "function"): origins["data", "checker"]}
    preset = recipe.train.rl.preset
    by_preset = {("train", "rl", *path) for path in flatten(PRESETS[preset])} if preset else set()
    for path in flatten(recipe.model_dump(mode="json", by_alias=True)):
        origin = origin_of(path, origins)
        default = f"preset {preset}" if path in by_preset else "default"
        key = find_key(path)
        is_set = path in origins or (key is not None and key.has_free_keys and key.path in origins)
        all_origins[".".join(path)] = origin if origin and is_set else default
    return all_origins


def with_model_defaults(recipe: Recipe, is_set: Callable[[str], bool]) -> tuple[Recipe, list[str]]:
    """The recipe with defaults that depend on the model and the machine, and a note for each. `is_set`: whether a key is set."""
    try:
        config = hf_config(recipe.model, fetch=False)
        shape = None if config is None else shape_of(config)
    except UserError:
        return recipe, []
    notes: list[str] = []
    recipe = _with_mtp_defaults(recipe, shape, is_set, notes)
    return _with_precision(recipe, shape, is_set, notes), notes


def _with_mtp_defaults(recipe: Recipe, shape: ModelShape | None, is_set: Callable[[str], bool], notes: list[str]) -> Recipe:
    """Disable speculation and MTP training if there is no MTP head."""
    key = "rollout.speculation.num_tokens"
    lacks_head = shape is not None and not has_mtp_head(recipe.model, shape)
    if lacks_head and not is_set("mtp.mode"):
        recipe = recipe.model_copy(update={"mtp": recipe.mtp.model_copy(update={"mode": "off"})})
    if (lacks_head or recipe.mtp.mode == "off") and recipe.rollout.speculation.model_tokens and not is_set(key):
        speculation = recipe.rollout.speculation.model_copy(update={"num_tokens": 0})
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"speculation": speculation})})
        notes.append(f"{key}: 0, because {'the model has no MTP head' if lacks_head else 'mtp.mode is off'}: speculation is off")
    return recipe


def _with_precision(recipe: Recipe, shape: ModelShape | None, is_set: Callable[[str], bool], notes: list[str]) -> Recipe:
    """Set fp32 on a CPU without AMX, except for linear attention, which vLLM's own kernels support on a CPU only in bf16."""
    needs_bf16 = shape is not None and "linear_attention" in shape.layer_kinds and recipe.numerics == "default"
    if is_set("train.precision") or recipe.device == "cuda" or needs_bf16 or has_amx():
        return recipe
    notes.append("train.precision: fp32, because this CPU has no AMX, without which bf16 is slower")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "fp32"})})


def has_amx() -> bool:
    """Whether this machine's CPU has AMX for bf16."""
    try:
        flags = next((line for line in CPU_INFO.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return False
    return set(flags.split()) >= AMX_FLAGS
