"""One SGLang engine (0.5.21) in a separate Python environment, and its weight updates.

SGLang computes log-probs at the sampling temperature, with and without drafts. Weights are updated in SGLang's
update sessions, one for the target and one for the drafter. A pause moves running responses back to the queue. Closing a session drops the
KV cache, so these responses continue with a cache that is recomputed with the new weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import psutil

from mtpctl.cluster.rendezvous import host_store
from mtpctl.errors import UserError
from mtpctl.rollout.engine import Engine, GenerationChunk, speculation_from_histogram
from mtpctl.rollout.installed import check_options
from mtpctl.rollout.protocol import ABORTED, SpeculationState
from mtpctl.rollout.sglang.settings import WEIGHT_LOADER, SglangSettings
from mtpctl.samples import GenerationRequest, Speculation
from mtpctl.sync.protocol import PauseMode, PlanMismatch, SyncError
from mtpctl.sync.receiver import RankSums, UpdateStep

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine as SglangRuntime
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs
    from torch.distributed import TCPStore

LIVENESS_S = 5.0
"""Interval of checks whether the engine's processes are alive, in seconds."""

ABORT_INTERVAL_S = 0.05
"""Interval of repeated aborts of a request, in seconds."""

SCHEDULER_RESERVED_TOKENS = 2
"""Tokens of the context that SGLang's scheduler reserves (`init_req_max_new_tokens`)."""


class _Span(TypedDict):
    start: int
    end: int
    version: str


class _Meta(TypedDict):
    """SGLang's `meta_info`; log-probs are `(logprob, token, text)`."""

    finish_reason: dict[str, object] | None
    weight_version: str
    weight_versions: NotRequired[list[_Span] | None]
    output_token_logprobs: NotRequired[list[tuple[float, int, str | None]] | None]
    spec_correct_drafts_histogram: NotRequired[list[int] | None]
    spec_num_proposed_drafts: NotRequired[int]


class _Output(TypedDict):
    """A finished response of SGLang."""

    output_ids: list[int]
    meta_info: _Meta


