"""`sync.kv` on a real vLLM: what running and later requests compute again after a weight sync, and with which log-probs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional as F

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import Tensors, random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.mimo_reference import Cache, layer, norm

CONFIG = tiny_config()
PROMPT = [3 + 7 * place % 300 for place in range(100)]
BLOCK = 32
STEP_TOKENS = 64
Kv = Literal["keep", "recompute"]


class Served:
    """An engine, the tensors of its versions, and the tokens that its scheduler schedules for each request in each step."""

    def __init__(self, engine: VllmEngine, store: VersionStore) -> None:
        self.engine, self.store = engine, store
        self.tensors: dict[int, Tensors] = {0: random_tensors(CONFIG, 0)}
        self.scheduled: list[dict[str, int]] = []
        self.scheduler: Any = engine._llm.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        upstream = self.scheduler.schedule

        def schedule(*args: Any) -> Any:
            output = upstream(*args)
            self.scheduled.append(dict(output.num_scheduled_tokens))
            return output

        self.scheduler.schedule = schedule

    def publish(self, seed: int) -> Manifest:
        """A version of random weights. Equal seeds: equal weights."""
        version = max(self.tensors) + 1
        self.tensors[version] = random_tensors(CONFIG, seed)
        return Publisher(self.store, bucket_bytes=1 << 30).publish(self.tensors[version].items(), version, checksums=True)

    def set(self, kv: Kv) -> None:
        self.engine._settings = replace(self.engine._settings, keep_kv=kv == "keep")

    async def running(self, tokens: int) -> Any:
        """The only request of the scheduler, once it has sampled this many tokens."""
        while True:
            for request in self.scheduler.requests.values():
                if request.num_output_tokens >= tokens:
                    return request
            await asyncio.sleep(0)

    def tokens_since(self, step: int) -> list[int]:
        """Tokens that each step since `step` scheduled, all requests together."""
        return [sum(counts.values()) for counts in self.scheduled[step:] if counts]


@pytest.fixture(scope="module")
def served(start_engine: Callable[[VllmSettings], VllmEngine], run: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, random_tensors(CONFIG, 0))
    options = {"enable_prefix_caching": True, "block_size": BLOCK, "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 4}
    store = VersionStore(tmp_path_factory.mktemp("store"))
    yield Served(start_engine(cpu_settings(folder, k=1, engine_args=options)), store)
    store.close()


def request(index: int, prompt: list[int] = PROMPT, max_tokens: int = 60, temperature: float = 1.0) -> GenerationRequest:
    return GenerationRequest(Sample(f"p{index}", "g", list(prompt)), max_tokens, seed=index, temperature=temperature)


def logprobs_with_kept_cache(tokens: list[int], parts: list[tuple[int, Tensors]]) -> torch.Tensor:
    """Log-probs [len(tokens) - 1] in float64 if each part's weights compute the tokens before its end, on the cache of the parts before."""
    caches: list[Cache] = [[] for _ in range(CONFIG["num_hidden_layers"])]
    logits, start = [], 0
    for end, tensors in parts:
        weights = {name: tensor.double() for name, tensor in tensors.items()}
        x = weights["model.embed_tokens.weight"][torch.tensor(tokens[start:end])]
        for number, cache in enumerate(caches):
            x = layer(x, weights, f"model.layers.{number}.", CONFIG, cache)
        logits.append(F.linear(norm(x, weights["model.norm.weight"], CONFIG["rms_norm_eps"]), weights["lm_head.weight"]))
        start = end
    return torch.cat(logits).log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


async def across_sync(served: Served, started: GenerationRequest, after: int, manifest: Manifest) -> tuple[Sample, list[int]]:
    """The response to a request that meets a sync after so many tokens, and the tokens of each step since."""
    task = asyncio.ensure_future(served.engine.generate(started))
    await served.running(after)
    await served.engine.update(manifest)
    step = len(served.scheduled)
    sample = await task
    return sample, served.tokens_since(step)


def assert_logprobs(sample: Sample, expected: torch.Tensor) -> None:
    own = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
    torch.testing.assert_close(own, expected[len(sample.prompt_ids) - 1 :], atol=2e-5, rtol=0)


