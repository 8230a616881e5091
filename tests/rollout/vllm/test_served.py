"""A running `vllm serve`: weights and adapters are sent over HTTP, by the command and by direct calls."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.errors import UserError
from mtpctl.rollout.vllm.client import ServedEngine
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.store import SHARED_MEMORY
from mtpctl.sync.update import SyncReport
from tests.fakes import adapters
from tests.fakes.engine_checkpoints import random_tensors, reference_logprobs, tiny_config, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny_mtp.yaml"
CONFIG = tiny_config(vocab_size=320)
BASE = random_tensors(CONFIG, 0)
PROMPT = [3, 4, 5, 6, 7]


class Server:
    """vLLM's OpenAI server on a model folder."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
            "--port",
            self.url.rpartition(":")[2],
        ]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
        command += ["--max-num-seqs", "16", "--max-model-len", "128", "--logprobs-mode", "processed_logprobs", "--skip-tokenizer-init"]
        command += [
            "--no-enable-prefix-caching",
            "--speculative-config",
            json.dumps({"method": "mtp", "num_speculative_tokens": 1}),
            *options,
        ]
        switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "TORCH_COMPILE_DISABLE": "1"}
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | switches)

    def ready(self, seconds: float = 240) -> None:
        """Return once it answers."""
        until = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.5)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})) as answer:
            return json.loads(answer.read())

    def continuation(self, model: str) -> tuple[list[int], list[float]]:
        """Tokens behind the prompt, greedily, and their log-probs."""
        options = {"max_tokens": 12, "temperature": 0.0, "logprobs": 1, "return_tokens_as_token_ids": True, "ignore_eos": True}
        choice = self.ask("/v1/completions", {"model": model, "prompt": PROMPT, **options})["choices"][0]
        tokens = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        return tokens, choice["logprobs"]["token_logprobs"]


def assert_answers(server: Server, model: str, tensors: adapters.Tensors) -> None:
    tokens, result = server.continuation(model)
    wanted = reference_logprobs(CONFIG, tensors, PROMPT + tokens)[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(result, dtype=torch.float64), wanted, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "model", CONFIG, BASE)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    options = ("--weight-transfer-config", '{"backend": "mtpctl"}', "--enable-lora", "--max-lora-rank", "8")
    result = Server(
        folder, folder.parent / "server.log", *options, "--worker-extension-cls", "mtpctl.rollout.vllm.receiver.WorkerExtension"
    )
    try:
        result.ready()
        yield result
    finally:
        result.process.terminate()
        result.process.wait(60)
        # A server's adapter outlives who sent it.
        for left in SHARED_MEMORY.glob(f"mtpctl-adapter-http-*-{result.url.rpartition(':')[2]}"):
            shutil.rmtree(left)


def sync(server: Server, manifest: Any) -> SyncReport:
    async def update() -> SyncReport:
        engine = await ServedEngine.connect(server.url, tuple(manifest.sections))
        return await engine.update(manifest, mode="keep", verify=True, deadline_s=60)

    return asyncio.run(update())


def version(server: Server) -> int:
    named = str(server.ask("/weight_info")["weight_version"])
    return int(named) if named.isdigit() else 0  # before the first sync


@pytest.fixture
def adapted(server: Server, tmp_path: Path) -> Server:
    """The server with an adapter: that of the previous test, or a new one."""
    if all(model["id"] != "mtpctl" for model in server.ask("/v1/models")["data"]):
        sends = adapters.publisher(tmp_path / "first", sections=("adapter",))
        sync(server, sends.publish(adapters.adapter(BASE, 9).items(), version(server) + 1, checksums=True))
    return server


def test_the_command_sends_base_adapter_and_draft_and_then_the_adapter_and_draft_alone(server: Server, folder: Path) -> None:
    sets = {"model": f"{{path: {folder}, config: null, init: weights, tokenizer: bytes}}", "cluster.num_cpus": "2"}
    sets |= {"train.lora": "{rank: 4, alpha: 8}", "sync.sections": "[adapter, draft]"}
    inputs = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-m",
        "mtpctl",
        "sync-weights",
        str(RECIPE),
        *inputs,
        "--to",
        server.url,
        "--repeat",
        "2",
        "--verify",
        "--json",
    ]
    before = version(server)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    drafts = [name for name in BASE if ".mtp_layers." in name]
    tensors = len(adapters.adapter(BASE, 0))
    assert (first["verified"], second["verified"]) == (len(BASE) + tensors, len(drafts) + tensors)
    assert second["nbytes"] < first["nbytes"] / 2
    assert version(server) == before + 2
    assert_answers(server, str(folder), BASE)
    assert_answers(server, "mtpctl", BASE)  # B begins at nothing


