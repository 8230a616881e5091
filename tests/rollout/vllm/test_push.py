"""A real vLLM on the CPU that receives weights and adapters from a sender in another process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PlanMismatch, SyncError
from mtpctl.sync.sender import Publisher, Sender
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import cancel
from mtpctl.sync.update import cancel_on_error
from tests.fakes import adapters
from tests.fakes.engine_checkpoints import random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.engines import run as run
from tests.fakes.engines import start_engine as start_engine
from tests.fakes.pushing import CONTEXT, Die, Receiver, send_version

CONFIG = tiny_config(vocab_size=256)
PROMPT = [3, 4, 5, 6, 7]
RANK = 4
PEFT = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 16,
    "target_modules": ["o_proj", "down_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}
ADAPTED = {"self_attn.o_proj": (128, 128), "mlp.down_proj": (256, 128)}


def _send(pipe: Any, root: Path, transport: str, bucket_bytes: int) -> None:
    sender = Sender(VersionStore(root), transport, "cpu", host="127.0.0.1", deadline_s=30.0, bucket_bytes=bucket_bytes)
    while (order := pipe.recv()) is not None:
        seed, version, fault, members = order
        tensors = random_tensors(CONFIG, seed)
        sections: tuple[str, ...] = ("target", "draft")
        ordered = [item for section in sections for item in tensors.items() if sender.section_of(item[0]) == section]
        send_version(pipe, sender, version, members, ordered, sending=_until(fault, ordered))
    sender.close()


def _until(fault: str, ordered: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """An export that, with a fault, ends halfway: in an error, or with its process."""
    half = len(ordered) // 2
    yield from ordered[:half]
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if not fault:
        yield from ordered[half:]


class Pushing:
    """A trainer's process, as far as its weights go."""

    def __init__(self, root: Path, transport: str, bucket_bytes: int) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_send, args=(theirs, root, transport, bucket_bytes), daemon=True)
        self._process.start()

    def announce(self, seed: int, version: int, *, fault: str = "", members: tuple[str, ...] = ("engine",)) -> Any:
        self._pipe.send((seed, version, fault, members))
        return self._pipe.recv()

    def sent(self) -> Any:
        assert self._pipe.poll(40)
        return self._pipe.recv()

    def end(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(10)


@pytest.fixture(scope="module")
def engine(start_engine: Callable[[VllmSettings], VllmEngine], tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, random_tensors(CONFIG, 0))
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    return start_engine(cpu_settings(folder, k=1, engine_args=lora))


@pytest.fixture(params=["nccl", "ipc"])
def pushing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pushing]:
    result = Pushing(tmp_path, request.param, 64 << 10)
    yield result
    result.end()


def request(index: int, tokens: int = 60) -> GenerationRequest:
    return GenerationRequest(Sample(f"p{index}", "g", list(PROMPT)), tokens, temperature=1.0)


def assert_policies(sample: Sample, policies: dict[int, dict[str, torch.Tensor]], atol: float = 1e-5) -> None:
    """Every token has the log-prob of the weights that its span names."""
    for span in sample.version_spans:
        full = reference_logprobs(CONFIG, policies[span.version], sample.prompt_ids + sample.response_ids, 1.0)
        wanted = full[len(sample.prompt_ids) - 1 :][span.start : span.end]
        result = torch.tensor(sample.behaviour_logprobs[span.start : span.end], dtype=torch.float64)
        torch.testing.assert_close(result, wanted, atol=atol, rtol=0)


def assert_matches(sample: Sample, seeds: dict[int, int]) -> None:
    assert_policies(sample, {span.version: random_tensors(CONFIG, seeds[span.version]) for span in sample.version_spans})