class SglangEngine(Engine):
    """An SGLang engine that this process starts. Create with `await SglangEngine.start(settings)`."""

    def __init__(self, engine: SglangRuntime, settings: SglangSettings, version: int) -> None:
        args = engine.server_args
        super().__init__(
            SglangClient(engine.tokenizer_manager),
            version=version,
            context=compute_usable_context(engine.tokenizer_manager),
            slots=int(settings.args["max_running_requests"]),
            sections=("target", "draft") if args.speculative_algorithm else ("target",),
        )
        self._engine, self._manager = engine, engine.tokenizer_manager
        self._settings = settings
        self._not_paused = asyncio.Event()
        self._not_paused.set()
        self._aborted = asyncio.Event()
        self._submitted_rids: set[str] = set()
        self._rids_changed = asyncio.Condition()
        self._rendezvous: TCPStore | None = None
        self._processes = [psutil.Process(pid) for pid in engine.get_all_child_pids()]

    @classmethod
    async def start(cls, settings: SglangSettings, *, version: int = 0) -> SglangEngine:
        """Load the model and warm up. `version`: the version of its weights.

        Raises UserError for an unknown name in `rollout.engine_args`, PrerequisiteMissing if SGLang's processes would not find the plugin,
        UpstreamMoved for another SGLang release, and SGLang's errors for a model that it cannot load.
        """
        os.environ.update(settings.environment)
        from sglang.srt.entrypoints.engine import Engine as SglangRuntime
        from sglang.srt.server_args import ServerArgs

        from mtpctl.rollout.sglang import plugin

        # The plugin is called directly, because SGLang only logs the errors of plugins.
        plugin.register()
        plugin.check_plugin()
        check_options("SGLang", list_option_names(ServerArgs), settings.args)
        with open_rendezvous() as store:
            # SGLang binds its sockets to the thread of the event loop, so the runtime is created in this thread.
            runtime = SglangRuntime(**settings.args | {"weight_version": str(version)})
        engine = cls(runtime, settings, version)
        engine._rendezvous = store
        return engine

    # ------------------------------------------------------------------------------------------------- generation

    def _remaining_context(self, prompt_tokens: int) -> int:
        # SGLang rejects a prompt of `max_req_input_len` or more tokens. A partial response that has reached this length ends.
        return super()._remaining_context(prompt_tokens) if prompt_tokens < self._manager.max_req_input_len else 0

    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], max_tokens: int) -> GenerationChunk:
        # SGLang aborts all requests whose id begins with the given one. With a dot at the end, no id is a prefix of another.
        rid = f"{request_id}."
        if not await self._wait_until_running(request.deadline_s):
            return GenerationChunk([], [], [], ABORTED)
        task = asyncio.ensure_future(
            self._engine.async_generate(
                input_ids=prompt,
                sampling_params=self._sampling_params(request, max_tokens),
                return_logprob=True,
                logprob_start_len=-1,
                rid=rid,
            )
        )
        self._submitted_rids.add(rid)
        try:
            while not (await asyncio.wait([task], timeout=LIVENESS_S))[0]:
                if self._errored:
                    raise RuntimeError("an SGLang process has died")
            output: _Output = task.result()
        finally:
            if task.cancel():
                # The caller was cancelled. Without an abort, SGLang would continue to generate.
                self._manager.abort_request(rid=rid)
            async with self._rids_changed:
                self._submitted_rids.discard(rid)
                self._rids_changed.notify_all()
        return self._chunk(output)

    async def _wait_until_running(self, timeout_s: float) -> bool:
        """Wait until the engine is not paused, for at most `timeout_s` and until an abort. Returns whether it is running."""
        if self._not_paused.is_set():
            return True  # without giving other coroutines a turn, which might abort a request that is not submitted yet
        waits = [asyncio.ensure_future(event.wait()) for event in (self._not_paused, self._aborted)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._not_paused.is_set()

    def _end_waiting_requests(self) -> None:
        """End the requests that wait for the end of the pause. Later requests wait for the next event."""
        self._aborted.set()
        self._aborted = asyncio.Event()

    def _sampling_params(self, request: GenerationRequest, max_tokens: int) -> dict[str, object]:
        if request.top_p < 1 or request.top_k:
            raise UserError(
                "rollout.engine: SGLang's log-probs do not account for top_p and top_k; leave them out, or set rollout.engine: vllm"
            )
        if request.extra_sampling is not None and (names := request.extra_sampling.changed):
            raise UserError(
                f"{names[0]}: SGLang's log-probs do not account for it; leave it out of the request, or set rollout.engine: vllm"
            )
        if request.stop and self._settings.args["skip_tokenizer_init"]:
            raise UserError("stop strings need the engine's tokenizer: name them in rollout.stop, or stop by token ids")
        options: dict[str, object] = {
            "temperature": request.temperature,
            "max_new_tokens": max_tokens,
            "stop_token_ids": request.stop_token_ids or None,
            "stop": request.stop or None,
            # `ignore_eos` also ignores stop ids. If it is false, the EOS token of the model's config also ends a response.
            "ignore_eos": self._settings.args["skip_tokenizer_init"] and not request.stop_token_ids,
        }
        if request.seed is not None and self._settings.args.get("enable_deterministic_inference"):
            options["sampling_seed"] = (request.seed + 1_000_003 * len(request.sample.response_ids)) % (1 << 31)
        return options

    def _chunk(self, output: _Output) -> GenerationChunk:
        meta_info = output["meta_info"]
        logprobs = [float(entry[0]) for entry in meta_info.get("output_token_logprobs") or []]
        tokens = list(output["output_ids"])
        finish_reason = str(meta_info["finish_reason"]["type"]) if meta_info["finish_reason"] else None
        spans = [(span["start"], min(span["end"], len(tokens)), int(span["version"])) for span in meta_info.get("weight_versions") or []]
        if not spans:
            spans = [(0, len(tokens), int(meta_info["weight_version"]))]
        histogram = meta_info.get("spec_correct_drafts_histogram")
        counts = speculation_from_histogram(list(histogram), meta_info["spec_num_proposed_drafts"]) if histogram else Speculation()
        return GenerationChunk(tokens, logprobs, [span for span in spans if span[0] < span[1]], finish_reason, counts)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._manager.tokenizer.decode(tokens, skip_special_tokens=True))

    async def _abort(self, request_ids: list[str]) -> None:
        # SGLang ignores aborts of requests that it has not registered yet, so aborts are repeated until the requests have ended.
        rids = {f"{request_id}." for request_id in request_ids}
        while remaining_rids := rids & self._submitted_rids:
            for rid in remaining_rids:
                self._manager.abort_request(rid=rid)
            await asyncio.sleep(ABORT_INTERVAL_S)

    # ----------------------------------------------------------------------------------------------------- control

    async def pause(self, mode: PauseMode = "keep") -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._not_paused.clear()
        if mode == "abort":
            self._end_waiting_requests()
            await self._with_deadline(self._abort([rid.removesuffix(".") for rid in self._submitted_rids]), "aborting responses")
        if mode != "keep":
            async with self._rids_changed:
                all_ended = self._rids_changed.wait_for(lambda: not self._submitted_rids)
                await (self._with_deadline(all_ended, "aborting responses") if mode == "abort" else all_ended)
        await self._with_deadline(self._manager.pause_generation(PauseGenerationReqInput(mode="retract")), f"pausing ({mode})")
        self._paused = True

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._check_alive()
        await self._with_deadline(self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False)), "resuming")
        self._paused = False
        self._not_paused.set()

    async def control_speculation(self, drafts: int | None = None, *, weights_changed: bool = False) -> SpeculationState:
        raise UserError("rollout.speculation.auto: works with rollout.engine: vllm; set it to false")

    @property
    def _errored(self) -> bool:
        return not all(map(_is_running, self._processes))

    async def shutdown(self) -> None:
        await asyncio.to_thread(self._engine.shutdown)
        self._target.close()


