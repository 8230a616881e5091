"""The folder of `mtpctl init --template reasoning-gym`: rows, reward and a recipe that fits a pretrained model and this machine."""

from __future__ import annotations

import difflib
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtpctl.data.messages import NotRendered
from mtpctl.data.tokenizers import Tokenizer, load_plain_tokenizer, load_tokenizer
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.first_settings import Machine, Setting, Workload, cautions, choose, tree
from mtpctl.recipe.model import ModelConfig, hf_config

SETTINGS: dict[str, dict[str, object]] = {"chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 3}}
"""Settings of tasks that are not reasoning-gym's defaults. A small model solves some of these sums before training, so it can learn."""
TRAINING_ROWS = {"chain_sum": 20_000}
MEASURED_ROWS = 2_000
"""Number of rows whose tokens are counted."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FirstTask:
    """texts: the files by name. settings: the chosen keys with their reasons. cautions: what to know before the run."""

    texts: dict[str, str]
    settings: Sequence[Setting]
    cautions: Sequence[str]


def first_task(name: str, model: str, task: str, machine: Machine, templates: Path) -> FirstTask:
    """The files of the task `name`, except README.md.

    Args:
        model: a model folder or hub id.
        task: a dataset of reasoning-gym.
        templates: the folder with make_rows.py, reward.py and test_mytask.py.

    Raises:
        UserError: for an unknown task, or a model that cannot be read.
        EnvironmentMissing: if reasoning-gym is not installed, or the hub does not respond.
    """
    _check_task(task)
    config = hf_config(ModelConfig(path=model), field="--model")
    assert config is not None, "the hub was contacted"
    shape = shape_of(config)
    texts = {file: (templates / file).read_text(encoding="utf-8") for file in ("make_rows.py", "reward.py", "test_mytask.py")}
    constants = {
        "TASK": f'"{task}"',
        "SETTINGS": json.dumps(SETTINGS.get(task, {})),
        "TRAINING": f"{TRAINING_ROWS.get(task, 5_000):_}",
        "HELD_OUT": str(512 if machine.gpus else 64),
    }
    for constant, value in constants.items():
        texts = {file: re.sub(rf"^{constant} = .*$", f"{constant} = {value}", text, flags=re.MULTILINE) for file, text in texts.items()}
    rows, held_out = _rows(texts["make_rows.py"], task)
    tokenizer = load_plain_tokenizer(Path(model)) if Path(model).is_dir() else load_tokenizer(model)
    templated = _has_template(tokenizer)
    work = workload(shape, tokenizer, [*rows[:MEASURED_ROWS], *held_out], len(rows), templated)
    settings = choose(work, machine)
    texts |= {"rows.jsonl": _lines(rows), "held_out.jsonl": _lines(held_out)}
    texts["recipe.yaml"] = recipe_text(name, model, task, work, settings, gpu=machine.gpus > 0, templated=templated)
    return FirstTask(texts, settings, cautions(work, machine))


def _check_task(task: str) -> None:
    if find_spec("reasoning_gym") is None:
        raise EnvironmentMissing("init: the template reasoning-gym needs the package reasoning-gym; install mtpctl[tasks]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        from reasoning_gym.factory import DATASETS
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 1)
        raise UserError(f"--task: reasoning-gym has no dataset {task}; " + (f"did you mean {near[0]}?" if near else "try chain_sum"))


def _rows(make_rows: str, task: str) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, made by the text of make_rows.py."""
    module: dict[str, Any] = {"__name__": "make_rows"}
    exec(compile(make_rows, "make_rows.py", "exec"), module)
    training, held_out = (
        module["make_rows"](seed, count) for seed, count in zip(module["SEEDS"], (module["TRAINING"], module["HELD_OUT"]), strict=True)
    )
    for row in held_out:
        if not isinstance(row["answer"], str) or not row["answer"].strip():
            raise UserError(f"--task: {task} has rows without an answer as text, which a row needs; take another task")
    return training, held_out


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _has_template(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.chat([{"role": "user", "content": "a"}])
    except NotRendered:
        return False
    return True


def workload(shape: ModelShape, tokenizer: Tokenizer, rows: Sequence[Row], count: int, templated: bool) -> Workload:
    """The sizes of the model and of its rows, of which `rows` are measured."""
    counts = count_parameters(shape)
    moe = shape.moe
    unused = 0 if moe is None else round(counts["experts"] * (1 - moe.experts_per_token / moe.experts))
    prompts = (
        tokenizer.chat([{"role": "user", "content": row["question"]}]) if templated else tokenizer.encode(row["question"], special=True)
        for row in rows
    )
    return Workload(
        parameters=counts["total"],
        active=counts["total"] - unused,
        positions=shape.max_positions,
        prompt_tokens=max(map(len, prompts)),
        answer_tokens=max(len(tokenizer.encode(row["answer"])) for row in rows),
        rows=count,
    )


def recipe_text(name: str, model: str, task: str, work: Workload, settings: Sequence[Setting], *, gpu: bool, templated: bool) -> str:
    """The recipe as YAML, with the reason of each setting as a comment above it."""
    basics = [
        Setting("name", name),
        Setting("model.path", model),
        Setting("data.path", "rows.jsonl"),
        Setting("data.eval_path", "held_out.jsonl"),
        Setting("data.columns", {"prompt": "question", "answer": "answer"}),
        *([Setting("data.chat_template", True)] if templated else []),
        Setting("reward.function", "reward.py:score"),
        Setting("train.stages", ["rl"]),
        Setting("train.eval_every", 20 if gpu else 0),
        Setting("train.rl.preset", "dapo", "no KL to the start, clip-higher, and groups without signal are replaced"),
        Setting("rollout.engine", "vllm"),
    ]
    everything = [*basics, *settings, *([] if gpu else [Setting("cluster.device", "cpu")])]
    reasons = {setting.key: setting.why for setting in everything if setting.why}
    size = f"{work.parameters / 1e6:.0f}M"
    head = f"# {task} of reasoning-gym with {model} ({size} parameters). docs/your-first-run.md explains the choices.\n"
    return head + "".join(f"{line}\n" for line in _yaml(tree(everything), reasons))


def _yaml(values: Mapping[str, object], reasons: Mapping[str, str], path: str = "", indent: str = "") -> list[str]:
    """Lines of a block mapping. Lists, and mappings of strings without reasons, are written in one line."""
    lines = []
    for key, value in values.items():
        name = f"{path}{key}"
        if reason := reasons.get(name):
            lines.append(f"{indent}# {reason}")
        explained = any(each.startswith(f"{name}.") for each in reasons)
        if isinstance(value, Mapping) and (explained or not all(isinstance(each, str) for each in value.values())):
            lines += [f"{indent}{key}:", *_yaml(value, reasons, f"{name}.", f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


def _scalar(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_scalar(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value / 10 ** (exponent := math.floor(math.log10(value))):.3g}e{exponent}"
    # JSON is YAML; plain strings only need quotes if they have special characters.
    text = json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) and value.replace("/", "").replace(".", "").replace("_", "").replace("-", "").isalnum() else text
