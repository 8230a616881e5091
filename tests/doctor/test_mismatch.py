"""`mtpctl doctor --mismatch`: agreement of real engines and trainers, and injected faults, which must be named."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

from mtpctl.cli.app import main
from mtpctl.convert.hf_folder import create_hf_folder
from mtpctl.doctor.mismatch import Mismatch, examine_mismatch
from mtpctl.doctor.mismatch_parts import LogprobDifference, ModuleDifference, Request, generate, score
from mtpctl.doctor.parts import run_part
from mtpctl.errors import ThresholdMissed, UserError
from mtpctl.model.gpt import MtpModel
from mtpctl.recipe.loading import load_recipe
from mtpctl.rollout.vllm.patches import IMMEDIATE_ADMISSION
from mtpctl.trainer.engine import MegatronEngine
from tests.fakes.toys import GLM4_MOE, MIMO

TOYS = {"dense": (MIMO, 2), "moe": (GLM4_MOE, 1), "bitwise": (MIMO, 3)}
"""Configs, and drafts per step."""
ROUNDED = ("dense", "moe")
"""Toys with the default numerics."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders in which real engines have recorded a response, by toy."""
    folders = {name: tmp_path_factory.mktemp(name) for name in TOYS}
    for name, (config, drafts) in TOYS.items():
        model = create_hf_folder(config, folders[name] / "model", 0).path
        keys = {"model.path": model, "model.config": "null", "model.init": "weights", "rollout.context": 128, "rollout.temperature": 0.7}
        keys["rollout.speculation.num_tokens"] = drafts
        if name == "bitwise":
            keys |= {"numerics": "bitwise", "rollout.temperature": 1.0}
        recipe = load_recipe("tiny_mtp", sets=[f"{key}={value}" for key, value in keys.items()]).recipe
        Request(recipe.model_dump_json(by_alias=True), str(model), list(range(3, 40)), 48, "cpu").write(folders[name])
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv(IMMEDIATE_ADMISSION, "1")  # which the engine sets, and later engines of this process must not find
            # The patches of bitwise numerics change a whole process.
            counts = asyncio.run(run_part("mismatch-engine", folders[name], 200)) if name == "bitwise" else generate(folders[name])
        assert counts["tokens"] == 48 and counts["drafted"] > 20
    return folders


@pytest.mark.parametrize("toy", ROUNDED)
def test_engine_server_and_trainer_agree_without_a_fault(recorded: dict[str, Path], toy: str) -> None:
    result = Mismatch.from_result(score(recorded[toy]), 0.0)
    layers = [f"{layer}.{module}" for layer in range(2) for module in ("norm1", "attention", "norm2", "mlp")]
    assert [module.name for module in result.modules] == ["embedding", *layers, "final_norm", "head"]
    assert result.error is None, result.verdict
    assert result.verdict.startswith("engine, log-prob server and trainer agree")
    assert [line.source for line in result.logprobs] == ["engine, decode", "engine, prefill", "log-prob server"]
    # Rounding errors of fp32, and not zeros: two programs computed them.
    assert all(0 < module.mean < 1e-5 for module in result.modules if module.name.endswith(("attention", "mlp")))
    assert result.label("1.mlp") == ("layer 1, experts" if toy == "moe" else "layer 1, MLP")


def _rounded(module: nn.Module) -> None:
    """Round a module's output to bf16."""

    def round_output(_: nn.Module, args: object, out: Tensor | tuple[Tensor, Tensor | None]) -> Tensor | tuple[Tensor, Tensor | None]:
        return (out[0].bfloat16().float(), *out[1:]) if isinstance(out, tuple) else out.bfloat16().float()

    module.register_forward_hook(round_output)


def _rounded_norm(linear: nn.Module) -> None:
    norm: Callable[[Tensor], Tensor] = linear._norm
    linear._norm = lambda x: norm(x).bfloat16().float()  # type: ignore[assignment]


FAULTS: dict[tuple[str, str], Callable[[MtpModel], None]] = {
    ("dense", "embedding"): lambda model: _rounded(model.embedding),
    ("dense", "1.norm1"): lambda model: _rounded_norm(model.decoder.layers[1].self_attention.linear_qkv),
    ("dense", "0.attention"): lambda model: _rounded(model.decoder.layers[0].self_attention),
    ("dense", "0.norm2"): lambda model: _rounded_norm(model.decoder.layers[0].mlp.linear_fc1),
    ("dense", "1.mlp"): lambda model: _rounded(model.decoder.layers[1].mlp),
    ("dense", "final_norm"): lambda model: _rounded(model.decoder.final_layernorm),
    ("moe", "1.norm2"): lambda model: _rounded(model.decoder.layers[1].pre_mlp_layernorm),
    ("moe", "1.mlp"): lambda model: _rounded(model.decoder.layers[1].mlp),
}


