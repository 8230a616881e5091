"""`mtpctl init`: write a folder with a user-defined task, which trains without changes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtpctl.cli.options import answer

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
"""The files of a template in the order of listing; a template need not have all."""

UNTIL_LOSS = {"agent": "0.1", "coding": "0.4", "exact": "1.4", "judge": "2.3", "tool": "0.1"}
"""The loss at which the supervised stage of each template ends: by then some responses are right, and some are not."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def init(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder to make; its name becomes the run's.")],
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
    """Write a task of your own that trains as it is: recipe, rows, reward, environment or agent, tests."""
    from mtpctl.errors import UserError

    path = Path(folder).expanduser()
    name = path.resolve().name
    if not _NAME.fullmatch(name):
        raise UserError(f"init: {name!r} names a run and a test; begin with a letter, and go on with letters, digits, _ and -")
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"init: {path} is there already, and is not overwritten; name another folder")
    texts, notes = _texts(template, name, model, task)
    files = {file: path / file.replace("test_mytask", _test(name)) for file in texts}
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            files[file].write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"init: {path} cannot be written ({error.strerror}); name another folder") from error
    width = max(len(str(file)) for file in files.values())
    for file, text in texts.items():
        answer(f"{files[file]!s:{width}}  {text.count(chr(10)):4} lines  {ABOUT[file]}")
    for note in notes:
        answer(note)
    answer(f"next: mtpctl recipe check {path / 'recipe.yaml'}")


def _texts(template: str, name: str, model: str | None, task: str) -> tuple[dict[str, str], list[str]]:
    """The files of the task `name`, and lines about the settings that were chosen."""
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
    chosen = first_task(name, model, task, machine, TEMPLATES / "reasoning_gym")
    notes = [f"{setting.key}: {setting.value} ({setting.why})" for setting in chosen.settings if setting.why]
    notes += [f"caution: {line}" for line in chosen.cautions]
    return _named({file: chosen.texts[file] for file in ABOUT if file in chosen.texts}, name), notes


def contents(template: str, name: str) -> dict[str, str]:
    """The texts of the task `name`, by the names of the template's files."""
    source = TEMPLATES / template
    texts = {file: (source / file).read_text(encoding="utf-8") for file in ABOUT if (source / file).is_file()}
    texts["recipe.yaml"] += (TEMPLATES / "machine.yaml").read_text(encoding="utf-8").replace("{until_loss}", UNTIL_LOSS[template])
    return _named(texts, name)


def _named(texts: dict[str, str], name: str) -> dict[str, str]:
    """The files with the name of the task, and README.md."""
    table = "".join(f"| `{file}` | {ABOUT[file]} |\n" for file in texts)
    readme = (TEMPLATES / "README.md").read_text(encoding="utf-8")
    tested = "the agent" if "agent.py" in texts else "the reward and the tool" if "environment.py" in texts else "the reward"
    texts["README.md"] = readme.replace("{files}", table).replace("{tested}", tested)
    return {file: text.replace("test_mytask", _test(name)).replace("mytask", name) for file, text in texts.items()}


def _test(name: str) -> str:
    return f"test_{name.replace('-', '_')}"
