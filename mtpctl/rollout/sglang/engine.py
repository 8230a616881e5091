"""One SGLang engine (0.5.21), in an environment of its own: the same responses, and the same target for weight updates.

SGLang's log-probs are of the distribution at the sampling temperature, with drafts as without. Weights come in through SGLang's
update sessions, of the target and of the drafter; a pause takes running responses back to the queue, and the cache is dropped with
the first session that closes, so that they go on from a state computed anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from mtpctl.cluster.meeting import host_store
from mtpctl.errors import UserError
from mtpctl.rollout.engine import Engine, Stretch, check_options, speculation_counts
from mtpctl.rollout.protocol import ABORTED
from mtpctl.rollout.sglang.client import SglangClient
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.samples import GenerationRequest, Speculation
from mtpctl.sync.protocol import PauseMode

LIVENESS_S = 5.0
"""Seconds between looks at the engine's processes while a response is awaited."""

AGAIN_S = 0.05
"""Seconds between two aborts of the same request."""

SCHEDULER_KEEPS = 2
"""Tokens of the context that SGLang's scheduler gives no request (`init_req_max_new_tokens`)."""


class SglangEngine(Engine):
    """Build with `await SglangEngine.start(settings)`."""

    def __init__(self, engine: Any, settings: SglangSettings, version: int) -> None:
        args = engine.server_args
        super().__init__(
            SglangClient(engine.tokenizer_manager),
            version=version,
            context=usable_context(engine.tokenizer_manager),
            places=int(settings.args["max_running_requests"]),
            holds=("target", "draft") if args.speculative_algorithm else ("target",),
        )
        self._engine, self._manager = engine, engine.tokenizer_manager
        self._settings = settings
        self._initial = version
        self._open = asyncio.Event()
        self._open.set()
        self._submitted: set[str] = set()
        self._drained = asyncio.Condition()
        self._meeting: Any = None
        self._processes = [psutil.Process(pid) for pid in engine.get_all_child_pids()]

    @classmethod
    async def start(cls, settings: SglangSettings, *, version: int = 0) -> SglangEngine:
        """Load the model and warm up. `version` is what its weights count as until the first update.

        Raises UserError for an unknown name in `rollout.engine_args`, EnvironmentMissing where SGLang's processes would not find the
        plugin, UpstreamMoved for another SGLang, and what SGLang raises for a model it cannot load.
        """
        os.environ.update(settings.environment)
        from sglang.srt.entrypoints.engine import Engine as Upstream
        from sglang.srt.server_args import ServerArgs

        from mtpctl.rollout.sglang import plugin

        # SGLang logs what a plugin raises, and goes on without it.
        plugin.register()
        plugin.check_plugin()
        check_options("SGLang", option_names(ServerArgs), settings.args)
        with ranks_meet_here() as meeting:
            # In the loop's own thread: SGLang binds its sockets and its event loop where it is built.
            upstream = Upstream(**settings.args | {"weight_version": str(version)})
        engine = cls(upstream, settings, version)
        engine._meeting = meeting
        return engine

    # ------------------------------------------------------------------------------------------------- generation

    def _room(self, tokens: int) -> int:
        # SGLang takes no prompt of this length or longer; a response that was aborted so near the end of the context ends there.
        return super()._room(tokens) if tokens < self._manager.max_req_input_len else 0

    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> Stretch:
        # SGLang aborts whatever begins with a name: one that ends the same way for all is no beginning of another.
        name = f"{request_id}."
        if not await self._admitted(request.deadline_s):
            return Stretch([], [], [], ABORTED)
        asked = asyncio.ensure_future(
            self._engine.async_generate(
                input_ids=prompt, sampling_params=self._sampling(request, room), return_logprob=True, logprob_start_len=-1, rid=name
            )
        )
        self._submitted.add(name)
        try:
            while not (await asyncio.wait([asked], timeout=LIVENESS_S))[0]:
                if self._errored:
                    raise RuntimeError("an SGLang process has died")
            output: dict[str, Any] = asked.result()
        finally:
            if asked.cancel():
                # Who waited is gone; the scheduler would go on.
                self._manager.abort_request(rid=name)
            async with self._drained:
                self._submitted.discard(name)
                self._drained.notify_all()
        return self._stretch(output)

    async def _admitted(self, seconds: float) -> bool:
        """Wait until nothing is paused, at most so long."""
        try:
            await asyncio.wait_for(self._open.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _sampling(self, request: GenerationRequest, room: int) -> dict[str, Any]:
        if request.top_p < 1 or request.top_k:
            raise UserError("rollout.engine: SGLang's log-probs leave top_p and top_k out; sample without, or set rollout.engine: vllm")
        if request.stop and self._settings.args["skip_tokenizer_init"]:
            raise UserError("stop strings need the engine's tokenizer: name them in rollout.stop, or stop by token ids")
        found: dict[str, Any] = {
            "temperature": request.temperature,
            "max_new_tokens": room,
            "stop_token_ids": request.stop_token_ids or None,
            "stop": request.stop or None,
            # It would have SGLang ignore stop ids as well. With one, the end token of the model's config stops too.
            "ignore_eos": self._settings.args["skip_tokenizer_init"] and not request.stop_token_ids,
        }
        if request.seed is not None and self._settings.args.get("enable_deterministic_inference"):
            found["sampling_seed"] = (request.seed + 1_000_003 * len(request.sample.response_ids)) % (1 << 31)
        return found

    def _stretch(self, output: dict[str, Any]) -> Stretch:
        meta = output["meta_info"]
        logprobs = [float(each[0]) for each in meta.get("output_token_logprobs") or []]
        tokens = list(output["output_ids"])
        reason = (meta["finish_reason"] or {}).get("type")
        spans = [(span["start"], min(span["end"], len(tokens)), int(span["version"])) for span in meta.get("weight_versions") or []]
        if not spans:
            spans = [(0, len(tokens), int(meta["weight_version"]))]
        histogram = meta.get("spec_correct_drafts_histogram")
        counts = speculation_counts(list(histogram), meta["spec_num_proposed_drafts"]) if histogram else Speculation()
        return Stretch(tokens, logprobs, [span for span in spans if span[0] < span[1]], reason, counts)

    def _read(self, tokens: list[int]) -> str:
        return str(self._manager.tokenizer.decode(tokens, skip_special_tokens=True))

    async def _abort(self, request_ids: list[str]) -> None:
        # SGLang passes over what it has not registered yet, so it is told until they are gone.
        names = {f"{request_id}." for request_id in request_ids}
        while left := names & self._submitted:
            for name in left:
                self._manager.abort_request(rid=name)
            await asyncio.sleep(AGAIN_S)

    # ----------------------------------------------------------------------------------------------------- control

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `Engine.pause`."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._open.clear()
        if mode == "abort":
            await self._within(self._abort([name.removesuffix(".") for name in self._submitted]), "aborting responses")
        if mode != "keep":
            async with self._drained:
                waiting = self._drained.wait_for(lambda: not self._submitted)
                await (self._within(waiting, "aborting responses") if mode == "abort" else waiting)
        await self._within(self._manager.pause_generation(PauseGenerationReqInput(mode="retract")), f"pausing ({mode})")
        self._paused = True

    async def resume(self) -> None:
        """See `Engine.resume`."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._check_alive()
        await self._within(self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False)), "resuming")
        self._paused = False
        self._open.set()

    async def speculate(self, drafts: int | None = None, *, look_again: bool = False) -> dict[str, Any]:
        """See `Engine.speculate`."""
        raise UserError("rollout.speculation.auto: works with rollout.engine: vllm; set it to false")

    @property
    def _errored(self) -> bool:
        return any(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in self._processes)

    async def shutdown(self) -> None:
        """End the engine. May be called again."""
        await asyncio.to_thread(self._engine.shutdown)
        self._target.close()


@contextmanager
def ranks_meet_here() -> Iterator[Any]:
    """An SGLang engine that is started in the block has its ranks meet in the store that this gives, to be held as long as the engine.

    By itself SGLang looks for a free port, and its first rank takes it many seconds later, when the model is loaded: where another
    program has come first, that rank dies, and takes the process with it that started it.
    """
    store = host_store("127.0.0.1")
    meeting = {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        # torch's own: rank 0 joins a store that is there, as the others do.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    before = {name: os.environ.get(name) for name in meeting}
    os.environ.update(meeting)
    try:
        yield store
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def usable_context(manager: Any) -> int:
    """Tokens that a prompt and its response may have together: fewer than the context that SGLang was started with.

    Its tokenizer manager refuses what leaves less than `num_reserved_tokens` for drafts, its scheduler silently cuts two tokens off
    the context, with drafts or without.
    """
    return int(manager.context_len) - max(int(manager.num_reserved_tokens), SCHEDULER_KEEPS)


def option_names(server_args: Any) -> list[str]:
    """Every option of SGLang's `ServerArgs`."""
    return list(getattr(server_args, "__struct_fields__", None) or server_args.__annotations__)
