"""On-policy distillation: what a teacher adds to the advantage of a token that the policy sampled."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

MOST = 10.0
"""Bound of the ratio of the teacher's probability to the policy's in the forward KL, which is unbounded for tokens that hardly occur."""

Floats = npt.NDArray[np.float32]


def teacher_gain(kl: Literal["reverse", "forward"], teacher: Floats, behaviour: Floats) -> Floats:
    """The gain [tokens] whose policy gradient is that of the negative KL at each token, from log-probs in nats under teacher and policy.

    reverse, KL(policy ‖ teacher): log-prob of the teacher less the policy's (MiniLLM, arXiv 2306.08543, equation 3, without the part of
    later tokens; GKD, arXiv 2306.13649, at a lambda of 1). forward, KL(teacher ‖ policy): the ratio of their probabilities, to at most
    `MOST`, less 1, which is its mean and takes variance away.
    """
    apart = teacher - behaviour
    if kl == "reverse":
        return apart
    return np.exp(np.minimum(apart, np.float32(math.log(MOST)))) - 1
