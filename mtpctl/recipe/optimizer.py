"""The sections `train.sft.optimizer` and `train.rl.optimizer`."""

from __future__ import annotations

from pydantic import Field

from mtpctl.recipe.section import Float, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    mtp_lr: PositiveFloat | None = Field(None, description="Learning rate of the MTP layers; default: the same.")
    betas: tuple[Float, Float] = Field((0.9, 0.95), description="Adam's decay rates.")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay.")
    warmup_steps: NonNegativeInt = Field(
        0, description="Linear warm-up from zero, in optimizer steps, of which an RL update makes `minibatches`."
    )
    min_lr_ratio: Fraction = Field(1.0, description="Cosine decay to this share of the peak; 1: constant.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest gradient norm of the trunk, beyond which it is clipped; 0: never.")


class SftOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = Field(1e-5, description="Peak learning rate.")
