"""The sections `model` and `mtp`: what is trained, and what becomes of its MTP layers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mtpctl.recipe.section import HomePath, NonNegativeFloat, PositiveInt, Section

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""What torch and the engines call the precisions."""
BYTE_VOCAB_SIZE = 259
"""Ids of the tokenizer `bytes`: a byte each, padding, begin and end."""


class ModelConfig(Section):
    path: HomePath | None = Field(None, description="Hugging Face folder, or hub id such as XiaomiMiMo/MiMo-7B-RL.")
    init: Literal["weights", "random"] = Field("weights", description="Load the weights, or draw them from the seed.")
    config: dict[str, Any] | None = Field(
        None, description="Hugging Face config.json fields, inline: a new model of this shape is made in the run directory."
    )
    tokenizer: HomePath | None = Field(None, description="Tokenizer folder, or `bytes`; default: the one beside the model.")

    @property
    def drawn(self) -> bool:
        """Whether the weights that a run begins with are drawn from its seed, into its directory."""
        return self.config is not None or self.init == "random"


class MtpConfig(Section):
    mode: Literal["off", "load", "joint", "isolated"] = Field(
        "isolated",
        description="off: no MTP layers; load: kept and exported, not trained; joint: its loss also moves the trunk; "
        "isolated: trained on a trunk, embedding and head that its loss cannot move.",
    )
    loss_scale: NonNegativeFloat = Field(0.1, description="Weight of the MTP loss beside the main loss.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Clip the MTP layers' own gradient norm here; 0: never.")
    repeat: PositiveInt = Field(1, description="Depths to train through one MTP layer, where the family shares it.")

    @property
    def trains(self) -> bool:
        """Whether MTP layers that are there are trained."""
        return self.mode in ("joint", "isolated")
