"""Block verification in vLLM: rejected if vLLM ignores it; on a GPU exact, and accepts at least as much as token-by-token verification."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mtpctl.errors import UserError
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.vllm.engine import VllmEngine, check_verification
from mtpctl.rollout.vllm.settings import VllmSettings, build_engine_settings
from mtpctl.samples import Sample
from tests.fakes.engine_checkpoints import write_checkpoint
from tests.fakes.engines import START_S, Loop, cpu_settings
from tests.fakes.speculation import CASES, CONFIG, check_distribution, exact, requests, unlike_tensors

RULES: tuple[Literal["token", "block"], ...] = ("token", "block")
MIN_GAIN = 1.015
"""The toy's expected gain is 1.034 or more; its error over 40,000 tokens is 0.005."""


def speculation(drafts: int, rule: Literal["token", "block"]) -> SpeculationConfig:
    return SpeculationConfig(num_tokens=drafts, draft_method="probabilistic", verification=rule)


def toy(folder: Path) -> Path:
    return write_checkpoint(folder, CONFIG | {"model_type": "mimo"}, unlike_tensors()[0])


def test_settings_pass_the_rule_to_vllm(tmp_path: Path) -> None:
    token, block = (cpu_settings(tmp_path, speculation=speculation(3, rule)) for rule in RULES)
    assert block.verifies_blocks and not token.verifies_blocks
    assert block.args["speculative_config"] == token.args["speculative_config"] | {"rejection_sample_method": "block"}


def test_engine_that_ignores_the_rule_is_refused(run: Loop, tmp_path: Path) -> None:
    """By the worker's sampler: vLLM's configuration accepts the option on a CPU."""
    with pytest.raises(
        UserError, match=r"^rollout.speculation.verification: vLLM ignores block here and verifies token by token"
    ) as caught:
        run(VllmEngine.start(cpu_settings(toy(tmp_path / "model"), speculation=speculation(2, "block"))), START_S)
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized(), "the engine that was started is shut down"


def test_one_worker_that_ignores_the_rule_is_enough() -> None:
    check_verification(["block", "block"])
    with pytest.raises(UserError, match="set token"):
        check_verification(["block", "token"])


def gpu(folder: Path, drafts: int, rule: Literal["token", "block"]) -> VllmSettings:
    """In fp32, so that log-probs are exact."""
    options: dict[str, Any] = {"max_in_flight": 256, "context": 256, "kv_cache_bytes": 256 << 20, "gpu_memory": 0.1, "eager": True}
    options["engine_args"] = {"attention_backend": "TRITON_ATTN"}
    settings = build_engine_settings(
        VllmConfig(**options, speculation=speculation(drafts, rule)), model=str(folder), precision="fp32", device="cuda", seed=0
    )
    return replace(settings, environment=settings.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafts", [3, 5])
def test_forty_thousand_tokens_are_exact_and_more_drafts_are_accepted(drafts: int, run: Loop, tmp_path: Path) -> None:
    folder, (_, logits, _) = toy(tmp_path / "model"), unlike_tensors()
    lengths: dict[tuple[str, str], float] = {}
    for rule in RULES:
        engine = run(VllmEngine.start(gpu(folder, drafts, rule)), START_S)
        try:
            for case in ("T=0.7", "T=1.0"):
                samples = run(answers(engine, case), START_S)
                check_distribution(samples, logits, CASES[case])
                error = rescoring_error(samples, logits, CASES[case])
                steps = sum(sample.speculation.steps for sample in samples)
                lengths[case, rule] = 1 + sum(sample.speculation.accepted for sample in samples) / steps
                print(f"| k = {drafts}, {case} | {rule} | {lengths[case, rule]:.3f} tokens per step | log-probs off by {error:.1e} |")
                assert error < 1e-5
        finally:
            run(engine.shutdown())
    for case in ("T=0.7", "T=1.0"):
        assert lengths[case, "block"] > MIN_GAIN * lengths[case, "token"]


async def answers(engine: VllmEngine, case: str) -> list[Sample]:
    return await asyncio.gather(*(engine.generate(request) for request in requests(320, 125, **CASES[case])))


def rescoring_error(samples: list[Sample], logits: torch.Tensor, case: dict[str, Any]) -> float:
    """The largest error of a log-prob against a rescoring in float64, of accepted and of resampled tokens."""
    # States have a mean square of 1, to which the final norm adds epsilon.
    normed = logits.double() * (1 + CONFIG["rms_norm_eps"]) ** -0.5
    tables = torch.stack([exact(row, **case) for row in normed]).log()
    before: Callable[[Sample], list[int]] = lambda sample: [3, *sample.response_ids[:-1]]  # noqa: E731
    return max(
        float((tables[before(sample), sample.response_ids.tolist()] - torch.tensor(sample.behaviour_logprobs.tolist())).abs().max())
        for sample in samples
    )
