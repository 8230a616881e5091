"""The status page, its JSON and the Prometheus metrics show the newest state of a run, and other requests are rejected."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from mtpctl.controller import status
from mtpctl.controller.status import Waits, bind_status_socket, create_status_app
from mtpctl.errors import UserError
from mtpctl.recipe.schema import TelemetryConfig
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import ReplicaCounts
from mtpctl.telemetry.session import ResumePoint, Telemetry
from mtpctl.web.server import address_of, serving

NEW = ResumePoint()
COUNTS = ReplicaCounts(serving=2, requested=3, least=1, most=4, restarts=1)


def telemetry_of(path: Path, resumed: ResumePoint = NEW) -> Telemetry:
    run = RunDirectory.create(path, "name: t\n")
    config = TelemetryConfig(tensorboard=False)
    return Telemetry(run, config, plain=True, stage_steps={"sft": 5, "rl": 20}, resumed=resumed, console=Console(file=io.StringIO()))


def with_client(telemetry: Telemetry, counts: ReplicaCounts | None, use: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Serve the page of this run, and use it."""

    async def main() -> None:
        bound = bind_status_socket(TelemetryConfig(http="127.0.0.1:0"))
        assert bound is not None
        async with (
            serving(create_status_app(telemetry.live, lambda: counts), bound),
            httpx.AsyncClient(base_url=address_of(bound)) as client,
        ):
            await use(client)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_page_shows_the_latest_values(tmp_path: Path) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        result = (await client.get("/status.json")).json()
        assert (result["state"], result["stage"], result["step"], result["steps"]) == ("running", "rl", 7, 20)
        assert (result["reward"], result["unfiltered_reward"], result["accuracy"]) == (0.5, 0.25, 0.5) and 0 <= result["age_s"] < 20
        assert result["replicas"] == {"serving": 2, "requested": 3, "least": 1, "most": 4, "restarts": 1}
        assert result["restarts"] == ["trainer back after 3 s"] and result["waiting"] == ["rollout: waiting for room, 3 s"]
        assert [(event["kind"], event["message"]) for event in result["errors"]] == [
            ("alarm", "the reward <swings>"),
            ("restart", "trainer back after 3 s"),
        ]
        assert result["metrics"]["eval/accuracy"] == 0.5 and result["metrics"]["sync/seconds"] == "NaN"
        assert "sft/loss" not in result["metrics"], "that stage is over"

        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html") and page.headers["refresh"] == "5"
        for message in ("7 of 20", "waiting for room, 3 s", "2 of 3 (1 to 4) serve, 1 restarted", "the reward &lt;swings&gt;", "50.0%"):
            assert message in page.text

        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family.samples[0] for family in text_string_to_metric_families(metrics.text)}
        assert families["mtpctl_run_step"].labels == {"run": "run", "stage": "rl"} and families["mtpctl_run_step"].value == 7
        assert families["mtpctl_reward_unfiltered_mean"].value == 0.25 and families["mtpctl_eval_gsm8k_avg_4"].value == 0.75
        assert math.isnan(families["mtpctl_sync_seconds"].value)
        assert (families["mtpctl_run_replicas_serving"].value, families["mtpctl_run_waits"].value) == (2, 1)

        assert (await client.get("/etc/passwd")).status_code == 404
        assert (await client.post("/", content=b"x")).status_code in (405, 413)

    with telemetry_of(tmp_path / "run") as telemetry:
        telemetry.log(5, {"sft/loss": 1.0}, "sft")
        telemetry.log(6, {"reward/mean": 0.5, "reward/unfiltered_mean": 0.125, "sync/seconds": 1.0}, "rl")
        telemetry.log(5, {"eval/accuracy": 0.5, "eval/gsm8k/avg@4": 0.75}, "rl")
        telemetry.log(7, {"reward/mean": 0.5, "reward/unfiltered_mean": 0.25, "sync/seconds": math.nan}, "rl")
        telemetry.event("alarm", "the reward <swings>")
        telemetry.event("restart", "trainer back after 3 s")
        telemetry.event("eval", "nothing wrong")
        telemetry.waiting(["rollout: waiting for room, 3 s"])
        with_client(telemetry, COUNTS, use)


