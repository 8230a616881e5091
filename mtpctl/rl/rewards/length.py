"""The reward `length`: another reward, less a penalty for the length of the response."""

from __future__ import annotations

from collections.abc import Mapping

from mtpctl.errors import UserError
from mtpctl.recipe.reward import reference_of
from mtpctl.rl.rewards.function import RewardFunction, Role, load_function
from mtpctl.rl.rewards.outcome import Answered, parse
from mtpctl.samples import Sample


def score(
    response: str,
    problem: Answered,
    sample: Sample,
    of: str = "exact",
    of_args: Mapping[str, object] | None = None,
    target: int | None = None,
    max: int | None = None,
    penalty: float = 1.0,
) -> dict[str, float]:
    """The reward `of` (a plain function: built in, or one's own), less a share of `penalty` that grows with the n tokens of the policy.

    With `max` the share is min(max(n / max - 1, 0), 1): none up to `max` tokens, all of it from twice as many on. With `target` it is
    min(|n - target| / target, 1), the distance to a wished length as in L1 (arXiv 2503.04697, equation 1), here relative and bounded.
    Parts: `correct`, the reward without the penalty, and `length`, what was taken off.

    Raises UserError where not exactly one of the two is given, and where `of` is a coroutine.
    """
    limit = target if max is None else max
    if limit is None or limit < 1 or (target is not None and max is not None):
        raise UserError("reward.args: length takes one of target and max, in tokens, of at least 1; set {max: 512}, say")
    base, parts = parse(_plain(of, of_args or {}).call(response, problem, sample, **(of_args or {})))
    tokens = sample.sampled
    off = tokens / limit - 1
    share = min(abs(off) if max is None else off if off > 0 else 0.0, 1.0)
    return {**parts, "reward": base - penalty * share, "correct": base, "length": -penalty * share}


_loaded: dict[str, RewardFunction] = {}


def _plain(of: str, args: Mapping[str, object]) -> RewardFunction:
    if of not in _loaded:
        function = load_function(reference_of(of), args, Role.reward("reward.args: of"))
        if function.coroutine:
            raise UserError(f"reward.args: of: {of} is a coroutine, and length takes a plain function; take the penalty off in your own")
        _loaded[of] = function
    return _loaded[of]
