"""The section `logprob`: servers that compute old log-probs beside generation."""

from __future__ import annotations

from pydantic import Field

from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class LogprobConfig(Section):
    standalone: bool = Field(False, description="Compute old log-probs in servers, while generation goes on, and not in the trainer.")
    replicas: PositiveInt = Field(1, description="Log-prob servers.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a replica within an hour before it is quarantined.")
    tokens_per_batch: PositiveInt = Field(16384, description="Packed tokens of a forward pass, at most.")
    queue_tokens: PositiveInt = Field(1 << 20, description="Tokens that may wait in the queue; beyond them callers have to wait.")
    keep_previous: bool = Field(False, description="Keep the weights of the version before, too; takes their memory a second time.")
    gpus: NonNegativeFloat = Field(1.0, description="GPUs of each rank; a fraction shares the card.")
