"""What a run says that it waits for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtpctl.controller import waits
from mtpctl.controller.waits import Waits


def test_a_wait_is_told_with_the_newest_line_of_its_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 0.001)
    told: list[Sequence[str]] = []

    async def main() -> None:
        under_way = Waits(told.append, tmp_path)
        telling = asyncio.create_task(under_way.run())
        with under_way.on("rollout: starting", "rollout replica 0"), under_way.on("trainer"):
            printed = "── today, process 1\nLoading\n\x1b[32m 10%\r 50%|█\r\na.py:1: UserWarning: b\n  warnings.warn(\n"
            (tmp_path / "rollout-replica-0.log").write_text(printed)
            while not told or "50%" not in told[-1][0]:
                await asyncio.sleep(0.001)
        telling.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert told[-2] == ["rollout: starting, 0 s · 50%|█", "trainer, 0 s"]
    assert told[-1] == [], "nothing is left to wait for"


def test_what_an_earlier_run_printed_is_not_told(tmp_path: Path) -> None:
    log = tmp_path / "trainer-rank-0.log"
    log.write_text("── yesterday\nit died\n")
    os.utime(log, (1.0, 1.0))
    under_way = Waits(lambda _: None, tmp_path)
    with under_way.on("trainer: loading", "trainer rank 0") as wait:
        assert wait.told(tmp_path) == "trainer: loading, 0 s"
        log.write_text("── yesterday\nit died\n── today\n")
        os.utime(log, (time.time() + 9, time.time() + 9))
        assert wait.told(tmp_path) == "trainer: loading, 0 s", "it has started, and printed nothing yet"
