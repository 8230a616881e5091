"""Grouped experts against sequential experts, stacked weights without copies, and the exchange of tokens between ranks."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.kernels.grouped import stack_tensors
from mtpctl.kernels.rows import expert_order
from mtpctl.model import build
from mtpctl.model.experts import AllToAll, MixtureOfExperts, gather_row_probs, gather_rows, sum_rows
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken
from tests.fakes.kept import Kept
from tests.fakes.kernel_routes import drawn_routes
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences
from tests.fakes.toys import TOYS, toy_folder
from tests.fakes.trainer_cases import MODELS

SPARSE = [name for name, config in TOYS.items() if "moe_intermediate_size" in config]


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, targets=["linear_fc1", "linear_fc2"])], ids=["all-weights", "adapters"])
def test_loss_and_gradients_match_sequential_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, lora: LoraConfig | None
) -> None:
    folder = HfFolder.open(toy_folder(TOYS[family], tmp_path / "model", 0, "fp32"))
    mode = "off" if lora or not folder.shape.mtp_layers else "joint"

    def updated() -> tuple[float, dict[str, torch.Tensor]]:
        with engine(folder, mtp=MtpConfig(mode=mode, clip_grad=0), lora=lora) as trainer:
            trainer.set_optimizer(GENTLE)
            return trainer.update(sequences(), NextToken())["sft/loss"], gradients(trainer)

    actual = updated()
    monkeypatch.setattr(build, "MixtureOfExperts", MoELayer)
    monkeypatch.setattr(build, "Experts", SequentialMLP)
    expected = updated()
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert any(".experts." in name and value.abs().max() > 0 for name, value in expected[1].items())
    assert_close(actual[1], expected[1], 1e-5)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_expert_weights_and_buffers_are_stacked_without_copies(tmp_path: Path, distributed_optimizer: bool) -> None:
    """Copies would cost as much memory as the model, and its bandwidth in every layer."""
    folder = mimo(tmp_path / "model", **MODELS["qwen3-moe"] | {"moe_intermediate_size": 32})
    with engine(folder, mtp=MtpConfig(mode="off"), distributed_optimizer=distributed_optimizer) as trainer:
        assert isinstance(trainer, MegatronEngine)
        trainer.set_optimizer(GENTLE)
        layers = [module for module in trainer.module.modules() if isinstance(module, MixtureOfExperts)]
        assert layers
        for layer in layers:
            for name in ("linear_fc1", "linear_fc2"):
                weights = [getattr(expert, name).weight for expert in reversed(layer.experts.local_experts)]
                for tensors in (weights, [weight.main_grad for weight in weights]):
                    assert stack_tensors(tensors).data_ptr() == tensors[0].data_ptr()


@pytest.mark.parametrize("frozen_input", [False, True])
def test_running_in_parts_saves_only_inputs_and_gives_equal_gradients(tmp_path: Path, frozen_input: bool) -> None:
    folder = mimo(tmp_path / "model", **MODELS["qwen3-moe"] | {"moe_intermediate_size": 64})
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        trainer.model.train()
        experts = next(module for module in trainer.module.modules() if isinstance(module, MixtureOfExperts)).experts
        hidden, count = folder.shape.hidden, 64
        rows, probs = torch.randn(count, hidden, requires_grad=not frozen_input), torch.rand(count, requires_grad=not frozen_input)
        leaves = [] if frozen_input else [rows, probs]
        ends, upstream = torch.tensor([3, 3, 20, 21, 40, 55, 64, 64], dtype=torch.int32), torch.randn(count, hidden)
        actual: list[tuple[int, list[torch.Tensor]]] = []
        for run in (experts.run, partial(experts.run_in_chunks, max_rows=24)):
            trainer.gradients.clear(1)
            for leaf in leaves:
                leaf.grad = None
            with Kept(rows, probs, *trainer.module.parameters()) as memory:
                out = run(rows, ends, probs)
            saved = memory.bytes
            out.backward(upstream)
            buffers = [weight.main_grad.clone() for name, weight in experts.named_parameters() if name.endswith("weight")]
            actual.append((saved, [out.detach(), *(leaf.grad for leaf in leaves), *buffers]))
        (whole, expected), (saved, tensor) = actual
        assert saved <= out.nbytes + 3 * ends.nbytes < whole / 3
        for a, b in zip(tensor, expected, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            torch.testing.assert_close(experts.run_in_chunks(rows, ends, probs, 24), tensor[0])


TOKENS, EXPERTS, K = 23, 6, 2


def test_gather_and_sum_of_rows_match_dense_products_with_gradients() -> None:
    routes = drawn_routes(TOKENS, EXPERTS, K)
    order = expert_order(routes, K, 1)
    tokens = torch.randn(TOKENS, 4, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
    rows = gather_rows(tokens, order) * gather_row_probs(probs, order)[:, None]
    expected = tokens * (probs * routes).sum(1, keepdim=True)
    torch.testing.assert_close(sum_rows(rows, order), expected)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(sum_rows(rows, order), [tokens, probs], upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, [tokens, probs], upstream))


class Probe(torch.autograd.Function):
    """Logs its forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        ctx.events = events
        events.append("computed")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.events.append("gradient computed")
        return grads[0] * 2, None


class Doubled:
    """Codec that doubles rows before they are sent, in both passes."""

    def encode(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0] * 2

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def encode_grads(self, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]

    def decode_grads(self, rows: torch.Tensor) -> tuple[torch.Tensor]:
        return (rows * 2,)


def exchanged(rows: torch.Tensor, *, is_async: bool = True) -> AllToAll:
    return AllToAll(Doubled(), [rows], [2, 3], [1, 2], group=None, is_async=is_async)  # type: ignore[arg-type]


class Events(list[str]):
    """Supports weak references."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """The calls of an all-to-all that adds 1 to its rows."""
    logged = Events()

    class Work:
        def wait(self) -> None:
            logged.append("waited")

    def all_to_all(out: torch.Tensor, rows: torch.Tensor, to: list[int], of: list[int], *, group: Any, async_op: bool) -> Work | None:
        assert out.shape[0] == sum(to) and rows.shape[0] == sum(of)
        out.zero_()[: len(rows)] = rows[: len(out)] + 1
        logged.append("sent")
        return Work() if async_op else None

    monkeypatch.setattr("torch.distributed.all_to_all_single", all_to_all)
    return logged


@pytest.mark.usefixtures("events")
def test_pass_that_fails_before_wait_is_freed_at_once() -> None:
    in_graph = Events()
    pass_graph = weakref.ref(in_graph)
    gc.disable()  # The memory is needed before Python's next full collection.
    try:
        exchange = exchanged(Probe.apply(torch.randn(5, 3, requires_grad=True), in_graph))
        del exchange, in_graph
        assert pass_graph() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_async", [True, False])
def test_all_to_all_overlaps_with_computation_in_both_passes(events: Events, is_async: bool) -> None:
    rows, other = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
    exchange = exchanged(rows, is_async=is_async)
    other_out = Probe.apply(other, events)
    received = exchange.wait()
    assert received.equal(2 * rows[:3] + 1) and events == ["sent", "computed", "waited"][: 3 if is_async else 2]
    events.clear()
    upstream = torch.randn(3, 3)
    rows_grad, other_grad = torch.autograd.grad((received * upstream).sum() + other_out.sum(), [rows, other])
    assert events == ["sent", "gradient computed", "waited"][: 3 if is_async else 2]
    assert rows_grad.equal(2 * torch.cat([upstream + 1, torch.zeros(2, 3)])) and other_grad.equal(torch.full((5, 3), 2.0))
