"""The section `evaluation`: named held-out sets, and when they are evaluated."""

from __future__ import annotations

import re

from pydantic import Field

from mtpctl.recipe.data import ColumnsConfig, DataConfig, check_path, is_dataset_id
from mtpctl.recipe.reward import RewardConfig, check_function
from mtpctl.recipe.rollout import LOWEST_TEMPERATURE, RolloutBase
from mtpctl.recipe.section import Complaints, Float, HomePath, PositiveFloat, PositiveInt, Section


class EvaluationSetConfig(Section):
    """One held-out set."""

    path: HomePath | None = Field(
        None, description="Rows of the set: a file, a folder, or the id of a Hugging Face dataset; see data.path."
    )
    subset: str | None = Field(None, description="As data.subset.")
    split: str = Field("test", min_length=1, description="As data.split.")
    columns: ColumnsConfig | None = Field(None, description="As data.columns; default: data.columns.")
    limit: PositiveInt | None = Field(None, description="Maximum number of problems, evenly spaced over the rows; default: all.")
    n: PositiveInt = Field(1, description="Responses per problem: avg@n, and pass@k for k up to n.")
    temperature: PositiveFloat | None = Field(None, description="Sampling temperature; default: rollout.temperature.")
    max_tokens: PositiveInt | None = Field(None, description="Maximum response tokens; default: rollout.max_tokens.")
    right_from: Float = Field(1.0, description="Minimum reward of a correct response, for pass@k.")
    reward: RewardConfig | None = Field(None, description="Reward of this set; default: the run's.")


class EvaluationConfig(Section):
    sets: dict[str, EvaluationSetConfig] = Field(
        {}, description="Held-out sets by name, in addition to data.eval_path; metrics are eval/NAME/…."
    )
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
    for name, each in evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield f"evaluation.sets: {name!r} may contain only letters, digits, dashes and underscores; rename the set"
        if each.path is None:
            yield f"{key}.path: the set has no rows; name a file, a folder or a dataset id"
            continue
        yield from check_path(each.path, f"{key}.path")
        if each.subset is not None and not is_dataset_id(each.path):
            yield f"{key}.subset: only a Hugging Face dataset has subsets, and {each.path} is none; leave it out"
        same = data.path is not None and each.path == data.path and (each.subset, each.split) == (data.subset, data.split)
        if same or (data.path is not None and not is_dataset_id(each.path) and each.path == data.path):
            yield f"{key}.path: equals data.path, which is trained on; name held-out problems, or another split of the dataset"
        if each.temperature is not None and each.temperature < LOWEST_TEMPERATURE:
            yield f"{key}.temperature: the minimum of vLLM is {LOWEST_TEMPERATURE}, got {each.temperature}; raise it"
        if each.max_tokens is not None and rollout.context is not None and each.max_tokens >= rollout.context:
            yield f"{key}.max_tokens: must leave room for a prompt in rollout.context: {rollout.context}, got {each.max_tokens}"
        if each.reward is not None:
            yield from check_function(each.reward, f"{key}.reward")
