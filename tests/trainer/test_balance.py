"""Router losses match plain formulas and autograd; biases follow the loads; both have metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.model.router import Router
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.train import LoraConfig, MoeConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences
from tests.fakes.toys import TOYS, toy_folder
from tests.fakes.trainer_cases import MODELS
from tests.fakes.updates import Nothing

Routed = tuple[Router, Tensor, Tensor]
BATCH = sequences(9, vocab=61)
TOTAL = sum(len(s.token_ids) for s in BATCH)
SMALL = 40
"""Tokens per microbatch; a batch has several."""


def switch_loss(router: Router, x: Tensor, routes: Tensor) -> Tensor:
    """E Σ f P, arXiv 2101.03961, equations 4 to 6, with k rows a token in place of one."""
    logits = F.linear(x, router.weight)
    scores = logits.softmax(-1) if router.score_function == "softmax" else F.normalize(logits.sigmoid(), p=1, dim=-1)
    f, p = routes.double().mean(0) / router.topk, scores.mean(0)
    return router.num_experts * (f * p).sum()


def st_moe_loss(router: Router, x: Tensor, _: Tensor) -> Tensor:
    """Mean log² Σ exp(logits), arXiv 2202.08906, equation 5."""
    return F.linear(x, router.weight).exp().sum(-1).log().square().mean()


def routed_by(trainer: MegatronEngine, micro: Any) -> list[Routed]:
    """Each router with its input and its routing, in a pass that keeps the graph."""
    result: list[Routed] = []

    def keep(router: Router, args: tuple[Tensor, ...], out: tuple[Tensor, Tensor]) -> None:
        result.append((router, args[0].flatten(0, -2), out[1]))

    hooks = [module.register_forward_hook(keep) for module in trainer.module.modules() if isinstance(module, Router)]
    trainer.module(micro.input_ids, micro.packing, depths=trainer.depths)
    for hook in hooks:
        hook.remove()
    return result


def plain_gradients(folder: HfFolder, moe: MoeConfig, mtp: MtpConfig) -> dict[str, Tensor]:
    """The losses by both formulas, summed over layers; means over microbatches, weighted by tokens, and over depths that share a layer."""
    with engine(folder, mtp=mtp, tokens_per_microbatch=SMALL) as trainer:
        trainer.set_optimizer(GENTLE)
        micros = trainer._micro_batches(BATCH, trainer.depths)
        assert len(micros) > 2
        trainer.model.train()
        trainer.gradients.clear(len(micros))
        for micro in micros:
            for router, x, routes in (routed := routed_by(trainer, micro)):
                times = sum(other is router for other, *_ in routed)
                loss = moe.aux_loss * switch_loss(router, x, routes) + moe.z_loss * st_moe_loss(router, x, routes)
                (loss * len(micro.input_ids) / (TOTAL * times)).backward(retain_graph=True)
        return gradients(trainer)


def balancing_gradients(folder: HfFolder, moe: MoeConfig, mtp: MtpConfig, recompute: str = "none") -> dict[str, Tensor]:
    """The gradients of an update with a main loss of weight 0 and no MTP loss."""
    with engine(folder, mtp=mtp, tokens_per_microbatch=SMALL, moe=moe, recompute=recompute) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.update(BATCH, Nothing())
        return gradients(trainer)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "moe",
    [
        *(pytest.param(alone, marks=pytest.mark.slow) for alone in (MoeConfig(aux_loss=0.3), MoeConfig(z_loss=0.2))),
        MoeConfig(aux_loss=0.3, z_loss=0.2),
    ],
)
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek"])
def test_gradients_match_the_plain_formulas(tmp_path: Path, family: str, moe: MoeConfig, recompute: str) -> None:
    folder, mtp = mimo(tmp_path / "model", **MODELS[family]), MtpConfig(mode="off")
    expected = plain_gradients(folder, moe, mtp)
    assert max(float(value.norm()) for value in expected.values()) > 1e-3
    assert_close(balancing_gradients(folder, moe, mtp, recompute), expected, 1e-5)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_depths_that_share_a_layer_share_its_router_losses(tmp_path: Path, recompute: str) -> None:
    folder = HfFolder.open(toy_folder(TOYS["qwen3.5-moe"], tmp_path / "model", 0, "fp32"))
    # Gradients of the MTP loss are as good as none.
    moe, mtp = MoeConfig(aux_loss=0.3, z_loss=0.2), MtpConfig(mode="isolated", repeat=2, loss_scale=1e-9, clip_grad=0)
    expected = plain_gradients(folder, moe, mtp)
    assert any(name.startswith("mtp") and value.norm() > 1e-3 for name, value in expected.items())
    assert_close(balancing_gradients(folder, moe, mtp, recompute), expected, 5e-5)


def test_adapter_receives_the_router_loss(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "model", **MODELS["qwen3-moe"])
    for recompute in ("none", "full"):
        with engine(
            folder, mtp=MtpConfig(mode="off"), moe=MoeConfig(aux_loss=0.3), lora=LoraConfig(rank=4), recompute=recompute
        ) as trainer:
            trainer.set_optimizer(GENTLE)
            metrics = trainer.update(BATCH, Nothing())
            assert metrics["actor/grad_norm"] > 1e-4
            assert metrics["moe/dropped"] == 0


def test_routers_have_no_extra_loss_by_default(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "model", **MODELS["deepseek"])
    result = balancing_gradients(folder, MoeConfig(), MtpConfig(mode="off"))
    biases = {name for name in result if name.endswith("bias")}
    assert biases
    assert all(value.abs().max() == 0 for name, value in result.items() if name not in biases)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_loads_are_counted_once_with_recomputation(tmp_path: Path, recompute: str) -> None:
    folder = mimo(tmp_path / "model", **MODELS["deepseek"])
    with engine(folder, mtp=MtpConfig(mode="off"), tokens_per_microbatch=SMALL) as trainer:
        micros = trainer._micro_batches(BATCH, 0)
        sums = [torch.stack([routes.sum(0) for *_, routes in routed_by(trainer, micro)]) for micro in micros]
        loads = torch.stack(sums).sum(0).double()
    assert loads.shape == (2, 8)  # the first layer is dense
    assert (loads.sum(1) == 4 * TOTAL).all()
    with engine(folder, mtp=MtpConfig(mode="off"), tokens_per_microbatch=SMALL, recompute=recompute) as trainer:
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update(BATCH, NextToken())
        assert metrics["moe/load_max"] == pytest.approx(float((loads.amax(1) / loads.mean(1)).mean()))
        assert metrics["moe/load_cv"] == pytest.approx(float((loads.std(1, correction=0) / loads.mean(1)).mean()))
        assert metrics["moe/dropped"] == 0
        trainer.score(BATCH)
        assert trainer.update(BATCH, NextToken())["moe/dropped"] == 0


def test_dense_model_has_no_load_metrics(tmp_path: Path) -> None:
    with engine(mimo(tmp_path / "model"), mtp=MtpConfig(mode="off")) as trainer:
        trainer.set_optimizer(GENTLE)
        assert not [name for name in trainer.update(BATCH, NextToken()) if name.startswith("moe/")]


def biases(trainer: MegatronEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.export() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_update_moves_each_bias_towards_equal_loads(tmp_path: Path, precision: str) -> None:
    """Biases stay fp32, because bf16 would round the step away. A skipped update changes none, and a checkpoint stores them."""
    folder = mimo(tmp_path / "model", **MODELS["deepseek"])
    step = 1e-4
    with engine(folder, mtp=MtpConfig(mode="off"), moe=MoeConfig(bias_update=step), precision=precision) as trainer:
        trainer.set_optimizer(GENTLE)
        routers = [module for module in trainer.module.modules() if isinstance(module, Router)]
        before = [router.expert_bias.clone() for router in routers]
        trainer.update(BATCH, NextToken())
        after = [router.expert_bias.clone() for router in routers]
        for router, old, new in zip(routers, before, after, strict=True):
            load = router.load.double()
            assert new.dtype == torch.float32
            assert len(set(load.tolist())) > 1
            torch.testing.assert_close(new, old + step * (load.mean() - load).sign().float(), rtol=0, atol=0)
        exported = biases(trainer)
        assert all(any(torch.equal(value, new) for new in after) for value in exported.values())
        assert len(exported) == len(routers)
        trainer.save(tmp_path / "checkpoint")
        weight = next(p for name, p in trainer.module.named_parameters() if name.endswith("linear_proj.weight"))
        retained = weight.detach().clone()
        weight.data[0, 0] = torch.nan
        assert trainer.update(BATCH, NextToken())["skipped"] == 1
        assert all(torch.equal(router.expert_bias, new) for router, new in zip(routers, after, strict=True))
        weight.data.copy_(retained)
        trainer.update(BATCH, NextToken())
        assert not all(torch.equal(router.expert_bias, new) for router, new in zip(routers, after, strict=True))
        trainer.restore(tmp_path / "checkpoint")
        assert all(torch.equal(router.expert_bias, new) for router, new in zip(routers, after, strict=True))
