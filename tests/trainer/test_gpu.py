"""The engine on a GPU: in fp32 it matches transformers in fp64, in bf16 it is as close as transformers in bf16.

Each bound on bf16 is a multiple of PyTorch's own error at the same weights, so that it holds at any shape.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.bench.train_step import create_config_folder, make_samples
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.model.core_attention import PackedAttention
from mtpctl.model.packing import Packing
from mtpctl.plan.memory import GIB
from mtpctl.plan.sharding import activation_width, transient_width
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken
from tests.fakes.convert_models import CASES, hf_model
from tests.fakes.tiny import MIMO, assert_close, engine, gradients, mimo, sequences
from tests.fakes.trainer_gpus import PAIRS, run
from tests.fakes.updates import reference

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 512}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama3": {},
    "qwen3-moe": {"moe_intermediate_size": 128},
    "glm4-moe-qk-norm": {"moe_intermediate_size": 128},
    # Queries and keys wider than values.
    "deepseek-v3": {"moe_intermediate_size": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64},
    "qwen3.5": {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "head_dim": 64},
    "nemotron-h": {"moe_intermediate_size": 128, "mamba_head_dim": 32, "ssm_state_size": 32},
    "qwen3-next": {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "head_dim": 64, "moe_intermediate_size": 128},
}


def error(result: list[Tensor], exact: list[Tensor]) -> float:
    """Root mean square of the difference, relative to that of the exact values."""
    off = torch.cat([(a.double().cpu() - b.double().cpu()).flatten() for a, b in zip(result, exact, strict=True)])
    return float(off.norm() / torch.cat([b.double().cpu().flatten() for b in exact]).norm())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(8, 8, 128, 128), (8, 2, 128, 128), (4, 1, 256, 256), (4, 4, 192, 128), (4, 4, 12, 12), (4, 4, 40, 24)],
)
def test_packed_attention_matches_its_reference(heads: int, kv_heads: int, dim: int, value_dim: int) -> None:
    """Forward and backward of packed sequences, including the widths of latent attention, which the kernel does not support."""
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1))  # type: ignore[arg-type]
    packing = Packing.of([300, 1, 77, 128, 5], "cuda")
    torch.manual_seed(0)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    inputs = [torch.randn(511, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    weights = torch.randn(511, heads, value_dim, device="cuda", dtype=torch.bfloat16)

    def run(way: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = way(*leaves, packing)
        return [out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)]

    exact = run(attention._attend_by_group, torch.float64)
    own, result = run(attention._attend_by_group, torch.bfloat16), run(attention._flash, torch.bfloat16)
    for what, mine, theirs, right in zip(("out", "q", "k", "v"), result, own, exact, strict=True):
        assert error([mine], [right]) <= 2 * error([theirs], [right]), what


def logits(trainer: MegatronEngine, ids: list[list[int]]) -> list[Tensor]:
    flat = torch.tensor([token for sample in ids for token in sample], device=trainer.device)
    with torch.no_grad():
        hidden = trainer.module(flat, Packing.of([len(sample) for sample in ids], trainer.device))
        return [part.cpu() for part in (hidden.trunk @ hidden.head.T).split([len(sample) for sample in ids])]


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def in_plain_torch(model: torch.nn.Module) -> Iterator[None]:
    """Make transformers use no kernels of other packages for linear attention in the block, because they lack fp64."""
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
            if hasattr(module, name):
                patch.setattr(module, name, inspect.unwrap(getattr(module, name)))
        yield


@pytest.mark.parametrize("case", MODELS)
def test_logits_of_every_kind_of_layer_match(tmp_path: Path, case: str) -> None:
    kind, fields = CASES[case]
    hf = hf_model(kind, fields | WIDE | MODELS[case], tmp_path)
    ids = [s.token_ids.tolist() for s in sequences(6, vocab=512, low=20, high=110)]
    result = {}
    for precision in ("fp32", "bf16"):
        with engine(HfFolder.open(tmp_path), train=False, precision=precision, mtp=MtpConfig(mode="off")) as trainer:
            result[precision] = logits(trainer, ids)
    own, exact = {}, {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        # Transformers computes on the CPU: its linear attention solves triangular systems, which need libraries that a GPU's
        # torch loads on demand and a host may lack.
        model = deepcopy(hf)
        with torch.no_grad(), in_plain_torch(model):
            # Parameters alone: frequencies of rotary embeddings stay fp32, as in a model that is loaded so. What is exact is of the
            # weights as they were rounded.
            cast(model, dtype)
            own[precision] = [model(torch.tensor([sample])).logits[0] for sample in ids]
            cast(model, torch.float64)
            exact[precision] = [model(torch.tensor([sample])).logits[0] for sample in ids]
    of_bf16 = error(own["bf16"], exact["bf16"])
    # The kernels of linear attention multiply fp32 in TF32, which has three binary digits more than bf16.
    bound = of_bf16 / 3 if case in ("qwen3.5", "qwen3-next", "nemotron-h") else 4 * error(own["fp32"], exact["fp32"])
    assert error(result["fp32"], exact["fp32"]) <= bound
    assert error(result["bf16"], exact["bf16"]) <= 3 * of_bf16


@pytest.mark.parametrize("mode", ["joint", "isolated"])
def test_gradients_of_packed_and_separate_samples_match(tmp_path: Path, mode: str) -> None:
    """Of two MTP depths and the trunk, against the formulas in plain torch."""
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    batch = sequences(9, seed=3)
    settings = {"depths": 2, "isolated": mode == "isolated", "loss_scale": 0.3}
    exact = reference(folder, batch, **settings)[1]
    own = reference(folder, batch, **settings, dtype=torch.bfloat16)[1]
    names = sorted(exact)
    for precision in ("fp32", "bf16"):
        bound = 1e-5 if precision == "fp32" else 2 * error([own[name] for name in names], [exact[name] for name in names])
        for budget in (1, 100_000):
            mtp = MtpConfig(mode=mode, loss_scale=0.3, clip_grad=0)  # type: ignore[arg-type]
            with engine(folder, precision=precision, mtp=mtp, tokens_per_microbatch=budget) as trainer:
                trainer.forward_backward(batch, NextToken())
                result = reduced_gradients(trainer)
            assert error([result[name] for name in names], [exact[name] for name in names]) <= bound, (precision, budget)


def reduced_gradients(trainer: MegatronEngine) -> dict[str, Tensor]:
    """In fp32, because `gradients` would round them to bf16."""
    trainer.module.float()
    return gradients(trainer)


def test_saved_activations_fit_the_memory_plan(tmp_path: Path) -> None:
    """8,192 packed tokens of a MiMo with four layers and one of MTP: peak of forward and backward beyond weights and buffers."""
    fields = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    config = MIMO | fields | {"num_hidden_layers": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
    folder, tokens, workspace = create_config_folder(config, tmp_path), 8192, 512 << 20
    kernels = KernelsConfig(workspace_bytes=workspace)
    with engine(folder, precision="bf16", tokens_per_microbatch=tokens, random_seed=0, kernels=kernels) as trainer:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            trainer.forward_backward(make_samples(32000, tokens, 8, 0.02), NextToken())
        peak = torch.cuda.max_memory_allocated() - before
    shape, parallel = folder.shape, ParallelConfig()
    # In addition to the five layers: embeddings, both MTP inputs and their concatenation, the head's states and their gradients.
    elements = 5 * activation_width(shape, parallel) + 2 * transient_width(shape, parallel) + 16 * shape.hidden
    assert peak <= 2 * tokens * elements + workspace


def test_peak_memory_is_that_of_the_gpu_after_an_update(tmp_path: Path) -> None:
    with engine(mimo(tmp_path / "model"), precision="bf16") as trainer:
        trainer.set_optimizer(OptimizerConfig())
        trainer.update(sequences(9, seed=3), NextToken())
        metrics = trainer.peak_memory()
        allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    assert 0 < metrics["perf/memory_allocated_gib"] <= allocated
    assert metrics["perf/memory_allocated_gib"] <= metrics["perf/memory_reserved_gib"] <= reserved


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The results of each case over two ranks, or the reason why there is none. Progress is printed."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        return run(tmp_path_factory.mktemp("cards"))


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs")
@pytest.mark.parametrize("name", [case.name for case in PAIRS])
def test_update_on_two_gpus_matches_one(two_gpus: dict[str, Any], name: str) -> None:
    """In fp32 up to rounding; in bf16, with the flash kernel, as close to one GPU's fp32 results as one GPU in bf16."""
    case = next(case for case in PAIRS if case.name == name)
    for needed in (case.like, f"{case.like}-bf16", name, f"{name}-bf16"):
        assert not isinstance(two_gpus[needed], str), f"{needed}: {two_gpus[needed]}"
    single, single_half = two_gpus[case.like]["gradients"], two_gpus[f"{case.like}-bf16"]["gradients"]
    whole, half = two_gpus[name]["gradients"], two_gpus[f"{name}-bf16"]["gradients"]
    assert_close(whole, single, 3 * case.bound)
    names = sorted(single)
    exact = [single[name] for name in names]
    assert error([half[name] for name in names], exact) <= 2 * error([single_half[name] for name in names], exact)
    assert two_gpus[name]["metrics"]["sft/loss"] == pytest.approx(two_gpus[case.like]["metrics"]["sft/loss"], rel=1e-5)
