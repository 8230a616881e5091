"""Versions that are sent as changes: bit-equal at every version, whatever is lost, repeated or late, and small."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.sync.engine_target import EngineTarget
from mtpctl.sync.packing import spec_of
from mtpctl.sync.protocol import Manifest, SyncError, TargetDirty, VersionConflict
from mtpctl.sync.receiver import UpdateStep
from mtpctl.sync.sender import Publisher, Sender
from mtpctl.sync.store import COMPLETE, VersionStore
from mtpctl.sync.update import cancel_on_error, update_target
from tests.fakes import adapters
from tests.fakes.delta_syncs import Trainer, new_engine, same, split, update
from tests.fakes.module_engine import ModuleEngine, Tensors, engine_target
from tests.fakes.pushing import CONTEXT, in_process


def publisher(root: Path, *, bucket_bytes: int = 3000) -> Publisher:
    return Publisher(VersionStore(root), bucket_bytes=bucket_bytes, delta=True)


class Faults:
    """Loses, repeats and reorders steps of an update. `count`: how many so far."""

    def __init__(self, seed: int, kinds: Sequence[str] = ("lost", "repeated", "late", "out of order")) -> None:
        self.random, self.count, self.on, self.kinds = random.Random(seed), 0, False, kinds
        self._before: UpdateStep | None = None

    def __call__(self, step: UpdateStep) -> list[UpdateStep]:
        before, self._before = self._before, step
        if not self.on or self.random.random() > 0.1:
            return [step]
        self.on = False
        self.count += 1
        kind = self.random.choice(self.kinds)
        if kind == "lost":
            return []
        if kind == "repeated":
            return [step, step]
        if kind == "late" and before is not None and before["action"] == "buckets":
            return [before, step]
        if step["action"] == "buckets" and step["count"] > 1:
            return [UpdateStep(**{**step, "first": step["first"] + 1, "count": step["count"] - 1}), step]  # type: ignore[typeddict-item]
        return []


def test_200_syncs_with_lost_and_repeated_steps_apply_exact_versions(tmp_path: Path) -> None:
    """Steps are lost, repeated and reordered; whole manifests too; receivers restart. What a receiver calls its version is that version."""
    trainer, publish = Trainer(), publisher(tmp_path)
    start, chance, faults = trainer.copy(), random.Random(1), Faults(2)
    history: dict[int, Tensors] = {0: start}
    manifests: dict[int, Manifest] = {}
    engine = ModuleEngine(*split(start))
    target = engine_target(engine)
    counts = dict.fromkeys(["refused", "dirty", "behind", "repeated", "restarted", "complete"], 0)
    for version in range(1, 201):
        history[version] = trainer.step()
        manifests[version] = publish.publish(history[version].items(), version, checksums=True)
        counts["complete"] += (VersionStore(tmp_path).folder(version) / COMPLETE).exists()
        event = chance.random()
        if event < 0.1:
            counts["behind"] += 1  # its manifest is lost
            continue
        if event < 0.2:
            counts["restarted"] += 1
            engine = new_engine(version)
            target = engine_target(engine)
        engine.disturb, faults.on = faults, chance.random() < 0.5
        try:
            update(target, manifests[version], verify=True)
        except SyncError:
            counts["refused"] += 1
        except TargetDirty:
            # As in any update, an engine that fails before its first complete version is restarted.
            counts["dirty"] += 1
            engine = new_engine(version)
            target = engine_target(engine)
        faults.on = False
        assert not target.dirty
        assert not target.version or same(engine.live(), history[target.version]), (version, target.version)
        if chance.random() < 0.2 and target.version == version:
            counts["repeated"] += 1
            for older in (version, version - 1):
                with pytest.raises(VersionConflict):
                    update(target, manifests.get(older, manifests[version]))
            assert target.version == version and same(engine.live(), history[version])
    update(target, publish.publish(trainer.step().items(), 201, checksums=True), verify=True)
    assert target.version == 201 and same(engine.live(), trainer.copy())
    assert min(counts.values()) >= 1 and faults.count >= 20, (counts, faults.count)


def _send_versions(pipe: Any, root: Path) -> None:
    """The sender's process. Orders: `step`; `send` with a version and its receivers; `persist`."""
    trainer = Trainer()
    sender = Sender(VersionStore(root), "nccl", "cpu", host="127.0.0.1", deadline_s=30.0, delta=True, bucket_bytes=3000)
    sender.plan(spec_of(name, tensor) for name, tensor in trainer.tensors.items())
    tensors = trainer.copy()
    while (order := pipe.recv()) is not None:
        match order:
            case "step":
                tensors = trainer.step()
            case ("send", version, members):
                pipe.send(sender.announce(version, members, sender.plan_from(tensors.items(), checksums=True)))
                try:
                    sender.send(tensors.items())
                    pipe.send("")
                except SyncError as error:
                    pipe.send(str(error))
            case "persist":
                sender.persist(tensors.items())
                sender.flush()
                pipe.send("")
    sender.close()


