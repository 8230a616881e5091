"""Settings of an engine, and the requests and results of scoring. Imports no torch, so that the log-prob server can share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig, MoeConfig, OffloadConfig
from mtpctl.routes import Routes
from mtpctl.samples import Logprobs


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    train: if False, no gradient buffers are created. random_seed: initialize random weights on the device instead of loading them. lora:
    freeze the trunk and train adapters, initialized from `adapter_seed`; MTP layers train as without LoRA. drafts: number of draft tokens
    per step of the rollout engine, for estimates of acceptance rates; 0: one per MTP depth. greedy_drafts: train `mtp.loss: e2e_tv` for
    greedy drafts. only_drafter: the trunk is never trained, and has no gradient buffers.
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
    greedy_drafts: bool = False
    only_drafter: bool = False
    numerics: Numerics = "default"


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Scoring options of one sequence. topk: number of most likely tokens to return. mtp: whether to score the MTP depths."""

    temperature: float = 1.0
    topk: int = 0
    mtp: bool = False


@dataclass(slots=True)
class DraftScores:
    """Scores of one MTP depth over the response: each token's log-prob, and whether greedy drafting would have proposed it.

    None for tokens that are not drafted: the first `depth` tokens of each turn, and tokens outside the mask.
    """

    logprobs: list[float | None]
    hits: list[bool | None]


@dataclass(slots=True)
class TokenScores:
    """Scores of one sequence, with an entry per response token: log-prob, and entropy of the distribution (nats).

    topk_ids, topk_logprobs [tokens, k]: most likely tokens first. drafts: one per depth. routes: the experts selected in the pass. These
    are empty or None unless requested.
    """

    logprobs: Logprobs
    entropy: Logprobs
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    drafts: list[DraftScores] = field(default_factory=list)
    routes: Routes | None = None
