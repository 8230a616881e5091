"""Settings of an engine, in a module without torch for callers that only state them."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.train import LoraConfig, MoeConfig, OffloadConfig
from mtpctl.routes import Routes
from mtpctl.samples import Logprobs


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


# What the engine is asked for when it scores a sequence, and what it answers. Needs no torch, so that the log-prob server shares it.


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What one sequence is scored for. topk: how many of the likeliest tokens to name; mtp: whether to score the MTP depths as well."""

    temperature: float = 1.0
    topk: int = 0
    mtp: bool = False


@dataclass(slots=True)
class DraftScores:
    """One MTP depth over the response: the log-prob of each token, and whether the depth would have drafted it greedily.

    None where no drafter can be asked: the first tokens of each turn, up to the depth, and tokens outside the mask.
    """

    logprobs: list[float | None]
    hits: list[bool | None]


@dataclass(slots=True)
class TokenScores:
    """One sequence, an entry for each response token: its log-prob, and the entropy of the distribution it was drawn from (nats).

    topk_ids and topk_logprobs are [tokens, k], likeliest first; drafts: one a depth. All three are empty where not asked for. routes: those
    that the pass took; None where not asked for.
    """

    logprobs: Logprobs
    entropy: Logprobs
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    drafts: list[DraftScores] = field(default_factory=list)
    routes: Routes | None = None