def push(pipe: Any, target: EngineTarget, manifest: Manifest) -> bool:
    """Apply a version that is being sent. Returns False if a participant failed."""
    applied = True
    try:
        asyncio.run(cancel_on_error(manifest, update_target(target, manifest, verify=True, deadline_s=30)))
    except (SyncError, TargetDirty):
        applied = False
    assert pipe.poll(60)
    return not pipe.recv() and applied


def test_200_pushed_syncs_with_lost_steps_apply_exact_versions(tmp_path: Path) -> None:
    """As a run does it: a failed transfer is repeated, and a receiver that restarts is first updated from the store.

    Steps are lost. A repeated one would wait for its deadline, because both ends of a pushed transfer take part in each.
    """
    trainer, chance, faults = Trainer(), random.Random(3), Faults(4, ("lost",))
    pipe, theirs = CONTEXT.Pipe()
    process = in_process(_send_versions, theirs, tmp_path)
    engine, started = new_engine(), 0
    target, before = engine_target(engine), trainer.copy()
    counts = dict.fromkeys(["failed", "restarted", "complete", "changes"], 0)
    for version in range(1, 201):
        pipe.send("step")
        tensors, applied = trainer.step(), False
        if chance.random() < 0.1 and version > 1:
            started += 1
            engine = new_engine(version)
            target = engine_target(engine)
            update(target, VersionStore(tmp_path).open(version - 1))
            counts["restarted"] += 1
        for attempt in range(2):
            pipe.send(("send", version, [f"engine {started}"]))
            assert pipe.poll(60)
            manifest = pipe.recv()
            assert manifest.base is None or (manifest.base == version - 1 == target.version and not attempt)
            engine.disturb, faults.on = faults, not attempt and chance.random() < 0.5
            applied = push(pipe, target, manifest)
            faults.on = False
            if applied:
                break
            counts["failed"] += 1
            if target.dirty:
                started += 1
                engine = new_engine(version)
                target = engine_target(engine)
            assert target.version < version and (not target.version or same(engine.live(), before))
        assert applied and target.version == version and same(engine.live(), tensors)
        counts["complete" if manifest.base is None else "changes"] += 1
        pipe.send("persist")
        assert pipe.poll(60) and not pipe.recv()
        before = tensors
    pipe.send(None)
    process.join(20)
    assert min(counts.values()) >= 10 and counts["changes"] > 100, counts


def test_one_percent_of_changes_needs_at_most_4_percent_of_the_bytes(tmp_path: Path) -> None:
    trainer, publish = Trainer(), publisher(tmp_path)
    trainer.tensors["model.layers.0.w"] = torch.randn(1000, 700, generator=trainer.generator).bfloat16()
    full = publish.publish(trainer.copy().items(), 1).nbytes
    for version in (2, 3):
        manifest = publish.publish(trainer.step().items(), version)
        assert manifest.base == version - 1
        assert manifest.nbytes <= 0.04 * full
        written = sum(file.stat().st_size for file in VersionStore(tmp_path).folder(version).glob("*.bin"))
        assert written == manifest.nbytes


def test_unchanged_weights_are_a_version_without_bytes(tmp_path: Path) -> None:
    trainer, publish = Trainer(), publisher(tmp_path)
    engine = new_engine()
    target = engine_target(engine)
    update(target, publish.publish(trainer.copy().items(), 1, checksums=True), verify=True)
    manifest = publish.publish(trainer.copy().items(), 2, checksums=True)
    assert (manifest.base, manifest.nbytes) == (1, 0)
    report = update(target, manifest, verify=True)
    assert (target.version, report.verified) == (2, len(trainer.tensors))
    assert same(engine.live(), trainer.copy())


def test_a_version_is_complete_if_changes_are_not_smaller(tmp_path: Path) -> None:
    trainer, publish = Trainer(share=1.0, dtype=torch.float32), publisher(tmp_path)
    publish.publish(trainer.copy().items(), 1)
    manifest = publish.publish(trainer.step().items(), 2)
    assert manifest.base is None and all(plan.delta is None for plan in manifest.sections.values())
    plan = manifest.sections["target"]
    assert plan.num_changed is not None and plan.num_changed / plan.numel > 0.5
    trainer.share = 0.01
    assert publish.publish(trainer.step().items(), 3).base == 2


