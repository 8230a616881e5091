"""Replayed routes match a model with fixed routers, and invalid routes are rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import UserError
from mtpctl.model.router import DecoderLayer, Router
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.train import LoraConfig
from mtpctl.routes import RouteShape
from mtpctl.samples import Sample
from mtpctl.trainer.actor import TrainerRank
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken
from mtpctl.trainer.share import distribute
from tests.fakes.sequences import sequences_of
from tests.fakes.tiny import GENTLE, assert_close, drawn_routes, engine, gradients, mimo, sequences
from tests.fakes.toys import TOYS, toy_folder
from tests.fakes.trainer_cases import MODELS

FAMILIES = [
    "qwen3-moe",
    "deepseek-v3",
    "qwen3-next",
    "qwen3.5-moe",
    "glm4-moe",
    "glm4-moe-lite",
    "mimo-v2-flash",
    "ernie4.5-moe",
    "nemotron-h",
]


def model(family: str, path: Path) -> HfFolder:
    if family == "qwen3-moe":
        return mimo(path, **MODELS["qwen3-moe"])
    return HfFolder.open(toy_folder(TOYS[family], path, 0, "fp32"))


def shape_of(folder: HfFolder) -> RouteShape:
    result = RouteShape.of(folder.shape)
    assert result is not None
    return result


def routed(folder: HfFolder, count: int = 5) -> list[Sequence]:
    return [replace(s, routes=drawn_routes(shape_of(folder), len(s.token_ids) - 1, i)) for i, s in enumerate(sequences(count, vocab=61))]


def fixed_shares(router: Router, logits: Tensor, experts: Tensor) -> Tensor:
    """The weight of each expert for given experts [T, k], by the families' formulas."""
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    if router.score_function == "softmax":
        # The softmax of all experts, of which the chosen ones' shares are made to add up to 1.
        shares = logits.double().softmax(-1) * chosen
        shares = shares / shares.sum(-1, keepdim=True)
    else:
        scores = logits.double().sigmoid() * chosen
        shares = scores / scores.sum(-1, keepdim=True) if experts.shape[1] > 1 else scores
    return (shares * (router.config.moe_router_topk_scaling_factor or 1.0)).to(logits.dtype)


