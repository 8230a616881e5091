"""The agent behind `rollout.environment: verifiers:NAME`: plays episodes of environments of the package verifiers.

In an episode, a harness (a program in a process or a container) works on one task, and calls the model through a proxy of verifiers. Then
the task computes its rewards. The proxy forwards requests to the trajectory's base URL, so the gateway records the sampled tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mtpctl.data.problems import Problem
from mtpctl.data.taskset import is_held_out, resolve_environment_config, task_data
from mtpctl.environments.gateway.requests import OVER_BUDGET, OVER_CONTEXT
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.rl.rewards.function import RESERVED_PARTS

MODEL, UNSET_KEY_VARIABLE = "policy", "MTPCTL_NO_KEY"
"""The model's name in requests, and the variable of verifiers' API key. It stays unset, because the base URL contains the secret."""

_environments: dict[bool, asyncio.Future[Any]] = {}
"""The environments of this process, by whether they have `eval_args` (for held-out problems)."""
_serving_tasks: set[asyncio.Task[None]] = set()
"""The asyncio tasks that serve the environments; the reference prevents their garbage collection."""


async def play(
    problem: Problem, base_url: str, name: str, args: Mapping[str, object], eval_args: Mapping[str, object], max_turns: int
) -> dict[str, float]:
    """Play an episode of the problem's task. Returns its `reward`, and the task's own rewards and metrics by name.

    `base_url`: the trajectory's base URL. `name`, `args` and `eval_args`: the recipe's environment and its arguments. `max_turns`: maximum
    turns of each agent that has no own limit. Raises UserError for an environment that training does not support, and RuntimeFailure for a
    failed episode.
    """
    import verifiers.v1 as vf

    held_out = is_held_out(problem, name)
    environment = await _get_environment(name, args, eval_args if held_out else {}, max_turns, held_out)
    task_type, config = type(environment.taskset).task_type(), environment.config.taskset.task
    task = task_type(task_type.data_type().model_validate(task_data(problem, name)), config)
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=UNSET_KEY_VARIABLE)
    return episode_rewards(await environment.run_episode(task, vf.ModelContext(model=MODEL, client=client)), base_url)


async def _get_environment(name: str, args: Mapping[str, object], overrides: Mapping[str, object], max_turns: int, held_out: bool) -> Any:
    """The environment, which is loaded at its first episode and served until this process ends. After a failure, it is loaded again."""
    held_out = held_out and bool(overrides)
    if (future := _environments.get(held_out)) is None:
        future = _environments[held_out] = asyncio.get_running_loop().create_future()
        _serving_tasks.add(asyncio.create_task(_serve(name, args, overrides, max_turns, held_out, future)))
    return await asyncio.shield(future)


async def _serve(
    name: str, args: Mapping[str, object], overrides: Mapping[str, object], max_turns: int, held_out: bool, ready: asyncio.Future[Any]
) -> None:
    import verifiers.v1 as vf

    try:
        environment: Any = vf.load_environment(_limit_turns(resolve_environment_config(name, args, overrides), max_turns))
        async with environment.serving():
            # A shared proxy would keep a client for each trajectory's base URL. Without it, each episode starts a proxy.
            environment._interception = None
            ready.set_result(environment)
            await asyncio.Event().wait()
    except Exception as error:
        del _environments[held_out]
        if ready.done():
            raise
        ready.set_exception(error)


def _limit_turns(config: Any, max_turns: int) -> Any:
    """The configuration with `max_turns` for agents without a limit. An agent that reaches the limit ends, and is rewarded."""
    from verifiers.v1.configs.agent import agent_config_fields

    unlimited = {name: agent_config for name, agent_config in agent_config_fields(config).items() if agent_config.max_turns is None}
    return config.model_copy(
        update={name: agent_config.model_copy(update={"max_turns": max_turns}) for name, agent_config in unlimited.items()}
    )


def episode_rewards(episode: Any, base_url: str) -> dict[str, float]:
    """The `reward` of an episode, and its rewards and metrics by name; reserved names get the suffix `_`. See `play` for errors.

    The reward is 0 if the episode failed because the gateway rejected a request beyond the trajectory's budget or context.
    """
    policy_traces = [trace for trace in episode.traces if trace.agent.config.client.base_url == base_url]
    for trace in policy_traces:
        if not trace.agent.trainable:
            agent = trace.agent.name
            raise UserError(
                f"rollout.environment_args: {agent} is not trainable but uses the policy; give it another model: "
                f"{{{agent}: {{model: …, client: {{base_url: …}}}}}}"
            )
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if not trace.ok and trace.last_error)]
    if len(policy_traces) != 1 and not errors:
        raise UserError(
            f"rollout.environment: the policy plays {len(policy_traces)} times in one episode, each with its own reward; "
            "use an environment in which it plays once; train.rl.group_size sets the number of episodes"
        )
    if errors:
        if any(code in error.message for error in errors for code in (OVER_BUDGET, OVER_CONTEXT)):
            return {"reward": 0.0}
        raise RuntimeFailure(f"{errors[-1].type}: {' '.join(errors[-1].message.split())[-300:]}")
    (trace,) = policy_traces
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    reserved = RESERVED_PARTS | {"reward"}
    return {"reward": trace.reward} | {f"{name}_" if name in reserved else name: value for name, value in parts.items()}