def test_requests_choose_between_base_and_adapter(server: Server, folder: Path, tmp_path: Path) -> None:
    sends = adapters.publisher(tmp_path, sections=("adapter",))
    for seed in (1, 2):
        delta = adapters.adapter(BASE, seed)
        report = sync(server, sends.publish(delta.items(), version(server) + 1, checksums=True))
        assert report.verified == len(delta)
        assert_answers(server, "mtpctl", adapters.merged(BASE, delta))
        assert_answers(server, str(folder), BASE)


def test_session_of_a_killed_sync_is_ended_by_the_next_one(server: Server, folder: Path, tmp_path: Path) -> None:
    """The server is paused, with an open session: a failed sync leaves it paused, a successful one resumes it."""
    sends = adapters.publisher(tmp_path, sections=("adapter",))
    server.ask("/pause?mode=keep&clear_cache=true", {})
    server.ask("/start_weight_update", {})
    delta = adapters.adapter(BASE, 4)
    unknown = {name.replace("layers.1.", "layers.7."): tensor for name, tensor in delta.items()}
    other = adapters.publisher(tmp_path / "other", sections=("adapter",))
    with pytest.raises(SyncError, match=r"resolves to nothing.* was already paused, and remains paused"):
        sync(server, other.publish(unknown.items(), version(server) + 1, checksums=True))
    assert server.ask("/is_paused")["is_paused"]
    sync(server, sends.publish(delta.items(), version(server) + 1, checksums=True))
    assert_answers(server, "mtpctl", adapters.merged(BASE, delta))


def wrong_shape() -> tuple[adapters.Tensors, int]:
    delta = adapters.adapter(BASE, 3)
    name = next(name for name in delta if name.endswith("o_proj.lora_B.weight"))
    return delta | {name: delta[name][:-1].contiguous()}, adapters.RANK


def unknown_layer() -> tuple[adapters.Tensors, int]:
    delta = adapters.adapter(BASE, 3)
    return {name.replace("layers.1.", "layers.7."): tensor for name, tensor in delta.items()}, adapters.RANK


def half_a_pair() -> tuple[adapters.Tensors, int]:
    delta = adapters.adapter(BASE, 3)
    del delta[next(iter(delta))]
    return delta, adapters.RANK


def too_much_rank() -> tuple[adapters.Tensors, int]:
    return adapters.adapter(BASE, 3, rank=16), 16


@pytest.mark.parametrize(
    ("created", "said"),
    [
        (wrong_shape, r"the adapter of model\.layers\.0\.self_attn\.o_proj\.weight has shape \(127, 128\)"),
        (unknown_layer, r"model\.layers\.7\.self_attn\.q_proj\.weight resolves to nothing"),
        (half_a_pair, r"model\.layers\.0\.self_attn\.q_proj has lora_B alone"),
        (too_much_rank, r"the adapter has rank 16, this engine was started with max_lora_rank 8"),
    ],
)
def test_mismatched_adapter_is_rejected_without_changes(adapted: Server, tmp_path: Path, created: Any, said: str) -> None:
    server = adapted
    before, (live, _) = version(server), server.continuation("mtpctl")
    delta, rank = created()
    sends = adapters.publisher(tmp_path, rank=rank, sections=("adapter", "draft"))
    drafts = {name: tensor for name, tensor in random_tensors(CONFIG, 5).items() if ".mtp_layers." in name}
    with pytest.raises(SyncError, match=said):
        sync(server, sends.publish((delta | drafts).items(), before + 1, checksums=True))
    assert version(server) == before
    assert server.continuation("mtpctl")[0] == live


def test_full_weights_with_a_loaded_adapter_are_rejected(adapted: Server) -> None:
    with pytest.raises(UserError, match=rf"--to: {adapted.url} has the adapter mtpctl loaded, which would apply on top of full weights"):
        asyncio.run(ServedEngine.connect(adapted.url, ("target", "draft")))


def test_unreachable_server_and_missing_routes_are_reported(server: Server) -> None:
    for url, said in (("localhost:1", "is not a URL"), ("http://127.0.0.1:9", "does not answer")):
        with pytest.raises(UserError, match=f"--to: {url} {said}"):
            asyncio.run(ServedEngine.connect(url))
