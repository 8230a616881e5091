"""The job of `mtpctl eval`: evaluate the held-out sets on the recipe's engines, without a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from mtpctl.controller.evaluate import evaluate
from mtpctl.controller.preflight import check_sandbox
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.services import start_rewards
from mtpctl.data.prompts import check_lengths
from mtpctl.data.sets import load_held_out
from mtpctl.environments.agents import open_generator
from mtpctl.errors import UserError
from mtpctl.jobs.engines import Report, WeightSource, engine_cluster, find_weights, serving, with_merged_sync, without_training
from mtpctl.recipe.checks import validate
from mtpctl.recipe.data import GeneratedTask, is_dataset_id
from mtpctl.recipe.schema import Recipe
from mtpctl.sync.store import VersionStore

UNNAMED_LABEL = "held-out"
"""The printed name of the set of the section `data`."""


class Evaluation(TypedDict):
    """The result of `evaluate_weights`.

    sets: the metrics of each held-out set, with `n`, its responses per problem. seen: the number of held-out problems whose prompt a
    training row has; None if the training rows cannot be read.
    """

    model: str
    version: int
    seconds: float
    seen: int | None
    sets: dict[str, dict[str, float]]


def evaluate_weights(recipe: Recipe, *, n: int | None, report: Report, start: str | None = None) -> Evaluation:
    """Evaluate weights on the recipe's held-out sets, with `n` responses to each problem, or as many as each set configures.

    `start`: as in `find_weights`. Before anything starts, raises UserError if there is no held-out set, and for unsuitable problems,
    rewards or weights. Errors of the cluster and the engines are raised unchanged.
    """
    recipe = with_merged_sync(recipe)
    validate(_for_validation(recipe))
    problems = load_held_out(recipe.data, recipe.seed, recipe.evaluation, recipe.rollout, stages=recipe.train.stages)
    if not problems.held_out:
        raise UserError("evaluation.sets: the recipe has no held-out problems; name a set, or data.eval_path")
    check_sandbox(recipe)
    with tempfile.TemporaryDirectory(prefix="mtpctl-eval-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        source = find_weights(recipe, start, folder, report)
        for held_out in problems.held_out.values():
            check_lengths(source.tokenizer, held_out, recipe.data, context=source.context)
        counts = {name: (n or recipe.evaluation.of(name).n) for name in problems.held_out}
        total = sum(len(held_out) * counts[name] for name, held_out in problems.held_out.items())
        report(f"model: {source.name}; {total} responses to {sum(map(len, problems.held_out.values()))} held-out problems")
        if source.ends.disagreement:
            report(source.ends.disagreement)
        if problems.seen_prompts is None and recipe.data.path is not None:
            report("data.path: the training rows cannot be read, so the accuracy on unseen prompts is unknown")
        store = stack.enter_context(engine_cluster(recipe, source, folder))
        prepared = Prepared(source.model, source.tokenizer, problems, source.context, ends=source.ends)
        began = time.perf_counter()
        metrics = asyncio.run(_evaluate(recipe, source, store, prepared, n, report))
        seconds = time.perf_counter() - began
    return {
        "model": source.name,
        "version": source.version,
        "seconds": seconds,
        "seen": None if problems.seen_prompts is None else problems.count_seen(),
        "sets": {name or UNNAMED_LABEL: {"n": counts[name], **_set_metrics(metrics, name)} for name in problems.held_out},
    }


async def _evaluate(
    recipe: Recipe, source: WeightSource, store: VersionStore, prepared: Prepared, n: int | None, report: Report
) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        rewards = await start_rewards(recipe, stack, report=report)
        pool = await stack.enter_async_context(serving(recipe, source, store, recipe.seed))
        name, context = recipe.name, prepared.context
        agents = open_generator(recipe.rollout, pool, source.tokenizer, context=context, name=name, report=report)
        return await evaluate(recipe, prepared, await stack.enter_async_context(agents), rewards, version=source.version, n=n)


def _for_validation(recipe: Recipe) -> Recipe:
    """The recipe without training, for validation. An evaluation needs no training rows, so a generated task stands in for missing ones."""
    recipe, data = without_training(recipe), recipe.data
    if data.path is not None or data.task is not None or recipe.rollout.verifiers is not None:
        return recipe
    held_out = data.eval_path if data.eval_path and is_dataset_id(data.eval_path) else None
    return recipe.model_copy(update={"data": data.model_copy(update={"task": GeneratedTask(), "eval_path": held_out})})


def _set_metrics(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The metrics of one set, without their prefix."""
    prefix = f"eval/{name}/" if name else "eval/"
    set_values = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {key: value for key, value in set_values.items() if "/" not in key and (name or key not in ("version", "mixed_fraction"))}


def render(evaluation: Evaluation) -> str:
    """A table of the sets."""
    rows = [["set", "problems", "n", "avg@n", *(["unseen"] if evaluation["seen"] else []), "pass@k", "length", "cut off", "acceptance"]]
    for name, metrics in evaluation["sets"].items():
        n = int(metrics["n"])
        mean = metrics.get(f"avg@{n}", metrics.get("accuracy", 0.0))
        pass_at_k = "  ".join(f"@{key[5:]} {value:.1%}" for key, value in metrics.items() if key.startswith("pass@"))
        acceptance = f"{metrics['spec_accept_rate']:.1%}" if "spec_accept_rate" in metrics else "–"
        cells = [f"{metrics['problems']:.0f}", str(n), f"{mean:.3f}"]
        if evaluation["seen"]:
            cells.append(_format_unseen(metrics, mean))
        cells += [pass_at_k or "–", f"{metrics['length_mean']:.1f}"]
        rows.append([name, *cells, f"{metrics['truncated_fraction']:.1%}", acceptance])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if evaluation["seen"]:
        lines.append("unseen: avg@n of the problems whose prompt no training row has, and their number")
    elif evaluation["seen"] == 0:
        lines.append("no training row has a held-out prompt")
    return "\n".join([*lines, f"{evaluation['model']}; {evaluation['seconds']:.1f} s including the start of the engines"])


def _format_unseen(metrics: Mapping[str, float], mean: float) -> str:
    """`avg@n` of the unseen problems of a set and their number, such as `0.121 (362)`; `mean` is that of all problems."""
    if (count := metrics.get("unseen_problems", metrics["problems"])) == 0:
        return "– (0)"
    value = next((value for key, value in metrics.items() if key.startswith(("unseen_accuracy", "unseen_avg@"))), mean)
    return f"{value:.3f} ({count:.0f})"
