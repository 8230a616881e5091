"""Agents as a `Generator`: an agent works on each request through the gateway, and the samples of its trajectory are returned.

The run starts the agent in worker processes (`rollout.agent`), or serves its problems to agents over the network (`rollout.gateway`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol, cast

from mtpctl.data.problems import Problem
from mtpctl.data.tokenizers import HfTokenizer, Tokenizer
from mtpctl.environments.gateway.requests import FieldRules
from mtpctl.environments.gateway.server import AnswerReader, Assignment, CreateSingleRequest, Gateway
from mtpctl.environments.gateway.trajectory import ChatBackend, Trajectory
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.rl.rewards.function import AGENT, EPISODE, Outcome
from mtpctl.rl.rewards.pool import Pool
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import ABORTED, DEADLINE, ENVIRONMENT_ERROR, Generator, SpeculationState, as_completed
from mtpctl.samples import EnvironmentUse, GenerationRequest, Sample, finished_before_unwanted
from mtpctl.web.server import listen

KEY_VARIABLE = "MTPCTL_GATEWAY_KEY"
"""Environment variable with the key of external agents."""
MAX_REPORTED_FIELDS = 50
"""Maximum number of ignored fields to report, because agents may send any names."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Player(Protocol):
    """Runs an agent on a trajectory until the trajectory ends."""

    async def play(self, request: GenerationRequest, secret: str, gateway: Gateway) -> Outcome: ...


class LocalAgents:
    """An agent function (the user's `rollout.agent`, or one that plays an environment) in worker processes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def play(self, request: GenerationRequest, secret: str, gateway: Gateway) -> Outcome:
        return await self._pool.call(gateway.base_url(secret), cast(Problem, request.problem), request.sample)


class ExternalAgents:
    """Serves problems to agents that request them from the gateway, and waits until they finish."""

    def __init__(self, deadline_s: float, idle_s: float) -> None:
        self._deadline_s, self._idle_s = deadline_s, idle_s
        self._waiting: asyncio.Queue[tuple[Assignment, asyncio.Event]] = asyncio.Queue()

    async def next(self) -> Assignment:
        """The next problem whose trajectory has not ended."""
        while True:
            assignment, accepted = await self._waiting.get()
            if not assignment.finished.is_set():
                accepted.set()
                return assignment

    async def play(self, request: GenerationRequest, secret: str, gateway: Gateway) -> Outcome:
        problem = cast(Problem, request.problem)
        body: dict[str, object] = {"prompt_id": problem.prompt_id, "prompt": problem.prompt, "answer": problem.answer}
        body |= {"messages": [dict(message) for message in problem.messages], "fields": dict(problem.fields)}
        assignment, accepted, clock = gateway.assign(secret, body), asyncio.Event(), asyncio.get_running_loop().time
        self._waiting.put_nowait((assignment, accepted))
        try:
            await accepted.wait()  # without a deadline: no agent works on it yet
            started = clock()
            gateway.restart_clock(secret)
            while not assignment.finished.is_set():
                remaining, remaining_idle = self._deadline_s - (clock() - started), self._idle_s - gateway.idle_s(secret)
                if remaining <= 0:
                    reason = f"the agent did not finish within {self._deadline_s:g} s (rollout.deadline_s)"
                    return Outcome(None, {}, reason, True, clock() - started)
                if remaining_idle <= 0:
                    reason = f"the agent sent no request for {self._idle_s:g} s (rollout.agent_idle_s)"
                    return Outcome(None, {}, reason, True, clock() - started)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(assignment.finished.wait(), min(remaining, remaining_idle))
            return Outcome(None, seconds=clock() - started)
        finally:
            assignment.finished.set()


class AgentGenerator(Generator):
    """Runs at most `limit` trajectories concurrently. Reports the name of each ignored request field once, through `report`."""

    def __init__(self, engines: ReplicaPool, gateway: Gateway, player: Player, limit: int, report: Callable[[str], None]) -> None:
        self._engines, self._gateway, self._player, self._limit, self._report = engines, gateway, player, limit, report
        self._reported: set[str] = set()

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        """See `Generator.generate`. If a trajectory has several samples, the last one is returned, with the others in `earlier`."""
        slots = asyncio.Semaphore(self._limit - 1)  # `as_completed` starts the first request without a slot.

        async def play(request: GenerationRequest) -> Sample:
            try:
                return await self._run_trajectory(request)
            finally:
                slots.release()

        async with contextlib.aclosing(as_completed(requests, play, lambda _: slots.acquire())) as samples:
            async for sample in samples:
                yield sample

    async def _run_trajectory(self, request: GenerationRequest) -> Sample:
        secret, trajectory = self._gateway.open(request)
        agent_task = asyncio.ensure_future(self._player.play(request, secret, self._gateway))
        outcome: Outcome | None = None
        try:
            if request.unwanted is None:
                outcome = await agent_task
            elif await finished_before_unwanted(agent_task, request.unwanted):
                outcome = agent_task.result()
        finally:
            agent_task.cancel()
            samples = self._gateway.close(secret)
        if outcome is None:
            request.sample.finish_reason = ABORTED
            return request.sample
        new_fields = [name for name in trajectory.ignored if name not in self._reported]
        for name in new_fields[: MAX_REPORTED_FIELDS - len(self._reported)]:
            self._reported.add(name)
            self._report(f"an agent sent {name}, which is ignored (rollout.gateway_fields)")
        return _finalize_sample(request, trajectory, samples, outcome)

    async def control_speculation(self, drafts: int | None = None) -> list[SpeculationState]:
        return await self._engines.control_speculation(drafts)


def _finalize_sample(request: GenerationRequest, trajectory: Trajectory, samples: list[Sample], outcome: Outcome) -> Sample:
    """The trajectory's last sample, with the others in `earlier`. If the agent sent no request, the sample has no response."""
    last = samples[-1] if samples else request.sample.copy()
    last.earlier = samples[:-1]
    last.environment = EnvironmentUse(
        turns=trajectory.answers,
        seconds=outcome.seconds,
        errors=int(bool(outcome.error) and not outcome.timed_out),
        timeouts=int(outcome.timed_out),
        failure=outcome.error,
        samples=max(len(samples), 1),
        rewritten=trajectory.num_rewritten_histories,
    )
    if outcome.error:
        last.finish_reason = DEADLINE if outcome.timed_out else ENVIRONMENT_ERROR
    last.finish_reason = last.finish_reason or "stop"
    last.environment_reward = outcome.reward if outcome.reward is not None else trajectory.reward
    last.reward_parts = outcome.parts
    return last


