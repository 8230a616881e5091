"""Weights from a version store in a replica: converted, verified against the sent ones, applied or discarded as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.cluster.object_store import ObjectStore
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.families.tensors import section_of
from mtpctl.logprob.protocol import ScoreRequest
from mtpctl.logprob.replica import Replica
from mtpctl.logprob.weights import VersionedWeights
from mtpctl.sync.protocol import Manifest, PlanMismatch, SyncError, TargetDirty, VersionConflict
from mtpctl.sync.remote import URL_FIELD, delete_cache, find_cache
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import update_target
from tests.fakes.logprob_ranks import Loop, serve

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors(engine: Any, folder: Path) -> Iterator[Tensors]:
    """The weights that the engine starts with, and has again afterwards."""
    engine.load(folder)
    yield load_file(folder / "model.safetensors")
    engine.load(folder)


@pytest.fixture(scope="module")
def others(other_folder: Path) -> Tensors:
    return load_file(other_folder / "model.safetensors")


@pytest.fixture
def publish(tmp_path: Path, folder: Path) -> Callable[..., Manifest]:
    """Publishes tensors as a version. Buckets are small, so that the embedding is split and q, k and v travel apart."""
    shape = HfFolder.open(folder).shape
    store = VersionStore(tmp_path / "versions")

    def make(version: int, tensors: Tensors, sections: tuple[str, ...] = ("target", "draft")) -> Manifest:
        publisher = Publisher(store, bucket_bytes=20_000, sections=sections, section_of=lambda name: section_of(name, shape))  # type: ignore[arg-type]
        return publisher.publish(iter(tensors.items()), version, checksums=True)

    make.store = store  # type: ignore[attr-defined]
    return make


IDS = [(7 * i) % 300 for i in range(60)]


async def logprobs(replica: Replica, version: int) -> torch.Tensor:
    (scored,) = await replica.score([ScoreRequest(IDS, mtp=True)], version)
    assert scored.version == version
    return torch.tensor([*scored.logprobs, *[x for x in scored.drafts[0].logprobs if x is not None]])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_batch_gets_the_same_numbers_from_the_server_as_from_the_trainers_recompute(
    temperature: float, run: Loop, engine: Any, tensors: Tensors, replica: Any
) -> None:
    """To the bit: the engine's pass over a batch, and the server's over its samples as they come."""
    from mtpctl.trainer.batch import Sequence

    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 200, (24,), generator=generator).tolist()
    batch = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in lengths]

    async def ask() -> None:
        server = await serve(lambda _: asyncio.sleep(0, replica()), tokens_per_batch=300)
        answers = await asyncio.gather(*(server.score(ScoreRequest(ids, len(ids) - 4, temperature=temperature)) for ids in batch))
        recomputed = engine.score([Sequence(ids, len(ids) - 4, [1] * 4) for ids in batch], temperature=temperature)
        assert [answer.logprobs for answer in answers] == [scores.logprobs for scores in recomputed]
        assert [answer.entropy for answer in answers] == [scores.entropy for scores in recomputed]
        await server.close()

    run(ask())


def test_update_equals_loading_the_weights(
    run: Loop, engine: Any, tensors: Tensors, others: Tensors, other_folder: Path, publish: Any, replica: Any
) -> None:
    engine.load(other_folder)
    loaded = run(logprobs(replica(), 0))
    engine.load(engine.folder.path)
    one = replica()
    before = run(logprobs(one, 0))
    report = run(update_target(one, publish(1, others), verify=True))
    assert report.verified == len(others) and one.versions == [1]
    assert run(logprobs(one, 1)).equal(loaded) and (loaded - before).abs().max() > 1
    run(update_target(one, publish(2, tensors), verify=True))
    assert run(logprobs(one, 2)).equal(before)


def test_host_of_a_replica_keeps_only_the_current_version_from_object_storage(
    run: Loop, folder: Path, tensors: Tensors, others: Tensors, tmp_path: Path, replica: Any
) -> None:
    """A host without an engine, whose downloads only the replica can delete."""
    url, shape, one = f"file://{tmp_path}/bucket", HfFolder.open(folder).shape, replica()
    store = VersionStore(tmp_path / "versions", ObjectStore(url, URL_FIELD))
    publisher = Publisher(store, bucket_bytes=20_000, section_of=lambda name: section_of(name, shape))
    try:
        for version, weights in ((1, others), (2, tensors), (3, others)):
            run(update_target(one, publisher.publish(iter(weights.items()), version, checksums=True), verify=True))
            downloads = find_cache(url)
            assert downloads is not None and [path.name[:9] for path in downloads.glob("v*")] == [f"v{version:08d}"]
    finally:
        delete_cache(url)


def test_update_of_the_target_does_not_change_the_draft(run: Loop, tensors: Tensors, others: Tensors, publish: Any, replica: Any) -> None:
    one = replica(keep_previous=True)
    run(update_target(one, publish(1, others, ("target",))))
    result = run(one.checksums())
    from mtpctl.sync.checksums import checksum

    for name, tensor in tensors.items():
        assert result[name] == checksum(tensor if ".mtp_layers." in name else others[name])


@pytest.mark.parametrize("keep_previous", [False, True])
def test_changes_are_written_into_the_current_weights(
    keep_previous: bool, run: Loop, engine: Any, tensors: Tensors, others: Tensors, folder: Path, tmp_path: Path, replica: Any
) -> None:
    """Of parts of a packed layer, of the drafter alone, of nothing, and by a replica that missed two versions."""
    shape = HfFolder.open(folder).shape
    publisher = Publisher(
        VersionStore(tmp_path / "changes"), bucket_bytes=20_000, section_of=lambda name: section_of(name, shape), delta=True
    )
    one = replica(keep_previous=keep_previous)
    generator = torch.Generator().manual_seed(0)
    weights = {name: tensor.clone() for name, tensor in others.items()}
    parts = [lambda name: True, lambda name: "k_proj" in name or "up_proj" in name, lambda name: ".mtp_layers." in name, lambda name: False]
    answers = {}
    for version in range(1, 6):
        manifest = publisher.publish(iter(weights.items()), version, checksums=True)
        assert manifest.base == (version - 1 or None)
        report = run(update_target(one, manifest, verify=True))
        assert report.verified == len(weights) and one.versions == ([version, version - 1] if keep_previous else [version])
        answers[version] = run(logprobs(one, version))
        if keep_previous and version > 1:
            assert run(logprobs(one, version - 1)).equal(answers[version - 1])
        for name, tensor in weights.items():
            if version < 5 and parts[version - 1](name):
                mask = torch.rand(tensor.shape, generator=generator) < 0.02
                tensor[mask] = -2 * tensor[mask]
    assert not answers[2].equal(answers[1]) and answers[5].equal(answers[4])
    engine.load(folder)
    late = replica(keep_previous=keep_previous)
    run(update_target(late, manifest, verify=True))
    assert late.versions[0] == 5 and run(logprobs(late, 5)).equal(answers[5])


def test_previous_version_is_retained_with_keep_previous(run: Loop, tensors: Tensors, others: Tensors, publish: Any, replica: Any) -> None:
    one = replica(keep_previous=True)
    before = run(logprobs(one, 0))
    run(update_target(one, publish(1, others)))
    after = run(logprobs(one, 1))
    assert one.versions == [1, 0]
    assert run(logprobs(one, 0)).equal(before) and run(logprobs(one, 1)).equal(after)
    run(update_target(one, publish(2, tensors)))
    assert one.versions == [2, 1]
    assert run(logprobs(one, 1)).equal(after) and run(logprobs(one, 2)).equal(before)
    with pytest.raises(VersionConflict):
        run(logprobs(one, 0))


def test_a_server_answers_under_the_pinned_version(run: Loop, tensors: Tensors, others: Tensors, publish: Any, replica: Any) -> None:
    async def ask() -> None:
        one = replica(keep_previous=True)
        server = await serve(lambda _: asyncio.sleep(0, one))
        old = await server.score(ScoreRequest(IDS))
        tasks = [asyncio.create_task(server.score(ScoreRequest(IDS))) for _ in range(64)]
        await asyncio.sleep(0)
        await server.update(publish(1, others), verify=True)
        new = await server.score(ScoreRequest(IDS, at_least=1))
        assert old.version == 0 and new.version == 1 and old.logprobs != new.logprobs
        for answer in await asyncio.gather(*tasks):
            expected = {0: old, 1: new}[answer.version].logprobs
            assert answer.logprobs == expected
        pinned = await server.score(ScoreRequest(IDS, version=0))
        assert pinned.version == 0 and pinned.logprobs == old.logprobs
        await server.close()

    run(ask())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(2)}), "not a tensor of the served model"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), "has shape"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.bfloat16)}), "is bfloat16"),
    ],
)
def test_mismatched_weights_are_rejected_before_writing(
    change: Any, message: str, run: Loop, tensors: Tensors, others: Tensors, publish: Any, replica: Any
) -> None:
    one = replica()
    before = run(logprobs(one, 0))
    wrong = dict(others)
    change(wrong)
    with pytest.raises(PlanMismatch, match=message):
        run(update_target(one, publish(1, wrong)))
    assert one.versions == [0] and run(logprobs(one, 0)).equal(before)
    run(update_target(one, publish(2, others), verify=True))


@pytest.mark.parametrize("keep_previous", [False, True])
def test_interrupted_update_is_aborted(
    keep_previous: bool, run: Loop, tensors: Tensors, others: Tensors, publish: Any, replica: Any
) -> None:
    one = replica(keep_previous=keep_previous)
    before = run(logprobs(one, 0))
    manifest = publish(1, others)
    bucket = manifest.sections["draft"].buckets[1]
    (Path(manifest.address) / f"draft-{bucket.index:05d}.bin").unlink()
    if keep_previous:
        with pytest.raises(SyncError):
            run(update_target(one, manifest))
        assert one.versions == [0] and run(logprobs(one, 0)).equal(before)
        run(update_target(one, publish(2, others), verify=True))
    else:
        with pytest.raises(TargetDirty, match="parts of version 1"):
            run(update_target(one, manifest))


def test_version_that_does_not_increase_is_rejected(run: Loop, tensors: Tensors, publish: Any, replica: Any) -> None:
    one = replica()
    manifest = publish(3, tensors)
    run(update_target(one, manifest))
    with pytest.raises(VersionConflict):
        run(update_target(one, manifest))
    assert one.version == 3


def test_a_mixed_replica_is_replaced_by_one_at_the_published_version(
    run: Loop, tensors: Tensors, others: Tensors, publish: Any, replica: Any
) -> None:
    async def ask() -> None:
        started: list[Replica] = []

        async def start(_: int) -> Replica:
            started.append(replica())
            return started[-1]

        server = await serve(start, store=publish.store)
        await server.update(publish(1, others))
        broken = publish(2, tensors)
        path = next(Path(broken.address).glob("draft-*.bin"))
        content = path.read_bytes()
        path.unlink()
        await server.update(broken)
        path.write_bytes(content)
        answer = await server.score(ScoreRequest(IDS))
        assert answer.version == 2 and len(started) == 2 and server.replicas.num_restarts == 1
        await server.close()

    run(ask())


@pytest.mark.parametrize("keep_previous", [False, True])
def test_a_buffer_is_a_weight_like_others(keep_previous: bool) -> None:
    """A router's bias is one."""
    module = torch.nn.BatchNorm1d(2)
    stored = VersionedWeights(module, 0, keep_previous=keep_previous)
    stored.begin(1)
    stored.destination(module.running_mean).fill_(7)  # type: ignore[arg-type]
    stored.commit()
    assert module.running_mean.tolist() == [7, 7]  # type: ignore[union-attr, operator]
    if keep_previous:
        with stored.using(0):
            assert module.running_mean.tolist() == [0, 0]  # type: ignore[union-attr, operator]
