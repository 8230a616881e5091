"""A rank's part in a weight update: rank 0 packs, all ranks export. Engine and tensors are fakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtpctl.errors import RuntimeFailure
from mtpctl.families.quantization import SCALE_SUFFIX, select_fp8_names
from mtpctl.families.reading import shape_of
from mtpctl.kernels.block_fp8 import quantized_tensors
from mtpctl.plan.buckets import wire_tensors
from mtpctl.recipe.schema import Recipe
from mtpctl.sync.checksums import checksum
from mtpctl.sync.protocol import PlanMismatch, Section
from mtpctl.sync.store import VersionStore
from mtpctl.trainer.sending import WeightExporter
from tests.fakes import adapters
from tests.fakes.engine_checkpoints import Tensors, random_tensors, tiny_config
from tests.fakes.pushing import Receiver

CONFIG = tiny_config(vocab_size=32)
BASE = random_tensors(CONFIG, 0)
WHOLE: tuple[Section, ...] = ("target", "draft")
FIRST: tuple[Section, ...] = ("adapter", "target", "draft")
LATER: tuple[Section, ...] = ("adapter", "draft")


class Engine:
    """Exports these tensors, and counts them."""

    def __init__(self, tensors: Tensors) -> None:
        self.folder = SimpleNamespace(shape=shape_of(CONFIG), path=Path("model"))
        self.device = torch.device("cpu")
        self.tensors, self.yielded, self.merged = tensors, 0, True

    def export(self, sections: tuple[Section, ...], *, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
        self.merged = merged
        return self._of(sections)

    def export_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._of(("adapter",))

    def _of(self, sections: tuple[Section, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            if adapters.section_of(name) in sections:
                self.yielded += 1
                yield name, tensor


def source(engine: Engine, rank: int = 0, **recipe: Any) -> WeightExporter:
    sync = {"transport": "shm", "bucket_bytes": 4096, **recipe.pop("sync", {})}
    return WeightExporter(Recipe.model_validate({"sync": sync, **recipe}), rank, engine)


def test_only_rank_0_packs_and_every_rank_exports(tmp_path: Path) -> None:
    first, second = Engine(dict(BASE)), Engine(dict(BASE))
    manifest = source(first).plan_weights(1, str(tmp_path), [], True, WHOLE)
    assert source(second, rank=1).plan_weights(1, str(tmp_path), [], True, WHOLE) is None
    assert manifest is not None and set(manifest.sections) == {"target", "draft"}
    assert {name for plan in manifest.sections.values() for name in plan.checksums} == set(BASE)
    assert first.yielded == second.yielded == 2 * len(BASE), "once to plan, once to send"
    assert first.merged, "an adapter that does not travel by itself is in the weights"


def test_failure_on_rank_0_does_not_block_the_export_of_other_ranks(tmp_path: Path) -> None:
    engine = Engine(dict(BASE))
    weights = source(engine)
    weights.plan_weights(1, str(tmp_path), [], False, WHOLE)
    engine.tensors, engine.yielded = BASE | {"model.norm.weight": torch.zeros(3)}, 0
    with pytest.raises(PlanMismatch, match=r"model\.norm\.weight \(3,\)"):
        weights.plan_weights(2, str(tmp_path), [], False, WHOLE)
    assert engine.yielded == len(BASE)


def test_adapter_base_is_sent_once_and_its_config_always(tmp_path: Path) -> None:
    engine = Engine(adapters.adapter(BASE, 0) | BASE)
    weights = source(engine, sync={"sections": ["adapter", "draft"]}, train={"lora": {"rank": adapters.RANK, "alpha": 8}})
    first = weights.plan_weights(1, str(tmp_path), [], True, FIRST)
    engine.tensors = adapters.adapter(BASE, 1) | BASE
    second = weights.plan_weights(2, str(tmp_path), [], True, LATER)
    assert first is not None and second is not None
    assert (set(first.sections), set(second.sections)) == (set(FIRST), set(LATER))
    assert not engine.merged, "the base is what lies beneath the adapter"
    for manifest in (first, second):
        assert manifest.sections["adapter"].config["r"] == adapters.RANK
        assert "q_proj" in manifest.sections["adapter"].config["target_modules"]
    assert first.sections["draft"].checksums == second.sections["draft"].checksums
    assert first.sections["adapter"].checksums != second.sections["adapter"].checksums


def test_pushed_changes_are_found_when_planning_and_every_rank_exports_alike(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in BASE.items()}
    first, second = Engine(tensors), Engine(tensors)
    options = {"transport": "nccl", "delta": True}
    sender, other, receiver = source(first, sync=options), source(second, rank=1, sync=options), Receiver()
    complete = 0
    for version in (1, 2, 3):
        manifest = sender.plan_weights(version, str(tmp_path), ["engine 0"], False, WHOLE)
        assert manifest is not None and manifest.base == (version - 1 or None)
        complete = complete or manifest.nbytes
        receiver.take(manifest)
        sent = sender.transfer_weights()
        assert sent is not None and sent.nbytes == manifest.nbytes <= (complete if version == 1 else 0.2 * complete)
        taken = receiver.taken()
        assert all(torch.equal(torch.tensor(taken[name], dtype=torch.bfloat16), tensor) for name, tensor in tensors.items())
        sender.persist_weights()
        other.plan_weights(version, str(tmp_path), ["engine 0"], False, WHOLE)
        other.transfer_weights()
        other.persist_weights()
        assert first.yielded == second.yielded
        for tensor in tensors.values():
            tensor.view(-1)[version::100] += 1
    receiver.end()


def test_matrices_are_quantized_except_in_the_store_of_unquantized_versions(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=32, hidden_size=128, num_attention_heads=2, num_key_value_heads=2, intermediate_size=256)
    shape = shape_of(config)
    engine = Engine({name: tensor.bfloat16() for name, tensor in random_tensors(config, 0).items()})
    engine.folder = SimpleNamespace(shape=shape, path=Path("model"))
    weights = source(engine, rollout={"quantization": "fp8"}, train={"precision": "bf16"}, logprob={"standalone": True})
    store = VersionStore(tmp_path)
    for version in (1, 2):
        plain = weights.plan_weights(version, str(store.unquantized.root), [], True, WHOLE)
        fp8 = weights.plan_weights(version, str(store.root), [], True, WHOLE)
    assert plain is not None and fp8 is not None
    names = select_fp8_names(shape)
    sent = {name: entry for plan in fp8.sections.values() for name, entry in plan.tensors().items()}
    assert {name for name, entry in sent.items() if entry.dtype == "float8_e4m3fn"} == names and "lm_head.weight" not in names
    assert sent.keys() == {*engine.tensors, *(name + SCALE_SUFFIX for name in names)}
    assert {entry.dtype for plan in plain.sections.values() for entry in plan.tensors().values()} == {"bfloat16"}
    assert store.versions() == store.unquantized.versions() == [1, 2]
    for section, plan in fp8.sections.items():
        planned = wire_tensors(shape, section, "bfloat16", names)
        assert {(spec.name, spec.shape, spec.dtype) for spec in planned} == {(e.name, e.shape, e.dtype) for e in plan.tensors().values()}
    sums = {name: value for plan in fp8.sections.values() for name, value in plan.checksums.items()}
    expected = {name: tensor for name, tensor in engine.tensors.items() if name not in names}
    for name in names:
        expected |= dict(quantized_tensors(name, engine.tensors[name]))
    assert sums == {name: checksum(tensor) for name, tensor in expected.items()}


def test_weights_that_are_not_finite_are_not_sent(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=32, hidden_size=128, num_attention_heads=2, num_key_value_heads=2, intermediate_size=256)
    engine = Engine({name: tensor.bfloat16() for name, tensor in random_tensors(config, 0).items()})
    engine.folder = SimpleNamespace(shape=shape_of(config), path=Path("model"))
    weights = source(engine, rollout={"quantization": "fp8"}, train={"precision": "bf16"})
    assert weights.plan_weights(1, str(tmp_path), [], False, WHOLE) is not None
    engine.tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = float("nan")
    with pytest.raises(RuntimeFailure, match=r"^model\.layers\.0\.mlp\.down_proj\.weight: contains infinities or NaN"):
        weights.plan_weights(2, str(tmp_path), [], False, WHOLE)
    assert VersionStore(tmp_path).versions() == [1]
