"""A killed conversion leaves no complete target, and starts over; a concurrent one is rejected."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from mtpctl.convert import conversion, parts
from mtpctl.convert.hf_writer import HfWriter
from mtpctl.convert.model_weights import Stored
from mtpctl.errors import UserError
from tests.fakes.convert_models import assert_same_tensors, change_config, converted
from tests.fakes.forked import exit_code
from tests.fakes.tiny import mimo


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 10_000)


def test_killed_conversion_starts_over_with_the_current_source(tmp_path: Path) -> None:
    """Its target never exists incomplete, and its parts are not used: they may be of another config with equal sizes."""
    folder = mimo(tmp_path / "hf", head_dim=None).path
    change_config(folder, num_attention_heads=8, num_key_value_heads=4)
    assert exit_code(lambda: killed_at_sixth_part(folder, tmp_path / "checkpoint"), 120) == -signal.SIGKILL
    assert not (tmp_path / "checkpoint").exists() and len(list((tmp_path / "checkpoint.partial").glob("*.distcp"))) >= 6
    change_config(folder, num_attention_heads=4, num_key_value_heads=2)
    converted(folder, tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", folder)


def killed_at_sixth_part(source: Path, target: Path) -> None:
    flush, flushed = conversion.PartWriter.flush, []

    def kill(self: conversion.PartWriter, number: int) -> None:
        flush(self, number)
        flushed.append(number)
        if len(flushed) == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    conversion.PartWriter.flush = kill  # type: ignore[method-assign]
    converted(source, target)


def test_concurrent_conversion_to_the_same_target_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while the first one runs, which is not disturbed."""
    folder = mimo(tmp_path / "hf").path
    flush, attempts = conversion.PartWriter.flush, []

    def attempt(self: conversion.PartWriter, number: int) -> None:
        flush(self, number)
        if not attempts:
            attempts.append(number)
            before = set(self.folder.rglob("*"))  # Names only: one file is being written in the meantime.
            with pytest.raises(UserError, match=r"checkpoint\.partial: another conversion writes to it; wait for its end"):
                converted(folder, tmp_path / "checkpoint")
            assert before <= set(self.folder.rglob("*"))

    monkeypatch.setattr(conversion.PartWriter, "flush", attempt)
    converted(folder, tmp_path / "checkpoint")
    assert attempts
    converted(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", folder)


def layout(count: int) -> list[Stored]:
    return [Stored(f"t{i}", "F32", (4,), (f"t{i}",)) for i in range(count)]


def test_shards_are_opened_while_others_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
