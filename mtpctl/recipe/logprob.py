"""The section `logprob`: servers of old log-probs."""

from __future__ import annotations

from pydantic import Field

from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.section import NonNegativeFloat, PositiveInt, Section


class LogprobConfig(Section):
    standalone: bool = Field(False, description="Old log-probs from servers beside generation, not from the trainer.")
    replicas: PositiveInt = Field(1, description="Servers.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    tokens_per_batch: PositiveInt = Field(16384, description="Packed tokens a forward pass, at most.")
    queue_tokens: PositiveInt = Field(1 << 20, description="Tokens that may wait before callers are told to.")
    keep_previous: bool = Field(False, description="Hold the weight version before the current one as well.")
    gpus: NonNegativeFloat = Field(1.0, description="GPUs of each rank; a fraction shares the card.")
