"""The section `evaluation`: held-out sets by name, and when they are looked at."""

from __future__ import annotations

import re

from pydantic import Field

from mtpctl.recipe.data import ColumnsConfig, DataConfig, is_dataset_id, path_fits
from mtpctl.recipe.reward import RewardConfig, function_fits
from mtpctl.recipe.rollout import LOWEST_TEMPERATURE, RolloutBase
from mtpctl.recipe.section import Complaints, Float, HomePath, PositiveFloat, PositiveInt, Section


class EvaluationSetConfig(Section):
    """One held-out set."""

    path: HomePath | None = Field(None, description="Its rows: a file, a folder, or the id of a Hugging Face dataset, as data.path.")
    subset: str | None = Field(None, description="As data.subset.")
    split: str = Field("test", min_length=1, description="As data.split.")
    columns: ColumnsConfig | None = Field(None, description="As data.columns; default: those.")
    limit: PositiveInt | None = Field(None, description="At most so many problems, evenly spaced over the rows; default: all.")
    n: PositiveInt = Field(1, description="Responses to each problem: avg@n, and pass@k for k up to n.")
    temperature: PositiveFloat | None = Field(None, description="Sampling temperature; default: rollout.temperature.")
    max_tokens: PositiveInt | None = Field(None, description="Response tokens, at most; default: rollout.max_tokens.")
    right_from: Float = Field(1.0, description="Reward from which on a response counts as right, for pass@k.")
    reward: RewardConfig | None = Field(None, description="Its own reward; default: the run's.")


class EvaluationConfig(Section):
    sets: dict[str, EvaluationSetConfig] = Field({}, description="Held-out sets by name, beside data.eval_path; metrics are eval/NAME/….")
    wait: bool = Field(
        False,
        description="Training waits until an evaluation is over, so that one weight version gives all of its responses. false: it goes on "
        "meanwhile, and eval/mixed_fraction tells which share of the responses was not made by the first version alone.",
    )

    def of(self, name: str) -> EvaluationSetConfig:
        """The settings of a set by its name; the defaults for the set of the section `data`."""
        return self.sets.get(name, EvaluationSetConfig())


def evaluation_fits(evaluation: EvaluationConfig, data: DataConfig, rollout: RolloutBase) -> Complaints:
    """Refuse sets without rows, names that metrics and `--set` cannot have, and what cannot be rewarded or sampled."""
    for name, each in evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield f"evaluation.sets: {name!r} may hold letters, digits, dashes and underscores only; rename the set"
        if each.path is None:
            yield f"{key}.path: the set has no rows; name a file, a folder or a dataset's id"
            continue
        yield from path_fits(each.path, f"{key}.path")
        if each.subset is not None and not is_dataset_id(each.path):
            yield f"{key}.subset: a subset is one of a Hugging Face dataset, and {each.path} is none; leave it out"
        same = data.path is not None and each.path == data.path and (each.subset, each.split) == (data.subset, data.split)
        if same or (data.path is not None and not is_dataset_id(each.path) and each.path == data.path):
            yield f"{key}.path: is data.path, which is trained on; name held-out problems, or another split of the dataset"
        if each.temperature is not None and each.temperature < LOWEST_TEMPERATURE:
            yield f"{key}.temperature: vLLM samples at {LOWEST_TEMPERATURE} where less is asked for; got {each.temperature}"
        if each.max_tokens is not None and rollout.context is not None and each.max_tokens >= rollout.context:
            yield f"{key}.max_tokens: must leave room for a prompt in rollout.context: {rollout.context}, got {each.max_tokens}"
        if each.reward is not None:
            yield from function_fits(each.reward, f"{key}.reward")
