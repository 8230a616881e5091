"""A vLLM server that someone started, as a target for weights: vLLM's own routes for reinforcement learning.

The server must have been started with `VLLM_SERVER_DEV_MODE=1` and
`--weight-transfer-config '{"backend": "mtpctl"}' --worker-extension-cls mtpctl.sync.vllm_receiver.WorkerExtension`.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from mtpctl.recipe import UserError
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import ABORTED_BY_SENDER, PauseMode, Section, SyncError
from mtpctl.sync.session import SyncReport, or_cancel, update_target
from mtpctl.sync.vllm_target import VllmTarget

_ANSWER_S = 300.0
STARTED_WITH = (
    'start it with VLLM_SERVER_DEV_MODE=1 vllm serve … --weight-transfer-config \'{"backend": "mtpctl"}\' '
    "--worker-extension-cls mtpctl.sync.vllm_receiver.WorkerExtension"
)


class HttpClient:
    """See `VllmClient`. Raises SyncError for what the server refuses, UserError for one that is not there or lacks the routes."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--to: {url} is no URL; give http://HOST:PORT of a vLLM server")
        self.url = f"{parts.scheme}://{parts.netloc}"

    async def ask(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        """The JSON that the server answers."""
        return await asyncio.to_thread(self._ask, path, body, method)

    def _ask(self, path: str, body: dict[str, Any] | None, method: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            told = error.read().decode(errors="replace")
            if error.code in (404, 405):
                raise UserError(f"--to: {self.url} has no {path}; {STARTED_WITH}") from error
            raise SyncError(f"{self.url}{path}: {told.strip()[:400] or error}") from error
        except (urllib.error.URLError, OSError) as error:
            raise UserError(f"--to: {self.url} does not answer: {getattr(error, 'reason', error)}") from error
        return json.loads(text) if text else None

    async def start(self, *, draft: bool) -> None:
        """See `VllmClient`."""
        await self.ask("/start_draft_weight_update" if draft else "/start_weight_update")

    async def step(self, info: dict[str, Any]) -> None:
        """See `VllmClient`."""
        try:
            await self.ask("/update_weights", {"update_info": info})
        except SyncError as error:
            if info["action"] == "abort":
                # What a session is ended with, told or not told by the server.
                raise SyncError(ABORTED_BY_SENDER) from error
            raise

    async def finish(self, version: int) -> None:
        """See `VllmClient`."""
        await self.ask("/finish_weight_update", {"weight_version": str(version)})

    async def rpc(self, method: str, *args: str) -> list[Any]:
        """See `VllmClient`."""
        answer = await self.ask("/collective_rpc", {"method": method, "args": list(args)})
        return list(answer["results"]) if answer else []

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        """See `VllmClient`. The server gives adapters numbers of its own."""
        await self.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder, "load_inplace": True})


class ServedEngine:
    """One server. Make it with `await ServedEngine.find(url)`."""

    def __init__(self, client: HttpClient, version: int, ranks: int, drafts: bool) -> None:
        self.client, self.ranks, self._paused = client, ranks, False
        self._holds: tuple[Section, ...] = ("target", "draft") if drafts else ("target",)
        self.target = VllmTarget(client, version, within=self._within, paused=lambda: self._paused, holds=self._holds)

    @classmethod
    async def find(cls, url: str) -> ServedEngine:
        """Ask a server what it is. Raises UserError where it is none, or cannot take weights."""
        client = HttpClient(url)
        told = await client.ask("/weight_info", method="GET")
        ranks = await client.ask("/get_world_size", method="GET")
        found = await client.rpc("mtpctl_drafts")
        version = str(told["weight_version"])
        return cls(client, int(version) if version.isdigit() else 0, int(ranks["world_size"]), str(found[0]) == "True")

    async def _within(self, step: Awaitable[Any], what: str) -> Any:
        try:
            return await asyncio.wait_for(step, _ANSWER_S)
        except TimeoutError as error:
            raise SyncError(f"{self.client.url}: {what} took longer than {_ANSWER_S:g} s") from error

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport:
        """Pause, take the version in, resume."""
        began = time.monotonic()
        query = urllib.parse.urlencode({"mode": mode, "clear_cache": "true"})
        await self.client.ask(f"/pause?{query}")
        self._paused = True
        try:
            report = await update_target(self.target, manifest, verify=verify, deadline_s=deadline_s, holds=self._holds)
        finally:
            if not self.target.dirty:
                await self.client.ask("/resume")
            self._paused = False
        return replace(report, stall_seconds=time.monotonic() - began)


class ServedEngines:
    """Servers as `WeightSync` sees a pool."""

    def __init__(self, engines: list[ServedEngine]) -> None:
        self.engines = engines

    @property
    def version(self) -> int:
        """The newest version that one of them has."""
        return max(engine.target.version for engine in self.engines)

    def members(self, ranks: int) -> list[str]:
        """A name for each rank of each server; the recipe's number of ranks does not matter here."""
        return [f"{engine.client.url} {rank}" for engine in self.engines for rank in range(engine.ranks)]

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        """Take every server to the version. Raises the first error, after all have answered."""
        calls = (or_cancel(manifest, e.update(manifest, mode=mode, verify=verify, deadline_s=deadline_s)) for e in self.engines)
        found = await asyncio.gather(*calls, return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return [result for result in found if isinstance(result, SyncReport)]