def fix_routers(trainer: MegatronEngine, batch: list[Sequence], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the decoder's routers send the tokens of one row, `batch` one after another, where its routes say; the last of each as they
    choose."""
    places = {m.mlp.router: m.moe_index for m in trainer.module.modules() if isinstance(m, DecoderLayer) and m.moe_index is not None}
    routing = Router.routing

    def fixed(self: Router, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shares, routes = routing(self, logits, padding_mask)
        if self not in places:
            return shares, routes
        own = routes.to(torch.int8).topk(self.topk, dim=1).indices
        start = 0
        for sequence in batch:
            assert sequence.routes is not None
            rows = torch.from_numpy(sequence.routes[:, places[self]].astype(np.int64))
            own[start : start + len(rows)] = rows
            start += len(sequence.token_ids)
        flat = logits.view(-1, self.num_experts)
        return fixed_shares(self, flat, own), torch.zeros_like(routes).scatter(1, own, True)

    monkeypatch.setattr(Router, "routing", fixed)


def update(folder: HfFolder, batch: list[Sequence], **fields: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    mtp = MtpConfig(mode="isolated" if folder.shape.mtp_layers else "off")
    with engine(folder, mtp=mtp, tokens_per_microbatch=500, **fields) as trainer:
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update(batch, NextToken())
        return gradients(trainer), metrics


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_gradients_match_a_model_with_fixed_routers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the gradients of routers, and of MTP layers, whose routers are not replayed."""
    folder = model(family, tmp_path / "model")
    batch = routed(folder)
    result, metrics = update(folder, batch)
    recomputed, _ = update(folder, batch, recompute="full")
    plain = [replace(s, routes=None) for s in batch]
    free, without = update(folder, plain)
    with monkeypatch.context() as patch, engine(folder, mtp=MtpConfig(mode="isolated" if folder.shape.mtp_layers else "off")) as trainer:
        trainer.set_optimizer(GENTLE)
        fix_routers(trainer, batch, patch)
        assert trainer._micro_batches(plain, 0)[0].order == list(range(len(batch)))
        trainer.update(plain, NextToken())
        expected = gradients(trainer)
    assert_close(result, expected, 1e-5)
    assert_close(recomputed, expected, 1e-5)
    gates = [name for name in result if name.endswith(("mlp.gate.weight", "mixer.gate.weight"))]
    assert gates
    assert all(result[name].any() for name in gates)
    with pytest.raises(AssertionError):
        assert_close(result, free, 1e-2)
    assert 0 < metrics["moe/replay_agreement"] < 0.9
    assert "moe/replay_agreement" not in without


def test_recorded_routes_are_replayed(tmp_path: Path) -> None:
    """Routes of one pass are replayed bit for bit by the next; tokens without routes use the router's choice."""
    folder = model("qwen3-moe", tmp_path / "model")
    batch, shape = sequences(6, vocab=61), shape_of(folder)
    with engine(folder, tokens_per_microbatch=50) as trainer:
        scored = trainer.score(batch, record_routes=True)
        for sequence, scores in zip(batch, scored, strict=True):
            assert scores.routes is not None
            assert scores.routes.shape == (len(sequence.token_ids) - 1, 3, 2)
            assert shape.fault(scores.routes, len(sequence.token_ids)) is None
        for part in (slice(None), slice(3)):
            again = trainer.score([replace(s, routes=f.routes[part]) for s, f in zip(batch, scored, strict=True) if f.routes is not None])
            assert [s.logprobs for s in again] == [s.logprobs for s in scored]
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update([replace(s, routes=f.routes) for s, f in zip(batch, scored, strict=True)], NextToken())
        assert metrics["moe/replay_agreement"] == 1.0


@pytest.mark.parametrize(
    "fields", [{}, {"recompute": "full"}, {"lora": LoraConfig(rank=4, alpha=8.0)}], ids=lambda f: "-".join(f) or "plain"
)
def test_random_routes_are_replayed_after_a_resume(tmp_path: Path, fields: dict[str, Any]) -> None:
    """All tokens except the last of each sequence use experts 0 and 1 of 8, independent of the routers."""
    folder = model("qwen3-moe", tmp_path / "model")
    batch, shape = sequences(6, vocab=61, low=16), shape_of(folder)
    tokens = sum(len(s.token_ids) for s in batch)
    routes = np.tile(np.array([0, 1], shape.dtype), (20, len(shape.layers), 1))
    forged = [replace(s, routes=routes[: len(s.token_ids) - 1]) for s in batch]
    for resumed in (False, True):
        with engine(folder, mtp=MtpConfig(mode="off"), tokens_per_microbatch=50, **fields) as trainer:
            trainer.set_optimizer(GENTLE)
            if resumed:
                trainer.restore(tmp_path / "checkpoint")
            apart = [
                np.abs(np.subtract(one.logprobs, two.logprobs)).max()
                for one, two in zip(trainer.score(forged), trainer.score(batch), strict=True)
            ]
            assert min(apart) > 1e-3
            metrics = trainer.update(forged, NextToken())
            assert 4 * (tokens - len(batch)) / tokens <= metrics["moe/load_max"] <= 4
            # By chance a router chooses one of the two for a quarter of the tokens.
            assert metrics["moe/replay_agreement"] < 0.6
            trainer.save(tmp_path / "checkpoint")


def test_adapter_trains_with_replayed_routes(tmp_path: Path) -> None:
    folder = model("qwen3-moe", tmp_path / "model")
    batch, lora = routed(folder), LoraConfig(rank=4, alpha=8.0)
    retained, metrics = update(folder, batch, lora=lora)
    recomputed, _ = update(folder, batch, lora=lora, recompute="full")
    assert metrics["moe/replay_agreement"] < 0.9
    assert_close(recomputed, retained, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:, :1], "routes have 1 layers, but the model has 3 with experts"),
        (lambda r: r[..., :1], "routes have 1 experts per token, but the model's routers select 2"),
        (lambda r: np.concatenate([r] * 9), "routes have .* tokens, but the sequence has"),
        (lambda r: r.astype(np.uint16), "routes are uint16, but those of 8 experts are uint8"),
        (lambda r: np.where(r == 1, 8, r).astype(np.uint8), "routes contain expert 8, but the model has 8"),
        (lambda r: np.zeros_like(r), "routes send token 0 to one expert twice"),
        (lambda r: r.astype(np.float32), "routes are float32"),
    ],
)
def test_routes_of_another_model_are_rejected_with_the_sample_name(change: Any, message: str, tmp_path: Path) -> None:
    folder = model("qwen3-moe", tmp_path / "model")
    (sequence,) = routed(folder, 1)
    with engine(folder, train=False) as trainer, pytest.raises(UserError, match=f"sample p7/3: {message}"):
        trainer.score([replace(sequence, routes=change(sequence.routes), name="p7/3")])


