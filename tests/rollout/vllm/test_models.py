"""Real vLLM models that pack, fuse and cut: after a sync every live parameter holds what vLLM's own loading puts there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import section_of
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import PlanMismatch
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.toys import SERVED, toy_folder
from tests.fakes.vllm_models import MODELS, models, parameters

SLOW = {name for name in MODELS if " with " in name} - {"llama with EAGLE-3 fp32", "qwen3-moe with EAGLE-3 bf16", "llama with DFlash fp32"}
# The default suite has both precisions of one dense family and of one mixture of experts.
SLOW |= {f"{family} fp32" for family, dtype in SERVED if dtype == "bf16" and family not in ("mimo", "deepseek-v3")}


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    result = Loop()
    yield result
    result.close()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS])
def served(request: pytest.FixtureRequest, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    config, drafts, dtype = MODELS[request.param]
    root = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    folders = [toy_folder(config, root / str(seed), seed, dtype) for seed in (0, 1)]
    engine = loop(VllmEngine.start(cpu_settings(folders[0], k=drafts, dtype=dtype)), 200)
    tensors = [{name: weights.tensor(name).clone() for name in weights.entries} for weights in map(FolderWeights, folders)]
    shape = shape_of(config)
    yield engine, tensors, VersionStore(root / "store"), lambda name: section_of(name, shape)
    loop(engine.shutdown())


MISSING = ("experts.2.up_proj.weight", "layers.1.self_attn.v_proj.weight", "layers.1.self_attn.kv_b_proj.weight", "linear_attn.A_log")


def ask(engine: VllmEngine, loop: Loop) -> Sample:
    return loop(engine.generate(GenerationRequest(Sample("p", "g", [5, 6, 7, 8]), 12, temperature=0.0)))


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 3000])
def test_parameters_after_a_sync_equal_loaded_ones(served: Any, loop: Loop, bucket_bytes: int) -> None:
    engine, tensors, store, section = served
    loaded, answer = parameters(engine), ask(engine, loop)
    sections = ["target", "draft"]
    for turn, weights in ((1, tensors[1]), (2, tensors[0])):
        publisher = Publisher(store, bucket_bytes=bucket_bytes, sections=sections, section_of=section)
        manifest = publisher.publish(weights.items(), engine.version + 1, checksums=True)
        report = loop(engine.update(manifest, verify=True))
        assert report.verified == len(weights), "every tensor of the folder"
        if turn == 1:
            changed = parameters(engine)
            same = [
                name for name, value in changed.items() if value.numel() and torch.equal(value, loaded[name]) and value.unique().numel() > 1
            ]
            assert not same, "drawn again instead of received"
    after = parameters(engine)
    assert [name for name in loaded if not torch.equal(loaded[name], after[name])] == []
    again = ask(engine, loop)
    assert (again.response_ids, again.behaviour_logprobs) == (answer.response_ids, answer.behaviour_logprobs)


def test_syncs_of_the_target_alone_leave_the_drafter_of_the_folder(served: Any, loop: Loop) -> None:
    engine, tensors, store, section = served
    live = models(engine)
    if "draft" not in live:
        pytest.skip("no MTP layer drafts")
    shared = {parameter.data_ptr() for parameter in live["target"].parameters()}
    own = {f"draft {name}" for name, parameter in live["draft"].named_parameters() if parameter.data_ptr() not in shared}
    before = parameters(engine)
    publisher = Publisher(store, bucket_bytes=1 << 16, sections=["target"], section_of=section)
    for turn in (1, 0):
        manifest = publisher.publish(tensors[turn].items(), engine.version + 1, checksums=True)
        assert loop(engine.update(manifest, verify=True)).verified == sum(section(name) == "target" for name in tensors[turn])
        after = parameters(engine)
        drafter = [name for name in after if name.removesuffix(" as it is used") in own]
        assert drafter and [name for name in drafter if not torch.equal(before[name], after[name])] == []
        assert all(torch.equal(before[name], after[name]) for name in before) == (turn == 0), "the target moves"


def test_missing_responses_are_listed(served: Any, loop: Loop) -> None:
    engine, tensors, store, section = served
    less = dict(tensors[0])
    gone = [name for name in less if name.endswith(MISSING)]
    for name in gone:
        del less[name]
    manifest = Publisher(store, bucket_bytes=1 << 30, section_of=section).publish(less.items(), engine.version + 1)
    with pytest.raises(PlanMismatch, match="is filled") as message:
        loop(engine.update(manifest))
    assert str(message.value).count("is filled") >= len({name.rpartition(".")[0] for name in gone if section(name) == "target"}) > 0
