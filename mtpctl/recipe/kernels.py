"""The section `kernels`: which implementation computes log-probs and losses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mtpctl.recipe.section import PositiveInt, Section


class KernelsConfig(Section):
    linear_logprob: Literal["auto", "reference", "chunked", "triton"] = Field(
        "auto", description="What computes log-probs and losses from hidden states; reference takes a second pass for the loss."
    )
    workspace_bytes: PositiveInt = Field(1 << 30, description="Bytes that log-prob kernels may use beside their inputs and outputs.")
