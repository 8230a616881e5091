"""Bugs of sampling in vLLM's CPU backend exist without the patches and are fixed by them."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from mtpctl.rollout.protocol import EngineDead
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.patches import sampling
from mtpctl.rollout.vllm.plugin import install
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engine_checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.engines import run as run
from tests.fakes.engines import start_engine as start_engine

X = torch.tensor([0.5, 2.0, 0.0])
CUMULATIVE = torch.tensor([2, 2, 5], dtype=torch.int32)
EXPANDED = [0.5, 0.5, 1.0, 1.0, 1.0]


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's functions as they are shipped, for one test."""
    from vllm.platforms import current_platform

    install()
    current_platform.register_triton_kernel_overrides()
    spec = importlib.util.find_spec(rejection_sampler.__name__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    # In the namespace of the live module, whose kernels vLLM has bound to the CPU's.
    code = fresh.expand_batch_to_tokens
    monkeypatch.setattr(rejection_sampler, code.__name__, FunctionType(code.__code__, vars(rejection_sampler), argdefs=code.__defaults__))
    monkeypatch.setattr(rejection_sampler, "apply_top_k_top_p", fresh.apply_top_k_top_p)


def test_upstream_expansion_loses_the_values() -> None:
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((5,), -1.0)
    _expand_kernel_impl(output, X, CUMULATIVE, 0, 1)
    assert output.tolist() == [-1.0] * 5


def test_patched_expansion_repeats_values_by_count() -> None:
    result = sampling.expand_batch_to_tokens(X, CUMULATIVE, 5, replace_from=0, replace_to=1)
    assert result.tolist() == EXPANDED
    assert result.dtype == X.dtype
    whole = torch.tensor([40, 5], dtype=torch.int32)
    assert sampling.expand_batch_to_tokens(whole, torch.tensor([1, 3], dtype=torch.int32), 3).tolist() == [40, 5, 5]


class Metadata:
    """What `apply_sampling_constraints` reads of vLLM's sampling metadata."""

    all_greedy = False

    def __init__(self, temperature: list[float], top_k: list[int] | None) -> None:
        self.temperature = torch.tensor(temperature)
        self.top_k = None if top_k is None else torch.tensor(top_k, dtype=torch.int32)
        self.top_p = None


def constrained(logits: torch.Tensor, drafts: list[int], metadata: Metadata) -> torch.Tensor:
    cumulative = torch.tensor(drafts, dtype=torch.int32).cumsum(0).int()
    constrained_logits: torch.Tensor = rejection_sampler.apply_sampling_constraints(logits.clone(), cumulative, metadata)
    return constrained_logits


LOGITS = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
COOLED = LOGITS / torch.tensor([0.5, 0.5, 2.0])[:, None]


def test_temperature_reaches_every_draft_token() -> None:
    install()
    assert torch.allclose(constrained(LOGITS, [2, 1], Metadata([0.5, 2.0], None)), COOLED)


@pytest.mark.usefixtures("shipped")
def test_temperature_is_lost_without_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Uninitialized memory could contain the correct values by chance: fill it with sevens.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, 7))
    result = constrained(LOGITS, [2, 1], Metadata([0.5, 2.0], None))
    assert torch.allclose(result, LOGITS / 7)


def test_top_k_accepts_a_step_without_draft_tokens() -> None:
    install()
    assert constrained(torch.empty(0, 6), [0, 0], Metadata([1.0, 1.0], [3, 3])).shape == (0, 6)


@pytest.mark.usefixtures("shipped")
def test_top_k_without_draft_tokens_crashes_without_the_patch() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        constrained(torch.empty(0, 6), [0, 0], Metadata([1.0, 1.0], [3, 3]))


CONFIG = tiny_config()
REQUESTS = 8


def seeded(index: int) -> GenerationRequest:
    return GenerationRequest(Sample(f"p{index}", "g", [3 + index] * 20), 40, seed=index)


async def together(engine: VllmEngine, pauses: int = 0) -> list[list[int]]:
    """Responses to requests that together exceed a step's token budget when all are recomputed."""
    tasks = [asyncio.ensure_future(engine.generate(seeded(index))) for index in range(REQUESTS)]
    for _ in range(pauses):
        await asyncio.sleep(0.02)
        await engine.pause("keep")
        await engine.resume()
    return [sample.response_ids for sample in await asyncio.gather(*tasks)]


def test_seeded_responses_are_the_same_with_partial_prefills(
    start_engine: Callable[[VllmSettings], VllmEngine], run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    folder = write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG, 0))
    engine = start_engine(cpu_settings(folder, k=1, max_in_flight=REQUESTS, engine_args={"max_num_batched_tokens": 32}))
    alone = [run(engine.generate(seeded(index))).response_ids for index in range(REQUESTS)]
    assert run(together(engine)) == alone, "discarded samples do not advance a request's generator"
    assert all(len(response) == 40 for response in run(together(engine, pauses=5)))
    monkeypatch.setattr(CPUModelRunner, "sample_tokens", CPUModelRunner.sample_tokens.__wrapped__)  # type: ignore[attr-defined]
    with pytest.raises(EngineDead):
        run(together(engine))
