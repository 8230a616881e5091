"""A real vLLM with FP8 weights on the CPU: after syncs it has what a new engine loads from the exported folder, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.cluster.object_store import ObjectStore
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.errors import UserError
from mtpctl.families.quantization import SCALE_SUFFIX, select_fp8_names
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import section_of
from mtpctl.kernels.block_fp8 import dequantize, quantize
from mtpctl.rollout.vllm.client import VllmClient
from mtpctl.rollout.vllm.engine import VllmEngine, check_kernels
from mtpctl.rollout.vllm.fp8_loading import find_quantized_names
from mtpctl.sync.protocol import PlanMismatch
from mtpctl.sync.sender import Publisher, Sender
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import cancel_on_error
from tests.fakes.convert_models import write
from tests.fakes.engines import START_S, Loop, cpu_settings
from tests.fakes.fp8_models import Model, answer, changed
from tests.fakes.pushing import CONTEXT, send_version
from tests.fakes.toys import LLAMA_EAGLE3, toy_folder
from tests.fakes.vllm_models import models, parameters

CASES = {"mimo": 1, "qwen3-moe": 0, "glm4-moe": 1, "ernie4.5-moe": 1, "mimo-v2-flash": 1, "qwen3.5-moe": 1, "deepseek-v3": 1}
"""Draft tokens per step."""
DEFAULT = ("mimo", "qwen3-moe")


def start(run: Loop, folder: Path, case: str, **rollout: Any) -> VllmEngine:
    return run(VllmEngine.start(cpu_settings(folder, k=CASES[case], precision="bf16", context=64, **rollout)), START_S)


@pytest.fixture(scope="module", params=[pytest.param(case, marks=() if case in DEFAULT else pytest.mark.slow) for case in CASES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    result = Model(tmp_path_factory.mktemp(request.param), request.param)
    yield result
    result.store.close()


def test_weights_after_three_syncs_equal_those_loaded_from_the_exported_folder(model: Model, run: Loop) -> None:
    engine = start(run, model.root / "hf", model.case, quantization="fp8")
    loaded = parameters(engine)
    publisher = model.publisher(delta=True)
    names = select_fp8_names(model.shape)
    for version in (1, 2, 3):
        manifest = model.publish(publisher, version)
        entries = {name: entry for plan in manifest.sections.values() for name, entry in plan.tensors().items()}
        assert {name for name, entry in entries.items() if entry.dtype == "float8_e4m3fn"} == names
        assert {name.removesuffix(SCALE_SUFFIX) for name in entries if name.endswith(SCALE_SUFFIX)} == names
        assert run(engine.update(manifest, verify=True)).verified == len(entries)
    after, sample = parameters(engine), answer(engine, run)
    run(engine.shutdown())
    assert all(not torch.equal(after[name].float(), value.float()) for name, value in loaded.items() if name.endswith(SCALE_SUFFIX))
    fresh = start(run, model.exported(3), model.case)
    expected, again = parameters(fresh), answer(fresh, run)
    run(fresh.shutdown())
    assert expected.keys() == after.keys() and any(value.dtype == torch.float8_e4m3fn for value in expected.values())
    different = [
        name for name, value in expected.items() if after[name].dtype != value.dtype or not torch.equal(bits(after[name]), bits(value))
    ]
    assert not different
    assert (again.response_ids.tolist(), again.behaviour_logprobs) == (sample.response_ids.tolist(), sample.behaviour_logprobs)


def test_engine_computes_with_the_dequantized_weights(model: Model, run: Loop) -> None:
    """On a CPU activations are not quantized, so an unquantized engine with these weights computes the same, up to the order of sums."""
    if model.case not in DEFAULT:
        pytest.skip("one dense model and one with experts are enough")
    names, folder = select_fp8_names(model.shape), model.root / "dequantized"
    folder.mkdir()
    (folder / "config.json").write_bytes((model.root / "hf" / "config.json").read_bytes())
    write(folder, {n: dequantize(*quantize(w, n), torch.bfloat16) if n in names else w.clone() for n, w in model.weights.items()})
    answers = []
    for path, quantization in ((model.root / "hf", "fp8"), (folder, "none")):
        engine = start(run, path, model.case, quantization=quantization)
        answers.append(answer(engine, run))
        run(engine.shutdown())
    fp8, plain = answers
    assert fp8.response_ids.tolist() == plain.response_ids.tolist()
    apart = [abs(a - b) for a, b in zip(fp8.behaviour_logprobs, plain.behaviour_logprobs, strict=True)]
    # vLLM's kernel for experts adds them in another order, in bf16.
    assert sum(apart) / len(apart) < (0.02 if model.shape.moe else 1e-5)


def test_drafter_alone_stays_unquantized(model: Model, run: Loop) -> None:
    if model.case != "mimo":
        pytest.skip("one drafter is enough")
    engine = start(run, model.root / "hf", model.case, quantization="fp8", speculation={"num_tokens": 1, "quantization": "none"})
    live = parameters(engine)
    names = select_fp8_names(model.shape, mtp=False)
    manifest = model.publish(model.publisher(drafter=False), 4)
    verified = run(engine.update(manifest, verify=True)).verified
    with pytest.raises(PlanMismatch, match="is sent as float8_e4m3fn, but the engine stores"):
        run(engine.update(model.publish(model.publisher(), 5)))
    with pytest.raises(PlanMismatch, match="the engine's weights are FP8, but the weights are sent unquantized"):
        run(engine.update(model.publish(model.publisher(quantized=False), 6)))
    run(engine.shutdown())
    assert verified == len(model.weights) + len(names)
    drafter = {
        name: value for name, value in live.items() if name.startswith("draft ") and "embed_tokens" not in name and "lm_head" not in name
    }
    assert drafter and {value.dtype for value in drafter.values()} == {torch.bfloat16}
    assert any(value.dtype == torch.float8_e4m3fn for value in live.values())


def _send(pipe: Any, transport: str, root: Path, names: frozenset[str], order: list[tuple[str, torch.Tensor]]) -> None:
    sender = Sender(VersionStore(root), transport, "cpu", host="127.0.0.1", deadline_s=30.0, bucket_bytes=1 << 16, quantized=names)
    while (version := pipe.recv()) is not None:
        send_version(pipe, sender, version, ["engine"], list(changed(dict(order), version).items()))
    sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_fp8_weights_are_pushed(model: Model, run: Loop, tmp_path: Path, transport: str) -> None:
    if model.case != "mimo":
        pytest.skip("transports do not depend on the model")
    engine = start(run, model.root / "hf", model.case, quantization="fp8")
    names, pipes = select_fp8_names(model.shape), CONTEXT.Pipe()
    order = sorted(model.weights.items(), key=lambda item: section_of(item[0], model.shape) == "draft")
    process = CONTEXT.Process(target=_send, args=(pipes[1], transport, tmp_path, names, order), daemon=True)
    process.start()
    try:
        for version in (1, 2):
            pipes[0].send(version)
            manifest = pipes[0].recv()
            assert run(cancel_on_error(manifest, engine.update(manifest, verify=True))).verified == len(order) + len(names)
            assert pipes[0].poll(40)
            pipes[0].recv()
        pipes[0].send(None)
    finally:
        process.join(10)
        process.kill()
    live = parameters(engine)["target model.layers.0.self_attn.o_proj.weight"]
    run(engine.shutdown())
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(bits(live), bits(quantize(changed(model.weights, 2)[name], name)[0]))


@pytest.mark.slow
def test_fp8_weights_in_object_storage(model: Model, run: Loop, tmp_path: Path) -> None:
    if model.case != "mimo":
        pytest.skip("transports do not depend on the model")
    store = VersionStore(tmp_path / "store", ObjectStore(f"file://{tmp_path}/bucket", "sync.url"))
    store.claim()
    engine = start(run, model.root / "hf", model.case, quantization="fp8")
    publisher = Publisher(store, delta=True, **model.options())
    for version in (1, 2):
        manifest = model.publish(publisher, version)
        assert (manifest.transport, manifest.base) == ("storage", 1 if version == 2 else None)
        assert run(engine.update(manifest, verify=True)).verified == len(model.weights) + len(select_fp8_names(model.shape))
    run(engine.shutdown())
    store.close()


def test_drafter_in_its_own_folder_stays_unquantized(run: Loop, tmp_path: Path) -> None:
    """EAGLE-3. The model's folder has the name of a drafter's, which must not matter."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = LLAMA_EAGLE3 | sizes | {"drafter": LLAMA_EAGLE3["drafter"] | sizes}
    folder = toy_folder(config, tmp_path / "drafter", 0, "bf16")
    weights, shape = dict(ModelWeights(folder).items()), shape_of(config)
    names = find_quantized_names(folder, drafter=True)
    assert names and not any(name.startswith("drafter.") for name in names)
    engine = run(VllmEngine.start(cpu_settings(folder, k=2, precision="bf16", context=64, quantization="fp8")), START_S)
    publisher = Publisher(
        VersionStore(tmp_path / "store"), bucket_bytes=1 << 16, section_of=lambda name: section_of(name, shape), quantized=names
    )
    manifest = publisher.publish(changed(weights, 1).items(), 1, checksums=True)
    assert run(engine.update(manifest, verify=True)).verified == len(weights) + len(names)
    live, sample = parameters(engine), answer(engine, run)
    run(engine.shutdown())
    shared = ("embed_tokens", "lm_head")
    drafter = {name: value.dtype for name, value in live.items() if name.startswith("draft ") and not any(part in name for part in shared)}
    assert torch.float8_e4m3fn not in drafter.values() and len(drafter) > 5
    fp8 = {name for name, value in live.items() if value.dtype == torch.float8_e4m3fn and name.endswith(".weight")}
    assert len(fp8) == 4 * 4 and all(name.startswith("target ") for name in fp8)
    assert sample.speculation.drafted


