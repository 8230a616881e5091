"""Evaluation of held-out sets on the rollout engines: accuracy, avg@n and pass@k, and drafter acceptance."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from mtpctl.cluster.deadlines import finished_before
from mtpctl.controller.metrics import SampleRecorder, finish_reason_share, mean_pass_at_k, speculation_metrics
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.rollout_loop import RolloutLoop, build_request
from mtpctl.controller.state import RunState
from mtpctl.data.problems import Problem
from mtpctl.data.sets import UNNAMED
from mtpctl.recipe.data import EvaluationSetConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import CORRECT_PART, Reward
from mtpctl.rollout.protocol import DEADLINE, Generator
from mtpctl.samples import GenerationRequest, Sample, response_limit
from mtpctl.telemetry.session import Telemetry

Responses = Mapping[str, list[tuple[Problem, list[Sample]]]]
"""Problems with their responses, by the name of the held-out set."""


@dataclass(slots=True)
class HeldOutSet:
    """One held-out set in an evaluation: its problems, the responses received for each, and the number of failed rewards.

    `is_unseen`: for each problem, whether no training row has its prompt.
    """

    name: str
    config: EvaluationSetConfig
    problems: list[Problem]
    is_unseen: list[bool]
    responses: list[list[Sample]] = field(init=False)
    reward_errors: int = 0

    def __post_init__(self) -> None:
        self.responses = [[] for _ in self.problems]

    @property
    def trajectories(self) -> list[Sample]:
        """All responses, in the order of their problems: of an agent's trajectory, the last sample."""
        return [sample for responses in self.responses for sample in responses]

    @property
    def samples(self) -> list[Sample]:
        """The samples of all trajectories."""
        return [sample for last_sample in self.trajectories for sample in last_sample.trajectory]

    def metrics(self) -> dict[str, float]:
        """`eval/*` for the set of the section `data`, `eval/NAME/*` for a named set.

        If some of the prompts are also in the training data, `unseen_*` are the mean score of the other problems and their number. A
        response's score is the part `correct` of its reward, or the reward if it has no such part.
        """
        prefix, trajectories, n = f"eval/{self.name}/" if self.name else "eval/", self.trajectories, self.config.n
        scores = [[sample.reward_parts.get(CORRECT_PART, sample.reward or 0.0) for sample in responses] for responses in self.responses]
        mean = sum(map(sum, scores)) / len(trajectories)
        values = {"accuracy": mean} if self.name == UNNAMED else {}
        mean_name = "accuracy" if self.name == UNNAMED else f"avg@{n}"
        unseen_scores = [score for group, is_unseen in zip(scores, self.is_unseen, strict=True) for score in group if is_unseen]
        if unseen_scores and len(unseen_scores) < len(trajectories):
            values[f"unseen_{mean_name}"] = sum(unseen_scores) / len(unseen_scores)
        if not all(self.is_unseen):
            values["unseen_problems"] = float(sum(self.is_unseen))
        if self.name != UNNAMED or n > 1:
            correct_counts = [sum(score >= self.config.right_from for score in group) for group in scores]
            values |= {f"avg@{n}": mean} | {f"pass@{k}": value for k, value in mean_pass_at_k(correct_counts, n).items()}
        lengths = [len(sample.response_ids) for sample in self.samples]
        values |= {"problems": float(len(self.problems)), "length_mean": sum(lengths) / len(lengths)}
        values["truncated_fraction"] = finish_reason_share(trajectories, "length")
        values["deadline_fraction"] = finish_reason_share(trajectories, DEADLINE)
        if self.reward_errors:
            values["reward_errors"] = float(self.reward_errors)
        metrics = {prefix + name: value for name, value in values.items()}
        return metrics | {name.replace("rollout/", prefix): value for name, value in speculation_metrics(self.samples).items()}


async def evaluate(
    recipe: Recipe,
    prepared: Prepared,
    generator: Generator,
    rewards: Mapping[str, Reward],
    *,
    version: int = 0,
    n: int | None = None,
    on_request: Callable[[], None] = lambda: None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    on_progress: Callable[[], None] = lambda: None,
    on_end: Callable[[Responses], None] = lambda responses: None,
) -> dict[str, float]:
    """Generate and reward responses to all held-out problems. Returns the metrics `eval/*`; empty if there are no held-out problems.

    Responses are rewarded while others are generated. A failed reward counts as 0.

    `rewards`: by the name of the set; other sets use `rewards[UNNAMED]`. `n`: overrides the number of responses to each problem.
    `version`: weights of the engines at the start; `eval/mixed_fraction` is the share of responses with a token of another version.
    """
    sets = []
    for name, problems in prepared.problems.held_out.items():
        config = recipe.evaluation.of(name)
        is_unseen = [not prepared.problems.is_seen(problem) for problem in problems]
        sets.append(HeldOutSet(name, config if n is None else config.model_copy(update={"n": n}), problems, is_unseen))
    if not sets:
        return {}
    problem_of: dict[str, tuple[HeldOutSet, int]] = {}

    async def generate_requests() -> AsyncIterator[GenerationRequest]:
        for held_out in sets:
            for number, problem in enumerate(held_out.problems):
                group_id = f"eval-{held_out.name}-{number}" if held_out.name else f"eval-{number}"
                problem_of[group_id] = held_out, number
                for index in range(held_out.config.n):
                    on_request()
                    seed = number * held_out.config.n + index
                    yield _build_request(recipe, prepared, held_out.config, problem, group_id, index, seed)

    async def reward_sample(sample: Sample) -> None:
        held_out, number = problem_of[sample.group_id]
        text = await prepared.decode_response(sample)
        outcome = await rewards.get(held_out.name, rewards[UNNAMED])(text, held_out.problems[number], sample)
        sample.reward, sample.reward_parts = outcome.reward or 0.0, outcome.parts
        held_out.reward_errors += bool(outcome.error)
        held_out.responses[number].append(sample)
        on_progress()

    try:
        async with asyncio.TaskGroup() as tasks, contextlib.aclosing(generator.generate(generate_requests())) as samples:
            async for sample in samples:
                on_sample(sample)
                on_progress()
                tasks.create_task(reward_sample(sample))
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group
    on_end({held_out.name: list(zip(held_out.problems, held_out.responses, strict=True)) for held_out in sets})
    responses = [response for held_out in sets for response in held_out.trajectories]
    num_mixed = sum(
        any(span.version != version for sample in response.trajectory for span in sample.version_spans) for response in responses
    )
    metrics = {"eval/version": float(version), "eval/mixed_fraction": num_mixed / len(responses)}
    for held_out in sets:
        metrics |= held_out.metrics()
    return metrics


