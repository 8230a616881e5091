"""A hybrid model with a prefix cache: responses that share a long prompt have the log-probs of the policy, and the hits are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.families.reading import shape_of
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.routes import RouteShape
from mtpctl.samples import Sample
from tests.fakes.engines import START_S, Loop, cpu_settings, gpu_settings
from tests.fakes.hybrid import answers, mismatch
from tests.fakes.toys import QWEN3_5_MOE, toy_folder

pytestmark = pytest.mark.timeout(900)

CONFIG = QWEN3_5_MOE | {"max_position_embeddings": 4096}
ROUTES = RouteShape.of(shape_of(CONFIG))
SHARED, CONTEXT, GROUP = 1200, 1400, 8
"""The prompt has two of a CPU's blocks of 512 tokens."""
CASES = [
    # vLLM's cache of recurrent states has no CPU kernel for drafts.
    pytest.param("cpu", 0, marks=pytest.mark.slow),
    pytest.param("cuda", 0, marks=pytest.mark.gpu),
    pytest.param("cuda", 2, marks=pytest.mark.gpu),
]


def responses(folder: Path, run: Loop, device: str, drafts: int, *, cached: bool) -> list[Sample]:
    """Two groups of one prompt, one after the other: the second one finds what the first has read."""
    assert ROUTES is not None
    if device == "cpu":
        options = {"enable_prefix_caching": cached}
        settings = cpu_settings(folder, k=drafts, precision="bf16", context=CONTEXT, routes=ROUTES.layers, engine_args=options)
    else:
        gpu = {"enable_prefix_caching": cached, "additional_config": {"gdn_prefill_backend": "triton"}}
        settings = gpu_settings(folder, k=drafts, context=CONTEXT, engine_args=gpu)
    prompt = [3 + 7 * place % 300 for place in range(SHARED)]
    engine = run(VllmEngine.start(settings), START_S)
    try:
        return [sample for _ in range(2) for sample in run(answers(engine, [prompt] * GROUP, 40), 200)]
    finally:
        run(engine.shutdown())


@pytest.mark.parametrize(("device", "drafts"), CASES)
def test_cached_prompts_of_a_hybrid_model_keep_the_logprobs_of_the_policy(device: str, drafts: int, run: Loop, tmp_path: Path) -> None:
    folder = toy_folder(CONFIG, tmp_path / "model", 0, "bf16")
    plain, cached = (responses(folder, run, device, drafts, cached=each) for each in (False, True))
    assert all(sample.cached_tokens is None for sample in plain)
    hits = [sample.cached_tokens or 0 for sample in cached]
    print(f"{device}, {drafts} drafts: {sum(hits) / sum(len(sample.prompt_ids) for sample in cached):.0%} of prompt tokens from the cache")
    assert sum(hits) > 0
    limit = 2 * mismatch(folder, plain, tmp_path / "plain.json")
    assert mismatch(folder, cached, tmp_path / "cached.json") < limit
