"""The section `data`: training problems and held-out problems."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, HomePath, PositiveFloat, PositiveInt, Section


class GeneratedTask(Section):
    """A verifiable task that is generated from the seed."""

    name: Literal["addition", "subtraction", "multiplication", "reverse", "sort"] = Field("addition", description="Which task.")
    min_digits: PositiveInt = Field(1, description="Digits of the shortest operand, or characters of the shortest string.")
    max_digits: PositiveInt = Field(3, description="Digits of the longest operand, or characters of the longest string.")
    length_decay: PositiveFloat = Field(
        1.0, le=1, description="Problems of each length, as a multiple of those of the length before; below 1, long ones are rare."
    )
    train_size: PositiveInt = Field(20000, description="Training problems.")
    eval_size: PositiveInt = Field(256, description="Held-out problems, none of which is among the training problems.")


class DataConfig(Section):
    path: HomePath | None = Field(None, description="JSONL or Parquet with `prompt` and `answer` columns.")
    eval_path: HomePath | None = Field(None, description="Held-out problems in the same format.")
    task: GeneratedTask | None = Field(None, description="Generate the problems instead of reading them.")
    sft_path: HomePath | None = Field(None, description="Problems with `solution` for the supervised stage; default: the same as RL's.")
    sft_task: GeneratedTask | None = Field(
        None, description="Generate the supervised stage's problems, without the held-out ones; default: RL's task."
    )
    checker: Literal["exact", "math"] | None = Field(None, description="The older key for reward.function, which takes more.")
    chat_template: bool = Field(False, description="Wrap prompts in the tokenizer's chat template.")
    system_prompt: str | None = Field(None, description="System message; needs chat_template.")
    shuffle: bool = Field(True, description="Shuffle prompts by the seed.")


def data_fits(data: DataConfig) -> Complaints:
    """Refuse files that are missing, and keys that exclude or need each other."""
    if (data.path is None) == (data.task is None):
        said = "both path and task are given" if data.path else "there is nothing to train on"
        yield f"data: {said}; set data.path to a JSONL or Parquet file, or data.task.name to a generated task"
    if data.system_prompt is not None and not data.chat_template:
        yield "data.system_prompt: goes with a chat template; set data.chat_template: true, or leave it out"
    if data.eval_path and not data.path:
        yield "data.eval_path: goes with data.path; a generated task makes its own held-out problems"
    if data.sft_path and data.sft_task:
        yield "data: both sft_path and sft_task are given; keep one"
    for field, path in (("path", data.path), ("eval_path", data.eval_path), ("sft_path", data.sft_path)):
        if path and not Path(path).is_file():
            yield f"data.{field}: there is no file {path}"
    if data.path and data.eval_path and Path(data.path).resolve() == Path(data.eval_path).resolve():
        yield "data.eval_path: is data.path, which is trained on; name held-out problems, or leave it out"
    for field, task in (("task", data.task), ("sft_task", data.sft_task)):
        if task and task.min_digits > task.max_digits:
            yield f"data.{field}.min_digits: must be at most max_digits: {task.max_digits}, got {task.min_digits}"
