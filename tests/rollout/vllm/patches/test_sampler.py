"""The faults of vLLM's CPU sampler are there without the mends, and gone with them."""

from __future__ import annotations

import importlib
from types import FunctionType

import pytest
import torch
from vllm.v1.sample import rejection_sampler as mended

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import sampler, version
from mtpctl.rollout.vllm.plugin import install

X = torch.tensor([0.5, 2.0, 0.0])
CUMULATIVE = torch.tensor([2, 2, 5], dtype=torch.int32)
EXPANDED = [0.5, 0.5, 1.0, 1.0, 1.0]


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's functions as they are shipped, for one test."""
    from vllm.platforms import current_platform

    install()
    current_platform.register_triton_kernel_overrides()
    spec = importlib.util.find_spec(mended.__name__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    # In the namespace of the live module, whose kernels vLLM has bound to the CPU's.
    code = fresh.expand_batch_to_tokens
    monkeypatch.setattr(mended, code.__name__, FunctionType(code.__code__, vars(mended), argdefs=code.__defaults__))
    monkeypatch.setattr(mended, "apply_top_k_top_p", fresh.apply_top_k_top_p)


def test_upstream_loses_the_expanded_values() -> None:
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((5,), -1.0)
    _expand_kernel_impl(output, X, CUMULATIVE, 0, 1)
    assert output.tolist() == [-1.0] * 5


def test_expansion_by_the_mend() -> None:
    found = sampler.expand_batch_to_tokens(X, CUMULATIVE, 5, replace_from=0, replace_to=1)
    assert found.tolist() == EXPANDED
    assert found.dtype == X.dtype
    whole = torch.tensor([40, 5], dtype=torch.int32)
    assert sampler.expand_batch_to_tokens(whole, torch.tensor([1, 3], dtype=torch.int32), 3).tolist() == [40, 5, 5]


class Metadata:
    """What `apply_sampling_constraints` reads of vLLM's sampling metadata."""

    all_greedy = False

    def __init__(self, temperature: list[float], top_k: list[int] | None) -> None:
        self.temperature = torch.tensor(temperature)
        self.top_k = None if top_k is None else torch.tensor(top_k, dtype=torch.int32)
        self.top_p = None


def constrained(logits: torch.Tensor, drafts: list[int], metadata: Metadata) -> torch.Tensor:
    cumulative = torch.tensor(drafts, dtype=torch.int32).cumsum(0).int()
    found: torch.Tensor = mended.apply_sampling_constraints(logits.clone(), cumulative, metadata)
    return found


LOGITS = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
COOLED = LOGITS / torch.tensor([0.5, 0.5, 2.0])[:, None]


def test_temperature_reaches_every_draft_token() -> None:
    install()
    assert torch.allclose(constrained(LOGITS, [2, 1], Metadata([0.5, 2.0], None)), COOLED)


@pytest.mark.usefixtures("shipped")
def test_temperature_is_lost_without_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    # Uninitialised memory may hold anything, even the right values: have it hold sevens.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, 7))
    found = constrained(LOGITS, [2, 1], Metadata([0.5, 2.0], None))
    assert torch.allclose(found, LOGITS / 7)


def test_top_k_without_draft_tokens() -> None:
    install()
    assert constrained(torch.empty(0, 6), [0, 0], Metadata([1.0, 1.0], [3, 3])).shape == (0, 6)


@pytest.mark.usefixtures("shipped")
def test_top_k_without_draft_tokens_crashes_without_the_mend() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        constrained(torch.empty(0, 6), [0, 0], Metadata([1.0, 1.0], [3, 3]))


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed", lambda: "0.33.0")
    monkeypatch.setattr(mended, "expand_batch_to_tokens", None)
    with pytest.raises(UpstreamMoved, match=r"patches.sampler was written for vLLM 0\.32\.0, found 0\.33\.0"):
        sampler.install()


def test_a_fault_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mended, "expand_batch_to_tokens", None)
    monkeypatch.setattr(sampler, "_loses_result", lambda upstream: False)
    with pytest.raises(UpstreamMoved, match="remove the patch"):
        sampler.install()
