"""The tasks of a verifiers environment, as problems.

A verifiers task consists of data and code. A problem contains only the data. The process that runs an episode creates the task from the
problem, as verifiers' own server does, and therefore needs no dataset. The package is an extra of mtpctl, and is imported only if a recipe
names one of its environments.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from pydantic import ValidationError

from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.errors import MtpctlError, PrerequisiteMissing, UserError
from mtpctl.recipe.data import TasksetConfig
from mtpctl.recipe.rollout import RolloutBase

ENVIRONMENT_KEY, ARGS_KEY, EVAL_ARGS_KEY = "rollout.environment", "rollout.environment_args", "rollout.environment_eval_args"
RELEASE = "0.4.0"
"""The supported release of verifiers. Others are rejected, because this module uses functions that are not a stable API."""
TRAIN, HELD_OUT = "train", "eval"
"""The middle part of a problem's id, as in `NAME/train/17`."""


def require_verifiers() -> None:
    """Raise PrerequisiteMissing if verifiers is not installed, or another release is."""
    install = f"uv pip install verifiers=={RELEASE} (mtpctl's extra [verifiers])"
    try:
        installed = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as error:
        raise PrerequisiteMissing(f"{ENVIRONMENT_KEY}: the package verifiers is not installed; {install}") from error
    if installed != RELEASE:
        raise PrerequisiteMissing(f"{ENVIRONMENT_KEY}: verifiers {installed} is installed, but mtpctl supports {RELEASE}; {install}")


def resolve_environment_config(name: str, args: Mapping[str, object], overrides: Mapping[str, object], field: str = ARGS_KEY) -> Any:
    """The configuration of the environment `name`. `args` has the form of the block `env` in verifiers' configuration files.

    `overrides` are merged into `args`. `field` is the recipe key in errors. Raises PrerequisiteMissing if the environment's package is not
    installed, UserError for unsupported arguments.
    """
    require_verifiers()
    import verifiers.v1 as vf
    from verifiers.v1.utils.generic import deep_merge

    if os.getcwd() not in sys.path:  # as for user-defined code
        sys.path.append(os.getcwd())
    settings = deep_merge(deep_merge(dict(args), dict(overrides)), {"taskset": {"id": name}})
    try:
        return vf.resolve_env_config(settings)
    except ModuleNotFoundError as error:
        raise PrerequisiteMissing(f"{ENVIRONMENT_KEY}: verifiers:{name}: {' '.join(str(error).split())[:300]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join([field, *map(str, first['loc'])])}: {first['msg']}") from error
    except Exception as error:  # of the environment's package, at import
        raise _environment_error(name, error) from error


def check_runtimes(rollout: RolloutBase) -> None:
    """Raise PrerequisiteMissing if an agent runs in Prime Intellect's sandboxes, verifiers' default, and no API key for them is set."""
    assert rollout.verifiers is not None, "the recipe names a verifiers environment"
    config = resolve_environment_config(rollout.verifiers, rollout.environment_args, {})
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.prime import load_prime_config

    if os.environ.get("PRIME_API_KEY") or load_prime_config().get("api_key"):
        return
    for agent, agent_config in agent_config_fields(config).items():
        if agent_config.runtime.type == "prime":
            raise PrerequisiteMissing(
                f"{ARGS_KEY}: {agent} runs in a sandbox of Prime Intellect, but PRIME_API_KEY is not set; set it, or choose another "
                f"runtime: {{{agent}: {{runtime: {{type: docker}}}}}}, or subprocess, which is this machine without isolation"
            )


def iterate_tasks(name: str, args: Mapping[str, object], overrides: Mapping[str, object]) -> tuple[Iterator[Any], bool]:
    """Return an iterator over the environment's tasks, and whether it is finite. Raises the errors of `resolve_environment_config`."""
    config = resolve_environment_config(name, args, overrides, EVAL_ARGS_KEY if overrides else ARGS_KEY)
    from verifiers.v1.utils.loaders import load_taskset

    try:
        taskset = load_taskset(config.taskset)
        return iter(taskset), bool(taskset.bounded)
    except Exception as error:  # of the environment's own code
        raise _environment_error(name, error) from error


