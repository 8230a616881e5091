"""Checks of adapters against their config and the live model, and atomic updates of adapter and drafter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mtpctl.convert.hf_folder import write_config
from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.recipe.rollout import VLLM_ADAPTER_RANKS, VllmConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import build_engine_settings
from mtpctl.sync.engine_target import EngineTarget
from mtpctl.sync.parameters import TpRank
from mtpctl.sync.protocol import Manifest, PlanMismatch, SectionPlan, SyncError, TargetDirty, WeightsDiffer
from mtpctl.sync.receiver import check_fits, layers_of
from mtpctl.sync.update import update_target
from tests.fakes import adapters
from tests.fakes.adapters import BASE
from tests.fakes.toys import LLAMA_DFLASH, QWEN3_MOE_DFLASH


def plan_of(delta: adapters.Tensors, tmp_path: Path, **config: Any) -> SectionPlan:
    plan = adapters.publisher(tmp_path).publish(delta.items(), 1).sections["adapter"]
    return SectionPlan(plan.buckets, plan.checksums, plan.config | config)


class TestLayersOf:
    def test_layers_are_pairs_with_the_shape_of_the_adapted_weight(self, tmp_path: Path) -> None:
        layers = layers_of(plan_of(adapters.adapter(BASE, 0), tmp_path))
        assert {name: layer.shape for name, layer in layers.items()} == {name: tuple(BASE[name].shape) for name in layers}
        assert len(layers) == 2 * 7

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda delta: delta | {f"{ADAPTER_PREFIX}model.norm.weight": torch.zeros(4)}, "model.norm.weight"),
            (lambda delta: dict(list(delta.items())[1:]), "q_proj has lora_B alone"),
            (lambda delta: {name: t[:3].contiguous() if "lora_A" in name else t for name, t in delta.items()}, r"not of rank 4"),
        ],
    )
    def test_tensors_that_are_not_an_adapter_are_refused(self, tmp_path: Path, change: Any, message: str) -> None:
        with pytest.raises(PlanMismatch, match=f"this is not a LoRA adapter: .*{message}"):
            layers_of(plan_of(change(adapters.adapter(BASE, 0)), tmp_path))

    def test_an_adapter_without_a_rank_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PlanMismatch, match="has no rank r"):
            layers_of(plan_of(adapters.adapter(BASE, 0), tmp_path, r=0))


def live(*wrapped: str) -> nn.Module:
    """A module with the base's weights. Layers with these names store them in a `base_layer`, as vLLM's LoRA layers do."""
    model = nn.Module()
    for name, tensor in BASE.items():
        *path, leaf = name.split(".")
        if path[-1] in wrapped:
            path.append("base_layer")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return model


ALL = tuple(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))


class TestCheckFits:
    def check(self, delta: adapters.Tensors, tmp_path: Path, model: nn.Module, max_rank: int | None = 8) -> None:
        check_fits(plan_of(delta, tmp_path), model, rename=None, tp=TpRank(), max_rank=max_rank)

    def test_an_adapter_that_fits_is_accepted(self, tmp_path: Path) -> None:
        self.check(adapters.adapter(BASE, 0), tmp_path, live(*ALL))

    def test_an_adapter_for_an_unadapted_layer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PlanMismatch, match=r"model\.layers\.0\.mlp\.down_proj\.weight is part of .*, which does not support adapters"):
            self.check(adapters.adapter(BASE, 0), tmp_path, live(*ALL[:-1]))

    def test_an_adapter_of_another_shape_is_refused(self, tmp_path: Path) -> None:
        other = BASE | {"model.layers.1.mlp.up_proj.weight": torch.zeros(200, 128)}
        with pytest.raises(PlanMismatch, match=r"the adapter of model\.layers\.1\.mlp\.up_proj\.weight has shape \(200, 128\)"):
            self.check(adapters.adapter(other, 0), tmp_path, live(*ALL))

    @pytest.mark.parametrize(("max_rank", "message"), [(None, "without adapters"), (1, "has rank 4, .* max_lora_rank 1")])
    def test_an_adapter_above_the_engines_rank_is_refused(self, tmp_path: Path, max_rank: int | None, message: str) -> None:
        with pytest.raises(PlanMismatch, match=message):
            self.check(adapters.adapter(BASE, 0), tmp_path, live(*ALL), max_rank)


class Engine:
    """An `EngineClient` that records its live versions. `refuses`: the step or the adapter that it refuses.

    Like vLLM, it drops its adapter when a session on the target ends.
    """

    def __init__(self) -> None:
        self.refuses = ""
        self.live: dict[str, int] = {}
        self.label = 0
        self._section, self._version, self._draft = "", 0, False

    async def start(self, *, draft: bool) -> None:
        self._draft = draft

    async def step(self, info: dict[str, Any]) -> None:
        if info["action"] == "begin":
            self._section, self._version = info["section"], info["version"]
        if info["action"] == self.refuses and self._section == "draft":
            raise SyncError("refused")
        if info["action"] == "buckets" and self._section != "adapter":
            self.live[self._section] = info.get("version", self._version)

    async def finish(self, version: int) -> None:
        self.label = version
        if not self._draft:
            self.live.pop("adapter", None)

    async def rpc(self, method: str, *args: str) -> list[Any]:
        if method == "mtpctl_load_zero_adapter":
            self.live["adapter"] = 0
        return []

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        if self.refuses == Path(folder).name:
            raise ValueError("it is bent")
        self.live["adapter"] = int(Path(folder).name[1:])


class TestSectionsOfOneVersion:
    def publish(self, tmp_path: Path, version: int, sections: tuple[str, ...] = ("adapter", "draft")) -> Manifest:
        sends = adapters.publisher(tmp_path / "store", sections=sections)
        tensors = adapters.adapter(BASE, version) | BASE
        return sends.publish([item for item in tensors.items() if adapters.section_of(item[0]) in sections], version)

    def target(self, engine: Engine) -> EngineTarget:
        async def within(step: Awaitable[Any], what: str) -> Any:
            return await step

        return EngineTarget(engine, 0, with_deadline=within, paused=lambda: True)

    def test_a_target_with_different_checksums_is_dirty(self, tmp_path: Path) -> None:
        """The fake engine returns no checksums."""
        engine = Engine()
        target = self.target(engine)
        asyncio.run(update_target(target, self.publish(tmp_path, 1, ("target", "draft"))))
        sends = adapters.publisher(tmp_path / "store", sections=("target", "draft"))
        manifest = sends.publish(BASE.items(), 2, checksums=True)
        with pytest.raises(WeightsDiffer, match="after the sync to version 2 these tensors differ from what was sent: model"):
            asyncio.run(update_target(target, manifest, verify=True))
        assert target.dirty

    def test_verifying_a_version_without_checksums_fails_before_any_change(self, tmp_path: Path) -> None:
        engine = Engine()
        target = self.target(engine)
        with pytest.raises(SyncError, match="version 1 was published without checksums"):
            asyncio.run(update_target(target, self.publish(tmp_path, 1), verify=True))
        assert (engine.live, target.version, target.dirty) == ({}, 0, False)

    def test_a_failed_drafter_restores_the_previous_adapter(self, tmp_path: Path) -> None:
        engine = Engine()
        target = self.target(engine)
        asyncio.run(update_target(target, self.publish(tmp_path, 1)))
        assert (engine.live, target.version) == ({"adapter": 1, "draft": 1}, 1)
        manifest = self.publish(tmp_path, 2)
        for where in ("begin", "buckets"):
            engine.refuses = where
            with pytest.raises((SyncError, TargetDirty)):
                asyncio.run(self.failing(target, manifest, engine))
            assert (engine.live, target.version, target.dirty) == ({"adapter": 1, "draft": 1}, 1, False)

    async def failing(self, target: EngineTarget, manifest: Manifest, engine: Engine) -> None:
        """Update `target`, and let the engine refuse nothing any more once the update is aborted."""
        abort = target.abort_update

        async def accept_and_abort() -> None:
            engine.refuses = ""
            await abort()

        target.abort_update = accept_and_abort  # type: ignore[method-assign]
        try:
            await update_target(target, manifest)
        finally:
            target.abort_update = abort  # type: ignore[method-assign]

    def test_previous_adapter_is_restored_if_the_engine_rejects_the_new_one(self, tmp_path: Path) -> None:
        engine = Engine()
        target = self.target(engine)
        asyncio.run(update_target(target, self.publish(tmp_path, 1)))
        engine.refuses = "v00000002"
        with pytest.raises(SyncError, match="the engine refuses the adapter of version 2: it is bent"):
            asyncio.run(update_target(target, self.publish(tmp_path, 2)))
        assert (engine.live, target.version, target.dirty) == ({"adapter": 1, "draft": 1}, 1, False)
        assert engine.label == 1, "later tokens carry the version of the live weights"

    def test_a_target_is_dirty_if_the_previous_version_lacks_the_section(self, tmp_path: Path) -> None:
        """The previous version has only a draft section, so the target's weights cannot be restored."""
        engine = Engine()
        target = self.target(engine)
        asyncio.run(update_target(target, self.publish(tmp_path, 1, ("target", "draft"))))
        asyncio.run(update_target(target, self.publish(tmp_path, 2, ("draft",))))
        engine.refuses = "begin"
        with pytest.raises(TargetDirty, match="version 2 has no section target to restore"):
            asyncio.run(self.failing(target, self.publish(tmp_path, 3, ("target", "draft")), engine))
        assert target.dirty

    def test_an_adapter_is_loaded_before_requests_and_after_each_session(self, tmp_path: Path) -> None:
        engine = Engine()
        target = self.target(engine)
        asyncio.run(target.load_zero_adapter())
        assert engine.live == {"adapter": 0}, "before the first request"
        asyncio.run(update_target(target, self.publish(tmp_path, 1, ("target", "draft"))))
        assert engine.live == {"adapter": 0, "target": 1, "draft": 1}
        asyncio.run(update_target(target, self.publish(tmp_path, 2, ("adapter", "target", "draft"))))
        assert engine.live == {"adapter": 2, "target": 2, "draft": 2}

    def test_merged_weights_over_an_adapter_are_refused(self, tmp_path: Path) -> None:
        engine = Engine()
        target = self.target(engine)
        asyncio.run(update_target(target, self.publish(tmp_path, 1)))
        with pytest.raises(PlanMismatch, match="has an adapter loaded"):
            asyncio.run(update_target(target, self.publish(tmp_path, 2, ("target", "draft"))))
        assert (engine.live, target.version) == ({"adapter": 1, "draft": 1}, 1)

    def test_a_failed_first_version_makes_the_target_dirty(self, tmp_path: Path) -> None:
        engine = Engine()
        target, engine.refuses = self.target(engine), "begin"
        with pytest.raises(TargetDirty, match="restart this engine"):
            asyncio.run(update_target(target, self.publish(tmp_path, 1)))