def test_running_request_continues_without_a_prefill(served: Served, run: Loop) -> None:
    served.set("keep")
    before = served.engine.version
    sample, steps = run(across_sync(served, request(1), 20, served.publish(seed=1)))
    assert max(steps) <= 2, "a token and a draft per step"
    first, second = sample.version_spans
    assert [(span.version, span.stale_kv) for span in (first, second)] == [(before, False), (before + 1, True)]
    cut = len(PROMPT) + first.end - 1
    parts = [(cut, served.tensors[before]), (sample.length, served.tensors[before + 1])]
    expected = logprobs_with_kept_cache(sample.token_ids.tolist(), parts)
    assert_logprobs(sample, expected)
    fresh = reference_logprobs(CONFIG, served.tensors[before + 1], sample.token_ids.tolist())
    assert (fresh - expected)[cut:].abs().mean() > 0.1, "the stale cache matters here"


def test_each_of_two_syncs_leaves_the_cache_before_it(served: Served, run: Loop) -> None:
    served.set("keep")
    before = served.engine.version

    async def syncs() -> Sample:
        task = asyncio.ensure_future(served.engine.generate(request(30)))
        for tokens, seed in ((10, 7), (30, 8)):
            await served.running(tokens)
            await served.engine.update(served.publish(seed))
        return await task

    sample = run(syncs())
    spans = [(span.version, span.stale_kv) for span in sample.version_spans]
    assert spans == [(before, False), (before + 1, True), (before + 2, True)]
    *cuts, _ = [len(PROMPT) + span.end - 1 for span in sample.version_spans]
    ends = [*cuts, sample.length]
    parts = [(end, served.tensors[before + number]) for number, end in enumerate(ends)]
    assert_logprobs(sample, logprobs_with_kept_cache(sample.token_ids.tolist(), parts))


def assert_new_weights_only(sample: Sample, first: int, tensors: Tensors) -> None:
    """The tokens from `first` on have the log-probs of these weights without a stale cache."""
    expected = reference_logprobs(CONFIG, tensors, sample.token_ids.tolist())[len(sample.prompt_ids) - 1 + first :]
    assert len(expected) > 5
    own = torch.tensor(sample.behaviour_logprobs[first:], dtype=torch.float64)
    torch.testing.assert_close(own, expected, atol=2e-5, rtol=0)


def test_request_that_was_preempted_before_a_sync_is_recomputed_in_the_new_era(served: Served, run: Loop) -> None:
    """Its tokens are marked all the same, because the engine core does not report preemptions."""
    served.set("keep")

    async def preempt() -> Sample:
        task = asyncio.ensure_future(served.engine.generate(request(31)))
        preempted = await served.running(20)
        await served.engine.pause("keep")
        served.scheduler.running.remove(preempted)
        served.scheduler._preempt_request(preempted, time.monotonic(), drop_stale_output=True)
        served.scheduler.prev_step_scheduled_req_ids.discard(preempted.request_id)
        await served.engine.update(served.publish(seed=9))
        await served.engine.resume()
        return await task

    sample = run(preempt())
    assert [span.stale_kv for span in sample.version_spans] == [False, True]
    assert_new_weights_only(sample, sample.version_spans[1].start, served.tensors[served.engine.version])


def test_request_continued_after_an_abort_has_no_stale_cache(served: Served, run: Loop) -> None:
    served.set("keep")

    async def abort() -> Sample:
        started = request(32)
        task = asyncio.ensure_future(served.engine.generate(started))
        await served.running(10)
        await served.engine.update(served.publish(seed=10))
        await served.running(20)
        await served.engine.pause("abort")
        await served.engine.resume()
        sample = await task
        assert sample.finish_reason == "abort"
        return await served.engine.generate(replace(started, sample=sample))

    sample = run(abort())
    assert [span.stale_kv for span in sample.version_spans] == [False, True, False]
    assert_new_weights_only(sample, sample.version_spans[2].start, served.tensors[served.engine.version])


