"""Updates the weights of vLLM: of an `AsyncLLM` in this process, or of servers that the user started.

A server must run with `VLLM_SERVER_DEV_MODE=1` and
`--weight-transfer-config '{"backend": "mtpctl"}' --worker-extension-cls mtpctl.rollout.vllm.receiver.WorkerExtension`; for adapters also
with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and `--enable-lora --max-lora-rank N`, and for `sync.release_kv` with `--enable-sleep-mode`.
Requests for the model `mtpctl` use the adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from mtpctl.errors import UserError
from mtpctl.sync.engine_target import EngineTarget
from mtpctl.sync.protocol import JsonObject, Manifest, PauseMode, Section, SyncError
from mtpctl.sync.receiver import UpdateStep, adapter_root
from mtpctl.sync.update import SyncReport, cancel_on_error, update_target

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmClient:
    """An `EngineClient` of an `AsyncLLM` in this process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def start(self, *, draft: bool) -> None:
        await (self._llm.start_draft_weight_update() if draft else self._llm.start_weight_update())

    async def step(self, step: UpdateStep) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"step": step}))

    async def finish(self, version: int) -> None:
        await self._llm.finish_weight_update(str(version))

    async def rpc(self, method: str, *args: str) -> list[object]:
        return list(await self._llm.collective_rpc(method, args=args))

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        await self._llm.add_lora(adapter_request(name, number, folder, reload=True))


def adapter_request(name: str, number: int, folder: str, *, reload: bool = False) -> LoRARequest:
    """vLLM's reference to an adapter, in requests and for loading; `reload`: reload the adapter with this number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder, load_inplace=reload)


TIMEOUT_S = 300.0
_WORKER_ERROR = re.compile(r"Worker failed with error '(?P<error>.*)', please check the stack trace", re.DOTALL)
START_HINT = (
    'start it with VLLM_SERVER_DEV_MODE=1 vllm serve … --weight-transfer-config \'{"backend": "mtpctl"}\' '
    "--worker-extension-cls mtpctl.rollout.vllm.receiver.WorkerExtension"
)
ADAPTER_HINT = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve … --enable-lora --max-lora-rank N as well"
SLEEP_HINT = "start it with --enable-sleep-mode as well, or set sync.release_kv: false"


_KV_RELEASED = "to be resident"
"""Part of vLLM's error if the memory of the KV cache is released already."""


