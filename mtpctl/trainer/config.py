"""Settings of an engine, in a module without torch for callers that only state them."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpctl.recipe.kernels import KernelsConfig
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.train import LoraConfig, MoeConfig, OffloadConfig


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made of.

    `train=False` builds no gradient buffers. With `random_seed` weights are drawn on the device instead of loaded. With `lora`
    the trunk is frozen and adapters train in its place, first drawn from `adapter_seed`; MTP layers train as they would without.
    `drafts`: draft tokens a step whose acceptance is to be expected; 0: one for each MTP depth.
    """

    parallel: ParallelConfig
    precision: str = "fp32"
    mtp: MtpConfig = field(default_factory=MtpConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    tokens_per_microbatch: int = 8192
    recompute: str = "none"
    distributed_optimizer: bool = False
    train: bool = True
    random_seed: int | None = None
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig | None = None
    moe: MoeConfig = field(default_factory=MoeConfig)
    adapter_seed: int = 0
    drafts: int = 0
