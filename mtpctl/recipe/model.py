"""The sections `model` and `mtp`: the model to train, and how its MTP layers are trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mtpctl.recipe.section import Fraction, HomePath, NonNegativeFloat, PositiveInt, Section

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""The names of the precisions in torch and in the engines."""
BYTE_VOCAB_SIZE = 259
"""Ids of the tokenizer `bytes`: 256 bytes, padding, begin and end."""


class ModelConfig(Section):
    path: HomePath | None = Field(None, description="Hugging Face folder, or hub id such as XiaomiMiMo/MiMo-7B-RL.")
    init: Literal["weights", "random"] = Field("weights", description="weights: load them; random: draw them from the seed.")
    config: dict[str, object] | None = Field(
        None, description="Hugging Face config.json fields, inline: a new model of this shape is made in the run directory."
    )
    tokenizer: HomePath | None = Field(None, description="Tokenizer folder, or `bytes`; default: the one beside the model.")

    @property
    def drawn(self) -> bool:
        """Whether a run draws its first weights from its seed; they are then written into its directory."""
        return self.config is not None or self.init == "random"


class MtpConfig(Section):
    mode: Literal["off", "load", "joint", "isolated"] = Field(
        "isolated",
        description="off: no MTP layers; load: loaded and exported, not trained; joint: trained, and their loss also updates the trunk; "
        "isolated: trained, and their loss updates neither trunk, embedding nor LM head.",
    )
    loss: Literal["ce", "soft_ce", "kl", "tv"] = Field(
        "ce",
        description="What each MTP depth learns: ce: the sampled token; the trunk's own distribution of that token by cross-entropy "
        "(soft_ce), by KL divergence (kl) or by total variation (tv), the share of probabilistic drafts that would be turned down.",
    )
    loss_mix: Fraction = Field(1.0, description="Weight of mtp.loss; the rest of 1 is the weight of ce beside it.")
    loss_scale: NonNegativeFloat = Field(0.1, description="Weight of the MTP loss in the sum with the main loss.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest gradient norm of the MTP layers, beyond which it is clipped; 0: never.")
    repeat: PositiveInt = Field(1, description="MTP depths that are trained by applying the one MTP layer repeatedly.")

    @property
    def trains(self) -> bool:
        """Whether the MTP layers are trained."""
        return self.mode in ("joint", "isolated")
