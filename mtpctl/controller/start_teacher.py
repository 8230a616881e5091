"""Starts the teacher that the recipe names, or finds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mtpctl.cluster.bundles import Bundles
from mtpctl.cluster.deadlines import within
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.teacher import Hint, ServedAtUrl, ServedInRun, Source, Teacher
from mtpctl.data.tokenizers import has_tokenizer, load_tokenizer
from mtpctl.logprob.placed import start_server
from mtpctl.logprob.server import LogprobServer
from mtpctl.plan.placement import Placement
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import POLICY, TeacherConfig
from mtpctl.recipe.schema import Recipe

Starting = Callable[[str, list[str]], contextlib.AbstractContextManager[None]]
"""Shows that actors are starting while its block runs, from what they are together and their names."""
CHECKED = 8
"""Prompts of which the teacher's tokens are compared with the policy's."""


async def start_teacher(
    recipe: Recipe,
    prepared: Prepared,
    stack: contextlib.AsyncExitStack,
    placement: Placement,
    bundles: Bundles,
    policy: LogprobServer | None,
    starting: Starting,
) -> Teacher | None:
    """The teacher of `train.rl.teacher`, which is closed with the stack; None without one. `policy`: the run's log-prob server.

    Raises UserError where nobody is at its URL, its tokens are not the policy's, or the hint does not fit the problems.
    """
    config = recipe.train.rl.teacher
    if config is None:
        return None
    source: Source
    if config.url is not None:
        source = await stack.enter_async_context(ServedAtUrl(config.url))
    elif config.path == POLICY:
        assert policy is not None, "the recipe's checks let no such teacher through without the server"
        source = ServedInRun(policy, "the policy", None)
    else:
        source = await _served(recipe, config, prepared, stack, placement, bundles, starting)
    hint = None if config.hint is None else Hint(config.hint, prepared.tokenizer, recipe.data, prepared.tools)
    teacher = Teacher(config, source, recipe.rollout.temperature, hint)
    await teacher.check(prepared.tokenizer, prepared.problems.train[:CHECKED])
    return teacher


async def _served(
    recipe: Recipe,
    config: TeacherConfig,
    prepared: Prepared,
    stack: contextlib.AsyncExitStack,
    placement: Placement,
    bundles: Bundles,
    starting: Starting,
) -> ServedInRun:
    folder = prepared.teacher
    assert folder is not None, "prepare() finds the model of a teacher that the run serves"
    options = recipe.logprob.model_copy(update={"replicas": config.replicas, "parallel": config.parallel, "keep_previous": False})
    first = placement.of("teacher")[0]
    # Its own MTP layers have nothing to say about the policy's tokens.
    beginning = start_server(
        recipe.model_copy(update={"logprob": options, "mtp": MtpConfig(mode="off")}),
        folder.path,
        device=placement.device,
        cpus=first.cpus,
        gpus=first.gpus,
        bundles=bundles,
        role="teacher",
    )
    with starting("teacher", [f"teacher replica {i} rank 0" for i in range(config.replicas)]):
        server = await within(beginning, recipe.cluster.actor_deadline_s, "teacher, start")
    stack.push_async_callback(server.close)
    return ServedInRun(server, f"the teacher {folder.path}", load_tokenizer(folder.path) if has_tokenizer(folder.path) else None)
