"""Weights and adapters are synced to GPUs: a sender process, engines on one GPU and two, a log-prob replica, and the KV cache.

Without a GPU, `pytest -m gpu` runs the same steps between CPU processes, except for those that need a GPU.
On hosts without NVLink multicast set NCCL_NVLS_ENABLE=0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.logprob.protocol import ScoreRequest
from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
from mtpctl.logprob.replica import Replica
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.packing import spec_of
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.sender import Sender
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import TransferStats
from mtpctl.sync.update import SyncReport, cancel_on_error, update_target
from tests.fakes import adapters
from tests.fakes.engine_checkpoints import Tensors, reference_logprobs, write_checkpoint
from tests.fakes.engines import Loop
from tests.fakes.engines import run as run
from tests.fakes.engines import start_engine as start_engine
from tests.fakes.logprob_ranks import LocalRanks
from tests.fakes.pushed_gpus import BASE, CONFIG, GPUS, KV_BYTES, settings, weights
from tests.fakes.pushing import CONTEXT, send_version

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BOUND = 0.05 if GPUS else 1e-5
"""Bound on the mean difference to the exact log-probs of the same weights, from rounding in bf16 or fp32. Two versions of this policy
differ by 1 on average."""
PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, BASE)


def version_of(number: int) -> Tensors:
    """The expected weights of a version: the base, the version's adapter, and its MTP layers."""
    drafts = {name: tensor for name, tensor in weights(number).items() if ".mtp_layers." in name}
    return adapters.adapter(BASE, number) | BASE | drafts


def _send(pipe: Any, root: Path, transport: str, gpu: int) -> None:
    options: dict[str, Any] = {"bucket_bytes": 64 << 10, "sections": ("adapter", "target", "draft"), "section_of": adapters.section_of}
    device = f"cuda:{gpu}" if GPUS else "cpu"
    if GPUS:
        torch.cuda.set_device(gpu)
    config = {"adapter": adapters.config()}
    sender = Sender(VersionStore(root), transport, device, host="127.0.0.1", deadline_s=60.0, config=config, **options)
    sender.plan(spec_of(name, tensor) for name, tensor in version_of(1).items())
    while (order := pipe.recv()) is not None:
        version, sections, members = order
        sender.next_sections = sections
        tensors = {name: tensor.to(device) for name, tensor in version_of(version).items()}
        ordered = [item for section in sections for item in tensors.items() if adapters.section_of(item[0]) == section]
        send_version(pipe, sender, version, members, ordered)
    sender.close()


class Trainer:
    """The sender's process on one GPU."""

    def __init__(self, root: Path, transport: str, gpu: int = 0) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_send, args=(theirs, root, transport, gpu), daemon=True)
        self._process.start()

    def announce(self, version: int, sections: tuple[str, ...], members: list[str]) -> Manifest:
        self._pipe.send((version, sections, members))
        result = self.receive()
        assert isinstance(result, Manifest), result
        return result

    def receive(self) -> Any:
        assert self._pipe.poll(120)
        return self._pipe.recv()

    def end(self) -> None:
        """End the process. Fails if it waits for a receiver."""
        if self._process.exitcode == 0:
            return
        self._pipe.send(None)
        self._process.join(60)
        try:
            assert self._process.exitcode == 0, f"the sender's exit code is {self._process.exitcode}; None: it did not end"
        finally:
            self._process.kill()


FIRST, LATER = ("adapter", "target", "draft"), ("adapter", "draft")


@pytest.fixture(scope="module")
def engine(start_engine: Callable[[VllmSettings], Any], folder: Path) -> VllmEngine:
    result: VllmEngine = start_engine(settings(folder, adapter=LoraConfig(rank=adapters.RANK), release_kv=bool(GPUS)))
    return result


@pytest.fixture
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    transport, gpu = getattr(request, "param", ("ipc", 0))
    result = Trainer(tmp_path / "store", transport, gpu)
    yield result
    result.end()


def request(index: int, tokens: int = 40, prompt: list[int] = PROMPT) -> GenerationRequest:
    return GenerationRequest(Sample(f"p{index}", "g", list(prompt)), tokens, temperature=1.0)


def assert_matches(samples: list[Sample], policies: dict[int, Tensors]) -> None:
    """Check that every token has the log-prob of the version of its span."""
    means, differences = [], []
    for sample in samples:
        for span in sample.version_spans:
            full = reference_logprobs(CONFIG, policies[span.version], sample.prompt_ids + sample.response_ids)
            wanted = full[len(sample.prompt_ids) - 1 :][span.start : span.end]
            off = (torch.tensor(sample.behaviour_logprobs[span.start : span.end], dtype=torch.float64) - wanted).abs()
            means.append(float(off.mean()))
            first = next((at for at, value in enumerate(off.tolist(), span.start) if value > 4 * BOUND), None)
            said = "none" if first is None else f"token {first} the first"
            differences.append(
                f"{sample.prompt_id} version {span.version}, tokens {span.start} to {span.end}: {means[-1]:.2g} in the mean, {said} far off"
            )
    assert max(means) < BOUND, "\n".join(differences)


def policy(number: int) -> Tensors:
    return adapters.merged(BASE, adapters.adapter(BASE, number))


def push(run: Loop, engine: VllmEngine, trainer: Trainer, sections: tuple[str, ...], ranks: int) -> SyncReport:
    """Sync the engine's next version, and compare all checksums."""
    version = engine.version + 1
    manifest = trainer.announce(version, sections, [f"engine {rank}" for rank in range(ranks)])
    report: SyncReport = run(cancel_on_error(manifest, engine.update(manifest, verify=True, deadline_s=60)))
    sent = trainer.receive()
    assert isinstance(sent, TransferStats), sent
    stored = [name for name in version_of(version) if adapters.section_of(name) in sections]
    assert (report.version, report.verified) == (version, len(stored))
    return report