def load_environment_problems(
    rollout: RolloutBase, sizes: TasksetConfig | None, limit: int | None = None
) -> tuple[list[Problem], list[Problem]]:
    """The training problems and the held-out problems of the recipe's environment.

    Args:
        sizes: the recipe's `data.taskset`.
        limit: maximum number of problems of each kind; None for all.

    Raises:
        UserError: if the environment has no tasks, if it has infinitely many and no size is set, or if every task would be held out.
    """
    name, sizes = rollout.verifiers, sizes or TasksetConfig()
    assert name is not None, "the recipe names a verifiers environment"
    has_eval_args, held_out = bool(rollout.environment_eval_args), sizes.eval_size or 0
    # If the recipe has no arguments for held-out tasks, the first training tasks are held out.
    offset = 0 if has_eval_args else held_out
    train_size = offset + sizes.train_size if sizes.train_size else None
    train = _load_problems(rollout, name, TRAIN, train_size, offset + limit if limit else None)
    if has_eval_args:
        return train, _load_problems(rollout, name, HELD_OUT, sizes.eval_size, limit)
    if len(train) <= held_out:
        raise UserError(f"data.taskset.eval_size: {held_out} would hold out all {len(train)} tasks of verifiers:{name}; lower it")
    return train[held_out:], train[:held_out][:limit]


def _load_problems(rollout: RolloutBase, name: str, split: str, size: int | None, limit: int | None) -> list[Problem]:
    """The tasks as problems, at most `size` and `limit`; None is no bound."""
    iterator, finite = iterate_tasks(name, rollout.environment_args, rollout.environment_eval_args if split == HELD_OUT else {})
    key = "train_size" if split == TRAIN else "eval_size"
    if not finite and size is None and limit is None:
        raise UserError(f"data.taskset.{key}: verifiers:{name} has infinitely many tasks; set a number")
    bounds = [bound for bound in (size, limit) if bound is not None]
    try:
        tasks = islice(iterator, min(bounds, default=None))
        problems = [as_problem(task, f"{name}/{split}/{number}") for number, task in enumerate(tasks)]
    except MtpctlError:
        raise
    except Exception as error:  # of the environment's own code
        raise _environment_error(name, error) from error
    if not problems:
        raise UserError(f"{ENVIRONMENT_KEY}: verifiers:{name} has no task; check {ARGS_KEY}: {{taskset: …}}")
    return problems


def as_problem(task: Any, prompt_id: str) -> Problem:
    """A task as a problem, with the task's data as fields.

    A task in which a simulated user speaks first has no prompt; its name or `prompt_id` is used instead.
    """
    fields = task.data.model_dump(mode="json", exclude_defaults=True)
    answer = fields.get("answer")
    prompt = task.data.prompt_text or task.data.name or prompt_id
    return Problem(prompt_id, prompt, answer if isinstance(answer, str) else NO_ANSWER, fields=fields)


def task_data(problem: Problem, name: str) -> dict[str, object]:
    """The data from which verifiers creates the task, in the environment `name`.

    For a problem that was a task, these are its fields; for one that was read from a file, prompt, answer and fields.
    """
    row: dict[str, object] = {"prompt": [dict(message) for message in problem.messages] or problem.prompt}
    if problem.answer != NO_ANSWER:
        row["answer"] = problem.answer
    is_task = re.fullmatch(rf"{re.escape(name)}/({TRAIN}|{HELD_OUT})/\d+", problem.prompt_id) is not None
    return dict(problem.fields) if is_task else row | dict(problem.fields)


def is_held_out(problem: Problem, name: str) -> bool:
    """Whether the problem is a held-out task of the environment `name`."""
    return problem.prompt_id.startswith(f"{name}/{HELD_OUT}/")


def _environment_error(name: str, error: BaseException) -> UserError:
    return UserError(f"{ENVIRONMENT_KEY}: verifiers:{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
