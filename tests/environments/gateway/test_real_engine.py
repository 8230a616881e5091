"""Random agents before a real vLLM on the CPU: the log-prob of each sampled token is the one that a rescoring of its sample gives.

The agents are those of `tests.environments.gateway.test_fuzz`: several turns, tools, streams, several choices, changed history,
requests that are given up. The engine drafts none to three tokens a step, and gets new weights while they work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

from mtpctl.environments.gateway.server import AnswerReader, Gateway
from mtpctl.environments.gateway.trajectory import ChatBackend
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.web.server import listen
from tests.fakes.chat_families import FAMILIES, tokenizer_of
from tests.fakes.engine_checkpoints import random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.fuzzed_agents import Agent, Work, calls

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONTEXT, TRAJECTORIES, ADMIT_AT_ONCE, UPDATES = 400, 48, 12, 3
FAMILY = next(family for family in FAMILIES if family.name == "qwen2.5")


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_logprobs_are_those_of_a_rescoring(k: int, start_engine: Callable[[VllmSettings], VllmEngine], run: Loop, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILY)
    ends = [tokenizer.inner.convert_tokens_to_ids(token) for token in FAMILY.ends]
    config = tiny_config(vocab_size=len(tokenizer.inner), max_position_embeddings=512, bos_token_id=0, eos_token_id=ends[0])
    versions = {version: random_tensors(config, version) for version in range(UPDATES + 1)}
    tokenizer.inner.save_pretrained(tmp_path / "tokenizer")
    settings = cpu_settings(write_checkpoint(tmp_path / "model", config, versions[0]), k=k, context=CONTEXT)
    settings.args.update(skip_tokenizer_init=False, tokenizer=str(tmp_path / "tokenizer"))  # stop strings are found by the engine
    engine = start_engine(settings)
    model = ChatBackend(engine.generate, tokenizer, AnswerReader(tokenizer, calls), CONTEXT)
    works = [Work(number, False, tools=number % 2 > 0) for number in range(TRAJECTORIES)]
    samples: list[Sample] = []
    finished = 0

    async def updates(store: VersionStore) -> None:
        """New weights, each after a quarter of the trajectories."""
        publisher = Publisher(store, bucket_bytes=1 << 30)
        for version in range(1, UPDATES + 1):
            while finished < version * TRAJECTORIES // (UPDATES + 1):
                await asyncio.sleep(0.01)
            await engine.update(publisher.publish(versions[version].items(), version), mode="keep")

    async def play() -> None:
        nonlocal finished
        room, store = asyncio.Semaphore(ADMIT_AT_ONCE), VersionStore(tmp_path / "store")
        async with Gateway(model, tokenizer, "toy", 6, listen("127.0.0.1", 0)) as gateway:
            transport = httpx.ASGITransport(app=gateway.app)  # type: ignore[arg-type]

            async def one(work: Work) -> None:
                nonlocal finished
                async with room, httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                    first = Sample(f"p{work.number}", "g", [])
                    secret, _ = gateway.open(GenerationRequest(first, 200, stop_token_ids=ends, seed=work.number))
                    await Agent(client, f"/t/{secret}/v1", work, FAMILY, seed=k).run()
                    samples.extend(gateway.close(secret))
                    finished += 1

            await asyncio.gather(updates(store), *map(one, works))
        store.close()

    run(play(), 400)
    worst, tokens = 0.0, 0
    for sample in samples:
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        for span in sample.version_spans:
            scored = reference_logprobs(config, versions[span.version], sample.token_ids.tolist())[len(sample.prompt_ids) - 1 :]
            apart = (torch.tensor(sample.behaviour_logprobs, dtype=torch.float64) - scored).abs()[span.start : span.end]
            here = mask[span.start : span.end]
            tokens += int(here.sum())
            worst = max(worst, float(apart[here].max()) if here.any() else 0.0)
    print(f"k = {k}: {len(samples)} samples, {tokens} sampled tokens, at most {worst:.1e} nats apart")
    assert worst < 1e-5
    drafted = sum(sample.speculation.drafted for sample in samples)
    assert (drafted > 0) == (k > 0)
    # The trajectories were what they are to be: of several turns, streamed, given up, over several versions.
    assert tokens > 20 * TRAJECTORIES and len(samples) > TRAJECTORIES
    assert {span.version for sample in samples for span in sample.version_spans} == set(versions)
    assert any(len(sample.version_spans) > 1 for sample in samples)
    assert any(0 in sample.loss_mask for sample in samples)
    for name in ("streamed", "hung up"):
        assert any(work.counts[name] for work in works), name
