"""An interrupted conversion goes on as it began, or starts anew: what was made of another model is no part of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.convert import conversion, parts
from mtpctl.convert.hf_writer import HfWriter
from mtpctl.convert.journal import Journal
from mtpctl.convert.model_weights import Stored
from mtpctl.errors import UserError
from tests.fakes.convert_models import assert_same_tensors, change_config, converted, tensors, write
from tests.fakes.tiny import mimo


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 10_000)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Convert, and stop after the sixth part."""

    def stop(source: Path, target: Path, **wanted: Any) -> None:
        with monkeypatch.context() as patched:
            note = conversion.Journal.note

            def noted(self: conversion.Journal, part: int, what: Any = None) -> None:
                note(self, part, what)
                if len(self.done) == 6:
                    raise KeyboardInterrupt

            patched.setattr(conversion.Journal, "note", noted)
            with pytest.raises(KeyboardInterrupt):
                converted(source, target, **wanted)
        assert target.with_name(target.name + ".partial").is_dir()

    yield stop


def test_it_goes_on_where_it_stopped(tmp_path: Path, stopped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mimo(tmp_path / "hf").path
    converted(folder, tmp_path / "checkpoint")
    stopped(tmp_path / "checkpoint", tmp_path / "back")
    written: list[str] = []
    put = HfWriter.put
    monkeypatch.setattr(HfWriter, "put", lambda self, name, tensor: (written.append(name), put(self, name, tensor))[1])
    converted(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", folder)
    assert 0 < len(written) < len(tensors(folder))


def test_a_config_that_was_mended_meanwhile_makes_it_start_anew(tmp_path: Path, stopped: Any) -> None:
    """Other heads of the same sizes in all: q, k and v of every layer lie otherwise in Megatron's."""
    folder = mimo(tmp_path / "hf", head_dim=None).path
    change_config(folder, num_attention_heads=8, num_key_value_heads=4)
    stopped(folder, tmp_path / "checkpoint")
    change_config(folder, num_attention_heads=4, num_key_value_heads=2)
    converted(folder, tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", folder)


def test_a_model_folder_of_another_layout_makes_it_start_anew(tmp_path: Path, stopped: Any) -> None:
    folder = mimo(tmp_path / "hf").path
    other = mimo(tmp_path / "other").path
    write(other, tensors(other) | {"visual.proj.weight": torch.ones(3)})
    converted(folder, tmp_path / "checkpoint")
    stopped(tmp_path / "checkpoint", tmp_path / "back", model=folder)
    converted(tmp_path / "checkpoint", tmp_path / "back", model=other)
    assert_same_tensors(tmp_path / "back", other)


def test_what_another_conversion_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is the same conversion or another, and only as long as it runs."""
    folder, other = mimo(tmp_path / "hf").path, mimo(tmp_path / "other", vocab_size=80).path
    note, asked = conversion.Journal.note, []

    def noted(self: conversion.Journal, part: int, what: Any = None) -> None:
        note(self, part, what)
        if not asked:
            for source in (folder, other):
                asked.append(source)
                # Of the parts the names alone: one is being written meanwhile.
                before, journal = set(self.work.rglob("*")), self.file.read_bytes()
                with pytest.raises(UserError, match=r"checkpoint\.partial: another conversion writes there; wait for its end"):
                    Journal(tmp_path / "checkpoint", {"of": str(source)})
                assert before <= set(self.work.rglob("*")) and self.file.read_bytes() == journal

    monkeypatch.setattr(conversion.Journal, "note", noted)
    converted(folder, tmp_path / "checkpoint")
    assert len(asked) == 2
    converted(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", folder)


def layout(count: int) -> list[Stored]:
    return [Stored(f"t{i}", "F32", (4,), (f"t{i}",)) for i in range(count)]


def test_shards_may_be_begun_while_others_are_brought_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = HfWriter(tmp_path, layout(3), {f"t{i}": 4 for i in range(3)}, shard_bytes=16)
    writer.allocate()
    writer.put("t0", torch.zeros(4))
    under_way, go_on, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow(handle: int) -> None:
        under_way.set()
        assert go_on.wait(10)
        sync(handle)

    monkeypatch.setattr(os, "fdatasync", slow)
    failed: list[BaseException] = []

    def flush() -> None:
        try:
            writer.flush()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=flush)
    thread.start()
    assert under_way.wait(10)
    writer.put("t1", torch.ones(4))
    go_on.set()
    thread.join(10)
    writer.close()
    assert not failed


def test_a_file_that_was_allocated_and_not_begun_gets_its_header(tmp_path: Path) -> None:
    writer = HfWriter(tmp_path, layout(1), {"t0": 4})
    (tmp_path / "model.safetensors").write_bytes(bytes(writer.shards[0].nbytes))
    writer.allocate()
    writer.put("t0", torch.arange(4.0))
    writer.close()
    assert torch.equal(tensors(tmp_path)["t0"], torch.arange(4.0))
