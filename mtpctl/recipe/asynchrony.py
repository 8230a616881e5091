"""The section `async`: how far generation may run ahead of training."""

from __future__ import annotations

from pydantic import Field

from mtpctl.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class AsyncConfig(Section):
    staleness_threshold: NonNegativeFloat = Field(
        0.5, description="Share of samples, beyond what the updates until the next sync need, that may be generated ahead; 0: none."
    )
    max_staleness: NonNegativeInt = Field(
        8,
        description="Greatest age of a trained token, in versions behind the published one; prompts of older groups are sent out again, "
        "and the trainer waits for those.",
    )
    sync_every: PositiveInt = Field(1, description="Updates between weight syncs.")
    partial_rollout: bool = Field(True, description="Responses in flight at a sync go on under the new weights.")
    deterministic: bool = Field(False, description="Same seed, same loss: no staleness, fixed batches in prompt order, a seed per request.")

    @property
    def staleness(self) -> float:
        """The threshold that holds: a deterministic run generates nothing ahead, and none generates what would get too old in line."""
        return 0.0 if self.deterministic else min(self.staleness_threshold, self.max_staleness)