def bind_gateway(rollout: RolloutBase) -> socket.socket | None:
    """Bind the gateway's socket, before the slow part of the start; None for a recipe without agents.

    Raises UserError for an address in use, and for a public one without a key.
    """
    if not rollout.uses_agents:
        return None
    if rollout.gateway_host not in LOOPBACK and not os.environ.get(KEY_VARIABLE):
        raise UserError(
            f"rollout.gateway_host: {rollout.gateway_host} is reachable from other hosts; set {KEY_VARIABLE} to a key, or use 127.0.0.1"
        )
    return listen(rollout.gateway_host, rollout.gateway_port, fields=("rollout.gateway_host", "rollout.gateway_port"))


@contextlib.asynccontextmanager
async def open_generator(
    rollout: RolloutBase,
    engines: ReplicaPool,
    tokenizer: Tokenizer,
    *,
    context: int,
    name: str,
    report: Callable[[str], None],
    log: Path | None = None,
    key_file: Path | None = None,
    trains: bool = True,
    create_single_request: CreateSingleRequest | None = None,
    listener: socket.socket | None = None,
) -> AsyncIterator[Generator]:
    """The recipe's generator: the engines, or agents that use them through the gateway.

    Args:
        name: the model's name.
        report: receives messages for the user.
        log: file for the output of agents.
        key_file: file for a generated key. If None, the key is passed to `report`.
        trains: whether samples are trained on. If false, requests may contain sampling settings.
        create_single_request: see `Gateway.create_single_request`.
        listener: the result of an earlier `bind_gateway`.

    Raises:
        UserError: for an agent that cannot be loaded, a tokenizer without a chat template, and the errors of `bind_gateway`.
    """
    if (listener := listener or bind_gateway(rollout)) is None:
        yield engines
        return
    chat_tokenizer = _require_chat_template(tokenizer)
    backend = ChatBackend(engines.sample, chat_tokenizer, AnswerReader(chat_tokenizer, _load_tool_parser(rollout, chat_tokenizer)), context)
    async with contextlib.AsyncExitStack() as stack:
        key, rules = os.environ.get(KEY_VARIABLE), FieldRules(client_sampling=not trains, ignore=rollout.gateway_fields == "ignore")
        gateway = Gateway(backend, tokenizer, name, rollout.max_turns, listener, key=key, rules=rules, client_limit=rollout.client_limit)
        await stack.enter_async_context(gateway)
        player: Player
        if (agent := rollout.started_agent) is not None:
            (reference, args), role = agent, AGENT if rollout.verifiers is None else EPISODE
            pool = Pool(reference, args, workers=rollout.agents, timeout_s=rollout.deadline_s, log=log, role=role)
            stack.push_async_callback(pool.close)
            await pool.start()
            player = LocalAgents(pool)
        else:
            player = external = ExternalAgents(rollout.deadline_s, rollout.agent_idle_s)
            gateway.next_problem, gateway.create_single_request = external.next, create_single_request
            key_hint = "" if key else f"the key {gateway.token}"
            if key_hint and key_file is not None:
                _write_private(key_file, gateway.token)
                key_hint = f"the key in {key_file}"
            if create_single_request is None:
                report(f"agents{f' with {key_hint}' if key_hint else ''} get problems at {gateway.address}/v1/trajectories")
            else:
                single_requests_url = f"{gateway.address}/v1 for single requests"
                trajectory_url = f"POST {gateway.address}/v1/trajectories for a trajectory"
                report(f"serving {name}: {single_requests_url}, {trajectory_url}{f', with {key_hint}' if key_hint else ''}")
        yield AgentGenerator(engines, gateway, player, rollout.agents, report)


def _write_private(path: Path, text: str) -> None:
    """Write a file with mode 600."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")


def _require_chat_template(tokenizer: Tokenizer) -> HfTokenizer:
    """The tokenizer, which must have a chat template."""
    if not isinstance(tokenizer, HfTokenizer) or not tokenizer.chat_template:
        raise UserError(f"model.tokenizer: {tokenizer.name} has no chat template, which agents need; name one with a chat template")
    return tokenizer


def _load_tool_parser(rollout: RolloutBase, tokenizer: HfTokenizer) -> Any:
    """The parser of tool calls; None if the chat template has no format for them."""
    from mtpctl.rollout.vllm.serving import find_parser_name, load_parser

    name = rollout.tool_parser or find_parser_name(tokenizer.chat_template)
    return None if name is None else load_parser(name, tokenizer.inner)