def test_page_exists_before_the_first_step(tmp_path: Path) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        result = (await client.get("/status.json")).json()
        assert (result["stage"], result["step"], result["reward"], result["replicas"]) == ("", 0, None, None)
        assert (await client.get("/")).status_code == (await client.get("/metrics")).status_code == 200

    with telemetry_of(tmp_path / "run") as telemetry:
        with_client(telemetry, None, use)


def test_resumed_run_shows_its_previous_values(tmp_path: Path) -> None:
    with telemetry_of(tmp_path / "run") as telemetry:
        for step in (1, 2, 3):
            telemetry.log(step, {"reward/mean": step / 10}, "rl")
        telemetry.event("restart", "trainer back after 3 s")
    (tmp_path / "run" / ".lock").unlink()

    async def use(client: httpx.AsyncClient) -> None:
        result = (await client.get("/status.json")).json()
        assert (result["step"], result["reward"], result["restarts"]) == (2, 0.2, ["trainer back after 3 s"])

    with telemetry_of(tmp_path / "run", ResumePoint("rl", 2, ["sft"])) as telemetry:
        with_client(telemetry, None, use)


def test_unusable_address_is_reported_with_its_key() -> None:
    taken = r"^telemetry\.http: cannot listen on 127\.0\.0\.1:\d+ \(Address already in use\); choose another address or port$"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UserError, match=taken):
        bind_status_socket(TelemetryConfig(http=f"127.0.0.1:{other.getsockname()[1]}"))
    with pytest.raises(UserError, match=r"^telemetry\.http: cannot listen on 192\.0\.2\.77:80 "):
        bind_status_socket(TelemetryConfig(http="192.0.2.77:80"))
    assert bind_status_socket(TelemetryConfig()) is None


def test_status_json_is_valid_for_any_metric(tmp_path: Path) -> None:
    with telemetry_of(tmp_path / "run") as telemetry:
        telemetry.log(1, {"reward/mean": math.inf, "eval/accuracy": math.nan}, "rl")
        assert json.loads(json.dumps(telemetry.live.as_json(), allow_nan=False))["reward"] == "Infinity"


# What a run says that it waits for.


def test_wait_shows_the_newest_line_of_its_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REPORT_INTERVAL_S", 0.001)
    message: list[Sequence[str]] = []

    async def main() -> None:
        under_way = Waits(message.append, tmp_path)
        run_task = asyncio.create_task(under_way.run())
        with under_way.show("rollout: starting", "rollout replica 0"), under_way.show("trainer"):
            warnings = "a.py:1: UserWarning: b\n  warnings.warn(\na.py:9: SyntaxWarning: c\n  if x is 1:\n"
            warnings += "W1127 15:37:31.734000 21193 torch/utils/cpp_extension.py:178] No CUDA runtime is found\n"
            printed = f"── today, process 1\nLoading\n\x1b[32m 10%\r 50%|█\r\n{warnings}"
            (tmp_path / "rollout-replica-0.log").write_text(printed)
            while not message or "50%" not in message[-1][0]:
                await asyncio.sleep(0.001)
        run_task.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert message[-2] == ["rollout: starting, 0 s · 50%|█", "trainer, 0 s"]
    assert message[-1] == [], "nothing is left to wait for"


def test_wait_ignores_output_of_an_earlier_run(tmp_path: Path) -> None:
    log = tmp_path / "trainer-rank-0.log"
    log.write_text("── yesterday\nit died\n")
    os.utime(log, (1.0, 1.0))
    under_way = Waits(lambda _: None, tmp_path)
    with under_way.show("trainer: loading", "trainer rank 0") as wait:
        assert wait.describe(tmp_path) == "trainer: loading, 0 s"
        log.write_text("── yesterday\nit died\n── today\n")
        os.utime(log, (time.time() + 9, time.time() + 9))
        assert wait.describe(tmp_path) == "trainer: loading, 0 s", "it has started, and printed nothing yet"
