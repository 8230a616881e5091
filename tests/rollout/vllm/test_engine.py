"""A real vLLM on the CPU: its log-probs match its samples through speculation, weight updates and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.errors import UserError
from mtpctl.rollout.protocol import ABORTED, DEADLINE
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.patches.admission import AdmissionBursts
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PlanMismatch, SyncError, VersionConflict
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import update_target
from tests.fakes.engine_checkpoints import Tensors, random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings

CONFIG = tiny_config()
PROMPT = [3, 4, 5, 6, 7]


def request(index: int = 0, max_tokens: int = 40, **options: object) -> GenerationRequest:
    return GenerationRequest(Sample(f"p{index}", "g", list(PROMPT)), max_tokens, seed=index, **options)  # type: ignore[arg-type]


def assert_matches(sample: Sample, weights: Callable[[int], Tensors], temperature: float = 1.0) -> None:
    """Each span's log-probs against a recomputation under the version that it names."""
    assert [span.start for span in sample.version_spans[1:]] == [span.end for span in sample.version_spans[:-1]]
    for span in sample.version_spans:
        full = reference_logprobs(CONFIG, weights(span.version), sample.prompt_ids + sample.response_ids, temperature)
        wanted = full[len(sample.prompt_ids) - 1 :][span.start : span.end]
        result = torch.tensor(sample.behaviour_logprobs[span.start : span.end], dtype=torch.float64)
        torch.testing.assert_close(result, wanted, atol=1e-5, rtol=0)


class Weights:
    """Published versions of random weights; version 0 is what the engine loads."""

    def __init__(self, root: Path) -> None:
        self.store = VersionStore(root)
        self.by_version: dict[int, Tensors] = {0: random_tensors(CONFIG, 0)}
        self.newest = 0

    def publish(self, *, bucket_bytes: int = 1 << 30, **options: object) -> Manifest:
        """The next version, with new random weights."""
        self.newest += 1
        self.by_version[self.newest] = random_tensors(CONFIG, self.newest)
        publisher = Publisher(self.store, bucket_bytes=bucket_bytes, **options)  # type: ignore[arg-type]
        return publisher.publish(self.by_version[self.newest].items(), self.newest, checksums=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weights]:
    result = Weights(tmp_path_factory.mktemp("store"))
    yield result
    result.store.close()


@pytest.fixture(scope="module")
def engine(start_engine: Callable[[VllmSettings], VllmEngine], weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, weights.by_version[0])
    return start_engine(cpu_settings(folder, k=1))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_policy(engine: VllmEngine, run: Loop, weights: Weights, temperature: float) -> None:
    async def many() -> list[Sample]:
        return await asyncio.gather(*(engine.generate(request(index, temperature=temperature)) for index in range(8)))

    for sample in run(many()):
        assert sample.finish_reason == "length"
        assert len(sample.response_ids) == len(sample.behaviour_logprobs) == len(sample.loss_mask) == 40
        assert sample.speculation.drafted == sample.speculation.steps > 0
        assert sample.speculation.accepted == sample.speculation.accepted_by_position[0]
        assert_matches(sample, weights.by_version.__getitem__, temperature)


