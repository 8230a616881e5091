"""pass@k: the probability that at least one of k responses is right."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def pass_at_k(n: int, right: int, k: int) -> float:
    """The unbiased estimate of pass@k from `n` responses of which `right` are right, for 1 ≤ k ≤ n.

    Chen et al. 2021 (arXiv 2107.03374), formula 1: 1 - C(n - c, k) / C(n, k), here as a product, so that no binomial overflows.
    Raises ValueError for a k that no subset of n responses has.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses")
    if n - right < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(n - right + 1, n + 1))


def ks_of(n: int) -> list[int]:
    """The k that are told of n responses: powers of two, and n."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})


def mean_pass_at_k(right: Sequence[int], n: int) -> dict[int, float]:
    """pass@k, the mean over problems, for each of `ks_of(n)`; `right` counts the right ones among n responses to each problem."""
    return {k: sum(pass_at_k(n, each, k) for each in right) / len(right) for k in ks_of(n)}
