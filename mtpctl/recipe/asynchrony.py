"""The section `async`: how far generation may run ahead of training."""

from __future__ import annotations

from pydantic import Field

from mtpctl.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class AsyncConfig(Section):
    staleness_threshold: NonNegativeFloat = Field(
        0.5, description="Samples that may be generated ahead, as a share of those that the updates until the next sync need; 0: none."
    )
    max_staleness: NonNegativeInt = Field(
        8,
        description="Greatest age of a token that is trained on, in versions behind the published one. Prompts of groups with older tokens "
        "are generated again, and the trainer waits for them.",
    )
    sync_every: PositiveInt = Field(1, description="Updates between weight syncs.")
    partial_rollout: bool = Field(
        True, description="Responses in flight at a sync continue under the new weights; false: the sync waits until they end."
    )
    deterministic: bool = Field(
        False, description="Same seed, same losses: nothing is generated ahead, batches are in prompt order, each request has its seed."
    )

    @property
    def staleness(self) -> float:
        """The threshold in effect: 0 in a deterministic run, at most `max_staleness`, beyond which samples would be too old to train on."""
        return 0.0 if self.deterministic else min(self.staleness_threshold, self.max_staleness)