def test_a_receiver_that_starts_late_reads_at_most_one_and_a_half_versions(tmp_path: Path) -> None:
    trainer, publish, store = Trainer(share=0.05), publisher(tmp_path), VersionStore(tmp_path)
    full = publish.publish(trainer.copy().items(), 1).nbytes
    longest = most = 0
    for version in range(2, 30):
        assert publish.publish(trainer.step().items(), version).base == version - 1, "others never need a complete version"
        chain = store.chain(version)
        assert chain[0].base is None and [m.version for m in chain] == list(range(chain[0].version, version + 1))
        assert sum(manifest.nbytes for manifest in chain) < 1.5 * full
        assert store.versions()[0] == store.chain(version - 1)[0].version, "nothing else is stored"
        longest = max(longest, len(chain))
        most = max(most, sum(file.stat().st_size for file in tmp_path.rglob("*.bin")))
        engine = new_engine()
        update(engine_target(engine), store.open(version))
        assert same(engine.live(), trainer.copy())
    assert longest > 2 and most < 3.5 * full


def test_a_failed_export_is_followed_by_a_complete_version(tmp_path: Path) -> None:
    trainer, publish = Trainer(), publisher(tmp_path)
    publish.publish(trainer.copy().items(), 1)

    def export() -> Any:
        yield from list(trainer.step().items())[:2]
        raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        publish.publish(export(), 2)
    manifest = publish.publish(trainer.step().items(), 2)
    assert manifest.base is None
    engine = new_engine()
    update(engine_target(engine), manifest)
    assert same(engine.live(), trainer.copy())


def test_changes_are_found_in_any_order_of_the_export(tmp_path: Path) -> None:
    """The previous values of the next tensor in the plan are fetched early, but another tensor may follow."""
    trainer, publish, engine = Trainer(), publisher(tmp_path), new_engine()
    target, shuffles = engine_target(engine), random.Random(0)
    for version in range(1, 9):
        tensors = trainer.step()
        order = list(tensors)
        if version > 1:
            shuffles.shuffle(order)
        manifest = publish.publish([(name, tensors[name]) for name in order], version, checksums=True)
        assert manifest.base == (version - 1 or None)
        update(target, manifest, verify=True)
        assert same(engine.live(), tensors)


def test_a_receiver_without_the_store_refuses_changes_since_another_version(tmp_path: Path) -> None:
    trainer, publish = Trainer(), publisher(tmp_path)
    target = engine_target(new_engine())
    for version in (1, 2):
        manifest = publish.publish(trainer.step().items(), version)
    with pytest.raises(VersionConflict, match="contains only the changes since version 1, but this engine has none"):
        asyncio.run(target.begin_update(manifest, 2, "target"))
    assert target.version == 0


def test_an_adapter_is_sent_as_changes_with_its_drafter(tmp_path: Path) -> None:
    base = {name: tensor.bfloat16() for name, tensor in adapters.BASE.items()}
    options: Any = {"sections": ("adapter", "target", "draft"), "section_of": adapters.section_of, "config": {"adapter": adapters.config()}}
    publish = Publisher(VersionStore(tmp_path), bucket_bytes=3000, delta=True, **options)
    target_tensors, draft = split(base)
    engine = ModuleEngine({name: torch.zeros_like(tensor) for name, tensor in target_tensors.items()}, draft)
    target = engine_target(engine)
    adapter = adapters.adapter(base, 1)
    update(target, publish.publish([*adapter.items(), *base.items()], 1, checksums=True), verify=True)
    publish.next_sections = ("adapter", "draft")
    generator = torch.Generator().manual_seed(3)
    for version in (2, 3):
        for tensor in [*adapter.values(), *draft.values()]:
            mask = torch.rand(tensor.shape, generator=generator) < 0.02
            tensor[mask] = -tensor[mask]
        manifest = publish.publish([*adapter.items(), *draft.items()], version, checksums=True)
        assert manifest.base == version - 1 and set(manifest.sections) == {"adapter", "draft"}
        update(target, manifest, verify=True)
        assert same(engine.live(), {**target_tensors, **draft, **adapter})
        sent = asyncio.run(target.checksums(*manifest.sections)).keys()
        assert sent == adapter.keys() | draft.keys(), "no checksums of the base weights, which take seconds for a large model"
        assert asyncio.run(target.checksums()).keys() == sent | target_tensors.keys()
    target.close()
