"""The section `kernels`: how log-probs and losses are computed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mtpctl.recipe.section import PositiveInt, Section


class KernelsConfig(Section):
    linear_logprob: Literal["auto", "reference", "chunked", "triton", "liger"] = Field(
        "auto", description="How log-probs and losses are made from hidden states; `reference` and `liger` make no loss in one pass."
    )
    workspace_bytes: PositiveInt = Field(1 << 30, description="Memory that log-prob kernels may use beside their inputs and outputs.")