@pytest.mark.slow
def test_kv_cache_in_fp8(model: Model, run: Loop) -> None:
    if model.case != "mimo":
        pytest.skip("one model is enough")
    answers = {}
    for dtype in ("auto", "fp8"):
        engine = start(run, model.root / "hf", model.case, quantization="fp8", engine_args={"kv_cache_dtype": dtype})
        manifest = model.publish(Publisher(VersionStore(model.root / dtype), **model.options()), 1)
        assert run(engine.update(manifest, verify=True)).verified
        answers[dtype] = answer(engine, run)
        run(engine.shutdown())
    apart = [abs(a - b) for a, b in zip(answers["auto"].behaviour_logprobs, answers["fp8"].behaviour_logprobs, strict=True)]
    assert 0 < apart[0] < 0.5, "of the first token, which has the same context"


def test_weights_that_a_kernel_has_packed_are_refused(model: Model, run: Loop) -> None:
    """As by Marlin, on GPUs without FP8 arithmetic."""
    if model.case != "mimo":
        pytest.skip("one model is enough")
    engine = start(run, model.root / "hf", model.case, quantization="fp8")
    for module in models(engine)["target"].modules():
        if hasattr(getattr(module, "quant_method", None), "fp8_linear"):
            module.quant_method.fp8_linear = object()
    reason = r"vLLM packs \d+ matrices for object; a sync cannot update packed weights; set .*engine_args: \{linear_backend: triton\}$"
    with pytest.raises(PlanMismatch, match=f"rollout.quantization: {reason}"):
        run(engine.update(model.publish(model.publisher(), 7)))
    (packed,) = run(VllmClient(engine._llm).rpc("mtpctl_packed_fp8"))
    with pytest.raises(UserError, match=f"^rollout.quantization: {reason}"):
        check_kernels([packed])
    run(engine.shutdown())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