def test_weights_are_pushed_during_generation_and_after_a_fault(engine: VllmEngine, run: Loop, pushing: Pushing) -> None:
    base = engine.version
    seeds = {base: 0 if base == 0 else 1, base + 1: 2, base + 2: 1}

    async def push(version: int, **options: Any) -> Any:
        manifest = await asyncio.to_thread(pushing.announce, seeds[version], version, **options)
        return await cancel_on_error(manifest, engine.update(manifest, verify=True))

    async def during() -> list[Sample]:
        manifest = await asyncio.to_thread(pushing.announce, seeds[base + 1], base + 1)
        tasks = [asyncio.ensure_future(engine.generate(request(index, 150))) for index in range(3)]
        await asyncio.sleep(0.05)
        report = await cancel_on_error(manifest, engine.update(manifest, verify=True))
        assert report.verified == len(random_tensors(CONFIG, 0))
        return await asyncio.gather(*tasks)

    samples = run(during())
    assert pushing.sent().nbytes > 0
    for sample in samples:
        assert [span.version for span in sample.version_spans] == [base, base + 1]
        assert_matches(sample, seeds)
    live = run(engine.checksums())
    with pytest.raises(SyncError, match="gave up"):
        run(push(base + 2, fault="ends early"))
    assert "ended without" in pushing.sent()
    assert (run(engine.checksums()), engine.version) == (live, base + 1), "what had come was taken back, from the store"
    assert run(push(base + 2)).version == base + 2
    assert pushing.sent().nbytes > 0
    assert_matches(run(engine.generate(request(9))), seeds)


def test_kill_during_a_bucket_leaves_one_version(engine: VllmEngine, run: Loop, pushing: Pushing) -> None:
    base = engine.version

    async def push(version: int, doomed: Receiver | None = None, **options: Any) -> Any:
        members = ("engine",) if doomed is None else ("engine", "doomed")
        manifest = await asyncio.to_thread(pushing.announce, 1, version, members=members, **options)
        if doomed is not None:
            doomed.take(manifest)
            # In a thread: the engine holds up the loop that it shares with this test until the transfer ends.
            Thread(target=send, args=(manifest, doomed)).start()
        return await cancel_on_error(manifest, engine.update(manifest, verify=True))

    def send(manifest: Manifest, doomed: Receiver) -> None:
        doomed.process.join()
        cancel(manifest, "a receiver of the weights gave up: it was killed")

    assert run(push(base + 1)).version == base + 1
    assert pushing.sent().nbytes > 0
    live = run(engine.checksums())
    with pytest.raises(SyncError):
        run(push(base + 2, Receiver(Die(bucket=3))))
    assert "SyncError" in pushing.sent()
    assert (run(engine.checksums()), engine.version) == (live, base + 1)
    assert run(push(base + 2)).version == base + 2, "the next attempt is without it"
    assert pushing.sent().nbytes > 0
    with pytest.raises(SyncError):
        run(push(base + 3, fault="killed"))
    assert (run(engine.checksums()), engine.version) == (live, base + 2)
    assert_matches(run(engine.generate(request(9))), {base + 2: 1})


