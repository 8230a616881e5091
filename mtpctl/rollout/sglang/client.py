"""SGLang's weight updates behind the calls that an `EngineTarget` makes: sessions of the target and of the drafter, one step at a time.

A step reaches every rank as the JSON of one tensor, through SGLang's own update call and `mtpctl.rollout.sglang.receiver.take`. An
exception there would end the engine, so what became of a step is written beside: one file a rank and model.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.rollout.sglang.settings import LOADER
from mtpctl.sync.protocol import PlanMismatch, SyncError
from mtpctl.sync.receiver import RankSums, UpdateStep

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


class SglangClient:
    """An `EngineClient`; `manager` is the engine's tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._selector = "target"

    async def start(self, *, draft: bool) -> None:
        self._selector = "draft" if draft else "target"
        await self._begin(self._selector)

    async def step(self, info: UpdateStep) -> None:
        try:
            await self._send(info)
        except BaseException:
            await self._end()
            raise

    async def finish(self, version: int) -> None:
        """Close the session. The cache is dropped with it, and requests that wait go on under `version`."""
        try:
            await self._send(UpdateStep(action="finish"), flush=True, version=str(version))
        finally:
            await self._end()

    async def rpc(self, method: str, *args: str) -> list[object]:
        """`mtpctl_sums` of target and drafter; there is no other."""
        if method != "mtpctl_sums":
            raise SyncError(f"SGLang engines do not take adapters in: {method}")
        await self._begin("all")
        try:
            return list(await self._send(UpdateStep(action="sums"), selector="all"))
        finally:
            await self._end()

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        raise SyncError("SGLang engines do not take adapters in; train the whole weights, or set rollout.engine: vllm")

    async def _begin(self, selector: str) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector), None))

    async def _end(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _check(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    async def _send(
        self, info: UpdateStep, *, selector: str | None = None, flush: bool = False, version: str | None = None
    ) -> list[RankSums | None]:
        """Have every rank carry out a step, and return what each says. Raises SyncError or PlanMismatch with the first complaint."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        with tempfile.TemporaryDirectory(prefix="mtpctl-step-") as answers:
            text = json.dumps({**info, "answers": answers}).encode()
            payload = [("step", torch.frombuffer(bytearray(text), dtype=torch.uint8))]
            ranks = self._manager.server_args.tp_size
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[MultiprocessingSerializer.serialize(payload) for _ in range(ranks)],
                load_format=LOADER,
                flush_cache=flush,
                weight_version=version,
                selector=selector or self._selector,
            )
            _check(await self._manager.update_weights_from_tensor(request, None))
            found = [json.loads(path.read_text()) for path in sorted(Path(answers).iterdir())]
        for answer in found:
            if "error" in answer:
                raise (PlanMismatch if answer["misfit"] else SyncError)(answer["error"])
        if len(found) < ranks:
            raise SyncError(f"{len(found)} of {ranks} ranks answered a step of a weight update")
        return [answer["result"] for answer in found]


def _check(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise SyncError(f"SGLang refused a weight update: {message}")
