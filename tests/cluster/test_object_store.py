"""A folder of object storage, on a local S3 server and in memory: operations, and errors by kind."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from mtpctl.checkpoint.copying import COPY_URL_FIELD
from mtpctl.cluster.object_store import ObjectMissing, ObjectStore, StoreFailed
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.sync import remote
from tests.fakes.full_disk import full_disk
from tests.fakes.s3_server import BUCKET, S3Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serving() as result:
        yield result


@pytest.fixture(params=["s3", "memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        request.getfixturevalue("server")
    place = {"s3": f"s3://{BUCKET}", "memory": "memory://", "file": f"file://{tmp_path}"}[request.param]
    return ObjectStore(f"{place}/{uuid.uuid4()}/run/", COPY_URL_FIELD)


def test_objects_are_written_read_listed_and_removed(store: ObjectStore, tmp_path: Path) -> None:
    store.check()
    assert store.names("") == [] and store.read("a") is None
    (tmp_path / "here").write_bytes(bytes(range(256)) * 100)
    store.put(tmp_path / "here", "folder/deep/file")
    store.write("folder/text", b"one")
    store.write("folder/text", b"two")
    assert sorted(store.names("folder")) == sorted(store.names("")) == ["folder/deep/file", "folder/text"]
    assert store.read("folder/text") == b"two"
    store.get("folder/deep/file", tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    store.remove(["folder/text", "not there"])
    assert store.names("folder") == ["folder/deep/file"]
    with pytest.raises(ObjectMissing, match=r"cannot read .*/folder/text: "):
        store.get("folder/text", tmp_path / "there")


def test_interrupted_write_of_a_local_file_leaves_the_previous_contents(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/run", COPY_URL_FIELD)
    store.write("folder/text", b"one")
    with full_disk(100), pytest.raises(StoreFailed, match=r"cannot write .*/run/folder/text: .*File too large"):
        store.write("folder/text", bytes(1000))
    assert store.read("folder/text") == b"one" and store.names("") == ["folder/text"]


def test_reader_of_a_local_file_sees_complete_contents_during_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(f"file://{tmp_path}/run", COPY_URL_FIELD)
    store.write("text", b"one")
    contents: list[bytes | None] = []
    upstream = LocalFileSystem.open

    def open_and_read(files: LocalFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        stream = upstream(files, path, mode, **options)
        if mode == "wb":
            contents.append(store.read("text"))
        return stream

    monkeypatch.setattr(LocalFileSystem, "open", open_and_read)
    store.write("text", b"two")
    assert contents == [b"one"] and store.read("text") == b"two"


def test_missing_bucket_is_a_user_error(server: S3Server) -> None:
    message = r"train.checkpoint_copy: s3://elsewhere/run does not exist \(The specified bucket does not exist\); create the bucket"
    with pytest.raises(UserError, match=message):
        ObjectStore("s3://elsewhere/run", COPY_URL_FIELD).check()


def test_unknown_scheme_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"train.checkpoint_copy: fsspec does not know the scheme of s4://bucket/run; use s3://"):
        ObjectStore("s4://bucket/run", COPY_URL_FIELD)


def test_unreachable_server_is_reported_at_once() -> None:
    with pytest.raises(PrerequisiteMissing, match=r"train.checkpoint_copy: ftp://127.0.0.1:9/x cannot be reached: .*refused"):
        ObjectStore("ftp://127.0.0.1:9/x", COPY_URL_FIELD)


def test_missing_package_of_a_scheme_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    for field, fix in ((COPY_URL_FIELD, "remove the key"), (remote.URL_FIELD, "set another sync.transport")):
        message = f"^{field}: s3:// needs the package s3fs, which is not installed; install it, or {fix}$"
        with pytest.raises(PrerequisiteMissing, match=message):
            ObjectStore("s3://bucket/run", field)


def test_rejected_credentials_are_an_environment_error() -> None:
    with serving() as server:
        server.refuse()
        message = rf"train.checkpoint_copy: the credentials do not allow writing to s3://{BUCKET}/run \(The AWS Access Key Id"
        with pytest.raises(PrerequisiteMissing, match=message):
            ObjectStore(f"s3://{BUCKET}/run", COPY_URL_FIELD).check()


def test_store_that_stops_responding_is_named_in_the_error() -> None:
    with serving() as server:
        store = ObjectStore(f"s3://{BUCKET}/run", COPY_URL_FIELD)
        store.write("text", b"one")
        server.stop()
        with pytest.raises(StoreFailed, match=rf"cannot write s3://{BUCKET}/run/text: Could not connect to the endpoint URL"):
            store.write("text", b"two")


def test_package_that_a_module_of_fsspec_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "sftp", raising=False)
    with pytest.raises(PrerequisiteMissing, match=r'sftp:// cannot be used: .*"paramiko".*; install it, or set another sync\.transport$'):
        ObjectStore("sftp://host/run", remote.URL_FIELD)
