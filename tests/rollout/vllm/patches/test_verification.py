"""Every step of block verification has its own random numbers; with vLLM's, tokens do not follow the target's distribution."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.verification import (
    check_random_numbers,
    derive_step_seeds,
    propose_with_fresh_noise,
    verify_with_fresh_noise,
)
from tests.fakes.block_verification import Toy, chi_squared, tokens_per_step, transitions


@pytest.mark.parametrize("drafts", [3, 5])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_forty_thousand_tokens_follow_the_distribution(temperature: float, drafts: int) -> None:
    """By the rule of the paper with the seeds of the patch, and more drafts are accepted than token by token."""
    toy = Toy(temperature)
    counts, block = transitions(toy, drafts, 40_000, fresh=True)
    statistic, degrees = chi_squared(counts, toy.target)
    assert counts.sum() >= 40_000
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
    assert block > 1.02 * tokens_per_step(toy, drafts)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_numbers_shared_by_steps_change_the_distribution(temperature: float) -> None:
    """The fault: drafts after the accepted prefix are drafted and verified again with the numbers that rejected them."""
    toy = Toy(temperature)
    counts, shared = transitions(toy, 3, 400_000, fresh=False)
    statistic, degrees = chi_squared(counts, toy.target)
    assert statistic > degrees + 10 * (2 * degrees) ** 0.5
    assert shared < transitions(toy, 3, 400_000, fresh=True)[1]


def test_seeds_depend_on_the_request_and_the_step() -> None:
    seeds = torch.tensor([5, 7, 9])
    first, second = (derive_step_seeds(seeds, torch.tensor([2, 0]), torch.tensor([begin, begin])) for begin in (10, 11))
    assert torch.equal(first, derive_step_seeds(seeds, torch.tensor([2, 0]), torch.tensor([10, 10]))), "the same step, the same seeds"
    assert first[1] == seeds[1] == 7 and len({*first.tolist(), *second.tolist(), *seeds.tolist()}) == 7
    assert seeds.tolist() == [5, 7, 9]


def test_verification_and_drafts_of_a_step_use_its_seeds() -> None:
    """Only with block verification, and not in a dummy run, whose slots are not requests."""
    seeds, requests, ends = torch.tensor([5, 7, 9]), torch.tensor([2, 0]), torch.tensor([0, 3, 5])
    positions = torch.tensor([20, 21, 22, 40, 41])
    expected = derive_step_seeds(seeds, requests, torch.tensor([20, 40]))

    def rejection_sample(
        logits: None, cu_num_logits: torch.Tensor, pos: torch.Tensor, idx_mapping: torch.Tensor, seed: torch.Tensor, **_: bool
    ) -> torch.Tensor:
        return seed

    def verify(
        cu_num_logits: torch.Tensor, pos: torch.Tensor, idx_mapping: torch.Tensor, seed: torch.Tensor, use_block_verification: bool = False
    ) -> torch.Tensor:
        return seed

    verified = verify_with_fresh_noise(verify)
    assert verified(ends, positions, requests, seeds) is seeds
    assert torch.equal(verified(ends, positions, requests, seeds, use_block_verification=True), expected)
    with pytest.raises(UpstreamMoved, match="no longer takes use_block_verification"):
        verify_with_fresh_noise(rejection_sample)

    def propose(self: Any, input_batch: Any, seeds: torch.Tensor, dummy_run: bool = False) -> torch.Tensor:
        return seeds

    batch = SimpleNamespace(
        logits_indices=torch.tensor([1, 2, 3, 5, 6]),
        cu_num_logits=ends,
        idx_mapping=requests,
        positions=torch.tensor([19, 20, 21, 22, 39, 40, 41]),
    )
    proposed = propose_with_fresh_noise(propose)
    block, token = (SimpleNamespace(speculative_config=SimpleNamespace(rejection_sample_method=rule)) for rule in ("block", "standard"))
    assert torch.equal(proposed(block, batch, seeds), expected)
    assert proposed(token, batch, seeds) is seeds and proposed(block, batch, seeds, dummy_run=True) is seeds


@pytest.mark.slow
def test_upstream_accepts_by_the_rule_with_and_without_the_patch() -> None:
    """Exactly the drafts that the paper's rule accepts for the numbers of the kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.vllm.patches.interpreted_verification"],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0 and "the rule holds" in done.stdout, done.stderr[-3000:]


def test_upstream_draws_its_numbers_from_seed_and_position() -> None:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    check_random_numbers(inspect.getsource(rejection_sampler_utils))
    verify_with_fresh_noise(rejection_sampler_utils.rejection_sample)
    for speculator in (MultiModuleMTPSpeculator, TargetDependentARSpeculator):
        propose_with_fresh_noise(vars(speculator)["propose"])
    with pytest.raises(UpstreamMoved, match="draws its random numbers in another way"):
        check_random_numbers("u = tl.rand(step_seed, i)")
