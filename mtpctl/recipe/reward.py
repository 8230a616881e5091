"""The section `reward`: the function that rewards responses, and how it is run."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, PositiveFloat, PositiveInt, Section
from mtpctl.user_code import is_reference, missing_file

FROM_ENVIRONMENT = "environment"
"""The function that takes what the environment's own `reward()` returned."""

BUILT_IN = {
    "exact": "mtpctl.rl.rewards.exact:score",
    "math": "mtpctl.rl.rewards.math:score",
    "length": "mtpctl.rl.rewards.length:score",
    "llm_judge": "mtpctl.rl.rewards.llm_judge:score",
    "code": "mtpctl.sandbox.reward:score",
    FROM_ENVIRONMENT: "mtpctl.environments.built_in:environment_reward",
}
"""Functions that come with mtpctl: the name in a recipe, and where it is found. All have the signature of a user's own."""

VERIFIERS = ("exact", "math")
"""Those that only compare the final answer, so that a row's own solution has to be right."""


BOUNDS = {"code": "timeout_s", "math": "seconds"}
"""The arguments by which some of them bound their own seconds: what is over these is a wrong answer, and over `timeout_s` a failed call."""


class RewardConfig(Section):
    function: str = Field(
        "exact",
        min_length=1,
        description=f"What gives rewards: a function of your own as FILE.py:NAME or MODULE:NAME, or one of {', '.join(BUILT_IN)}.",
    )
    args: dict[str, object] = Field({}, description="Arguments of the function, by name, beside response, problem and sample.")
    workers: PositiveInt | None = Field(
        None,
        description="Processes for a plain function; of a coroutine, calls under way at once. Default: a process a CPU, at most 16, and "
        "more while calls only wait; 256 calls of a coroutine.",
    )
    timeout_s: PositiveFloat = Field(30.0, description="Seconds that one call may take, without the wait for a free process.")
    on_error: Literal["zero", "drop", "stop"] = Field(
        "zero",
        description="After a call that raises, takes too long or returns no number. zero: the reward is 0; drop: the group is left out; "
        "stop: the run ends.",
    )


def reference_of(function: str) -> str:
    """Where the function that a recipe names is found: `FILE.py:NAME` or `MODULE:NAME`."""
    return BUILT_IN.get(function, function)


def reward_fits(reward: RewardConfig, checker: str | None) -> Complaints:
    """Refuse a function that is not there, and one beside another `data.checker`, the key that it had before."""
    if checker is not None and checker != reward.function:
        yield f"data.checker: {checker} is the older key for reward.function, which is {reward.function}; remove data.checker"
    yield from function_fits(reward, "reward")


def function_fits(reward: RewardConfig, section: str) -> Complaints:
    """Refuse a function that is neither built in nor a name in a file that is there, and one whose own bound is over that of its calls.

    `section` is the key of the recipe that holds `reward`.
    """
    function, field = reward.function, f"{section}.function"
    if function in BUILT_IN:
        seconds = reward.args.get(BOUNDS.get(function, ""))
        if isinstance(seconds, int | float) and seconds >= reward.timeout_s:
            key = f"{section}.args.{BOUNDS[function]}"
            yield f"{section}.timeout_s: must be more than {key}: {seconds:g}, got {reward.timeout_s:g}"
        return
    if is_reference(function):
        if told := missing_file(function):
            yield f"{field}: {told}"
        return
    if function.endswith(".py"):
        yield f"{field}: {function} is a file; name the function in it, as {function}:score"
        return
    near = difflib.get_close_matches(function, BUILT_IN, 1)
    hint = f"did you mean {near[0]}?" if near else f"built in are {', '.join(BUILT_IN)}; write your own as FILE.py:NAME or MODULE:NAME"
    yield f"{field}: {function!r} is not built in; {hint}"
