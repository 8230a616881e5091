"""Versions in object storage: bit-equal, downloaded once per host and before they are needed, and removed with the run."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from mtpctl.cluster import object_store
from mtpctl.cluster.leftovers import SHARED_MEMORY
from mtpctl.cluster.object_store import ObjectMissing, ObjectStore, StoreFailed
from mtpctl.sync import remote
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.remote import URL_FIELD, compute_digests, open_cache, prefetch
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import COMPLETE, VersionStore
from mtpctl.sync.update import manifests_to
from tests.fakes.delta_syncs import Trainer, new_engine, same, update
from tests.fakes.module_engine import engine_target
from tests.fakes.s3_server import BUCKET, serving


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VersionStore]:
    """A store whose buckets are in another folder."""
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    versions = VersionStore(tmp_path / "store", ObjectStore(f"file://{tmp_path}/bucket", URL_FIELD))
    versions.claim()
    yield versions
    versions.close()


def publisher(store: VersionStore, *, delta: bool = True) -> Publisher:
    return Publisher(store, bucket_bytes=3000, delta=delta)


def finished(publish: Publisher) -> None:
    if publish._upload is not None:
        publish._upload._thread.join(30)
        publish._upload.check()


@pytest.mark.parametrize("delta", [False, True])
def test_versions_in_storage_are_bit_equal(store: VersionStore, delta: bool) -> None:
    trainer, publish, engine = Trainer(), publisher(store, delta=delta), new_engine()
    target = engine_target(engine)
    full = 0
    for version in range(1, 6):
        manifest = publish.publish(trainer.step().items(), version, checksums=True)
        assert (manifest.transport, manifest.base) == ("storage", version - 1 if delta and version > 1 else None)
        update(target, manifest, verify=True)
        assert same(engine.live(), trainer.copy())
        full = full or manifest.nbytes
        assert manifest.nbytes < 0.2 * full or not delta or version == 1
    assert not list(SHARED_MEMORY.glob(f"mtpctl-upload-{publish._token}*")), "nothing is left on the sender's host"


def test_a_late_receiver_begins_with_all_buckets(store: VersionStore, tmp_path: Path) -> None:
    trainer, publish = Trainer(share=0.05), publisher(store)
    complete = 0
    for version in range(1, 12):
        manifest = publish.publish(trainer.step().items(), version, checksums=True)
        finished(publish)
        complete += (store.folder(version) / COMPLETE).exists()
        engine = new_engine(version)
        update(engine_target(engine), manifest, verify=True)
        assert same(engine.live(), trainer.copy())
        # Versions that no receiver needs are removed.
        used = {path.name[:9] for path in (tmp_path / "bucket").iterdir() if any(path.rglob("*.bin"))}
        assert used == {f"v{number:08d}" for number in store.versions()}
    assert complete >= 1 and store.versions()[0] > 1
    store.close()
    assert not list((tmp_path / "bucket").rglob("*.bin"))
    assert not (SHARED_MEMORY / f"mtpctl-fetched-{zlib.crc32(f'file://{tmp_path}/bucket'.encode()):08x}").exists()


def test_background_upload_of_a_deleted_version_does_not_fail_later_versions(
    store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, publish, engine = Trainer(share=0.05), publisher(store), new_engine()
    target, may_upload = engine_target(engine), Event()
    upstream = ObjectStore.put

    def put(remote: ObjectStore, file: Path, name: str) -> None:
        if f"/{COMPLETE}/" in name:
            may_upload.wait(300)
        upstream(remote, file, name)

    monkeypatch.setattr(ObjectStore, "put", put)
    version = 0
    while publish._upload is None:
        version += 1
        update(target, publish.publish(trainer.step().items(), version))
    uploading = store.folder(version)
    trainer.share = 1.0  # so many changes that the next versions are complete
    for later in (version + 1, version + 2):
        assert publish._upload.running and uploading.exists()
        update(target, publish.publish(trainer.step().items(), later))
    assert not uploading.exists()
    may_upload.set()
    finished(publish)
    trainer.share = 0.05
    update(target, publish.publish(trainer.step().items(), version + 3))
    assert same(engine.live(), trainer.copy()) and not uploading.exists()
    assert {path.name[:9] for path in (tmp_path / "bucket").iterdir() if any(path.rglob("*.bin"))} == {
        f"v{number:08d}" for number in store.versions()
    }
    assert not list(SHARED_MEMORY.glob(f"mtpctl-upload-{publish._token}*"))


def test_downloaded_files_are_not_read_again(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, publish, engine = Trainer(), publisher(store), new_engine()
    target, gets = engine_target(engine), []
    upstream = ObjectStore.get
    monkeypatch.setattr(ObjectStore, "get", lambda self, name, file: (gets.append(name), upstream(self, name, file)))
    for version in (1, 2, 3):
        manifest = publish.publish(trainer.step().items(), version)
        prefetch(manifests_to(manifest, target.version))
        downloaded = len(gets)
        assert downloaded == len(set(gets)) > 0
        update(target, manifest)
        update(engine_target(new_engine()), publish.store.chain(version)[-1]) if version == 1 else None
        assert len(gets) == downloaded, "two receivers of a host share its files"
        gets.clear()
    assert same(engine.live(), trainer.copy())


def test_another_run_with_the_same_url_does_not_get_old_files(store: VersionStore, tmp_path: Path) -> None:
    trainer = Trainer()
    update(engine_target(new_engine()), publisher(store).publish(trainer.copy().items(), 1))
    other = VersionStore(tmp_path / "other", store.remote)
    engine = new_engine()
    update(engine_target(engine), publisher(other).publish(trainer.step().items(), 1))
    assert same(engine.live(), trainer.copy())


def test_temporary_failure_of_a_store_is_retried(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, publish, engine = Trainer(), publisher(store), new_engine()
    failures = {"put": 2, "get": 2}
    for method in failures:
        upstream = getattr(ObjectStore, method)

        def call(*arguments: object, method: str = method, upstream: object = upstream) -> object:
            failures[method] -= 1
            if failures[method] >= 0:
                raise StoreFailed("503 Slow Down")
            return upstream(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(ObjectStore, method, call)
    update(engine_target(engine), publish.publish(trainer.copy().items(), 1))
    assert same(engine.live(), trainer.copy()) and max(failures.values()) < 0


def test_a_version_that_cannot_be_downloaded_leaves_the_previous_one(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, publish, engine = Trainer(), publisher(store), new_engine()
    target = engine_target(engine)
    before = trainer.copy()
    update(target, publish.publish(before.items(), 1))
    manifest = publish.publish(trainer.step().items(), 2)

    def fail(*_: object) -> None:
        raise StoreFailed("503 Slow Down")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "get", fail)
        with pytest.raises(SyncError, match="the weights cannot be downloaded: 503 Slow Down"):
            update(target, manifest)
    assert target.version == 1 and same(engine.live(), before)
    update(target, manifest)
    assert same(engine.live(), trainer.copy())


def test_versions_in_s3_are_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if hosts are in a chain, which read pieces of files."""
    monkeypatch.setattr(object_store, "REQUEST_BYTES", 700)
    with serving():
        store = VersionStore(tmp_path / "store", ObjectStore(f"s3://{BUCKET}/run", URL_FIELD))
        trainer, publish, engine = Trainer(), Publisher(store, bucket_bytes=3000, delta=True, digests=True), new_engine()
        target = engine_target(engine)
        for version in (1, 2, 3):
            manifest = publish.publish(trainer.step().items(), version, checksums=True)
            if version > 1:
                prefetch([manifest])
                folder = next(path for path in open_cache(f"s3://{BUCKET}/run", 0).glob("v*"))
                assert compute_digests(sorted(folder.iterdir())) == manifest.digests
            update(target, manifest, verify=True)
            assert same(engine.live(), trainer.copy())
        with pytest.raises(ObjectMissing):
            store.remote.append("missing", tmp_path / "part", 10)  # type: ignore[union-attr]
        assert store.remote is not None and store.remote.names("")
        store.close()
        assert not store.remote.names("")
