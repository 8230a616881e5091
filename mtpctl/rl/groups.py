"""Statistics of response groups: learning signal and pass@k. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

_EPS = 1e-6


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group, before the overlong penalty, differ. Dynamic sampling replaces groups whose rewards are equal.

    DAPO (arXiv 2503.14476, section 3.2) requires an accuracy strictly between 0 and 1.
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) > _EPS


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k from `n` responses of which `correct` are correct, for 1 ≤ k ≤ n.

    Chen et al. 2021 (arXiv 2107.03374), formula 1: 1 - C(n - c, k) / C(n, k), computed as a product so that no binomial overflows.
    Raises ValueError for other k.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} is undefined for {n} responses")
    if n - correct < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def pass_at_k_values(n: int) -> list[int]:
    """The values of k that are reported for n responses: powers of two, and n."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})


def mean_pass_at_k(correct: Sequence[int], n: int) -> dict[int, float]:
    """pass@k averaged over problems, for each k of `pass_at_k_values(n)`. correct: correct responses of each problem, out of n."""
    return {k: sum(pass_at_k(n, count, k) for count in correct) / len(correct) for k in pass_at_k_values(n)}