def test_dense_model_rejects_routes(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "model")
    (sequence,) = sequences(1)
    with engine(folder, train=False) as trainer, pytest.raises(UserError, match="has no experts to route to"):
        trainer.score([replace(sequence, routes=np.zeros((2, 2, 2), np.uint8))])


@pytest.mark.parametrize("replay", ["off", "recompute", "rollout"])
def test_minibatches_replay_the_routes_that_the_recipe_selects(replay: str, tmp_path: Path) -> None:
    """`recompute` replays the routes of the scoring pass in all minibatches; `rollout` replays the samples' routes."""
    folder = model("qwen3-moe", tmp_path / "model")
    rl = {"steps": 1, "group_size": 2, "minibatches": 2, "prompts_per_step": 2, "old_logprobs": "recompute"}
    inputs = {"train": {"rl": rl, "moe": {"replay": replay}}, "mtp": {"mode": "off"}, "rollout": {"speculation": {"num_tokens": 0}}}
    rank = TrainerRank(Recipe.model_validate(inputs).model_dump_json(by_alias=True), 0, 1)
    samples = []
    for number, sequence in enumerate(sequences(4, vocab=61)):
        prompt = sequence.token_ids[: sequence.prompt_length]
        sample = Sample(f"p{number // 2}", str(number // 2), prompt, index=number % 2, reward=float(number % 2))
        response = sequence.token_ids[sequence.prompt_length :]
        sample.append(response, [-1.0] * len(response), 0)
        if replay == "rollout":
            sample.routes = drawn_routes(shape_of(folder), sample.length - 1, number)
        samples.append(sample)
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        trainer.set_optimizer(GENTLE.model_copy(update={"lr": 0.05}))
        rank.engine = trainer
        free = trainer.score([replace(s, routes=None) for s in sequences_of(samples)], record_routes=True)
        agreed: list[float | None] = []
        train, follow = trainer.update, []

        def update(batch: list[Sequence], *args: Any, **options: Any) -> dict[str, float]:
            follow.append([s.routes for s in batch])
            agreed.append((metrics := train(batch, *args, **options)).get("moe/replay_agreement"))
            return metrics

        trainer.update = update  # type: ignore[method-assign]
        table, (share,) = distribute(samples, minibatches=2, tokens_per_microbatch=4096, dp=1)
        rank.rl_step(table, share(), 0)
    followed = [routes for batch in follow for routes in batch]
    if replay == "off":
        assert followed == [None] * 4 and agreed == [None, None]
        return
    right = [s.routes for s in samples] if replay == "rollout" else [f.routes for f in free]
    assert all(np.array_equal(a, b) for a, b in zip(followed, right, strict=True))
    if replay == "recompute":
        assert agreed[0] == 1.0 and agreed[1] is not None and agreed[1] < 1.0