def test_a_section_that_is_sent_once_is_omitted_from_later_versions(tmp_path: Path) -> None:
    sends = adapters.publisher(tmp_path)
    whole = adapters.adapter(BASE, 0) | BASE
    first = sends.publish(whole.items(), 1, checksums=True)
    sends.next_sections = ("adapter", "draft")
    second = sends.publish(whole.items(), 2, checksums=True)
    assert (list(first.sections), list(second.sections)) == (["adapter", "target", "draft"], ["adapter", "draft"])
    assert second.sections["adapter"].buckets == first.sections["adapter"].buckets
    assert second.sections["draft"].checksums == first.sections["draft"].checksums


def test_an_engine_starts_with_the_smallest_sufficient_adapter_rank() -> None:
    rollout = VllmConfig(max_in_flight=4)
    for rank, max_rank in ((1, 1), (4, 8), (16, 16), (300, 320)):
        args = build_engine_settings(rollout, model="m", precision="fp32", device="cpu", adapter=LoraConfig(rank=rank)).args
        assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, max_rank)
    assert "enable_lora" not in build_engine_settings(rollout, model="m", precision="fp32", device="cpu").args


def test_an_engine_adapts_only_the_target_layers_unless_they_may_have_experts(tmp_path: Path) -> None:
    def modules(model: Path | str, *targets: str) -> object:
        options: dict[str, Any] = {"precision": "fp32", "device": "cpu", "adapter": LoraConfig(targets=list(targets))}
        return build_engine_settings(VllmConfig(), model=str(model), **options).args.get("lora_target_modules")

    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    for folder, config in ((dense, LLAMA_DFLASH), (sparse, QWEN3_MOE_DFLASH)):
        folder.mkdir()
        write_config(config, folder)
    for model in ("m", dense, sparse):
        assert modules(model, "linear_qkv", "linear_proj") == ["k_proj", "o_proj", "q_proj", "v_proj"]
    for model in ("m", sparse):
        assert modules(model, "linear_qkv", "linear_fc1") is None
    assert modules(dense, "linear_qkv", "linear_fc1") == ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]


def test_a_paused_engine_releases_its_cache_once_and_restores_it_on_resume() -> None:
    calls: list[str] = []

    class Recorder:
        """Records the name of every method that is called."""

        def __getattr__(self, name: str) -> Any:
            async def called(*args: Any, **options: Any) -> None:
                calls.append(name)

            return called

    class Llm(Recorder):
        model_config = SimpleNamespace(max_model_len=64)
        errored = False
        renderer = engine_core = Recorder()

    settings = build_engine_settings(VllmConfig(), model="m", precision="bf16", device="cuda", release_kv=True)
    assert settings.args["enable_sleep_mode"]
    engine = VllmEngine(Llm(), settings, 0)

    async def twice() -> None:
        await engine.pause("keep")
        await engine.pause("keep")
        await engine.resume()

    asyncio.run(twice())
    done = [name for name in calls if name in ("pause_scheduler_async", "release_kv_cache_memory", "wake_up", "resume_generation")]
    assert done == ["pause_scheduler_async", "release_kv_cache_memory", "pause_scheduler_async", "wake_up", "resume_generation"]


def test_adapter_ranks_of_the_recipe_equal_vllms() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == VLLM_ADAPTER_RANKS
