"""The head's one-pass and two-pass losses have equal losses and gradients; one pass saves a matrix product."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.bench.train_step import TwoPasses
from mtpctl.kernels import products
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import CorrectionConfig, RlConfig, TeacherConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import PolicyObjective
from mtpctl.trainer.update_loss import MEASURED_TOKENS
from tests.fakes import user_losses
from tests.fakes.policy_batch import rl_config
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences

FEW_ROWS = 10 * 3 * 4 * 64
"""Workspace for ten rows of the toy's logits, in bytes."""

LOSSES = {
    "ppo": rl_config(),
    "everything": rl_config(clip_dual=1.5, entropy_coef=0.01, kl_coef=0.1, correction=CorrectionConfig(mode="truncate", high=1.1)),
    "by sequence": rl_config(aggregate="sequence", correction=CorrectionConfig(mode="mask", level="sequence", low=0.5, high=2.0)),
    "decoupled": rl_config(loss="decoupled", entropy_coef=0.01),
    "cispo": rl_config(loss="cispo", clip_low=1.0, clip_high=0.2, aggregate="constant", entropy_coef=0.01),
    "sapo": rl_config(loss="sapo", aggregate="sequence", tau_neg=2.0, kl_coef=0.1),
    "own": rl_config(loss=f"{user_losses.__file__}:squared", entropy_coef=0.01),
    "taught": rl_config(teacher=TeacherConfig(url="http://teacher", topk=3, coef=0.5), aggregate="sequence"),
    "taught, forward": rl_config(teacher=TeacherConfig(url="http://teacher", topk=3, kl="forward"), entropy_coef=0.01),
    "gspo": rl_config(loss="gspo", clip_low=3e-4, clip_high=4e-4),
}


def lines(trainer: MegatronEngine) -> list[Sequence]:
    """Sequences whose old, behaviour and reference log-probs are close to the policy's."""
    draw = random.Random(7)

    def columns(logprobs: list[float]) -> dict[str, Any]:
        names = ("old", "behaviour", "reference")
        made_up: dict[str, Any] = {name: [value + draw.gauss(0, 0.3) for value in logprobs] for name in names}
        made_up["candidates"] = [[draw.randrange(trainer.folder.shape.vocab) for _ in range(3)] for _ in logprobs]
        made_up["candidate_logprobs"] = [[draw.uniform(-4, -1.2) for _ in range(3)] for _ in logprobs]
        return made_up | {"advantage": [draw.choice((-1.2, 0.7))] * len(logprobs)}

    batch = sequences(9, seed=3)
    return [replace(s, columns=columns(score.logprobs)) for s, score in zip(batch, trainer.score(batch), strict=True)]


def two_passes(trainer: MegatronEngine) -> TwoPasses:
    return TwoPasses(trainer.config.kernels, trainer.folder.shape, trainer.config.parallel, sequence_parallel=False)


def updated(folder: Any, config: RlConfig, *, passes: int, temperature: float = 1.0, **fields: Any) -> tuple[dict[str, float], Any]:
    mtp = MtpConfig(mode="joint", loss_scale=0.3, clip_grad=0)
    with engine(folder, mtp=mtp, **fields) as trainer:
        if passes == 2:
            trainer.head = two_passes(trainer)
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update(lines(trainer), PolicyObjective(config, max_tokens=20), temperature=temperature)
        return {name: value for name, value in metrics.items() if "timing" not in name}, gradients(trainer)