def count_deadline_truncations(recipe: Recipe, metrics: Mapping[str, float]) -> tuple[int, int]:
    """The number of responses of an evaluation that `rollout.deadline_s` truncated, and the number of all its responses."""
    num_truncated = num_responses = 0
    for name, share in metrics.items():
        if name.endswith("/deadline_fraction"):
            prefix = name.removesuffix("deadline_fraction")
            config = recipe.evaluation.sets.get(prefix.removeprefix("eval/").strip("/"), EvaluationSetConfig())
            responses = round(metrics[f"{prefix}problems"]) * config.n
            num_truncated, num_responses = num_truncated + round(share * responses), num_responses + responses
    return num_truncated, num_responses


def _build_request(
    recipe: Recipe, prepared: Prepared, config: EvaluationSetConfig, problem: Problem, group_id: str, index: int, seed: int
) -> GenerationRequest:
    """The request for one response, with the sampling parameters of the set."""
    request = build_request(recipe, prepared, problem, group_id=group_id, index=index, seed=seed)
    if config.temperature is not None:
        request = replace(request, temperature=config.temperature)
    if config.max_tokens is not None:
        max_tokens = response_limit(request.sample, max_tokens=config.max_tokens, context=prepared.context)
        request = replace(request, max_tokens=max_tokens)
    return request


class Evaluator:
    """Runs the evaluations of the RL stage, one at a time. Training continues meanwhile, unless `start` waits for the result."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        generator: Generator,
        rewards: Mapping[str, Reward],
        telemetry: Telemetry,
        state: RunState,
        rollout: RolloutLoop,
        recorder: SampleRecorder,
    ) -> None:
        self.recipe, self.prepared, self.generator, self.rewards = recipe, prepared, generator, rewards
        self.telemetry, self.state, self.rollout, self.recorder = telemetry, state, rollout, recorder
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether an evaluation was started and not awaited yet."""
        return self._task is not None

    def is_due(self) -> bool:
        """Whether `train.eval_every` requires an evaluation at this step. False at the final update, which is always evaluated."""
        every, step = self.recipe.train.eval_every, self.state.step
        return bool(every) and step % every == 0 and step < self.recipe.train.rl.steps

    async def start(self, *, background: bool = False) -> None:
        """Start an evaluation of the published weights, after the one in progress.

        `background`: return before it ends, unless `evaluation.wait` or `async.deterministic` is set.
        """
        await self.wait()
        if self.state.stop_requested.is_set():
            return
        self._task = asyncio.create_task(self._run(self.state.step, self.state.version), name="evaluation")
        if not background or self.recipe.evaluation.wait or self.recipe.async_.deterministic:
            await self.wait()

    async def raise_if_failed(self) -> None:
        """If the evaluation in progress has failed, raise its error."""
        if self._task is not None and self._task.done():
            await self.wait()

    async def wait(self) -> None:
        """Wait until the evaluation in progress ends, and raise its error if it fails. A requested stop cancels it."""
        if self._task is None or not await finished_before(self._task, self.state.stop_requested):
            return
        if not self._task.cancelled():
            self._task.result()
            self._task = None

    async def cancel(self) -> None:
        """Cancel the evaluation in progress, if any, because the stage ends."""
        if self._task is None:
            return
        self._task.cancel()
        (error,) = await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if error is not None:
            reason = "the stage ended first" if isinstance(error, asyncio.CancelledError) else str(error)
            self.telemetry.event("eval", f"the evaluation in progress has no result: {reason}")

    async def _run(self, step: int, version: int) -> None:
        """Evaluate all held-out sets, and log their metrics under `step`."""
        started_at = time.perf_counter()
        metrics = await evaluate(
            self.recipe,
            self.prepared,
            self.generator,
            self.rewards,
            version=version,
            on_request=self.rollout.count_request,
            on_sample=self.rollout.count_response,
            # Engines that are busy with held-out problems are not stuck.
            on_progress=self.rollout.record_progress,
            on_end=lambda responses: self.recorder.record_evaluation(step, responses),
        )
        if not metrics:
            return
        metrics["timing_s/evaluation"] = time.perf_counter() - started_at
        num_truncated, num_responses = count_deadline_truncations(self.recipe, metrics)
        if num_truncated:
            message = f"{num_truncated} of {num_responses} held-out responses were truncated by rollout.deadline_s"
            self.telemetry.event("eval", f"{message}: {self.recipe.rollout.deadline_s:g}, and are rewarded as they are; raise it")
        self.telemetry.log(step, metrics, "rl")