@contextmanager
def open_rendezvous() -> Iterator[TCPStore]:
    """A rendezvous store for the ranks of an SGLang engine that is started in the block. Keep it as long as the engine.

    By default SGLang selects a free port, which its first rank binds many seconds later, after the model is loaded. If another program
    has taken the port by then, that rank dies and kills the process that started it.
    """
    store = host_store("127.0.0.1")
    variables = {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        # With this variable rank 0 joins an existing store, as the other ranks do.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    previous_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield store
    finally:
        for name, value in previous_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compute_usable_context(manager: TokenizerManager) -> int:
    """Maximum tokens of a prompt and its response, which are fewer than SGLang's context.

    SGLang's tokenizer manager reserves `num_reserved_tokens` for drafts, and its scheduler silently reserves two tokens; the larger number
    applies.
    """
    return int(manager.context_len) - max(int(manager.num_reserved_tokens), SCHEDULER_RESERVED_TOKENS)


def list_option_names(server_args: type[ServerArgs]) -> list[str]:
    """All options of SGLang's `ServerArgs`."""
    return list(getattr(server_args, "__struct_fields__", None) or server_args.__annotations__)


def _is_running(process: psutil.Process) -> bool:
    """Whether the process is running. It may end between the two calls."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class SglangClient:
    """An `EngineClient` for SGLang; `manager` is the engine's tokenizer manager.

    SGLang's update call passes a step, as JSON in one tensor, to `mtpctl.rollout.sglang.plugin.apply_step` on every rank. An exception
    there would end the engine, so results and errors are returned in files, one per rank and model.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._selector = "target"

    async def start(self, *, draft: bool) -> None:
        self._selector = "draft" if draft else "target"
        await self._begin(self._selector)

    async def step(self, step: UpdateStep) -> None:
        try:
            await self._send(step)
        except BaseException:
            await self._end()
            raise

    async def finish(self, version: int) -> None:
        """Close the session. This drops the cache, and waiting requests continue with `version`."""
        try:
            await self._send(UpdateStep(action="finish"), flush=True, version=str(version))
        finally:
            await self._end()

    async def rpc(self, method: str, *args: str) -> list[object]:
        """Call `mtpctl_sums`, the only supported method, of target and drafter. `args` is ignored; all sections are returned."""
        if method != "mtpctl_sums":
            raise SyncError(f"SGLang engines do not support adapters: {method}")
        await self._begin("all")
        try:
            return list(await self._send(UpdateStep(action="sums"), selector="all"))
        finally:
            await self._end()

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        raise SyncError("SGLang engines do not support adapters; train all weights, or set rollout.engine: vllm")

    async def _begin(self, selector: str) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _require_success(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector), None))

    async def _end(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _require_success(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    async def _send(
        self, step: UpdateStep, *, selector: str | None = None, flush: bool = False, version: str | None = None
    ) -> list[RankSums | None]:
        """Run a step on every rank, and return the results. Raises SyncError or PlanMismatch with the first error."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        with tempfile.TemporaryDirectory(prefix="mtpctl-step-") as results_folder:
            payload_json = json.dumps({**step, "answers": results_folder}).encode()
            payload = [("step", torch.frombuffer(bytearray(payload_json), dtype=torch.uint8))]
            ranks = self._manager.server_args.tp_size
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[MultiprocessingSerializer.serialize(payload) for _ in range(ranks)],
                load_format=WEIGHT_LOADER,
                flush_cache=flush,
                weight_version=version,
                selector=selector or self._selector,
            )
            _require_success(await self._manager.update_weights_from_tensor(request, None))
            results = [json.loads(path.read_text()) for path in sorted(Path(results_folder).iterdir())]
        for result in results:
            if "error" in result:
                raise (PlanMismatch if result["misfit"] else SyncError)(result["error"])
        if len(results) < ranks:
            raise SyncError(f"{len(results)} of {ranks} ranks answered a step of a weight update")
        return [result["result"] for result in results]


def _require_success(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise SyncError(f"SGLang refused a weight update: {message}")
