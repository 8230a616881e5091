"""`mtpctl recipe` and `mtpctl init`: list, show, check and compare recipes, and write a folder with a user-defined task."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtpctl.cli.options import Json, Overlays, RecipeArgument, Sets, load, print_result

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

app = typer.Typer(help="List, show, check and compare recipes.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Resolved = Annotated[bool, typer.Option("--resolved", help="Print every key, defaults included.")]
Origin = Annotated[bool, typer.Option("--origin", help="Print the origin of each value.")]


@app.command("ls")
def list_recipes(as_json: Json = False) -> None:
    """The recipes and overlays that come with mtpctl."""
    from mtpctl.recipe.loading import RECIPES, list_recipes

    rows = [
        {"kind": kind, "name": path.stem, "path": str(path), "about": _about(path.read_text(encoding="utf-8"))}
        for kind, folder in (("recipe", RECIPES), ("overlay", RECIPES / "overlays"))
        for path in list_recipes(folder)
    ]
    if as_json:
        print_result(json.dumps(rows, indent=2))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        print_result(f"{row['kind']:8} {row['name']:{width}}  {row['about']}")


@app.command()
def show(
    recipe: RecipeArgument,
    sets: Sets = None,
    overlay: Overlays = None,
    resolved: Resolved = False,
    origin: Origin = False,
    as_json: Json = False,
) -> None:
    """Print a recipe with overlays and sets applied."""
    from mtpctl.recipe import yaml12
    from mtpctl.recipe.loading import flatten

    loaded = load(recipe, overlay, sets)
    tree = loaded.recipe.model_dump(mode="json", by_alias=True)
    values = {".".join(path): value for path, value in flatten(tree).items()}
    if not resolved:
        values = {key: value for key, value in values.items() if loaded.origins[key] != "default"}
    if as_json:
        document = (
            {key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()} if origin else _nested(values, tree)
        )
        print_result(json.dumps(document, indent=2))
    elif origin:
        lines = {key: f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()}
        width = min(60, max(map(len, lines.values()), default=0))
        for key, line in lines.items():
            print_result(f"{line:{width}}  # {loaded.origins[key]}")
    else:
        print_result(yaml12.dump(_nested(values, tree)), end="")
    if not as_json:
        for line in _end_tokens(loaded.recipe):
            print_result(f"# {line}")


@app.command()
def copy(
    name: RecipeArgument,
    target: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="New file; default: NAME.yaml.")] = None,
) -> None:
    """Copy a recipe or an overlay that comes with mtpctl, comments included, to a file of your own."""
    from mtpctl.errors import UserError
    from mtpctl.recipe.loading import find_recipe

    source = find_recipe(name)
    file = target or Path(source.name)
    file = file / source.name if file.is_dir() else file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(source.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise UserError(f"{file}: exists; name another FILE") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror}); name another FILE") from error
    print_result(str(file))


@app.command()
def schema() -> None:
    """The JSON schema of a recipe, for editors."""
    from mtpctl.recipe.schema import Recipe

    print_result(json.dumps(Recipe.model_json_schema(by_alias=True), indent=2))


@app.command()
def validate(recipe: RecipeArgument, sets: Sets = None, overlay: Overlays = None, as_json: Json = False) -> None:
    """Check a recipe and its data, test the custom code that it names, and warn of settings that are known to learn badly.

    Starts nothing. Only your code may use the network.
    """
    from mtpctl.controller.preflight import check_code
    from mtpctl.data.inspection import inspect_sets, leaks_in
    from mtpctl.recipe.checks import cautions_of
    from mtpctl.recipe.checks import validate as check

    loaded = load(recipe, overlay, sets)
    check(loaded.recipe)
    reports = inspect_sets(loaded.recipe.data, loaded.recipe.evaluation, loaded.recipe.train.stages)
    data, leaks = list(map(str, reports)), leaks_in(reports, loaded.recipe.data, loaded.recipe.train.stages)
    sources = [str(path) for path in loaded.sources]
    cautions = [*cautions_of(loaded.recipe), *check_code(loaded.recipe), *filter(None, [leaks])]
    if as_json:
        print_result(json.dumps({"ok": True, "name": loaded.recipe.name, "sources": sources, "data": data, "cautions": cautions}))
        return
    print_result(f"{' + '.join(sources)}: ok")
    for line in data:
        print_result(f"data: {line}")
    for note in loaded.notes:
        print_result(f"default: {note}")
    for caution in cautions:
        print_result(f"caution: {caution}")


@app.command()
def diff(
    first: RecipeArgument, second: Annotated[str, typer.Argument(metavar="RECIPE", help="Another recipe.")], as_json: Json = False
) -> None:
    """Print the keys whose values differ between two recipes, defaults included."""
    from mtpctl.recipe.loading import flatten

    trees = [flatten(load(name, None, None).recipe.model_dump(mode="json", by_alias=True)) for name in (first, second)]
    keys = list(dict.fromkeys([*trees[0], *trees[1]]))
    pairs = {".".join(key): tuple(tree.get(key, _ABSENT) for tree in trees) for key in keys}
    changed = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if as_json:
        print_result(
            json.dumps(
                {
                    key: {side: v for side, v in zip(("first", "second"), pair, strict=True) if v is not _ABSENT}
                    for key, pair in changed.items()
                }
            )
        )
        return
    for key, pair in changed.items():
        print_result(f"{key}: {' → '.join('(absent)' if value is _ABSENT else json.dumps(value, ensure_ascii=False) for value in pair)}")


_ABSENT = object()


def _end_tokens(recipe: Recipe) -> list[str]:
    """One line for each end token, and one more if a file that may name further tokens is missing. If they cannot be read, the error."""
    from mtpctl.data.end_tokens import recipe_end_tokens
    from mtpctl.errors import MtpctlError

    if recipe.model.path is None and recipe.model.config is None:
        return []
    try:
        ends, missing = recipe_end_tokens(recipe.model, recipe.rollout)
    except MtpctlError as error:  # the rest of the recipe is printed anyway
        return [f"end tokens: {error}"]
    return [f"end token {token}" for token in ends.tokens] + ([f"end tokens: {missing}"] if missing else [])


def _about(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return " ".join(lines)


def _nested(values: dict[str, object], tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """The part of `tree` whose dotted keys are among `values`."""
    nested: dict[str, object] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in values:
            nested[name] = value
        elif isinstance(value, dict) and (section := _nested(values, value, f"{key}.")):
            nested[name] = section
    return nested


TEMPLATES = Path(__file__).resolve().parents[1] / "templates"

ABOUT = {
    "recipe.yaml": "the run: data, reward, model, training",
    "make_rows.py": "makes the two files of rows",
    "rows.jsonl": "training problems, one per line",
    "talks.jsonl": "conversations for the supervised stage",
    "held_out.jsonl": "evaluation problems",
    "reward.py": "the reward function",
    "environment.py": "the tool that replies between the model's turns",
    "agent.py": "the agent and its reward",
    "test_mytask.py": "tests of the code above",
    "README.md": "this page",
}
"""The files that templates have, with their descriptions, in the order in which they are listed. No template has all of them."""

UNTIL_LOSS = {"agent": "0.1", "coding": "0.4", "exact": "1.4", "judge": "2.3", "tool": "0.1"}
"""The loss at which the supervised stage of each template ends: by then some responses are right, and some are not."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def init(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder to create; its name becomes the run's.")],
    template: Annotated[
        Literal["exact", "judge", "tool", "agent", "coding", "reasoning-gym"],
        typer.Option(
            "--template",
            help="exact: a reward function; judge: a reward by a judge; tool: an environment of several turns; "
            "agent: an agent whose model calls two tools; coding: an agent whose model writes, runs and corrects Python; "
            "reasoning-gym: a pretrained model (--model) on a dataset of reasoning-gym, with settings that fit model and machine.",
        ),
    ] = "exact",
    model: Annotated[
        str | None, typer.Option("--model", metavar="FOLDER|ID", help="For reasoning-gym: the model's folder or hub id.")
    ] = None,
    task: Annotated[str, typer.Option("--task", metavar="DATASET", help="For reasoning-gym: the name of its dataset.")] = "chain_sum",
) -> None:
    """Write a custom task that trains without changes: recipe, rows, reward, environment or agent, and tests."""
    from mtpctl.errors import UserError

    path = Path(folder).expanduser()
    name = path.resolve().name
    if not _NAME.fullmatch(name):
        raise UserError(f"init: {name!r} names a run and a test; begin with a letter, and go on with letters, digits, _ and -")
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"init: {path} exists and is not overwritten; name another folder")
    texts, notes = _texts(template, name, model, task)
    files = {file: path / file.replace("test_mytask", _test_name(name)) for file in texts}
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            files[file].write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"init: {path} cannot be written ({error.strerror}); name another folder") from error
    width = max(len(str(file)) for file in files.values())
    for file, text in texts.items():
        print_result(f"{files[file]!s:{width}}  {text.count(chr(10)):4} lines  {ABOUT[file]}")
    for note in notes:
        print_result(note)
    print_result(f"next: mtpctl recipe validate {path / 'recipe.yaml'}")