def test_an_adapter_is_pushed_while_requests_are_in_flight(engine: VllmEngine, run: Loop, trainer: Trainer) -> None:
    push(run, engine, trainer, FIRST, 1)
    first = engine.version

    async def during() -> list[Sample]:
        tasks = [asyncio.ensure_future(engine.generate(request(index, 200))) for index in range(8)]
        await asyncio.sleep(0.3 if GPUS else 0.05)
        manifest = await asyncio.to_thread(trainer.announce, first + 1, LATER, ["engine 0"])
        await cancel_on_error(manifest, engine.update(manifest, verify=True, deadline_s=60))
        return await asyncio.gather(*tasks)

    samples = run(during())
    assert isinstance(trainer.receive(), TransferStats)
    assert {span.version for sample in samples for span in sample.version_spans} == {first, first + 1}
    assert_matches(samples, {first: policy(first), first + 1: policy(first + 1)})
    result = run(engine.generate(request(99)))
    assert result.speculation.drafted > 0
    assert_matches([result], {first + 1: policy(first + 1)})


@pytest.mark.skipif(GPUS == 0, reason="the KV cache lies on a GPU")
def test_the_kv_cache_is_released_during_a_sync(engine: VllmEngine, run: Loop, tmp_path: Path) -> None:
    def used() -> int:
        return int(run(engine._llm.collective_rpc("mtpctl_memory"))[0]["used"])

    # Long enough for whole blocks, so that the prefix cache holds them.
    prompt = [3 + i % 200 for i in range(100)]
    before = run(engine.generate(request(0, prompt=prompt)))
    full = used()
    for mode in ("keep", "abort", "wait"):
        run(engine.pause(mode))  # type: ignore[arg-type]
        assert full - used() > 0.9 * KV_BYTES
        run(engine.resume())
        assert abs(full - used()) < 0.1 * KV_BYTES
    assert_matches([before], {engine.version: policy(engine.version) if engine.version else BASE})

    sends = adapters.publisher(tmp_path)

    async def during() -> list[Sample]:
        tasks = [asyncio.ensure_future(engine.generate(request(index, 100, prompt))) for index in range(8)]
        await asyncio.sleep(0.3)
        manifest = sends.publish(version_of(engine.version + 1).items(), engine.version + 1, checksums=True)
        await engine.update(manifest, verify=True)
        return await asyncio.gather(*tasks)

    old = engine.version
    samples = run(during())
    after = run(engine.generate(request(9, prompt=prompt)))
    assert_matches([*samples, after], {old: policy(old) if old else BASE, old + 1: policy(old + 1)})


TP_GPUS = [
    pytest.param(("ipc", 0), id="ipc", marks=pytest.mark.skipif(GPUS == 1, reason="needs two GPUs")),
    pytest.param(
        ("nccl", 2), id="nccl", marks=pytest.mark.skipif(GPUS in (1, 2), reason="needs a GPU for the sender and two for the engine")
    ),
]


@pytest.fixture(scope="module")
def wide_engine(start_engine: Callable[[VllmSettings], Any], folder: Path) -> VllmEngine:
    result: VllmEngine = start_engine(settings(folder, tp=2, adapter=LoraConfig(rank=adapters.RANK)))
    return result


@pytest.mark.parametrize("trainer", TP_GPUS, indirect=True)
def test_both_ranks_of_an_engine_receive_their_shards(wide_engine: VllmEngine, run: Loop, trainer: Trainer) -> None:
    for sections in (FIRST, LATER):
        push(run, wide_engine, trainer, sections, 2)
        assert_matches([run(wide_engine.generate(request(0)))], {wide_engine.version: policy(wide_engine.version)})


REPLICA_GPUS = [
    pytest.param(("ipc", 0), id="ipc"),
    pytest.param(("nccl", 1), id="nccl", marks=pytest.mark.skipif(GPUS == 1, reason="needs two GPUs")),
]


@pytest.mark.parametrize("trainer", REPLICA_GPUS, indirect=True)
def test_weights_are_pushed_to_a_log_prob_replica(folder: Path, run: Loop, trainer: Trainer) -> None:
    config = ReplicaConfig(
        str(folder), ParallelConfig(), "bf16" if GPUS else "fp32", MtpConfig(), KernelsConfig(), tokens_per_batch=1024, threads=1
    )
    rank = ScoreRank(config, 0)
    replica = Replica(LocalRanks(rank), rank.build(""), 0, keep_previous=False)
    ids = PROMPT + [(11 * i) % 250 for i in range(80)]

    async def scored(version: int) -> list[float]:
        (result,) = await replica.score([ScoreRequest(ids)], version)
        return list(result.logprobs)

    try:
        for version, sections in ((1, FIRST), (2, LATER)):
            manifest = trainer.announce(version, sections, ["log-prob 0"])
            report = run(cancel_on_error(manifest, update_target(replica, manifest, verify=True, deadline_s=60)))
            assert isinstance(trainer.receive(), TransferStats)
            assert report.verified == len([name for name in version_of(version) if adapters.section_of(name) in sections])
            wanted = reference_logprobs(CONFIG, policy(version), ids)
            off = (torch.tensor(run(scored(version)), dtype=torch.float64) - wanted[-len(ids) + 1 :]).abs()
            assert float(off.mean()) < BOUND
        trainer.end()  # while the replica is still in the communicator
    finally:
        run(replica.end())
        rank.engine.close()
