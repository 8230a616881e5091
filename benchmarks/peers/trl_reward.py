"""TRL's reward function of the comparison: the reward of peer_reward.py, and a line in its log per response.

The asynchronous trainer pickles the function for a child process, so it is at module level: `functools.partial(score, log=PATH)`.
"""

from __future__ import annotations

from typing import Any

from peer_reward import record, value


def score(
    completions: list[Any],
    completion_ids: list[list[int]],
    answer: list[str],
    split: list[str],
    key: list[str],
    in_training: list[bool],
    log: str,
    **others: Any,
) -> list[float]:
    """Rewards of a batch. Rows are conversations, so a completion is a list of messages. `others`: prompts and the trainer's state."""
    rewards = []
    for messages, ids, *row in zip(completions, completion_ids, answer, split, key, in_training, strict=True):
        reward = value(messages[-1]["content"], row[0])
        record(log, row[1], row[2], bool(row[3]), len(ids), reward)
        rewards.append(reward)
    return rewards