def test_logprobs_travel_with_the_end_of_a_response(engine: VllmEngine, run: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """But after each token if a request has not disabled streaming, also next to other requests."""
    processor, observed = engine._llm.output_processor, []
    upstream = processor.process_outputs

    def process(outputs: list[Any], *rest: Any, **options: Any) -> Any:
        observed.extend((o.request_id, len(o.new_token_ids), o.finish_reason, o.new_logprobs) for o in outputs)
        return upstream(outputs, *rest, **options)

    monkeypatch.setattr(processor, "process_outputs", process)
    at_once = engine._sampling_params(request(7), 40).clone()
    at_once.extra_args = None

    async def both() -> tuple[Sample, Any]:
        late = asyncio.ensure_future(engine.generate(request(7)))
        async for output in engine._llm.generate({"prompt_token_ids": list(PROMPT)}, at_once, "at once"):
            whole = output.outputs[0]
        return await late, whole

    late, whole = run(both())
    assert late.response_ids.tolist() == list(whole.token_ids)
    assert late.behaviour_logprobs == pytest.approx(list(whole.logprobs.logprobs), abs=1e-5)
    of_late, of_other = ([each for each in observed if each[0].startswith("at once") is other] for other in (False, True))
    assert [each[3] is None for each in of_late] == [each[2] is None for each in of_late] and len(of_late) > 15
    assert len(of_late[-1][3].logprobs) == sum(each[1] for each in of_late) == 40
    assert of_other and all(len(each[3].logprobs) == each[1] for each in of_other)


def test_delayed_requests_get_the_same_responses(engine: VllmEngine, run: Loop, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """160 requests for 64 slots: the first cycles hold back for different numbers of steps, whatever that is worth."""
    hold, holds = AdmissionBursts.should_hold, []

    def count(self: AdmissionBursts, now: float, running: int, waiting: int) -> bool:
        holds_back = hold(self, now, running, waiting)
        holds.append(holds_back)
        return holds_back

    async def many() -> list[Sample]:
        return await asyncio.gather(*(engine.generate(request(200 + index, 5 + index % 30)) for index in range(160)))

    run(engine.set_immediate_admission(True))
    monkeypatch.setattr(AdmissionBursts, "should_hold", count)
    at_once = run(many())
    assert not holds
    run(engine.set_immediate_admission(False))
    held_back = run(many())
    assert sum(holds) >= 5
    assert [sample.response_ids.tolist() for sample in held_back] == [sample.response_ids.tolist() for sample in at_once]
    for sample in held_back[::20]:
        assert_matches(sample, weights.by_version.__getitem__)


def test_other_requests_keep_their_own_logprobs(engine: VllmEngine, run: Loop) -> None:
    """Several responses, log-probs of the prompt and of the most likely tokens: alone, and next to requests with deferred log-probs."""
    from vllm import SamplingParams

    wanted = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=30, logprobs=3, prompt_logprobs=2, detokenize=False)

    async def ask(name: str) -> Any:
        async for output in engine._llm.generate({"prompt_token_ids": list(PROMPT)}, wanted.clone(), name):
            last = output
        return last

    async def together() -> tuple[Any, list[Sample]]:
        tasks = [asyncio.ensure_future(engine.generate(request(70 + index, 10 * index + 10))) for index in range(4)]
        return await ask("together"), await asyncio.gather(*tasks)

    alone, (among, late) = run(ask("alone")), run(together())
    assert len(among.outputs) == 2 and [len(sample.behaviour_logprobs) for sample in late] == [10, 20, 30, 40]
    pairs = [(alone.prompt_logprobs[1:], among.prompt_logprobs[1:])]
    for one, other in zip(alone.outputs, among.outputs, strict=True):
        assert list(one.token_ids) == list(other.token_ids) and len(other.logprobs) == 30
        pairs.append((one.logprobs, other.logprobs))
    for ones, others in pairs:
        for place, again in zip(ones, others, strict=True):
            assert len(again) >= 2 and {t: e.rank for t, e in place.items()} == {t: e.rank for t, e in again.items()}
            assert [e.logprob for e in place.values()] == pytest.approx([e.logprob for e in again.values()], abs=1e-4)
    assert not engine._llm.engine_core.engine_core.scheduler.mtpctl_pending_logprobs


def test_a_seed_repeats_a_response(engine: VllmEngine, run: Loop) -> None:
    first, second, other = (run(engine.generate(request(seed_index))) for seed_index in (11, 11, 12))
    assert first.response_ids == second.response_ids != other.response_ids


def test_a_stop_token_ends_a_response(engine: VllmEngine, run: Loop) -> None:
    whole = run(engine.generate(request(3)))
    stop = whole.response_ids[7]
    stopped = run(engine.generate(request(3, stop_token_ids=[stop])))
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids == whole.response_ids[: whole.response_ids.index(stop) + 1]


def test_a_full_context_ends_a_response(engine: VllmEngine, run: Loop) -> None:
    sample = run(engine.generate(request(0, max_tokens=1000)))
    assert sample.finish_reason == "length"
    assert sample.length == 256


def test_prompt_beyond_the_context_is_a_user_error(engine: VllmEngine, run: Loop) -> None:
    with pytest.raises(UserError, match=r"has 256 tokens, the context has 256; raise rollout.context"):
        run(engine.generate(GenerationRequest(Sample("p", "g", [3] * 256), 8)))


def test_deadline_keeps_the_generated_tokens(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    run(engine.pause("keep"))
    task = asyncio.ensure_future(engine.generate(request(0, deadline_s=0.2)), loop=run._loop)
    late = run(task)
    run(engine.resume())
    assert late.finish_reason == DEADLINE
    assert late.response_ids.tolist() == []


def test_aborted_response_is_continued(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    async def cut() -> Sample:
        task = asyncio.ensure_future(engine.generate(request(5, max_tokens=200)))
        await asyncio.sleep(0.1)
        await engine.pause("abort")
        partial = await task
        await engine.resume()
        return partial

    partial = run(cut())
    assert partial.finish_reason == ABORTED
    retained = list(partial.response_ids)
    assert 0 < len(retained) < 200
    first = partial.speculation
    assert len(retained) - 2 <= first.steps + first.accepted <= len(retained) + 2, "an aborted chunk is counted too"
    whole = run(engine.generate(GenerationRequest(partial, 200, seed=5)))
    assert whole.response_ids[: len(retained)].tolist() == retained
    assert len(whole.response_ids) == 200
    assert whole.finish_reason == "length"
    assert_matches(whole, weights.by_version.__getitem__)


def test_delayed_abort_keeps_the_response_consistent(
    engine: VllmEngine, run: Loop, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core in another process continues meanwhile: one response ends by itself, another one begins."""
    core = engine._llm.engine_core
    run(engine.generate(request(50, max_tokens=1)))  # The first step of an engine creates what is read here.
    retained, ask = core.engine_core.scheduler.mtpctl_pending_logprobs, core.call_utility_async

    async def cut() -> list[Sample]:
        short, long = (asyncio.ensure_future(engine.generate(request(51 + tokens, max_tokens=tokens))) for tokens in (30, 200))
        begun: list[asyncio.Future[Sample]] = []

        async def late(method: str, *args: Any) -> Any:
            answer = await ask(method, *args)
            monkeypatch.undo()
            begun.append(asyncio.ensure_future(engine.generate(request(53, max_tokens=200))))
            while not short.done():
                await asyncio.sleep(0)
            return answer

        while len(retained) < 2 or min(len(each.tokens) for each in retained.values()) < 3:
            await asyncio.sleep(0)
        monkeypatch.setattr(core, "call_utility_async", late)
        await engine.pause("abort")
        await engine.resume()
        return await asyncio.gather(short, long, *begun)

    short, long, newest = run(cut())
    assert (short.finish_reason, len(short.response_ids)) == ("length", 30)
    assert long.finish_reason == newest.finish_reason == ABORTED
    assert 3 <= len(long.response_ids) < 200
    for sample in (short, long, newest):
        assert len(sample.response_ids) == len(sample.behaviour_logprobs) == len(sample.loss_mask)
        assert_matches(sample, weights.by_version.__getitem__)
        run(engine.generate(GenerationRequest(sample, 200)))
        assert len(sample.response_ids) == 200
        assert_matches(sample, weights.by_version.__getitem__)
    assert run(engine.health()).alive and not retained


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 4096])
def test_an_update_during_generation(engine: VllmEngine, run: Loop, weights: Weights, bucket_bytes: int) -> None:
    async def update() -> list[Sample]:
        tasks = [asyncio.ensure_future(engine.generate(request(index, max_tokens=80))) for index in range(4)]
        await asyncio.sleep(0.1)
        before = engine.version
        manifest = weights.publish(bucket_bytes=bucket_bytes)
        assert len(manifest.sections["target"].buckets) == (1 if bucket_bytes > 1 << 20 else pytest.approx(600, abs=200))
        report = await engine.update(manifest, verify=True)
        assert (report.version, report.verified) == (before + 1, len(weights.by_version[0]))
        return await asyncio.gather(*tasks)

    for sample in run(update()):
        assert [span.version for span in sample.version_spans] == [weights.newest - 1, weights.newest]
        assert_matches(sample, weights.by_version.__getitem__)


def assert_labelled(sample: Sample, weights: Weights, version: int, neighbour: int) -> None:
    """All tokens are of one version, and their log-probs are its own and not those of its neighbour."""
    assert [(span.start, span.end, span.version) for span in sample.version_spans] == [(0, 40, version)]
    assert_matches(sample, weights.by_version.__getitem__)
    with pytest.raises(AssertionError):
        assert_matches(sample, lambda _: weights.by_version[neighbour])


def test_a_sync_between_submission_and_first_token_labels_every_token_with_the_new_version(
    engine: VllmEngine, run: Loop, weights: Weights
) -> None:
    async def sync() -> Sample:
        await engine.pause("keep")
        task = asyncio.ensure_future(engine.generate(request(61)))
        while not engine._in_flight:
            await asyncio.sleep(0)
        await engine.update(weights.publish(), verify=True)
        await engine.resume()
        return await task

    before = engine.version
    assert_labelled(run(sync()), weights, before + 1, before)


def test_a_sync_between_last_token_and_answer_labels_no_token_with_the_new_version(
    engine: VllmEngine, run: Loop, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine._llm.engine_core
    outputs_of_core = core.get_output_async
    updated = asyncio.Event()

    async def late() -> Any:
        outputs = await outputs_of_core()
        if any(each.finish_reason is not None for each in outputs.outputs) and not updated.is_set():
            await engine.update(weights.publish(), verify=True)
            updated.set()
        return outputs

    monkeypatch.setattr(core, "get_output_async", late)
    before = engine.version
    sample = run(engine.generate(request(62)))
    assert updated.is_set() and engine.version == before + 1
    assert_labelled(sample, weights, before, before + 1)


def test_an_update_of_the_drafter_alone_changes_no_policy(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    run(engine.update(weights.publish(), verify=True))
    last = weights.newest
    before = run(engine.checksums())
    run(engine.update(weights.publish(sections=["draft"]), verify=True))
    after = run(engine.checksums())
    assert {name for name in before if before[name] != after[name]} == {name for name in weights.by_version[0] if ".mtp_layers." in name}
    sample = run(engine.generate(request(21)))
    assert [span.version for span in sample.version_spans] == [weights.newest]
    assert_matches(sample, lambda version: weights.by_version[last])
    run(engine.update(weights.publish()))


BROKEN = {
    "shape": (lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}), r"model.norm.weight has shape \(64,\).*\(128,\)"),
    "dtype": (
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].half()}),
        "lm_head.weight is sent as float16, but the engine stores lm_head.weight as float32",
    ),
    "missing": (lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"), "qkv_proj.weight is filled only in part"),
    "missing draft": (
        lambda tensors: tensors.pop("model.mtp_layers.0.final_layernorm.weight"),
        "final_layernorm.weight is filled by no tensor",
    ),
    "stranger": (lambda tensors: tensors.update({"model.more.weight": torch.ones(3)}), "model.more.weight resolves to nothing"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_weights_that_do_not_fit_change_nothing(engine: VllmEngine, run: Loop, weights: Weights, tmp_path: Path, broken: str) -> None:
    change, message = BROKEN[broken]
    live, version = run(engine.checksums()), engine.version
    tensors = random_tensors(CONFIG, 99)
    change(tensors)
    manifest = Publisher(VersionStore(tmp_path), bucket_bytes=1 << 30).publish(tensors.items(), version + 1)
    with pytest.raises(PlanMismatch, match=message):
        run(engine.update(manifest))
    assert (run(engine.checksums()), engine.version) == (live, version)
    assert_matches(run(engine.generate(request(31))), weights.by_version.__getitem__)


def test_version_must_increase(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    with pytest.raises(VersionConflict, match="is not newer than the live"):
        run(engine.update(weights.store.open(engine.version)))


def test_one_update_at_a_time(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    async def twice() -> None:
        manifest = weights.publish()
        await engine.pause("keep")
        await engine.begin_update(manifest, manifest.version, "target")
        with pytest.raises(VersionConflict, match=f"an update to version {manifest.version} is under way"):
            await engine.update(manifest)
        await engine.abort_update()
        await engine.resume()
        await engine.update(manifest, verify=True)

    run(twice())
    assert engine.version == weights.newest


def test_weights_change_only_while_paused(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    manifest = weights.publish()
    with pytest.raises(SyncError, match="only while generation is paused"):
        run(engine.begin_update(manifest, manifest.version, "target"))
    run(engine.update(manifest))


def test_a_broken_off_update_returns_to_the_version_before(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    live, version = run(engine.checksums()), engine.version
    manifest = weights.publish(bucket_bytes=4096)
    lost = VersionStore(weights.store.root).folder(manifest.version) / f"target-{40:05d}.bin"
    lost.unlink()
    with pytest.raises(SyncError, match="bucket 40 of section target cannot be read"):
        run(engine.update(manifest))
    assert (run(engine.checksums()), engine.version) == (live, version)
    assert_matches(run(engine.generate(request(41))), weights.by_version.__getitem__)
    run(engine.update(weights.publish(), verify=True))


def test_a_step_takes_as_many_prompt_tokens_as_in_offline_generation(engine: VllmEngine) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    tokens, _ = EngineArgs.get_batch_defaults(1)
    result = engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    assert result == tokens[UsageContext.LLM_CLASS] > tokens[UsageContext.OPENAI_API_SERVER]


def test_engine_implements_the_weight_target_protocol(engine: VllmEngine, run: Loop, weights: Weights) -> None:
    async def drive() -> int:
        await engine.pause("wait")
        report = await update_target(engine, weights.publish(), verify=True)
        await engine.resume()
        return report.verified

    assert run(drive()) == len(weights.by_version[0])


def test_unsupported_head_size_is_rejected_before_loading(run: Loop, tmp_path: Path) -> None:
    config = tiny_config(num_attention_heads=8, num_key_value_heads=4)
    folder = write_checkpoint(tmp_path, config, random_tensors(config, 0))
    with pytest.raises(UserError, match=r"model: on a CPU vLLM has no attention for heads of 16; use a model with 32, 64, "):
        run(VllmEngine.start(cpu_settings(folder)))


def test_dead_engine_reports_the_first_error_with_a_message(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_failure", "")
    error = RuntimeError()
    error.__cause__ = ValueError("no room")
    assert str(engine._mark_failed(error)) == "ValueError: no room"
