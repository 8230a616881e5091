"""A fake `TrainerGroup` without processes and model, but with real checkpoint folders."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtpctl.checkpoint.listing import Entry
from mtpctl.errors import SaveFailed
from tests.fakes.checkpoint_folders import add_engine_files


class FakeTrainerGroup:
    """Accepts every call, and records its method in `calls`.

    A save takes until `written` is set, unless the caller waits for it. The next `failing_saves` saves fail. `published`: names of the
    checkpoints that were published.
    """

    sft_loss = 1.0

    def __init__(self, recipe: Any = None, placement: Any = None, bundles: Any = None) -> None:
        self.calls: list[str] = []
        self.path, self.folder = Path(), Path("none")
        self.written, self.failing_saves = False, 0
        self.published: list[str] = []

    async def called(self, method: str) -> None:
        """Called at the start of each method; subclasses fail or wait here."""
        self.calls.append(method)

    async def build(self, folder: Path) -> dict[str, int]:
        return {"parameters": 1, "trained": 1}

    async def begin_stage(self, stage: str, reference: Path, *, resumed: bool) -> None:
        await self.called("begin_stage")

    async def sft_step(self, rows: list[Any]) -> dict[str, float]:
        await self.called("sft_step")
        return {"sft/loss": self.sft_loss, "skipped": 0.0, "perf/tokens": 1.0}

    async def restore(self, checkpoint: Path) -> None:
        await self.called("restore")

    async def begin_save(self, path: Path) -> Path:
        await self.called("begin_save")
        assert not self.folder.exists(), "one at a time"
        self.path, self.folder = path, path.with_name(path.name + ".partial")
        self.folder.mkdir(parents=True)
        return self.folder

    async def finish_save(self, *, wait: bool, entries: Mapping[str, Entry]) -> bool:
        await self.called("finish_save")
        if self.failing_saves:
            self.failing_saves -= 1
            shutil.rmtree(self.folder)
            raise SaveFailed(f"checkpoint {self.path} was not written: disk full")
        if not (wait or self.written):
            return False
        if (self.folder / "run.json").exists():
            add_engine_files(self.folder)
        if self.path.exists():
            shutil.rmtree(self.path)
        self.folder.rename(self.path)
        return True

    async def abandon_save(self) -> None:
        await self.called("abandon_save")
        shutil.rmtree(self.folder)

    async def publish_checkpoint(self, path: Path, keep: int, needed: Sequence[str]) -> None:
        await self.called("publish_checkpoint")
        self.published.append(path.name)