@pytest.mark.parametrize(("toy", "module"), FAULTS)
def test_module_with_other_rounding_is_named(recorded: dict[str, Path], toy: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = MegatronEngine._build

    def faulty(engine: MegatronEngine) -> None:
        build(engine)
        FAULTS[toy, module](engine.module)

    monkeypatch.setattr(MegatronEngine, "_build", faulty)
    result = Mismatch.from_result(score(recorded[toy]), 0.0)
    assert result.first is not None and result.first.name == module
    # The relative error of bf16's rounding is at most 2^-9.
    assert 1e-4 < result.first.mean < 2**-8
    assert isinstance(result.error, ThresholdMissed) and str(result.error).startswith(
        f"{result.label(module)}: engine and trainer differ by"
    )
    # Modules that read a faulty one's output agree, because they are compared with the engine's inputs.
    faulty_modules = [each.name for each in result.modules if each.exceeds(result.limit)]
    assert set(faulty_modules) <= {module, module.replace("norm1", "attention").replace("norm2", "mlp")}


def test_bitwise_numerics_permit_no_difference(recorded: dict[str, Path]) -> None:
    result = Mismatch.from_result(score(recorded["bitwise"]), 0.0)
    assert result.error is None and result.verdict.endswith("numerics: bitwise allows no difference")
    assert {(each.mean, each.worst, each.total, each.prefill) for each in result.modules} == {(0.0, 0.0, 0.0, 0.0)}
    assert {(each.mean, each.largest) for each in result.logprobs} == {(0.0, 0.0)}


def test_layer_that_sums_in_the_usual_order_is_named(recorded: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    build = MegatronEngine._build

    def faulty(engine: MegatronEngine) -> None:
        build(engine)
        down = engine.module.decoder.layers[1].mlp.linear_fc2
        down.forward = lambda x: (nn.functional.linear(x, down.weight), None)

    monkeypatch.setattr(MegatronEngine, "_build", faulty)
    result = Mismatch.from_result(score(recorded["bitwise"]), 0.0)
    assert [each.name for each in result.modules if each.exceeds(result.limit)] == ["1.mlp"]
    assert result.first is not None and 0 < result.first.mean < 1e-5, "rounding in fp32"
    assert str(result.error).startswith("layer 1, MLP: engine and trainer differ by")


def _result(module: float, logprob: float) -> Mismatch:
    modules = [ModuleDifference("embedding", 0.0, 0.0, 0.0, 0.0), ModuleDifference("3.mlp", module, module, module, 0.0)]
    return Mismatch(modules, [LogprobDifference("engine, prefill", logprob, logprob)], 0.03, "bf16", [])


def test_log_probs_beyond_the_bound_are_a_mismatch_if_every_module_agrees() -> None:
    assert _result(0.01, 0.01).error is None
    error = _result(0.01, 0.5).error
    assert error is not None and str(error).startswith("engine, prefill: log-probs differ from the trainer's by 5.0e-01 nats")
    assert _result(0.01, float("nan")).error is not None


def test_recipe_and_not_the_limit_decides_whether_a_difference_is_allowed() -> None:
    exact = ModuleDifference("head", 0.0, 0.0, 0.0, 0.0)
    rounded, bitwise = (
        Mismatch([exact], [LogprobDifference("engine, prefill", 1e-7, 1e-7)], 0.0, "fp32", [], is_bitwise=is_bitwise)
        for is_bitwise in (False, True)
    )
    assert rounded.error is None and "rounding in fp32 explains" in rounded.verdict
    assert bitwise.error is not None


def test_nan_and_a_single_wrong_token_exceed_the_limit() -> None:
    first = _result(float("nan"), 0.0).first
    assert first is not None and first.name == "3.mlp"
    assert ModuleDifference("3.mlp", 0.01, 0.5, 0.01, 0.0).exceeds(0.03)
    assert not ModuleDifference("3.mlp", 0.01, 0.2, 0.9, 0.9).exceeds(0.03)


def test_other_engine_is_rejected(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: other\nmodel: {path: /nowhere}\nrollout: {engine: sglang}\n")
    with pytest.raises(UserError, match=r"^rollout\.engine: --mismatch compares the trainer with vLLM"):
        examine_mismatch(str(recipe))


@pytest.mark.parametrize(("module", "code"), [(0.01, 0), (0.1, 6)])
def test_command_prints_the_table_and_the_verdict(
    module: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mtpctl.doctor.mismatch.examine_mismatch", lambda target: _result(module, 0.01))
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--mismatch", "recipe.yaml", *arguments])
        printed = capsys.readouterr()
        assert int(ended.value.code or 0) == code
        if arguments:
            document = json.loads(printed.out)
            assert document["exit_code"] == code and document["modules"][1]["name"] == "layer 3, MLP"
            assert document["modules"][1]["exceeds"] == bool(code)
        else:
            assert re.search(rf"layer 3, MLP +{module:.1e}", printed.out) and "engine, prefill" in printed.out
            assert ("agree" in printed.out) == (code == 0)
            assert printed.err.startswith("error: layer 3, MLP: engine and trainer differ") == bool(code)


@pytest.mark.slow
def test_recipe_is_examined_from_end_to_end() -> None:
    result = examine_mismatch("tiny_mtp")
    assert result.error is None, result.verdict
    assert len(result.modules) == 3 + 4 * 3