def adapter(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for layer in range(2):
        for name, (width, height) in ADAPTED.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            result[f"{at}.lora_A.weight"] = 0.3 * torch.randn(RANK, width, generator=generator)
            result[f"{at}.lora_B.weight"] = 0.3 * torch.randn(height, RANK, generator=generator)
    return result


def merged(seed: int, adapter_seed: int) -> dict[str, torch.Tensor]:
    """The model with the adapter's product added, which is what the adapter means."""
    tensors, delta = random_tensors(CONFIG, seed), adapter(adapter_seed)
    for name in [name for name in delta if ".lora_A." in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        product = delta[name.replace("lora_A", "lora_B")].double() @ delta[name].double()
        tensors[target] = (tensors[target].double() + PEFT["lora_alpha"] / RANK * product).to(tensors[target].dtype)
    return tensors


def seed_beneath(engine: VllmEngine, run: Loop) -> int:
    """Of the target's weights: those it started with, or those that the tests above leave behind."""
    return 1 if "lm_head.weight" in run(engine.checksums()) else 0


def test_requests_in_flight_continue_with_new_adapters(engine: VllmEngine, run: Loop, tmp_path: Path) -> None:
    seed, base = seed_beneath(engine, run), engine.version
    options: dict[str, Any] = {"sections": ["adapter", "target", "draft"], "section_of": adapters.section_of, "config": {"adapter": PEFT}}
    publisher = Publisher(VersionStore(tmp_path), bucket_bytes=64 << 10, **options)

    async def during() -> list[Sample]:
        tasks = [asyncio.ensure_future(engine.generate(request(index, 200))) for index in range(3)]
        # The first over none, the second over one whose folder goes away with it; each with the weights beneath it, and without.
        for version, sections in ((1, ("adapter", "target", "draft")), (2, ("adapter", "draft")), (3, ("adapter", "target", "draft"))):
            await asyncio.sleep(0.05)
            publisher.next_sections = sections
            tensors = adapter(10 + version) | random_tensors(CONFIG, seed)
            await engine.update(publisher.publish(tensors.items(), base + version, checksums=True), verify=True)
        return await asyncio.gather(*tasks)

    policies = {base: random_tensors(CONFIG, seed)} | {base + version: merged(seed, 10 + version) for version in (1, 2, 3)}
    for sample in run(during()):
        assert [span.version for span in sample.version_spans] == [base, base + 1, base + 2, base + 3]
        assert_policies(sample, policies, 1e-4)


def test_adapter_sent_in_many_buckets_replaces_the_previous_one(engine: VllmEngine, run: Loop, tmp_path: Path) -> None:
    seed = seed_beneath(engine, run)
    base = {name: value for name, value in run(engine.checksums()).items() if not name.startswith(ADAPTER_PREFIX)}
    store = VersionStore(tmp_path)
    publisher = Publisher(store, bucket_bytes=1024, sections=["adapter"], section_of=lambda _: "adapter", config={"adapter": PEFT})
    roots = []
    for drawn in (11, 12):
        manifest = publisher.publish(adapter(drawn).items(), engine.version + 1, checksums=True)
        assert len(manifest.sections["adapter"].buckets) > 10
        assert run(engine.update(manifest, verify=True)).verified == len(adapter(drawn))
        sample = run(engine.generate(request(drawn, 20)))
        full = reference_logprobs(CONFIG, merged(seed, drawn), sample.prompt_ids + sample.response_ids, 1.0)
        result = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
        torch.testing.assert_close(result, full[len(PROMPT) - 1 :], atol=1e-4, rtol=0)
        assert engine._target.adapter is not None
        roots.append(engine._target.adapter)
    assert not roots[0].exists() and roots[1].exists(), "the one before is removed, once"
    assert run(engine._llm.engine_core.list_loras_async()) == {1}
    after = run(engine.checksums())
    assert all(after[name] == value for name, value in base.items()), "the weights beneath stay"


def test_after_an_adapter_that_vllm_refuses_tokens_are_named_after_the_one_before(
    engine: VllmEngine, run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, load = seed_beneath(engine, run), engine._llm.add_lora
    options: dict[str, Any] = {"sections": ["adapter"], "section_of": lambda _: "adapter", "config": {"adapter": PEFT}}
    publisher = Publisher(VersionStore(tmp_path), bucket_bytes=64 << 10, **options)
    live = engine.version + 1
    run(engine.update(publisher.publish(adapter(13).items(), live, checksums=True), verify=True))

    async def refuse(requested: Any) -> Any:
        if requested.lora_path.endswith(f"{live + 1:08d}"):
            raise ValueError("no room")
        return await load(requested)

    monkeypatch.setattr(engine._llm, "add_lora", refuse)
    with pytest.raises(SyncError, match=f"the engine refuses the adapter of version {live + 1}: no room"):
        run(engine.update(publisher.publish(adapter(14).items(), live + 1)))
    sample = run(engine.generate(request(13, 20)))
    assert [span.version for span in sample.version_spans] == [engine.version] == [live]
    assert_policies(sample, {live: merged(seed, 13)}, 1e-4)


def test_section_without_an_adapter_is_rejected(engine: VllmEngine, run: Loop, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sections": ["adapter"], "section_of": lambda _: "adapter", "config": {"adapter": PEFT}}
    publisher = Publisher(VersionStore(tmp_path), bucket_bytes=1024, **options)
    manifest = publisher.publish([("model.norm.weight", torch.zeros(4))], engine.version + 1)
    with pytest.raises(PlanMismatch, match=r"this is not a LoRA adapter: model\.norm\.weight"):
        run(engine.update(manifest))
