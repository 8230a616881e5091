"""The section `data`: training problems and held-out problems."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, HomePath, PositiveFloat, PositiveInt, Section
from mtpctl.user_code import nearest_file

ROW_FILES = (".jsonl", ".json", ".parquet")
"""Kinds of files that rows are read from, by their suffix."""
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

Column = Annotated[str, Field(min_length=1)]


class ColumnsConfig(Section):
    """The columns that problems are made of; a dot leads into a nested one (`reward_model.ground_truth`). All others are kept."""

    prompt: Column = Field("prompt", description="What is asked: text, or chat messages, which go through the tokenizer's chat template.")
    answer: Column | None = Field("answer", description="What the reward compares a response with; null: rows have no answer.")
    solution: Column = Field("solution", description="A worked solution, which the supervised stage trains on; rows may lack it.")


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


class TasksetConfig(Section):
    """How many of the problems that an environment brings a run uses, and which of them are held out."""

    train_size: PositiveInt | None = Field(None, description="Training problems, at most; needed where there is no end to them.")
    eval_size: PositiveInt | None = Field(
        None,
        description="Held-out problems, at most. With rollout.environment_eval_args the tasks by these are held out, by default all; "
        "without, so many of the first tasks, by default none, which are not trained on.",
    )


class DataConfig(Section):
    path: HomePath | None = Field(
        None, description="Rows to train on: a .jsonl, .json or .parquet file, a folder of them, or the id of a Hugging Face dataset."
    )
    subset: str | None = Field(None, description="Subset of the Hugging Face dataset; default: its only one.")
    split: str = Field("train", min_length=1, description="Split of the Hugging Face dataset.")
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    eval_path: HomePath | None = Field(
        None, description="Held-out problems, a file or folder with the same columns; evaluation.sets takes more than one set."
    )
    task: GeneratedTask | None = Field(None, description="Generate the problems instead of reading them.")
    taskset: TasksetConfig | None = Field(
        None, description="Sizes of what an environment of verifiers brings, where neither path nor task is given."
    )
    sft_path: HomePath | None = Field(
        None,
        description="Rows for the supervised stage: problems with `solution`, or conversations in a column `messages`, whose assistant's "
        "turns are trained on; default: the same as RL's.",
    )
    sft_subset: str | None = Field(None, description="As subset, of the dataset that sft_path names.")
    sft_split: str = Field("train", min_length=1, description="As split, of the dataset that sft_path names.")
    sft_columns: ColumnsConfig | None = Field(None, description="Columns of sft_path; default: data.columns.")
    sft_task: GeneratedTask | None = Field(
        None, description="Generate the supervised stage's problems, without the held-out ones; default: RL's task."
    )
    checker: Literal["exact", "math"] | None = Field(None, description="The older key for reward.function, which takes more.")
    chat_template: bool = Field(False, description="Wrap prompts in the tokenizer's chat template.")
    system_prompt: str | None = Field(None, description="System message; needs chat_template.")
    ignore_tools: bool = Field(
        False,
        description="Accept rows whose tools and tool calls the chat template drops; false: such a row is an error, because the model "
        "would not see them.",
    )
    shuffle: bool = Field(True, description="Shuffle prompts by the seed.")


def is_dataset_id(path: str) -> bool:
    """Whether `path` names a dataset of the Hugging Face hub: it has the form `owner/name`, and nothing here has that path."""
    local = Path(path)
    return bool(_DATASET_ID.fullmatch(path)) and local.suffix not in ROW_FILES and not local.exists() and not local.parent.is_dir()


def path_fits(path: str, field: str) -> Complaints:
    """Refuse a path that is neither here nor the id of a dataset."""
    if not is_dataset_id(path) and not Path(path).exists():
        near = nearest_file(Path(path), ROW_FILES)
        kinds = "give a .jsonl, .json or .parquet file, a folder of them, or a dataset's id (owner/name)"
        yield f"{field}: there is no file {path}; {f'did you mean {near}?' if near else kinds}"


def data_fits(data: DataConfig, *, environment_has_tasks: bool = False) -> Complaints:
    """Refuse files that are missing, and keys that exclude or need each other.

    `environment_has_tasks`: the recipe's environment brings problems of its own, so that the section may name none.
    """
    if data.taskset is not None and (not environment_has_tasks or data.path or data.task):
        yield "data.taskset: is for problems of rollout.environment: verifiers:NAME, without data.path and data.task; leave it out"
    if (data.path is None) == (data.task is None) and not (environment_has_tasks and data.path is None):
        said = "both path and task are given" if data.path else "there is nothing to train on"
        yield f"data: {said}; set data.path to a file, a folder or a dataset's id, or data.task.name to a generated task"
    if data.system_prompt is not None and not data.chat_template:
        yield "data.system_prompt: goes with a chat template; set data.chat_template: true, or leave it out"
    if data.eval_path and not data.path:
        yield "data.eval_path: goes with data.path; a generated task makes its own held-out problems"
    if data.sft_path and data.sft_task:
        yield "data: both sft_path and sft_task are given; keep one"
    for field, path in (("path", data.path), ("eval_path", data.eval_path), ("sft_path", data.sft_path)):
        if path:
            yield from path_fits(path, f"data.{field}")
    for field, path, subset in (("subset", data.path, data.subset), ("sft_subset", data.sft_path, data.sft_subset)):
        if subset is not None and not (path and is_dataset_id(path)):
            yield f"data.{field}: a subset is one of a Hugging Face dataset, and {path or 'no path'} is none; leave it out"
    if data.eval_path and is_dataset_id(data.eval_path):
        yield f"data.eval_path: a dataset needs its split: set evaluation.sets: {{NAME: {{path: {data.eval_path}, split: test}}}} instead"
    elif data.path and data.eval_path and os.path.realpath(data.path) == os.path.realpath(data.eval_path):
        yield "data.eval_path: is data.path, which is trained on; name held-out problems, or leave it out"
    for field, task in (("task", data.task), ("sft_task", data.sft_task)):
        if task and task.min_digits > task.max_digits:
            yield f"data.{field}.min_digits: must be at most max_digits: {task.max_digits}, got {task.min_digits}"
