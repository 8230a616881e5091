"""The sections `data` and `evaluation`: training problems, held-out problems, and named held-out sets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mtpctl.recipe.reward import RewardConfig, check_function
from mtpctl.recipe.rollout import LOWEST_TEMPERATURE, RolloutBase
from mtpctl.recipe.section import Complaints, Float, HomePath, PositiveFloat, PositiveInt, Section
from mtpctl.user_code import nearest_file

ROW_FILES = (".jsonl", ".json", ".parquet")
"""Suffixes of files with rows."""
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

Column = Annotated[str, Field(min_length=1)]


class ColumnsConfig(Section):
    """The columns of a problem; a dot selects a nested column (`reward_model.ground_truth`). Other columns become its fields."""

    prompt: Column = Field("prompt", description="The prompt: text, or chat messages, rendered with the tokenizer's chat template.")
    answer: Column | None = Field("answer", description="The reference answer, for the reward; null: rows have no answer.")
    solution: Column = Field("solution", description="An optional worked solution, the target of the supervised stage.")


class GeneratedTask(Section):
    """A verifiable task, generated from the seed."""

    name: Literal["addition", "subtraction", "multiplication", "reverse", "sort"] = Field("addition", description="Kind of task.")
    min_digits: PositiveInt = Field(1, description="Digits of the shortest operand, or characters of the shortest string.")
    max_digits: PositiveInt = Field(3, description="Digits of the longest operand, or characters of the longest string.")
    length_decay: PositiveFloat = Field(1.0, le=1, description="Ratio of the numbers of problems of successive lengths.")
    train_size: PositiveInt = Field(20000, description="Training problems.")
    eval_size: PositiveInt = Field(256, description="Held-out problems, disjoint from the training problems.")


class TasksetConfig(Section):
    """Sizes of the training and held-out sets that an environment provides."""

    train_size: PositiveInt | None = Field(None, description="Maximum training problems; required if the environment has no end of tasks.")
    eval_size: PositiveInt | None = Field(
        None,
        description="Maximum held-out problems. With rollout.environment_eval_args, the tasks of these arguments are held out (default: "
        "all); without, the first tasks (default: none).",
    )


class DataConfig(Section):
    path: HomePath | None = Field(None, description="Training rows: a .jsonl, .json or .parquet file, a folder of them, or a hub id.")
    subset: str | None = Field(None, description="Subset of the Hugging Face dataset; default: its only one.")
    split: str = Field("train", min_length=1, description="Split of the Hugging Face dataset.")
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    eval_path: HomePath | None = Field(None, description="Held-out problems with the same columns; see evaluation.sets for several sets.")
    task: GeneratedTask | None = Field(None, description="Generate the problems instead of reading them.")
    taskset: TasksetConfig | None = Field(None, description="Sizes of the tasks of a verifiers environment, without path and task.")
    sft_path: HomePath | None = Field(
        None,
        description="Rows of the supervised stage: problems with `solution`, or conversations in a column `messages`, of which the "
        "assistant's turns are trained; default: RL's problems.",
    )
    sft_subset: str | None = Field(None, description="As subset, for the dataset of sft_path.")
    sft_split: str = Field("train", min_length=1, description="As split, for the dataset of sft_path.")
    sft_columns: ColumnsConfig | None = Field(None, description="Columns of sft_path; default: data.columns.")
    sft_task: GeneratedTask | None = Field(None, description="Generate the problems of the supervised stage; default: RL's task.")
    checker: Literal["exact", "math"] | None = Field(None, description="Deprecated: use reward.function, which has more choices.")
    chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
    system_prompt: str | None = Field(None, description="System message; needs chat_template.")
    ignore_tools: bool = Field(False, description="Accept rows with tools that the chat template drops; false: such a row is an error.")
    shuffle: bool = Field(True, description="Shuffle prompts by the seed.")


def is_dataset_id(path: str) -> bool:
    """Whether `path` names a Hugging Face dataset: it has the form `owner/name`, and no such local path exists."""
    local = Path(path)
    return bool(_DATASET_ID.fullmatch(path)) and local.suffix not in ROW_FILES and not local.exists() and not local.parent.is_dir()


def check_path(path: str, field: str) -> Complaints:
    """Report a path that neither exists nor is a dataset id."""
    if not is_dataset_id(path) and not Path(path).exists():
        suggestion = nearest_file(Path(path), ROW_FILES)
        kinds = "name a .jsonl, .json or .parquet file, a folder of them, or a dataset id (owner/name)"
        yield f"{field}: there is no file {path}; {f'did you mean {suggestion}?' if suggestion else kinds}"


def check_data(data: DataConfig, *, environment_has_tasks: bool = False) -> Complaints:
    """Report missing files, and keys that conflict with others or require them.

    environment_has_tasks: whether the environment has problems, so that the section may name none.
    """
    if data.taskset is not None and (not environment_has_tasks or data.path or data.task):
        yield "data.taskset: applies to rollout.environment: verifiers:NAME without data.path and data.task; leave it out"
    if (data.path is None) == (data.task is None) and not (environment_has_tasks and data.path is None):
        reason = "both path and task are set" if data.path else "there is no training data"
        yield f"data: {reason}; set data.path to a file, a folder or a dataset id, or data.task.name to a generated task"
    if data.system_prompt is not None and not data.chat_template:
        yield "data.system_prompt: needs a chat template; set data.chat_template: true, or leave it out"
    if data.eval_path and not data.path:
        yield "data.eval_path: needs data.path; a generated task has its own held-out problems"
    if data.sft_path and data.sft_task:
        yield "data: both sft_path and sft_task are set; remove one"
    for field, path in (("path", data.path), ("eval_path", data.eval_path), ("sft_path", data.sft_path)):
        if path:
            yield from check_path(path, f"data.{field}")
    for field, path, subset in (("subset", data.path, data.subset), ("sft_subset", data.sft_path, data.sft_subset)):
        if subset is not None and not (path and is_dataset_id(path)):
            yield f"data.{field}: only Hugging Face datasets have subsets, got {path or 'no path'}; remove it"
    if data.eval_path and is_dataset_id(data.eval_path):
        yield f"data.eval_path: a dataset needs its split: set evaluation.sets: {{NAME: {{path: {data.eval_path}, split: test}}}} instead"
    elif data.path and data.eval_path and os.path.realpath(data.path) == os.path.realpath(data.eval_path):
        yield "data.eval_path: equals data.path, which is trained on; name held-out problems, or leave it out"
    for field, task in (("task", data.task), ("sft_task", data.sft_task)):
        if task and task.min_digits > task.max_digits:
            yield f"data.{field}.min_digits: must be at most max_digits: {task.max_digits}, got {task.min_digits}"


class EvaluationSetConfig(Section):
    """One held-out set."""

    path: HomePath | None = Field(None, description="Rows of the set: a file, a folder, or a Hugging Face dataset id; see data.path.")
    subset: str | None = Field(None, description="As data.subset.")
    split: str = Field("test", min_length=1, description="As data.split.")
    columns: ColumnsConfig | None = Field(None, description="As data.columns; default: data.columns.")
    limit: PositiveInt | None = Field(None, description="Maximum number of problems, evenly spaced over the rows; default: all.")
    n: PositiveInt = Field(1, description="Responses per problem: avg@n, and pass@k for k up to n.")
    temperature: PositiveFloat | None = Field(None, description="Sampling temperature; default: rollout.temperature.")
    max_tokens: PositiveInt | None = Field(None, description="Maximum response tokens; default: rollout.max_tokens.")
    right_from: Float = Field(
        1.0, description="Minimum score of a correct response, for pass@k. Its score is the part `correct` of the reward, else the reward."
    )
    reward: RewardConfig | None = Field(None, description="Reward of this set; default: the run's.")


class EvaluationConfig(Section):
    sets: dict[str, EvaluationSetConfig] = Field({}, description="Held-out sets by name, next to data.eval_path; metrics: eval/NAME/….")
    wait: bool = Field(
        False,
        description="Training waits for the end of an evaluation, so that all responses have one weight version. false: training "
        "continues, and eval/mixed_fraction reports the share of responses with tokens of later versions.",
    )

    def of(self, name: str) -> EvaluationSetConfig:
        """The settings of a set by name; the defaults for the set of the section `data`."""
        return self.sets.get(name, EvaluationSetConfig())


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, rollout: RolloutBase) -> Complaints:
    """Report sets without rows, names that metrics or `--set` cannot use, and unsupported rewards and sampling settings."""
    for name, config in evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield f"evaluation.sets: {name!r} may contain only letters, digits, dashes and underscores; rename the set"
        if config.path is None:
            yield f"{key}.path: the set has no rows; name a file, a folder or a dataset id"
            continue
        yield from check_path(config.path, f"{key}.path")
        if config.subset is not None and not is_dataset_id(config.path):
            yield f"{key}.subset: only Hugging Face datasets have subsets, got {config.path}; remove it"
        is_training_split = (
            data.path is not None and config.path == data.path and (config.subset, config.split) == (data.subset, data.split)
        )
        if is_training_split or (data.path is not None and not is_dataset_id(config.path) and config.path == data.path):
            yield f"{key}.path: equals data.path, which is trained on; name held-out problems, or another split of the dataset"
        if config.temperature is not None and config.temperature < LOWEST_TEMPERATURE:
            yield f"{key}.temperature: the minimum of vLLM is {LOWEST_TEMPERATURE}, got {config.temperature}; raise it"
        if config.max_tokens is not None and rollout.context is not None and config.max_tokens >= rollout.context:
            yield f"{key}.max_tokens: must leave room for a prompt in rollout.context: {rollout.context}, got {config.max_tokens}"
        if config.reward is not None:
            yield from check_function(config.reward, f"{key}.reward")
