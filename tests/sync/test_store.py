"""Versions are published atomically, only increase, and are deleted with the store."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mtpctl.cluster import leftovers
from mtpctl.errors import PrerequisiteMissing
from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Manifest, VersionConflict
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import RETAINED_VERSIONS, VersionStore, default_root, store_name
from mtpctl.sync.transports.base import open_reader
from tests.fakes.forked import exit_code
from tests.fakes.full_disk import full_disk


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("model.norm.weight", torch.full((8,), float(value))), ("model.mtp_layers.0.norm.weight", torch.full((4,), float(-value)))]


def publisher(root: Path, **options: object) -> Publisher:
    return Publisher(VersionStore(root), bucket_bytes=1 << 20, **options)  # type: ignore[arg-type]


def test_newest_two_versions_are_retained(tmp_path: Path) -> None:
    publish = publisher(tmp_path / "store").publish
    for version in (1, 2, 5):
        publish(tensors(version), version)
    assert VersionStore(tmp_path / "store").versions() == [2, 5]
    with pytest.raises(VersionConflict, match=r"version 1 is not in .*there are \[2, 5\]"):
        VersionStore(tmp_path / "store").open(1)


def test_a_version_that_is_not_newer_is_refused(tmp_path: Path) -> None:
    store = publisher(tmp_path)
    store.publish(tensors(1), 3)
    for version in (3, 2):
        with pytest.raises(VersionConflict, match=f"version {version} is not newer than the published 3"):
            store.publish(tensors(1), version)
    assert VersionStore(tmp_path).versions() == [3]


def test_a_manifest_is_equal_after_json(tmp_path: Path) -> None:
    written = publisher(tmp_path).publish(tensors(1), 1, checksums=True)
    assert VersionStore(tmp_path).open(1) == written
    assert set(written.sections) == {"target", "draft"}
    assert set(written.sections["target"].checksums) == {"model.norm.weight"}


def test_a_mapped_bucket_outlives_its_version(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    manifest = Publisher(store, bucket_bytes=1 << 20).publish(tensors(7), 1)
    [(bucket, mapped)] = open_reader(manifest.transport, manifest.address).stream("target", manifest.sections["target"].buckets)
    store.discard(1)
    assert mapped[: bucket.entries[0].nbytes].view(torch.float32).tolist() == [7.0] * 8


def _publish_and_die(root: Path) -> None:
    def export() -> object:
        yield from tensors(2)[:1]
        os.kill(os.getpid(), signal.SIGKILL)

    publish = publisher(root)
    publish.publish(tensors(1), 1)
    publish.publish(export(), 2)  # type: ignore[arg-type]


# The child uses a single thread, and is killed.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_publisher_publishes_nothing(tmp_path: Path) -> None:
    assert exit_code(partial(_publish_and_die, tmp_path), 30) == -signal.SIGKILL
    store = VersionStore(tmp_path)
    assert store.versions() == [1]
    assert store.folder(2).exists()
    publisher(tmp_path).publish(tensors(3), 2)
    assert store.versions() == [1, 2]


def test_a_failed_export_leaves_no_files(tmp_path: Path) -> None:
    store = publisher(tmp_path)
    store.publish(tensors(1), 1)

    def export() -> object:
        yield from tensors(2)[:1]
        raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        store.publish(export(), 2)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]


def test_close_deletes_the_store(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "run")
    Publisher(store, bucket_bytes=1 << 20).publish(tensors(1), 1)
    store.close()
    store.close()
    assert not (tmp_path / "run").exists()


def test_a_store_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrerequisiteMissing, match="cannot hold published weights"):
        publisher(tmp_path / "file").publish(tensors(1), 1)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of 3,000 bytes."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr("mtpctl.sync.store.SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(3000, 0, 3000))
    return tmp_path / "shm"


def test_shared_memory_is_used_if_the_kept_versions_and_the_next_one_fit(memory: Path, tmp_path: Path) -> None:
    assert default_root("run", 999, tmp_path) == memory / "mtpctl-run"
    assert default_root("run", 1000, tmp_path) == tmp_path


def test_the_store_never_holds_more_versions_than_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    def watched(self: VersionStore, manifest: Manifest) -> None:
        nonlocal most
        most = max(most, len(list(self.root.glob("v*"))))
        commit(self, manifest)

    commit = VersionStore.commit
    monkeypatch.setattr(VersionStore, "commit", watched)
    publish = publisher(tmp_path / "store").publish
    for version in range(1, 6):
        publish(tensors(version), version)
    assert most == RETAINED_VERSIONS + 1


def test_a_store_of_a_killed_process_is_removed(memory: Path, tmp_path: Path) -> None:
    def leave() -> None:
        store = VersionStore(memory / "mtpctl-run")
        store.claim()
        publisher(store.root).publish(tensors(1), 7)
        change_mark(store.root, pid=1 << 30)

    leave()
    assert not VersionStore(default_root("run", 1, tmp_path)).versions()
    leave()
    assert default_root("run", 1 << 40, tmp_path) == tmp_path
    assert not list(memory.iterdir())


def change_mark(root: Path, **changed: object) -> None:
    owner = json.loads((root / leftovers.MARK).read_text())
    (root / leftovers.MARK).write_text(json.dumps(owner | changed))


def test_a_store_of_another_container_is_not_removed(memory: Path, tmp_path: Path) -> None:
    """Containers that share memory may have run directories with the same path."""
    for place in ("mtpctl-run", f"mtpctl-run-{leftovers.process_namespace()}"):
        root = default_root("run", 1, tmp_path)
        assert root == memory / place
        VersionStore(root).claim()  # again, as a run does
        publisher(root).publish(tensors(1), 7)
        change_mark(root, namespace="another")
    assert default_root("run", 1, tmp_path) == tmp_path
    assert all(VersionStore(root).versions() == [7] for root in memory.iterdir())
    with pytest.raises(PrerequisiteMissing, match="may be in use by another process"):
        VersionStore(root).claim()


def test_a_store_in_the_run_directory_is_always_claimed(memory: Path, tmp_path: Path) -> None:
    """The run resumes in a new container with the same directory."""
    store = VersionStore(tmp_path / "run" / "versions")
    store.claim()
    publisher(store.root).publish(tensors(1), 7)
    change_mark(store.root, namespace="another")
    store.claim()
    assert store.versions() == []


def test_an_interrupted_removal_keeps_the_stores_mark(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = VersionStore(default_root("run", 1, tmp_path))
    publisher(store.root).publish(tensors(1), 7)

    def breaks(folder: Path) -> None:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                path.unlink()
                raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", breaks)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert (store.root / leftovers.MARK).is_file()


def test_several_hosts_use_a_store_on_disk(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.sync.store.on_one_host", lambda: False)
    assert default_root("run", 1, tmp_path) == tmp_path


def test_folders_with_the_same_name_have_different_stores(tmp_path: Path) -> None:
    names = {store_name(tmp_path / place / "run") for place in ("a", "b")}
    assert len(names) == 2 and all(name.startswith("run-") for name in names)


def test_a_manifest_counts_bytes(tmp_path: Path) -> None:
    manifest = publisher(tmp_path).publish(tensors(1), 1)
    assert isinstance(manifest, Manifest)
    assert manifest.nbytes == 8 * 4 + 4 * 4


def test_a_manifest_on_a_full_disk_is_an_error_with_its_folder(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    manifest = publisher(tmp_path).publish(tensors(1), 1)
    folder = store.prepare(2)
    with full_disk(), pytest.raises(PrerequisiteMissing, match=f"^{folder}: cannot hold published weights .*; free space there"):
        store.commit(replace(manifest, version=2))
    assert store.versions() == [1]


@pytest.mark.parametrize(("quantization", "standalone", "folder"), [("fp8", True, "unquantized"), ("fp8", False, ""), ("none", True, "")])
def test_the_logprob_server_loads_unquantized_versions(tmp_path: Path, quantization: str, standalone: bool, folder: str) -> None:
    recipe = Recipe.model_validate({"rollout": {"quantization": quantization}, "logprob": {"standalone": standalone}})
    assert VersionStore(tmp_path).for_logprob(recipe).root == tmp_path / folder
