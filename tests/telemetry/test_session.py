"""One session end to end: what the trainer logs is in every sink, on the screen, and in the summary."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from mtpctl.errors import PrerequisiteMissing, RuntimeFailure
from mtpctl.recipe.schema import TelemetryConfig
from mtpctl.samples import Sample
from mtpctl.telemetry.metrics_file import load_history
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.sample_log import read_samples, sample_row
from mtpctl.telemetry.session import ResumePoint, Telemetry, open_log
from mtpctl.telemetry.trackers import TensorBoardSink
from tests.fakes.full_disk import full_disk


def start(path: Path, config: TelemetryConfig | None = None) -> tuple[Telemetry, io.StringIO]:
    out = io.StringIO()
    run = RunDirectory.create(path, "name: t\n")
    telemetry = Telemetry(
        run, config or TelemetryConfig(tensorboard=False), plain=True, stage_steps={"rl": 20}, console=Console(file=out, width=200)
    )
    return telemetry, out


def test_log_event_and_summary(tmp_path: Path) -> None:
    telemetry, out = start(tmp_path / "run")
    with telemetry:
        telemetry.log(0, {"eval/accuracy": 0.25}, "rl")
        for step in range(1, 21):
            telemetry.log(step, {"reward/mean": step / 20}, "rl")
        telemetry.log(10, {"eval/accuracy": 0.15}, "rl")
        telemetry.log(20, {"eval/accuracy": 0.75}, "rl")
        telemetry.event("checkpoint", "step 20")
        telemetry.print_summary()
    telemetry.close()
    history = load_history(tmp_path / "run")
    assert history.series("eval/accuracy") == [(0, 0.25), (10, 0.15), (20, 0.75)]
    assert len(history.series("reward/mean")) == 20 and history.events[0].message == "step 20"
    table = " ".join(out.getvalue().split())
    assert "held-out accuracy 25.0% 75.0% +50.0 points" in table
    assert "its last 2, mean 25.0% 45.0% +20.0 points" in table
    assert "reward 0.075 0.975 +1200%" in table
    assert "best 75.0% at update 20; worst fall 10.0 points, from 25.0% at update 0 to 15.0% at update 10." in table


class FailingSink:
    """A tracker whose server is lost before the end of the run."""

    failure = ""

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        raise ConnectionError("connection refused\nmore")


def test_tracker_that_fails_at_the_end_is_reported_and_others_are_closed(tmp_path: Path) -> None:
    telemetry, out = start(tmp_path / "run", TelemetryConfig(tensorboard=True))
    telemetry._sinks.insert(0, FailingSink())
    telemetry.log(1, {"reward/mean": 0.5}, "rl")
    telemetry.close()
    message = "Failing may lack the last rows and the end of the run: ConnectionError: connection refused"
    assert f"tracker: {message}\n" in out.getvalue()
    assert load_history(tmp_path / "run").events[-1].message == message
    assert telemetry._log_file.closed
    assert list((tmp_path / "run" / "tensorboard").rglob("events.*"))


def test_accuracy_on_unseen_prompts_is_in_lines_and_summary(tmp_path: Path) -> None:
    telemetry, out = start(tmp_path / "run")
    with telemetry:
        telemetry.log(0, {"eval/accuracy": 0.25, "eval/unseen_accuracy": 0.1}, "rl")
        telemetry.log(20, {"eval/accuracy": 0.75, "eval/unseen_accuracy": 0.4}, "rl")
        telemetry.print_summary()
    text = " ".join(out.getvalue().split())
    assert "rl 20/20 held-out 75.0% unseen 40.0%" in text
    assert "held-out, unseen 10.0% 40.0% +30.0 points" in text


def test_resumed_panel_skips_steps_that_will_be_repeated(tmp_path: Path) -> None:
    telemetry, _ = start(tmp_path / "run")
    with telemetry:
        for step in range(1, 4):
            telemetry.log(step, {"sft/loss": 1.0}, "sft")
        for step in range(1, 8):
            telemetry.log(step, {"reward/mean": step / 10}, "rl")
    history = load_history(tmp_path / "run")
    assert [(row.phase, row.step) for row in ResumePoint("rl", 5, ["sft"]).rows_before(history)][-1] == ("rl", 5)
    assert {row.phase for row in ResumePoint("sft", 3, ["sft"]).rows_before(history)} == {"sft"}
    assert ResumePoint().rows_before(history) == [], "without a checkpoint everything is done again"
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with Telemetry(
        RunDirectory(tmp_path / "run"),
        TelemetryConfig(tensorboard=False),
        stage_steps={"sft": 9, "rl": 20},
        resumed=ResumePoint("sft", 3, ["sft"]),
        console=console,
    ):
        pass
    assert "3/3" in out.getvalue() and "0/20" in out.getvalue()


def test_a_run_of_no_rl_has_no_summary(tmp_path: Path) -> None:
    telemetry, out = start(tmp_path / "run")
    with telemetry:
        telemetry.log(1, {"sft/loss": 1.0}, "sft")
        telemetry.print_summary()
    assert "before" not in out.getvalue()


def test_tensorboard_holds_the_same_scalars_by_phase(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    telemetry, _ = start(tmp_path / "run", TelemetryConfig())
    with telemetry:
        telemetry.log(1, {"reward/mean": 0.25}, "rl")
        telemetry.log(2, {"reward/mean": 0.5}, "rl")
        telemetry.log(1, {"sft/loss": 3.0}, "sft")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "rl")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert EventAccumulator(str(tmp_path / "run" / "tensorboard" / "sft")).Reload().Scalars("sft/loss")[0].value == 3.0


@contextmanager
def full_for_tensorboard() -> Iterator[None]:
    """A full disk, by which TensorBoard's threads end: in this test, and not in the next one."""
    with full_disk():
        yield
    for thread in threading.enumerate():
        if getattr(thread, "exception", None) is not None:
            thread.join(10)


