"""A hybrid model on a GPU whose drafts are hardly ever right: long responses, aborted by syncs, have the log-probs of the policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import section_of
from mtpctl.recipe.rollout import SpeculationConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engines import START_S, Loop, gpu_settings
from tests.fakes.hybrid import answers, mismatch
from tests.fakes.toys import QWEN3_5, toy_folder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

CONTEXT, REQUESTS, SYNCS, SCORED = 4096, 64, 4, 4
CONFIG = QWEN3_5 | {"max_position_embeddings": CONTEXT}


def test_rejected_drafts_keep_the_logprobs_of_the_policy_through_aborts(run: Loop, tmp_path: Path) -> None:
    folder = toy_folder(CONFIG, tmp_path / "model", 0, "bf16")
    tensors = load_file(folder / "model.safetensors")
    speculation = SpeculationConfig(num_tokens=3, draft_method="probabilistic", auto=True)
    options = {"additional_config": {"gdn_prefill_backend": "triton"}}
    settings = gpu_settings(folder, speculation=speculation, context=CONTEXT, max_in_flight=REQUESTS, engine_args=options)
    engine = run(VllmEngine.start(settings), START_S)
    shape = shape_of(CONFIG)
    publisher = Publisher(VersionStore(tmp_path / "store"), bucket_bytes=1 << 20, section_of=lambda name: section_of(name, shape))
    prompts = [[3 + (7 * index + place) % 300 for place in range(16)] for index in range(REQUESTS)]

    async def aborted_by_syncs(drafts: int) -> list[Sample]:
        await engine.control_speculation(drafts)
        task = asyncio.ensure_future(answers(engine, prompts, CONTEXT))
        for _ in range(SYNCS):
            await asyncio.sleep(2)
            # The same weights under a new version: one policy scores all tokens.
            await engine.update(publisher.publish(tensors.items(), engine.version + 1), mode="abort")
            await engine.control_speculation(drafts)
        return await task

    try:
        plain, drafted = run(aborted_by_syncs(0), 400), run(aborted_by_syncs(3), 400)
    finally:
        run(engine.shutdown())
    drafts, accepted = (sum(getattr(sample.speculation, name) for sample in drafted) for name in ("drafted", "accepted"))
    assert drafts and accepted < 0.2 * drafts
    assert any(len(sample.version_spans) > 1 for sample in drafted)
    limit = 2 * mismatch(folder, plain[:SCORED], tmp_path / "plain.json")
    assert mismatch(folder, drafted[:SCORED], tmp_path / "drafted.json") < limit