@pytest.mark.parametrize("loss", [name for name in LOSSES if "taught" not in name])  # a candidate's gradients are added before or after
def test_one_pass_is_bit_equal_if_the_workspace_holds_all_logits(tmp_path: Any, loss: str) -> None:
    folder = mimo(tmp_path / "model")
    result, expected = (updated(folder, LOSSES[loss], passes=passes, temperature=0.7) for passes in (1, 2))
    assert result[0] == expected[0]
    assert all(torch.equal(result[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_slices_of_rows_match_the_oracle(tmp_path: Any, loss: str, tied: bool) -> None:
    """Compared with float64 and all logits in memory, from the same hidden states."""
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2, tie_word_embeddings=tied)
    few, exact = KernelsConfig(workspace_bytes=FEW_ROWS), KernelsConfig(linear_logprob="reference")
    result = updated(folder, LOSSES[loss], passes=1, kernels=few, tokens_per_microbatch=60)
    expected = updated(folder, LOSSES[loss], passes=2, kernels=exact, tokens_per_microbatch=60)
    assert result[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert_close(result[1], expected[1], 1e-5)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"recompute": "full", "tokens_per_microbatch": 33}, {"lora": LoraConfig(rank=4, alpha=8.0)}, {"mtp": "tv"}],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_isolated_mtp_loss_scale_leaves_policy_gradients_bit_equal(tmp_path: Any, loss: str, fields: dict[str, Any]) -> None:
    """The gradients of trunk, embedding, untied head or adapters."""
    folder, result = mimo(tmp_path / "model"), []
    for scale in (0.0, 10.0):
        mtp = MtpConfig(mode="isolated", loss=fields.get("mtp", "ce"), loss_scale=scale, clip_grad=0)
        with engine(folder, **{**fields, "mtp": mtp}) as trainer:
            trainer.set_optimizer(GENTLE)
            trainer.update(lines(trainer), PolicyObjective(LOSSES[loss], max_tokens=20))
            result.append(gradients(trainer))
    without, scaled = result
    changed = {name for name, value in scaled.items() if not value.equal(without[name])}
    assert changed and all("mtp" in name for name in changed)


@pytest.mark.parametrize("loss", LOSSES)
def test_number_of_microbatches_does_not_scale_any_term(tmp_path: Any, loss: str) -> None:
    """Including entropy, KL penalty, a teacher's KL and a user-defined loss."""
    folder = mimo(tmp_path / "model")
    expected = updated(folder, LOSSES[loss], passes=1, tokens_per_microbatch=4096)
    for budget in (1, 64):
        result = updated(folder, LOSSES[loss], passes=1, tokens_per_microbatch=budget)
        assert result[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert_close(result[1], expected[1], 1e-5)


def logits_made(folder: Any, monkeypatch: pytest.MonkeyPatch, loss: str, mtp: MtpConfig) -> tuple[int, int, int]:
    """Rows of logits that an update computes, of the trunk and of the MTP depth, with a small workspace."""
    made_of: list[int] = []
    plain = products.logits

    def counted(hidden: Tensor, weight: Tensor) -> Tensor:
        made_of.append(len(hidden) * len(weight))
        return plain(hidden, weight)

    kernels = KernelsConfig(workspace_bytes=10 * FEW_ROWS)
    with engine(mimo(folder, vocab_size=640), mtp=mtp, kernels=kernels, tokens_per_microbatch=100_000) as trainer:
        trainer.set_optimizer(GENTLE)
        batch = lines(trainer)
        monkeypatch.setattr(products, "logits", counted)
        trainer.update(batch, PolicyObjective(LOSSES[loss], max_tokens=20))
    assert sum(made_of) % 640 == 0
    return sum(made_of) // 640, sum(len(s.loss_mask) for s in batch), sum(s.num_drafted(1) for s in batch)


@pytest.mark.parametrize(("loss", "times"), [("everything", 1), ("gspo", 2)])
def test_logits_are_computed_once_unless_tokens_are_coupled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, loss: str, times: int) -> None:
    """Of rows and columns that the workspace cannot hold: by MTP's loss always once. The acceptance of drafts is measured too,
    of the draft's logits and the trunk's, on a bounded number of tokens."""
    trainer, trunk, drafts = logits_made(tmp_path / "model", monkeypatch, loss, MtpConfig(mode="isolated", clip_grad=0))
    assert trainer == times * trunk + drafts + 2 * min(drafts, MEASURED_TOKENS)


@pytest.mark.parametrize(("loss", "times"), [("everything", 1), ("gspo", 2)])
def test_depth_learns_from_the_logits_of_the_policy_loss(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, loss: str, times: int) -> None:
    """Unless tokens are coupled: then the trunk's logits are computed again for the depth."""
    mtp = MtpConfig(mode="isolated", loss="tv", clip_grad=0)
    trainer, trunk, drafts = logits_made(tmp_path / "model", monkeypatch, loss, mtp)
    assert trainer == times * trunk + times * drafts