broken_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@broken_thread
def test_full_disk_ends_a_run_with_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by what closing its files would raise."""
    monkeypatch.setattr("mtpctl.telemetry.metrics_file.DISK_FULL_TIMEOUT_S", 0.0)
    telemetry, _ = start(tmp_path / "run", TelemetryConfig())
    message = r"cannot write .*metrics.jsonl: File too large; free space and start"
    with full_for_tensorboard(), pytest.raises(RuntimeFailure, match=message), telemetry:
        telemetry.samples([sample_row(Sample("p", "g", [1]), lambda ids: "", step=1, kind="update")])
        telemetry.log(1, {"reward/mean": 1.0}, "rl")


@broken_thread
def test_run_continues_during_full_disk_without_losing_rows(tmp_path: Path) -> None:
    path = tmp_path / "run"
    telemetry, _ = start(path)
    with telemetry:
        with full_disk():
            telemetry.samples([sample_row(Sample("p", "g", [1]), lambda ids: "", step=1, kind="update")])
            telemetry.log(1, {"reward/mean": 1.0}, "rl")
            telemetry.event("restart", "of an actor")
        telemetry.log(2, {"reward/mean": 2.0}, "rl")
        end = time.monotonic() + 30
        while not read_samples(path):
            assert time.monotonic() < end
            time.sleep(0.05)
    history = load_history(path)
    assert [row.step for row in history.rows] == [1, 2] and [event.message for event in history.events] == ["of an actor"]
    assert [row["step"] for row in read_samples(path)] == [1]
    log = (path / "logs" / "run.log").read_text()
    assert "rl 1/20" in log and "restart: of an actor" in log and "rl 2/20" in log


@broken_thread
def test_tensorboard_continues_after_full_disk(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, {})
    sink.write(1, {"reward/mean": 1.0}, "rl")
    with full_for_tensorboard():
        end = time.monotonic() + 10
        while not sink.failure:
            assert time.monotonic() < end
            sink.write(2, {"reward/mean": 2.0}, "rl")
    assert sink.failure == "tensorboard/ lacks rows of metrics.jsonl: File too large"
    sink.write(3, {"reward/mean": 3.0}, "rl")
    sink.close()
    result = EventAccumulator(str(tmp_path / "rl")).Reload()
    assert 3 in [event.step for event in result.Scalars("reward/mean")]


def test_tensorboard_has_the_newest_recipe_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for lr in ("0.1", "0.2"):
        run = RunDirectory.create(tmp_path / "run", "")
        run.record(f"name: t\ntrain: {{lr: {lr}, stages: [sft, rl], lora: null}}\n")
        with run, Telemetry(run, TelemetryConfig(), plain=True, console=Console(file=io.StringIO())):
            pass
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    result = HParamsPluginData.FromString(content).session_start_info.hparams
    assert {key: value.number_value or value.string_value for key, value in result.items()} == {
        "name": "t",
        "train.lr": 0.2,
        "train.stages": '["sft", "rl"]',
    }


def test_many_threads_write_whole_rows(tmp_path: Path) -> None:
    telemetry, _ = start(tmp_path / "run")
    with telemetry:
        threads = [threading.Thread(target=lambda k=k: [telemetry.log(i, {f"m{k}": float(i)}, "rl") for i in range(100)]) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    history = load_history(tmp_path / "run")
    assert all(history.series(f"m{k}") == [(i, float(i)) for i in range(100)] for k in range(4))


def test_wandb_is_optional_and_reported_if_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.telemetry.trackers.find_spec", lambda name: None)
    with pytest.raises(PrerequisiteMissing, match=r"^telemetry\.wandb: "):
        start(tmp_path / "run", TelemetryConfig(tensorboard=False, wandb="project"))


def test_the_run_log_has_every_line_with_its_time_and_the_error_that_ended_the_run(tmp_path: Path) -> None:
    telemetry, out = start(tmp_path / "run")
    with pytest.raises(RuntimeFailure), telemetry:
        telemetry.event("start", "trainer ready")
        telemetry.log(1, {"reward/mean": 0.5}, "rl")
        raise RuntimeFailure("rollout replica 0: died")
    log = (tmp_path / "run" / "logs" / "run.log").read_text()
    first, second, third, *rest = log.splitlines()
    assert first[:2] == "20" and first.endswith("  start: trainer ready")
    assert second.endswith("  rl 1/20  reward 0.5") and third.endswith("  error: rollout replica 0: died")
    assert rest[0].startswith("Traceback") and rest[-1] == "mtpctl.errors.RuntimeFailure: rollout replica 0: died"
    last = load_history(tmp_path / "run").events[-1]
    assert (last.kind, last.message) == ("error", "rollout replica 0: died")
    assert "died" not in out.getvalue(), "the command prints it"


def test_unexpected_error_is_reported_by_type_and_interrupt_is_not(tmp_path: Path) -> None:
    telemetry, _ = start(tmp_path / "run")
    with pytest.raises(KeyError), telemetry:
        raise KeyError("reward")
    assert load_history(tmp_path / "run").events[-1].message == "KeyError: 'reward'"
    telemetry, _ = start(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt), telemetry:
        raise KeyboardInterrupt
    assert load_history(tmp_path / "other").events == []


def test_a_run_log_that_has_grown_is_renamed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.telemetry.session.MAX_LOG_BYTES", 10)
    (tmp_path / "run.log").write_text("x" * 11)
    open_log(tmp_path / "run.log").close()
    assert (tmp_path / "run.1.log").stat().st_size == 11 and (tmp_path / "run.log").stat().st_size == 0