def _error_message(body: str) -> str:
    """The message of vLLM's error response, reduced to the worker's error if it contains one."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        body = json.loads(body)["error"]["message"]
    worker_error = _WORKER_ERROR.search(body)
    return (worker_error["error"] if worker_error else body).strip()[:400]


class HttpClient:
    """An `EngineClient` of a server.

    Raises SyncError if a call fails or takes longer than `TIMEOUT_S`, and UserError if the server is unreachable or lacks a route.
    """

    def __init__(self, url: str) -> None:
        url_parts = urllib.parse.urlsplit(url)
        if url_parts.scheme not in ("http", "https") or not url_parts.hostname:
            raise UserError(f"--to: {url} is not a URL; use http://HOST:PORT of a vLLM server")
        self.url = f"{url_parts.scheme}://{url_parts.netloc}"

    async def request(self, path: str, body: dict[str, object] | None = None, *, method: str = "POST", hint: str = "") -> JsonObject:
        """Send a request and return the JSON object of the response; empty if the response is text.

        `hint` completes the error for a missing route: it explains how to start the server with this route.
        """
        return await asyncio.to_thread(self._send_request, path, body, method, hint or START_HINT)

    def _send_request(self, path: str, body: dict[str, object] | None, method: str, hint: str) -> JsonObject:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                response_body, content_type = response.read(), response.headers.get_content_type()
        except urllib.error.HTTPError as error:
            body_text = error.read().decode(errors="replace")
            if error.code in (404, 405):
                raise UserError(f"--to: {self.url} has no {path}; {hint}") from error
            raise SyncError(f"{self.url}{path}: {_error_message(body_text) or error}") from error
        except TimeoutError as error:
            raise SyncError(f"{self.url}{path}: no answer within {TIMEOUT_S:g} s") from error
        except (urllib.error.URLError, OSError) as error:
            raise UserError(f"--to: {self.url} does not answer: {getattr(error, 'reason', error)}") from error
        result = json.loads(response_body) if content_type == "application/json" else {}
        return result if isinstance(result, dict) else {}

    async def start(self, *, draft: bool) -> None:
        await self.request("/start_draft_weight_update" if draft else "/start_weight_update")

    async def step(self, step: UpdateStep) -> None:
        await self.request("/update_weights", {"update_info": {"step": step}})

    async def finish(self, version: int) -> None:
        await self.request("/finish_weight_update", {"weight_version": str(version)})

    async def rpc(self, method: str, *args: str) -> list[object]:
        response = await self.request("/collective_rpc", {"method": method, "args": list(args)})
        return list(response.get("results", []))

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        """Load the adapter under this name; the server numbers adapters itself."""
        await self.request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder, "load_inplace": True}, hint=ADAPTER_HINT)


class ServedEngine:
    """A server that the user started. Create with `await ServedEngine.connect(url)`."""

    def __init__(
        self, client: HttpClient, version: int, ranks: int, has_drafter: bool, *, release_kv: bool = False, keep_kv: bool = False
    ) -> None:
        self.client, self.ranks, self._paused = client, ranks, False
        self._release_kv, self._keep_kv = release_kv, keep_kv
        self._sections: tuple[Section, ...] = ("target", "draft", "adapter") if has_drafter else ("target", "adapter")
        # The name of the folder is derived from the URL, so the next sync finds the folder and replaces the adapter of this sync.
        self.target = EngineTarget(
            client,
            version,
            with_deadline=self._with_deadline,
            paused=lambda: self._paused,
            sections=self._sections,
            adapters=adapter_root("", re.sub(r"[^A-Za-z0-9.]+", "-", client.url)),
        )

    @classmethod
    async def connect(
        cls, url: str, sections: Collection[Section] = ("target", "draft"), *, release_kv: bool = False, keep_kv: bool = False
    ) -> ServedEngine:
        """Query a server's state. Raises UserError if it does not answer, or cannot be updated with these `sections`.

        `release_kv`: free its KV cache during a sync. `keep_kv`: running requests keep their KV cache.
        """
        client = HttpClient(url)
        weight_info = await client.request("/weight_info", method="GET")
        world_size = await client.request("/get_world_size", method="GET")
        if "target" in sections and "adapter" not in sections:
            models = await client.request("/v1/models", method="GET")
            if loaded_adapters := [model["id"] for model in models["data"] if model.get("parent")]:
                raise UserError(
                    f"--to: {client.url} has the adapter {', '.join(loaded_adapters)} loaded, which would apply on top of full weights; "
                    "unload it (POST /v1/unload_lora_adapter), or set sync.sections: [adapter, draft]"
                )
        drafter_answers = await client.rpc("mtpctl_drafts")
        version = str(weight_info["weight_version"])
        known_version = int(version) if version.isdigit() else 0
        return cls(
            client, known_version, int(world_size["world_size"]), str(drafter_answers[0]) == "True", release_kv=release_kv, keep_kv=keep_kv
        )

    async def _with_deadline[T](self, step: Awaitable[T], action: str) -> T:
        try:
            return await asyncio.wait_for(step, TIMEOUT_S)
        except TimeoutError as error:
            raise SyncError(f"{self.client.url}: {action} took longer than {TIMEOUT_S:g} s") from error

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport:
        """Pause, apply the update, resume.

        A server that is already paused may have partial weights of a killed sync, so it is resumed only after a complete update. That sync
        may also have released the KV cache.
        """
        started_at = time.monotonic()
        query = urllib.parse.urlencode({"mode": mode, "clear_cache": "false" if self._keep_kv else "true"})
        was_paused = bool((await self.client.request("/is_paused", method="GET"))["is_paused"])
        kv_released = update_applied = False
        try:
            if was_paused:
                # The open session of the killed sync would block a new session.
                with contextlib.suppress(SyncError):
                    await self.client.step(UpdateStep(action="abort", section=""))
            # The server may pause even if this call fails, so it is resumed below.
            await self.client.request(f"/pause?{query}")
            self._paused = True
            if self._release_kv:
                kv_released = True  # The server may release it even if this call fails.
                try:
                    await self.client.request("/release_kv_cache_memory", hint=SLEEP_HINT)
                except SyncError as error:
                    if not (was_paused and _KV_RELEASED in str(error)):
                        raise
            report = await update_target(self.target, manifest, verify=verify, deadline_s=deadline_s, sections=self._sections)
            update_applied = True
        except SyncError as error:
            if was_paused:
                raise SyncError(
                    f"{error}; {self.client.url} was already paused, and remains paused until a sync succeeds or it is resumed"
                ) from error
            raise
        finally:
            # A server whose weights may be a mix of versions stays paused until a later sync succeeds, or until it is restarted.
            if not self.target.dirty and (update_applied or not was_paused):
                if kv_released or was_paused:
                    # A cache that was not released stays as it is. A server without sleep mode has none that was.
                    with contextlib.nullcontext() if kv_released else contextlib.suppress(UserError, SyncError):
                        await self.client.request("/wake_up?tags=kv_cache", hint=SLEEP_HINT)
                await self.client.request("/resume")
                self._paused = False
        return replace(report, stall_seconds=time.monotonic() - started_at)


class ServedEngines:
    """Implements `mtpctl.sync.update.Generators` for servers that the user started, in place of a pool."""

    def __init__(self, engines: list[ServedEngine]) -> None:
        self.engines = engines

    @property
    def version(self) -> int:
        """The newest version that a server has."""
        return max(engine.target.version for engine in self.engines)

    def quiesce(self, mode: PauseMode) -> contextlib.AbstractAsyncContextManager[None]:
        """Does nothing: no server joins or leaves, and `apply_update` pauses each of them."""
        return contextlib.nullcontext()

    def rank_names(self, num_ranks: int) -> list[str]:
        """A name for each rank of each server. `num_ranks` is ignored, because servers report their own number."""
        return [f"{engine.client.url} {rank}" for engine in self.engines for rank in range(engine.ranks)]

    async def apply_update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        """Update every server. Raises the first error after all have answered."""
        calls = (
            cancel_on_error(manifest, engine.update(manifest, mode=mode, verify=verify, deadline_s=deadline_s)) for engine in self.engines
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, SyncReport)]
