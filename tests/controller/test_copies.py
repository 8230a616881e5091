"""Copies of a run's checkpoints: during training, with an unreliable store, and downloaded by a machine that has none."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.checkpoint.copying import COPY_URL_FIELD, newest_copy
from mtpctl.checkpoint.finding import newest_checkpoint, publish_checkpoint
from mtpctl.checkpoint.listing import LISTING, Listing
from mtpctl.cluster.object_store import ObjectStore, StoreFailed
from mtpctl.controller import copies as module
from mtpctl.controller.copies import CheckpointCopier, check_copies, fetch_if_lost
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.train import TrainConfig
from tests.environment import with_tree
from tests.fakes.checkpoint_folders import with_checksum
from tests.fakes.copied_runs import contents, make_checkpoint, make_run
from tests.fakes.s3_server import BUCKET, S3Server, serving
from tests.fakes.trainer_group import FakeTrainerGroup

WAIT_S = 30.0


class Store(ObjectStore):
    """A store in memory that is there or not (`down`), and that waits before it takes a file while `slow`."""

    def __init__(self) -> None:
        super().__init__(f"memory://{uuid.uuid4()}/run", COPY_URL_FIELD)
        self.down, self.slow = False, False

    def put(self, file: Path, name: str) -> None:
        end = time.monotonic() + WAIT_S
        while self.slow and time.monotonic() < end:
            time.sleep(0.001)
        if self.down:
            raise StoreFailed(f"cannot write {self.url}/{name}: no answer")
        super().put(file, name)


def wait_for(met: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("FIRST_DELAY_S", 0.01), ("MAX_DELAY_S", 0.02), ("FINAL_RETRY_S", 0.1)):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def copies_in(store: ObjectStore, run: Path) -> tuple[CheckpointCopier, list[str]]:
    message = list[str]()
    return CheckpointCopier(store, run, 2, message.append), message


def test_checkpoints_are_copied_in_the_background_and_complete_at_the_end(run: Path) -> None:
    store = Store()
    copier, message = copies_in(store, run)
    for step in (2, 4):
        copier.queue(make_checkpoint(run, f"rl-{step:06d}"))
    asyncio.run(copier.finish())
    assert newest_copy(store) == "rl-000004" and message == []
    result = copier.metrics()
    assert result.pop("timing_s/checkpoint_copy") >= 0
    assert result == {"checkpoint/copy_failures": 0, "checkpoint/copy_behind": 0}
    assert "timing_s/checkpoint_copy" not in copier.metrics(), "each is reported once"


def test_temporary_store_failure_is_reported_counted_and_recovered_from(run: Path) -> None:
    store = Store()
    copier, message = copies_in(store, run)
    copier.queue(make_checkpoint(run, "rl-000002"))
    wait_for(lambda: copier.metrics()["checkpoint/copy_behind"] == 0)
    store.down = True
    for step in (4, 6):
        copier.queue(make_checkpoint(run, f"rl-{step:06d}"))
    failures = 0.0

    def failed_again() -> bool:
        nonlocal failures
        failures += copier.metrics()["checkpoint/copy_failures"]
        return failures > 3

    wait_for(failed_again)
    assert copier.metrics()["checkpoint/copy_behind"] == 2
    assert newest_copy(store) == "rl-000002", "what was there stays"
    store.down = False
    asyncio.run(copier.finish())
    assert newest_copy(store) == "rl-000006" and copier.metrics()["checkpoint/copy_behind"] == 0
    lost, back = message
    assert lost.startswith(f"cannot write {store.url}/") and lost.endswith("no answer; training continues, and the copy is retried")
    assert back.startswith(f"rl-000006 is in {store.url}, after ") and back.endswith(" failed attempts")


def test_run_without_its_store_reports_it_and_ends(run: Path) -> None:
    store = Store()
    store.down = True
    copier, message = copies_in(store, run)
    copier.queue(make_checkpoint(run, "rl-000002"))
    asyncio.run(asyncio.wait_for(copier.finish(), WAIT_S))
    assert message[-1] == f"the newest checkpoint was not copied to {store.url}; start the same command again once it answers"


def test_waiting_copier_tries_again_as_soon_as_the_run_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.down = True
    copier, messages = copies_in(store, run)
    monkeypatch.setattr(module, "FIRST_DELAY_S", 3600.0)
    copier.queue(make_checkpoint(run, "rl-000002"))
    wait_for(lambda: messages)
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.001)
    store.down = False
    asyncio.run(asyncio.wait_for(copier.finish(), WAIT_S))
    assert messages[-1].startswith("rl-000002 is in ")


def test_bug_is_raised_instead_of_retried(run: Path) -> None:
    class Wrong(Store):
        def put(self, file: Path, name: str) -> None:
            raise ZeroDivisionError

    copier, _ = copies_in(Wrong(), run)
    copier.queue(make_checkpoint(run, "rl-000002"))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(copier.finish(), WAIT_S))


def test_a_checkpoint_is_not_deleted_while_it_is_copied(tmp_path: Path) -> None:
    """Although the run keeps only one checkpoint, and has written others since."""

    class Writing(FakeTrainerGroup):
        async def publish_checkpoint(self, path: Path, keep: int, needed: Sequence[str]) -> None:
            publish_checkpoint(path, keep=keep, needed=needed)

    async def main() -> None:
        store, run = Store(), make_run(tmp_path / "run")
        state = RunState(run / "checkpoints", TrainConfig(checkpoint_every=1, keep_checkpoints=1))
        state.copier, _ = copies_in(store, run)
        trainer = cast(TrainerGroup, Writing())
        state.begin("sft")
        store.slow = True

        def here() -> list[str]:
            return sorted(path.name for path in state.root.iterdir() if path.is_dir())

        for step in (1, 2, 3):
            state.step = step
            await state.checkpoint_if_due(trainer)
            await asyncio.to_thread(wait_for, lambda: state.copier is not None and "sft-000001" in state.copier.checkpoints_in_use)
        assert here() == ["sft-000001", "sft-000002", "sft-000003"], "the one that is copied, the one that waited, and the newest"
        store.slow = False
        await state.copier.finish()
        state.step = 4
        await state.checkpoint(trainer)
        assert newest_copy(store) == "sft-000003" and here() == ["sft-000004"]

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------ before a run


def recipe_in(run_dir: Path, url: str, **keys: Any) -> Recipe:
    return Recipe.model_validate({"name": "run", "run_dir": str(run_dir), "train": {"checkpoint_copy": url, **keys}})


def copied(run: Path, *names: str) -> str:
    """A copy of the run with these checkpoints; returns its URL."""
    store = Store()
    copier, _ = copies_in(store, run)
    for name in names:
        copier.queue(make_checkpoint(run, name))
        wait_for(lambda: copier.metrics()["checkpoint/copy_behind"] == 0)
    return store.url


def test_missing_run_directory_gets_the_newest_copied_checkpoint(run: Path, tmp_path: Path) -> None:
    url, message = copied(run, "rl-000002", "rl-000004"), list[str]()
    recipe = recipe_in(tmp_path / "elsewhere", url)
    line = fetch_if_lost(recipe, message.append)
    assert line.startswith(f"rl-000004 was fetched from {url} in ")
    assert newest_checkpoint(tmp_path / "elsewhere" / "checkpoints") == tmp_path / "elsewhere" / "checkpoints" / "rl-000004"
    assert contents(tmp_path / "elsewhere" / "checkpoints" / "rl-000004") == contents(run / "checkpoints" / "rl-000004")
    assert (tmp_path / "elsewhere" / "recipe.resolved.yaml").read_text() == "name: run\n"
    assert fetch_if_lost(recipe, message.append) == "" and len(message) == 1, "once"


def test_local_checkpoint_takes_precedence_over_the_copy(run: Path) -> None:
    url = copied(run, "rl-000002", "rl-000004")
    shutil.rmtree(run / "checkpoints" / "rl-000004")
    assert fetch_if_lost(recipe_in(run, url), print) == ""
    assert newest_checkpoint(run / "checkpoints") == run / "checkpoints" / "rl-000002"


@pytest.mark.parametrize("has_copy", [False, True])
def test_checkpoint_of_another_version_is_neither_copied_over_nor_renamed(run: Path, has_copy: bool) -> None:
    url = copied(run, "rl-000002") if has_copy else Store().url
    path = make_checkpoint(run, "rl-000004") / LISTING
    path.write_text(json.dumps(with_checksum(json.loads(path.read_text()) | {"format": 4})))
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError, match=r"rl-000004/files\.json: was saved by another version of mtpctl"):
        fetch_if_lost(recipe_in(run, url), print)
    assert sorted(run.rglob("*")) == before


def test_copier_reports_a_copy_of_another_version(run: Path) -> None:
    store = Store()
    copier, lines = copies_in(store, run)
    listing = json.loads(Listing(1, {}).to_json())
    store.write(f"checkpoints/rl-000002/{LISTING}", json.dumps(with_checksum(listing | {"format": 4})).encode())
    copier.queue(make_checkpoint(run, "rl-000004"))
    wait_for(lambda: lines)
    assert "was saved by another version of mtpctl" in lines[0] and lines[0].endswith("rl-000004 is not copied")


def test_run_begins_if_there_is_no_copy(tmp_path: Path) -> None:
    assert fetch_if_lost(recipe_in(tmp_path / "run", f"memory://{uuid.uuid4()}/run"), print) == ""
    assert not (tmp_path / "run").exists()


def test_copy_of_another_run_is_rejected(run: Path, tmp_path: Path) -> None:
    url = copied(run, "rl-000002")
    check_copies(recipe_in(tmp_path / "elsewhere", url))
    other = recipe_in(tmp_path / "elsewhere", url).model_copy(update={"name": "other"})
    message = f"train.checkpoint_copy: {url} contains the run run, not other; put {{name}} into the URL, or use another URL"
    with pytest.raises(UserError, match=message.replace("{", r"\{").replace("}", r"\}")):
        check_copies(other)


def test_unreachable_store_is_an_error_without_a_local_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_write(self: ObjectStore, name: str, data: bytes) -> None:
        raise StoreFailed(f"cannot write {self.url}/{name}: no answer", "no answer")

    monkeypatch.setattr(ObjectStore, "write", fail_to_write)
    recipe = recipe_in(run, "memory://away/run")
    message = r"train.checkpoint_copy: memory://away/run does not answer \(no answer\), and may have the checkpoint from which this"
    with pytest.raises(PrerequisiteMissing, match=message):
        check_copies(recipe)
    make_checkpoint(run, "rl-000002")
    check_copies(recipe)


# ------------------------------------------------------------------------------------------------------ a whole run


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serving() as result:
        yield result


def trained(run_dir: Path, server: S3Server, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    """The supervised stage of the tiny recipe, which needs no engine, with copies on the server."""
    sets = [f"run_dir={run_dir}", "train.stages=[sft]", f"train.sft.steps={steps}", "train.sft.batch_size=4", "train.sft.until_loss=0"]
    sets += ["train.checkpoint_every=2", f"train.checkpoint_copy=s3://{BUCKET}/runs/{{name}}", "cluster.num_cpus=1"]
    command = [sys.executable, "-m", "mtpctl", "train", "tiny_mtp", "--plain", *(part for each in sets for part in ("--set", each)), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=with_tree(**server.environment))


def losses(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["sft/loss"] for row in rows if "sft/loss" in row}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_resumes_from_the_copy_on_another_machine(server: S3Server, tmp_path: Path) -> None:
    here, there, lone = tmp_path / "here", tmp_path / "there", tmp_path / "lone"
    first = trained(here, server, 4)
    assert first.returncode == 0, first.stdout + first.stderr
    second = trained(there, server, 8)
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"sft-000004-end was fetched from s3://{BUCKET}/runs/tiny_mtp in " in second.stdout
    assert losses(there).keys() == set(range(1, 9)), "its metrics came along"
    store = ObjectStore(f"s3://{BUCKET}/runs/tiny_mtp", COPY_URL_FIELD)
    assert newest_copy(store) == "sft-000008-end"
    # The same without the move.
    assert trained(here, server, 8).returncode == 0
    assert losses(here) == losses(there)
    # A copy that cannot work is reported before anything starts.
    server.refuse()
    refused = trained(lone, server, 8, "--dry-run")
    assert refused.returncode == 3 and "the credentials do not allow writing to" in refused.stderr
    server.stop()
    away = trained(lone, server, 8)
    assert away.returncode == 3 and not lone.exists()
    assert "does not answer" in away.stderr and "may have the checkpoint from which this run resumes" in away.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lost_server_does_not_stop_training(server: S3Server, tmp_path: Path) -> None:
    sets = ("--set", f"train.checkpoint_copy=s3://{BUCKET}/run", "--set", "train.sft.batch_size=16")
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "mtpctl", "train", "tiny_mtp", "--plain"]
        for each in (f"run_dir={tmp_path / 'run'}", "train.stages=[sft]", "train.sft.steps=400", "train.sft.until_loss=0"):
            command += ["--set", each]
        command += ["--set", "train.checkpoint_every=2", *sets]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=with_tree(**server.environment))
    metrics = tmp_path / "run" / "metrics.jsonl"

    def rows() -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")] if metrics.exists() else []
        )

    def wait(met: Callable[[], object]) -> None:
        end = time.monotonic() + 240
        while not met():
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.2)

    try:
        wait(lambda: any("timing_s/checkpoint_copy" in row for row in rows()))
        server.stop()
        wait(lambda: sum(row.get("checkpoint/copy_failures", 0) for row in rows()) >= 2)
        at = rows()[-1].get("step", 0)
        wait(lambda: rows()[-1].get("step", 0) > at + 4)
        server.start()
        server.make_bucket()
        wait(lambda: any("failed attempts" in row.get("message", "") for row in rows()))
    finally:
        process.kill()
        process.wait()
    assert any("training continues, and the copy is retried" in row.get("message", "") for row in rows())
