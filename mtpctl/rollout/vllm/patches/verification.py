"""A fix for the random numbers of block verification (vLLM 0.32.0)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.guard import assign, patch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

_MULTIPLIER = 0x1E3779B97F4A7C15
"""2^64 divided by the golden ratio, without the top bit to fit int64. Its multiples spread positions over all bits (Fibonacci hashing)."""


@patch
def install_verification() -> None:
    """Give every step of block verification its own random numbers.

    vLLM derives the random numbers that sample and accept a draft from the request's seed and the token's position. Token-by-token
    verification examines each position once: it ends at the first rejected draft, and the next step begins after that draft. Block
    verification examines all drafts before it decides how many to accept (arXiv 2403.10444, algorithm 2). The next step drafts and
    verifies the positions after the accepted prefix again, with the random numbers on which that decision depended. This biases the
    distribution of tokens: on a toy with three drafts it is off by a total variation of 0.01, and fewer drafts are accepted
    (`tests/rollout/vllm/patches/test_verification.py`).

    With the patch, the seed also depends on the position at which the step begins. Token-by-token verification is unchanged.
    """
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return  # the first model runner, which verifies token by token
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    check_random_numbers(inspect.getsource(rejection_sampler_utils))
    assign(rejection_sampler, rejection_sample=verify_with_fresh_noise(rejection_sampler_utils.rejection_sample))
    for speculator in (MultiModuleMTPSpeculator, TargetDependentARSpeculator):
        assign(speculator, propose=propose_with_fresh_noise(vars(speculator)["propose"]))


def check_random_numbers(source: str) -> None:
    """Raise UpstreamMoved unless the verification kernel in `source` draws its numbers from the seed and the position."""
    if "tl_rand32(seed, pos" not in source:
        raise UpstreamMoved(f"{__name__}: vLLM's rejection kernel draws its random numbers in another way; check whether steps share them")


def step_seeds(seeds: torch.Tensor, requests: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return a copy of `seeds` in which the seed of each request in the batch also depends on the position at which its step begins.

    seeds [slots], int64. requests [n]: the slots of the requests. starts [n]: the position of each request's first row.
    """
    mixed = seeds.clone()
    slots = requests.long()
    mixed[slots] = seeds[slots] ^ ((starts.long() + 1) * _MULTIPLIER)
    return mixed


def verify_with_fresh_noise(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `rejection_sample` so that block verification uses `step_seeds`."""
    parameters = inspect.signature(upstream)
    _require(parameters, "rejection_sample", "cu_num_logits", "pos", "idx_mapping", "seed", "use_block_verification")

    @wraps(upstream)
    def rejection_sample(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        bound = call.arguments
        if bound.get("use_block_verification"):
            bound["seed"] = step_seeds(bound["seed"], bound["idx_mapping"], bound["pos"][bound["cu_num_logits"][:-1].long()])
        return upstream(*call.args, **call.kwargs)

    return rejection_sample


def propose_with_fresh_noise(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a drafter's `propose` so that drafts for block verification are sampled with `step_seeds`."""
    parameters = inspect.signature(upstream)
    _require(parameters, "propose", "input_batch", "seeds", "dummy_run")

    @wraps(upstream)
    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.speculative_config.rejection_sample_method != "block":
            return upstream(self, *args, **kwargs)
        call = parameters.bind(self, *args, **kwargs)
        bound = call.arguments
        if not bound.get("dummy_run"):
            batch: InputBatch = bound["input_batch"]
            first_rows = batch.logits_indices[batch.cu_num_logits[:-1].long()]
            bound["seeds"] = step_seeds(bound["seeds"], batch.idx_mapping, batch.positions[first_rows.long()])
        return upstream(*call.args, **call.kwargs)

    return propose


def _require(parameters: inspect.Signature, name: str, *names: str) -> None:
    if missing := [each for each in names if each not in parameters.parameters]:
        raise UpstreamMoved(f"{__name__}: vLLM's {name} no longer takes {', '.join(missing)}; find the new way to set its random numbers")