def _texts(template: str, name: str, model: str | None, task: str) -> tuple[dict[str, str], list[str]]:
    """The files of the task `name`, and lines about the chosen settings."""
    from mtpctl.errors import UserError

    if template != "reasoning-gym":
        if model is not None:
            raise UserError("--model: only the template reasoning-gym takes a model; in others, edit `model` in the recipe")
        return contents(template, name), []
    if model is None:
        raise UserError("--model: the template reasoning-gym trains a pretrained model; name its folder or hub id")
    from mtpctl.jobs.first_recipe import Machine, first_task
    from mtpctl.telemetry.versions import gpu_memory_gib, visible_gpus

    memory = gpu_memory_gib()
    cores = len(os.sched_getaffinity(0))
    machine = Machine(cores) if memory is None else Machine(cores, len(visible_gpus()), memory)
    task_files = first_task(name, model, task, machine, TEMPLATES / "reasoning_gym")
    notes = [f"{setting.key}: {setting.value} ({setting.reason})" for setting in task_files.settings if setting.reason]
    notes += [f"caution: {line}" for line in task_files.cautions]
    return _with_names({file: task_files.texts[file] for file in ABOUT if file in task_files.texts}, name), notes


def contents(template: str, name: str) -> dict[str, str]:
    """The texts of the files of the task `name`, by their names in the template."""
    source = TEMPLATES / template
    texts = {file: (source / file).read_text(encoding="utf-8") for file in ABOUT if (source / file).is_file()}
    texts["recipe.yaml"] += (TEMPLATES / "machine.yaml").read_text(encoding="utf-8").replace("{until_loss}", UNTIL_LOSS[template])
    return _with_names(texts, name)


def _with_names(texts: dict[str, str], name: str) -> dict[str, str]:
    """Insert the task's name into the files, and add README.md."""
    table = "".join(f"| `{file}` | {ABOUT[file]} |\n" for file in texts)
    readme = (TEMPLATES / "README.md").read_text(encoding="utf-8")
    tested_part = "the agent" if "agent.py" in texts else "the reward and the tool" if "environment.py" in texts else "the reward"
    texts["README.md"] = readme.replace("{files}", table).replace("{tested}", tested_part)
    return {file: text.replace("test_mytask", _test_name(name)).replace("mytask", name) for file, text in texts.items()}


def _test_name(name: str) -> str:
    return f"test_{name.replace('-', '_')}"
