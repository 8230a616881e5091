"""`mtpctl rollout --serve` for real: an agent talks to the engines through the gateway, and its trajectory is in the file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpctl.errors import UserError
from mtpctl.jobs.rollout import serve
from tests.environment import with_tree
from tests.fakes.runs import SMALL, recipe, run

__all__ = ["run"]

ASK = {"model": "any", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4, "logprobs": True}


def test_unusable_options_are_reported_before_anything_starts(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="MTPCTL_GATEWAY_KEY"):
        serve(recipe(run), None, host="0.0.0.0", port=0, report=print)
    (tmp_path / "o.jsonl").write_text("something else\n")
    with pytest.raises(UserError, match=r"o\.jsonl:1: is not a sample"):
        serve(recipe(run), tmp_path / "o.jsonl", host="127.0.0.1", port=0, report=print)


@pytest.mark.slow
def test_trajectory_is_written_and_a_single_request_is_not(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sets = [part for each in (*SMALL, "rollout.max_tokens=40", f"run_dir={run}") for part in ("--set", each)]
    command = [sys.executable, "-m", "mtpctl", "rollout", "tiny_mtp", "--serve", "--port", "0", "--out", str(out), *sets]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=with_tree())
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        address = line.split("POST ")[1].split("/v1/")[0]
        key = line.split("with the key ")[1].strip()
        with httpx.Client(timeout=60, headers={"authorization": f"Bearer {key}"}) as web:

            def post(url: str, body: Any = None) -> Any:
                return web.post(url, json=body).raise_for_status().json()

            assert len(post(f"{address}/v1/chat/completions", ASK)["choices"]) == 1
            greedy = [post(f"{address}/v1/chat/completions", ASK | {"temperature": 0})["choices"][0]["message"] for _ in range(2)]
            assert greedy[0] == greedy[1]
            colors = ASK | {"structured_outputs": {"choice": ["blue", "green"]}, "max_tokens": 20}
            assert post(f"{address}/v1/chat/completions", colors)["choices"][0]["message"]["content"] in ("blue", "green")
            for field in ({"logit_bias": {"65": 1}}, {"min_tokens": 1000}, {"temprature": 0}):  # the first two are the engine's word
                answer = web.post(f"{address}/v1/chat/completions", json=ASK | field)
                assert answer.status_code == 400 and next(iter(field)) in answer.json()["error"]["message"]
            assert httpx.post(f"{address}/v1/trajectories").status_code == 401
            base = post(f"{address}/v1/trajectories")["base_url"]
            first = post(f"{base}/chat/completions", ASK)["choices"][0]
            more = [*ASK["messages"], first["message"], {"role": "user", "content": "2+2="}]  # type: ignore[misc]
            second = post(f"{base}/chat/completions", ASK | {"messages": more})["choices"][0]
            post(f"{base}/finish", {"reward": 0.5})
        deadline = time.monotonic() + 20
        while not out.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "1 trajectories" in printed
    finally:
        process.kill()
        process.wait()
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["prompt_id"], row["reward"]) == ("trajectory/0", 0.5)
    answered = [each["logprob"] for turn in (first, second) for each in turn["logprobs"]["content"]]
    retained = [logprob for logprob, retained in zip(row["behaviour_logprobs"], row["loss_mask"], strict=True) if retained]
    assert retained == pytest.approx(answered, abs=1e-6) and row["environment"]["turns"] == 2
