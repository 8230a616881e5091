"""What SGLang's processes do with a step of an update, without SGLang: target and drafter are two models of one receiver."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mtpctl.rollout.sglang.plugin import apply_step
from mtpctl.sync.checksums import PartialSums, combine_sums
from mtpctl.sync.engine_target import EngineTarget
from mtpctl.sync.protocol import Manifest, SyncError
from mtpctl.sync.update import check_checksums, update_target
from tests.fakes import pushing


def live(names: list[str]) -> nn.Module:
    model = nn.Module()
    for name in names:
        owner, (*path, leaf) = model, name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(torch.zeros(pushing.SHAPES[name]), requires_grad=False))
    return model


class Process:
    """An `EngineClient` that passes steps to the models of one SGLang process, as `SglangClient` does."""

    def __init__(self, answers: Path) -> None:
        self.answers = answers
        self.target = live([name for name in pushing.SHAPES if ".mtp_layers." not in name])
        self.drafter: Any = live([name for name in pushing.SHAPES if ".mtp_layers." in name])
        self.drafter.map_model_name_to_mtp_param_name = lambda name: name
        self.drafter.get_embed_and_head = lambda: (self.target.get_parameter("model.embed.weight"),) * 2
        self._current = self.target

    async def start(self, *, draft: bool) -> None:
        self._current = self.drafter if draft else self.target

    async def step(self, info: dict[str, Any]) -> None:
        await self._take(self._current, info)

    async def finish(self, version: int) -> None:
        await self._take(self._current, {"action": "finish"})

    async def rpc(self, method: str, *args: str) -> list[Any]:
        return [await self._take(model, {"action": "sums"}) for model in (self.target, self.drafter)]

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        raise AssertionError("SGLang takes none")

    async def _take(self, model: nn.Module, info: dict[str, Any]) -> Any:
        text = json.dumps({**info, "answers": str(self.answers)}).encode()
        await asyncio.to_thread(apply_step, model, [("step", torch.frombuffer(bytearray(text), dtype=torch.uint8))])
        (message,) = self.answers.iterdir()
        answer = json.loads(message.read_text())
        message.unlink()
        if "error" in answer:
            raise SyncError(answer["error"])
        return answer["result"]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_rank=0, tp_size=1)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    (tmp_path / "answers").mkdir()
    return Process(tmp_path / "answers")


def target_of(process: Process, holds: tuple[str, ...]) -> EngineTarget:
    async def within(step: Awaitable[Any], what: str) -> Any:
        return await asyncio.wait_for(step, 60)

    return EngineTarget(process, 0, with_deadline=within, paused=lambda: True, sections=holds)  # type: ignore[arg-type]


def push(target: EngineTarget, root: Path, version: int) -> Manifest:
    """A version from a separate sender is received, and its checksums are compared."""
    here, there = pushing.CONTEXT.Pipe()
    members, export = ["engine 0"], list(pushing.model(version).items())
    sending = pushing.in_process(_send, there, root, version, members, export)
    manifest: Manifest = here.recv()
    asyncio.run(update_target(target, manifest, deadline_s=20))
    sending.join(20)
    return manifest


def _send(pipe: Any, root: Path, version: int, members: list[str], export: Any) -> None:
    pushing.send_version(pipe, pushing.sender(root, "ipc"), version, members, export)


def sums(process: Process) -> dict[str, str]:
    result = asyncio.run(process.rpc("mtpctl_sums"))
    return {name: combine_sums(PartialSums(**part) for part in parts) for model in result for name, parts in model.items()}


@pytest.mark.parametrize("again", [False, True])
def test_pushed_sections_reach_target_and_drafter(process: Process, tmp_path: Path, again: bool) -> None:
    """Both through one end of the transfer; a version that the receiver already has is ignored."""
    target = target_of(process, ("target", "draft"))
    for sending in range(1 + again):
        manifest = push(target, tmp_path / f"store-{sending}", 1)
        assert check_checksums(manifest, sums(process)) == len(pushing.SHAPES)
    wanted = pushing.model(1)
    stored = dict(process.target.named_parameters()) | dict(process.drafter.named_parameters())
    assert all(torch.equal(stored[name], tensor) for name, tensor in wanted.items())


def test_engine_without_a_drafter_ignores_the_draft_section(process: Process, tmp_path: Path) -> None:
    push(target_of(process, ("target",)), tmp_path / "store", 1)
    wanted = pushing.model(1)
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in process.target.named_parameters())