def test_running_request_prefills_again_by_default(served: Served, run: Loop) -> None:
    served.set("recompute")
    before = served.engine.version
    sample, steps = run(across_sync(served, request(2), 20, served.publish(seed=2)))
    assert sum(steps[:3]) >= len(PROMPT) + 20 and max(steps) == STEP_TOKENS
    assert [(span.version, span.stale_kv) for span in sample.version_spans] == [(before, False), (before + 1, False)]
    cut = sample.version_spans[0].end
    expected = torch.cat(
        [
            reference_logprobs(CONFIG, served.tensors[before], sample.token_ids.tolist())[: len(PROMPT) - 1 + cut],
            reference_logprobs(CONFIG, served.tensors[before + 1], sample.token_ids.tolist())[len(PROMPT) - 1 + cut :],
        ]
    )
    assert_logprobs(sample, expected)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_later_requests_reuse_only_blocks_of_their_version(served: Served, run: Loop, kv: Kv) -> None:
    """Also of the response: the next turn of a conversation begins with tokens that a running request sampled after the sync."""
    served.set(kv)
    sample, _ = run(across_sync(served, request(3), 20, served.publish(seed=3)))
    turns = [list(PROMPT), (sample.prompt_ids + sample.response_ids).tolist()]
    first, second = (run(served.engine.generate(request(4 + i, turn, 5))) for i, turn in enumerate(turns))
    if kv == "keep":
        assert first.cached_tokens == 0, "the running request's blocks are those of the old weights"
    # Of the last block vLLM's drafter needs the states too, so it is computed again.
    reusable = len(PROMPT) if kv == "keep" else sample.length - 1
    assert second.cached_tokens == (reusable // BLOCK - 1) * BLOCK
    for each in (first, second):
        assert [(span.version, span.stale_kv) for span in each.version_spans] == [(served.engine.version, False)]
        assert_logprobs(each, reference_logprobs(CONFIG, served.tensors[served.engine.version], each.token_ids.tolist()))


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_requests_that_have_no_token_at_a_sync_are_of_the_new_version_alone(served: Served, run: Loop, kv: Kv) -> None:
    """One in the middle of its prefill, one that waits for a slot, and one that has sampled."""
    served.set(kv)
    first = {"keep": 5, "recompute": 6}[kv]  # so that no prompt is in the cache
    prompts = [[first + (7 + i) * place % 300 for place in range(100)] for i in range(5)]

    async def sync() -> list[Sample]:
        tasks = [asyncio.ensure_future(served.engine.generate(request(10 + i, prompt))) for i, prompt in enumerate(prompts)]
        await served.running(1)
        states = [(r.num_output_tokens > 0, r.num_computed_tokens > 0) for r in served.scheduler.requests.values()]
        assert {(True, True), (False, True), (False, False)} <= set(states)
        await served.engine.update(served.publish(seed=4))
        return list(await asyncio.gather(*tasks))

    samples = run(sync())
    new = [sample for sample in samples if len(sample.version_spans) == 1]
    assert len(new) >= 2 and len(new) < len(samples)
    for sample in new:
        assert [(span.version, span.stale_kv) for span in sample.version_spans] == [(served.engine.version, False)]
        assert_logprobs(sample, reference_logprobs(CONFIG, served.tensors[served.engine.version], sample.token_ids.tolist()))


def test_kept_cache_changes_greedy_tokens_only_if_weights_change(served: Served, run: Loop) -> None:
    def tokens(kv: Kv, seed: int) -> list[int]:
        served.set("recompute")
        run(served.engine.update(served.publish(seed=5)))
        served.set(kv)
        sample, _ = run(across_sync(served, request(20, temperature=0.0), 20, served.publish(seed=seed)))
        assert sample.version_spans[0].end >= 20
        return sample.response_ids.tolist()

    served_again = {kv: tokens(kv, 5) for kv in ("keep", "recompute")}
    assert served_again["keep"] == served_again["recompute"]
    changed = {kv: tokens(kv, 6) for kv in ("keep", "recompute")}
    assert changed["keep"][:20] == changed["recompute"][:20] == served_again["keep"][:20]
    assert changed["keep"] != changed["recompute"]
