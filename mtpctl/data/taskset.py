"""Problems that come with an environment of the package verifiers: its tasks.

A task is data and behaviour. The data is what a problem carries, so the process that plays an episode makes the task of it again, as
verifiers' own server does, and loads no dataset. The package is an extra of mtpctl's, and is imported when a recipe names it.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from pydantic import ValidationError

from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.errors import EnvironmentMissing, MtpctlError, UserError
from mtpctl.recipe.data import TasksetConfig
from mtpctl.recipe.rollout import RolloutBase

FIELD, ARGS, EVAL_ARGS = "rollout.environment", "rollout.environment_args", "rollout.environment_eval_args"
RELEASE = "0.4.0"
"""The release of verifiers whose sources this was written against."""
TRAIN, HELD_OUT = "train", "eval"
"""The middle of a problem's id, `NAME/train/17`."""


def require_verifiers() -> None:
    """Raise EnvironmentMissing where verifiers is not installed here, or is another release."""
    install = f"uv pip install verifiers=={RELEASE} (mtpctl's extra [verifiers])"
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentMissing(f"{FIELD}: the package verifiers is not installed; {install}") from error
    if found != RELEASE:
        raise EnvironmentMissing(f"{FIELD}: verifiers {found} is installed, and mtpctl works with {RELEASE}; {install}")


def environment_config(name: str, args: Mapping[str, object], more: Mapping[str, object], field: str = ARGS) -> Any:
    """The configuration of the environment `name`: `args`, the block `env` of verifiers' own configurations, with `more` laid over it.

    Raises EnvironmentMissing where its package is not installed, UserError for what it does not take.
    """
    require_verifiers()
    import verifiers.v1 as vf
    from verifiers.v1.utils.generic import deep_merge

    if os.getcwd() not in sys.path:  # as for code of the user's own
        sys.path.append(os.getcwd())
    tree = deep_merge(deep_merge(dict(args), dict(more)), {"taskset": {"id": name}})
    try:
        return vf.resolve_env_config(tree)
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(f"{FIELD}: verifiers:{name}: {' '.join(str(error).split())[:300]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join([field, *map(str, first['loc'])])}: {first['msg']}") from error
    except Exception as error:  # whatever the environment's package raises where it is imported
        raise UserError(f"{FIELD}: verifiers:{name}: {_told(error)}") from error


def check_runtimes(rollout: RolloutBase) -> None:
    """Raise EnvironmentMissing where a seat plays in Prime Intellect's sandboxes, which is verifiers' default, and no login is here."""
    assert rollout.verifiers is not None, "the recipe names an environment of verifiers"
    config = environment_config(rollout.verifiers, rollout.environment_args, {})
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.prime import load_prime_config

    if os.environ.get("PRIME_API_KEY") or load_prime_config().get("api_key"):
        return
    for seat, each in agent_config_fields(config).items():
        if each.runtime.type == "prime":
            raise EnvironmentMissing(
                f"{ARGS}: {seat} plays in a sandbox of Prime Intellect, and no PRIME_API_KEY is set; set it, or name another place: "
                f"{{{seat}: {{runtime: {{type: docker}}}}}}, or subprocess, which is this machine without walls"
            )


def tasks(name: str, args: Mapping[str, object], more: Mapping[str, object]) -> tuple[Iterator[Any], bool]:
    """The environment's tasks, one after another, and whether they end. Raises as `environment_config` does."""
    config = environment_config(name, args, more, EVAL_ARGS if more else ARGS)
    from verifiers.v1.utils.loaders import load_taskset

    try:
        taskset = load_taskset(config.taskset)
        return iter(taskset), bool(taskset.bounded)
    except Exception as error:  # the author's own code
        raise UserError(f"{FIELD}: verifiers:{name}: {_told(error)}") from error


def brought_problems(rollout: RolloutBase, sizes: TasksetConfig | None, limit: int | None = None) -> tuple[list[Problem], list[Problem]]:
    """Training problems and held-out ones of the recipe's environment, as `data.taskset` says; of each the first `limit`, where given.

    Raises UserError for an environment without tasks or without an end, and for one that holds all of them out.
    """
    name, sizes = rollout.verifiers, sizes or TasksetConfig()
    assert name is not None, "the recipe names an environment of verifiers"
    apart, held = bool(rollout.environment_eval_args), sizes.eval_size or 0
    first = 0 if apart else held
    train = _problems(rollout, name, TRAIN, first + sizes.train_size if sizes.train_size else None, first + limit if limit else None)
    if apart:
        return train, _problems(rollout, name, HELD_OUT, sizes.eval_size, limit)
    if len(train) <= held:
        raise UserError(f"data.taskset.eval_size: {held} of the {len(train)} tasks of verifiers:{name} are all; lower it")
    return train[held:], train[:held]


def _problems(rollout: RolloutBase, name: str, role: str, most: int | None, limit: int | None) -> list[Problem]:
    """At most `most` of the tasks; `limit` of them are enough."""
    found, ends = tasks(name, rollout.environment_args, rollout.environment_eval_args if role == HELD_OUT else {})
    size = "train_size" if role == TRAIN else "eval_size"
    if not ends and most is None and limit is None:
        raise UserError(f"data.taskset.{size}: verifiers:{name} has tasks without end; set how many there are")
    bounds = [bound for bound in (most, limit) if bound is not None]
    try:
        problems = [problem_of(task, f"{name}/{role}/{number}") for number, task in enumerate(islice(found, min(bounds, default=None)))]
    except MtpctlError:
        raise
    except Exception as error:  # the author's own code
        raise UserError(f"{FIELD}: verifiers:{name}: {_told(error)}") from error
    if not problems:
        raise UserError(f"{FIELD}: verifiers:{name} has no task; see what it takes in {ARGS}: {{taskset: …}}")
    return problems


def problem_of(task: Any, prompt_id: str) -> Problem:
    """A task as a problem, whose fields are the task's data. One that its user opens has no prompt: its name stands for it."""
    fields = task.data.model_dump(mode="json", exclude_defaults=True)
    answer = fields.get("answer")
    prompt = task.data.prompt_text or task.data.name or prompt_id
    return Problem(prompt_id, prompt, answer if isinstance(answer, str) else NO_ANSWER, fields=fields)


def task_data(problem: Problem) -> dict[str, object]:
    """The data of the problem's task: its fields, and of a row from a file its prompt and its answer as well."""
    given: dict[str, object] = {"prompt": [dict(message) for message in problem.messages] or problem.prompt}
    if problem.answer != NO_ANSWER:
        given["answer"] = problem.answer
    own = problem.prompt_id.rpartition("/")[0].endswith((f"/{TRAIN}", f"/{HELD_OUT}"))
    return dict(problem.fields) if own else given | dict(problem.fields)


def is_held_out(problem: Problem, name: str) -> bool:
    """Whether the problem is one of the environment's that are held out."""
    return problem.prompt_id.startswith(f"{name}/{HELD_OUT}/")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
