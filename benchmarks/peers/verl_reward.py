"""verl's reward manager for the comparison: computes the reward of peer_reward.py, and logs each response.

Settings: reward.reward_manager.source=importlib, reward.reward_manager.name=CountingRewardManager, and this file as module.path. The log is
the value of `+reward.custom_reward_function.reward_kwargs.log`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase  # type: ignore[import-not-found]

sys.path.append(str(Path(__file__).parent))
from peer_reward import record, value


class CountingRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Scores a response like verl's `naive` manager, which does not pass the number of tokens to a reward function."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **others: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        self._log = config.reward.custom_reward_function.reward_kwargs.log

    async def run_single(self, data: Any) -> dict[str, Any]:
        item = data[-1]
        responses = item.batch["responses"]
        tokens = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(responses[:tokens], skip_special_tokens=True)
        )  # fmt: skip
        answer = item.non_tensor_batch["reward_model"]["ground_truth"]
        row = item.non_tensor_batch["extra_info"]
        reward = value(text, answer)
        record(self._log, row["split"], row["key"], bool(row["in_training"]), tokens, reward)
        return {"reward_score": reward, "reward_extra_info": {"acc": reward}}
