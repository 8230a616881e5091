"""The rewards `exact` and `length`, as a user would write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mtpctl.errors import UserError
from mtpctl.recipe.reward import reference_of
from mtpctl.rl.rewards.function import Answered, RewardFunction, Role, load_function, parse
from mtpctl.samples import Sample

_MARKED = re.compile(r"(?:(?<!\w)#|##)([^#]*[^#\s])\s*$")
"""The marker of a final answer, and the answer after it."""


def exact(response: str, problem: Answered, sample: Sample) -> float:
    """1.0 if the final answers of response and problem are the same text, else 0.0.

    An answer that is a worked solution, as in GSM8K, is parsed like a response: the text after its last `#` counts. A `#` that is part of a
    word (C#, F#m) marks no final answer; an answer with such a `#` is compared in full.
    """
    marked = _MARKED.search(problem.answer)
    if marked is None and "#" in problem.answer:
        return float(response.strip() == problem.answer.strip())
    # 42 in `#42` and in GSM8K's `#### 42`; the whole response if it has no `#`.
    answer = response.rpartition("#")[2].strip()
    return float(answer == (problem.answer if marked is None else marked[1]).strip())


def length(
    response: str,
    problem: Answered,
    sample: Sample,
    of: str = "exact",
    of_args: Mapping[str, object] | None = None,
    target: int | None = None,
    max: int | None = None,
    penalty: float = 1.0,
) -> dict[str, float]:
    """The reward `of` (a plain function, built-in or user-defined) minus a share of `penalty` that depends on the n sampled tokens.

    With `max` the share is min(max(n / max - 1, 0), 1): 0 up to `max` tokens, 1 from twice as many. With `target` it is
    min(|n - target| / target, 1): the distance to a target length as in L1 (arXiv 2503.04697, equation 1), here relative and bounded.
    Parts: `correct`, the reward without the penalty, and `length`, the penalty.

    Raises UserError unless exactly one of `max` and `target` is set, and if `of` is a coroutine.
    """
    limit = target if max is None else max
    if limit is None or limit < 1 or (target is not None and max is not None):
        raise UserError("reward.args: length takes one of target and max, in tokens, of at least 1; set {max: 512}, say")
    base, parts = parse(_plain(of, of_args or {}).call(response, problem, sample, **(of_args or {})))
    tokens = sample.sampled
    excess = tokens / limit - 1
    share = min(abs(excess) if max is None else excess if excess > 0 else 0.0, 1.0)
    return {**parts, "reward": base - penalty * share, "correct": base, "length": -penalty * share}


_loaded: dict[str, RewardFunction] = {}


def _plain(of: str, args: Mapping[str, object]) -> RewardFunction:
    if of not in _loaded:
        function = load_function(reference_of(of), args, Role.reward("reward.args: of"))
        if function.coroutine:
            raise UserError(f"reward.args: of: {of} is a coroutine, and length takes a plain function; subtract the penalty in your own")
        _loaded[of] = function
    return _loaded[of]
