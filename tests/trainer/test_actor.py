"""A trainer rank: the reference of a KL penalty, checkpoints, policy updates and profiles."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtpctl.checkpoint.finding import newest_checkpoint
from mtpctl.errors import RuntimeFailure, SaveFailed, UserError
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.losses import token_terms
from mtpctl.samples import Sample, logprobs_of, mask_of
from mtpctl.trainer.actor import TrainerRank, threads_for_stage
from mtpctl.trainer.batch import Sequence, pack
from mtpctl.trainer.config import TokenScores
from mtpctl.trainer.objective import PolicyObjective
from mtpctl.trainer.sending import WeightExporter
from mtpctl.trainer.share import distribute
from tests.fakes.checkpoint_folders import write_checkpoint
from tests.fakes.full_disk import full_disk


class Engine:
    """One weight, saved to a file."""

    def __init__(self, value: float) -> None:
        self.module = torch.nn.Linear(1, 1, bias=False)
        self.module.weight.data.fill_(value)
        self.trains_mtp = self.can_train_mtp = True
        self.trunk_frozen = False
        self.optimizer: str | None = "of the supervised stage"

    def resident(self) -> Any:
        return contextlib.nullcontext()

    def save(self, path: Path) -> None:
        assert self.optimizer is None, "a policy has none"
        path.write_text(str(self.module.weight.item()))

    def restore(self, path: Path) -> None:
        self.module.weight.data.fill_(float(path.read_text()))

    def set_trunk_frozen(self, frozen: bool) -> None:
        self.trunk_frozen = frozen

    def set_optimizer(self, config: Any) -> None:
        self.lr = config.lr
        self.module.weight.requires_grad_()
        if self.module.bias is not None:
            self.module.bias.requires_grad_(self.trains_mtp)


def began(value: float, reference: Path, *, resumed: bool = False, keep: int = 2) -> tuple[float, float]:
    """The weights of reference and policy after RL starts on a rank with this weight."""
    recipe = Recipe.model_validate({"train": {"keep_checkpoints": keep, "rl": {"kl_coef": 0.1}}})
    rank = TrainerRank(recipe.model_dump_json(by_alias=True), 0, 1)
    rank.engine = Engine(value)  # type: ignore[assignment]
    rank.begin_stage("rl", str(reference), resumed)
    assert rank.reference is not None
    return rank.reference[0].item(), rank.engine.module.weight.item()


def test_resumed_run_restores_its_initial_reference(tmp_path: Path) -> None:
    assert began(1.0, tmp_path / "reference") == (1.0, 1.0)
    assert began(7.0, tmp_path / "reference", resumed=True)[0] == 1.0


def test_new_run_replaces_the_reference_of_the_previous_one(tmp_path: Path) -> None:
    began(1.0, tmp_path / "reference")
    assert began(2.0, tmp_path / "reference") == (2.0, 2.0)
    assert began(3.0, tmp_path / "reference", resumed=True)[0] == 2.0


def test_reference_is_not_written_without_checkpoints(tmp_path: Path) -> None:
    assert began(1.0, tmp_path / "reference", keep=0) == (1.0, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_run_without_a_reference_cannot_resume_with_a_penalty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.rl\.kl_coef: .*reference, is missing"):
        began(1.0, tmp_path / "reference", resumed=True)


def test_pointer_that_cannot_be_written_does_not_fail_the_save(tmp_path: Path) -> None:
    rank, root = TrainerRank(Recipe().model_dump_json(by_alias=True), 0, 1), tmp_path / "checkpoints"
    rank.publish_checkpoint(str(write_checkpoint(tmp_path, "rl-000002")), 2)
    second = write_checkpoint(tmp_path, "rl-000004")
    with full_disk():
        rank.publish_checkpoint(str(second), 1)
    assert (root / "latest").read_text() == "rl-000002"
    assert newest_checkpoint(root) == second and not (root / "rl-000002").exists()


def test_old_checkpoints_that_cannot_be_deleted_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    rank = TrainerRank(Recipe().model_dump_json(by_alias=True), 0, 1)
    write_checkpoint(tmp_path, "rl-000002")
    monkeypatch.setattr("mtpctl.checkpoint.finding.shutil.rmtree", fail)
    with pytest.raises(
        SaveFailed,
        match="rl-000004 was written, but `latest` was not updated, or older checkpoints were not deleted: Device or resource busy",
    ):
        rank.publish_checkpoint(str(write_checkpoint(tmp_path, "rl-000004")), 1)


@pytest.mark.parametrize("train_mtp", [True, False])
def test_reference_has_the_parameters_that_rl_trains(tmp_path: Path, train_mtp: bool) -> None:
    """They may be fewer than those of the previous stage."""
    recipe = Recipe.model_validate({"train": {"keep_checkpoints": 0, "rl": {"kl_coef": 0.1, "train_mtp": train_mtp}}})
    rank = TrainerRank(recipe.model_dump_json(by_alias=True), 0, 1)
    rank.engine = Engine(1.0)  # type: ignore[assignment]
    rank.engine.module = torch.nn.Linear(1, 1)  # its bias stands for the MTP layers
    rank.begin_stage("rl", str(tmp_path / "reference"), False)
    assert rank.reference is not None
    assert [p.shape for p in rank.reference] == [p.shape for p in rank._trained_parameters()]


@pytest.mark.parametrize("stages", [["sft", "rl"], ["rl", "sft"]])
def test_stages_train_mtp_independently_of_their_order(stages: list[str]) -> None:
    recipe = Recipe.model_validate({"train": {"rl": {"train_mtp": False}}})
    rank = TrainerRank(recipe.model_dump_json(by_alias=True), 0, 1)
    rank.engine = Engine(1.0)  # type: ignore[assignment]
    trained = {}
    for stage in stages:
        rank.begin_stage(stage, "", False)
        trained[stage] = rank.engine.trains_mtp
    assert trained == {"sft": True, "rl": False}


def test_stage_draft_trains_the_mtp_layers_alone() -> None:
    recipe = Recipe.model_validate({"train": {"draft": {"optimizer": {"lr": 0.5}}, "rl": {"train_mtp": False, "optimizer": {"lr": 0.25}}}})
    rank = TrainerRank(recipe.model_dump_json(by_alias=True), 0, 1)
    rank.engine = Engine(1.0)  # type: ignore[assignment]
    stages = []
    for stage in ("draft", "rl"):
        rank.begin_stage(stage, "", False)
        stages.append((rank.engine.trunk_frozen, rank.engine.trains_mtp, rank.engine.lr))  # type: ignore[attr-defined]
    assert stages == [(True, True, 0.5), (False, False, 0.25)]


class Recorder(Engine):
    """Records its training batches, and gives every token the same score."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.folder = SimpleNamespace(shape=SimpleNamespace(max_positions=64, moe=None))
        self.batches: list[list[Sequence]] = []
        self.denominators: list[float] = []
        self.corrections: list[str] = []

    def update(self, sequences: list[Sequence], objective: Any, **options: Any) -> dict[str, float]:
        self.batches.append(sequences)
        self.corrections.append(objective.config.correction.mode)
        self.denominators.append(objective.denominator(tokens=sum(s.num_trained for s in sequences), sequences=len(sequences)))
        return {"skipped": 0.0, "perf/tokens": 1.0}

    def peak_memory(self) -> dict[str, float]:
        return {"perf/memory_reserved_gib": float(len(self.batches))}

    def score(self, sequences: list[Sequence], **options: Any) -> list[TokenScores]:
        return [TokenScores(logprobs_of([-1.5] * s.num_trained), logprobs_of([1.0] * s.num_trained)) for s in sequences]


def recorder(**rl: Any) -> tuple[TrainerRank, Recorder]:
    recipe = Recipe.model_validate({"train": {"rl": {"steps": 1, "group_size": 2, "advantage": "grpo_no_std", **rl}}})
    rank, engine = TrainerRank(recipe.model_dump_json(by_alias=True), 0, 1), Recorder()
    rank.engine = engine  # type: ignore[assignment]
    return rank, engine


def step(rank: TrainerRank, samples: list[Sample], version: int) -> dict[str, float]:
    """One update of a run with one rank."""
    table, (share,) = distribute(samples, minibatches=rank.recipe.train.rl.minibatches, tokens_per_microbatch=4096, dp=1)
    return rank.rl_step(table, share(), version)


def batch(*lengths: int) -> list[Sample]:
    """Groups of two responses of these lengths; the second of each is correct."""
    created = []
    for i, length in enumerate(lengths):
        sample = Sample(f"p{i // 2}", str(i // 2), [1, 2], index=i % 2, reward=float(i % 2))
        sample.append([3] * length, [-1.0] * length, 1)
        created.append(sample)
    return created


def test_policy_is_restored_if_scoring_the_reference_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, engine = recorder(kl_coef=0.1)
    rank.reference = [torch.full((1, 1), 2.0)]

    def fail(*_: Any, **__: Any) -> None:
        assert engine.module.weight.item() == 2
        raise MemoryError

    monkeypatch.setattr(engine, "score", fail)
    with pytest.raises(MemoryError):
        rank._reference_logprobs([])
    assert engine.module.weight.item() == 1


def test_peak_memory_is_that_after_the_last_minibatch() -> None:
    rank, _ = recorder(minibatches=2)
    assert step(rank, batch(2, 2, 1, 3), 1)["perf/memory_reserved_gib"] == 2


def test_empty_response_counts_in_its_group_and_is_not_trained_on() -> None:
    rank, engine = recorder(minibatches=2)
    step(rank, batch(2, 0, 1, 3), 1)
    assert [[s.columns["advantage"].tolist() for s in part] for part in engine.batches] == [[[-0.5, -0.5]], [[-0.5], [0.5] * 3]]
    with pytest.raises(RuntimeFailure, match=r"rollout\.deadline_s: no response of the batch has a sampled token"):
        step(rank, batch(0, 0), 1)


def test_minibatches_include_every_sample_of_unequal_groups() -> None:
    """As after resuming with another `group_size` than that of the groups in the checkpoint."""
    rank, engine = recorder(minibatches=2)
    step(rank, batch(1, 1, 1, 1, 1), 1)
    assert [len(part) for part in engine.batches] == [4, 1]


def test_reinforce_pp_normalizes_over_all_minibatches() -> None:
    """Weighted by trained tokens: 3 with reward 0 and 6 with reward 1; two more are from an environment."""
    result = []
    for minibatches in (1, 2):
        rank, engine = recorder(minibatches=minibatches, advantage="reinforce_pp", dynamic_sampling=False)
        samples = batch(2, 4, 1, 2)
        samples[1].append([5, 5], [0.0, 0.0], 1, trained=False)
        step(rank, samples, 1)
        result.append([s.columns["advantage"][0] for part in engine.batches for s in part])
    mean, std = 6 / 9, (6 / 9 * 3 / 9) ** 0.5
    assert result[0] == result[1] == pytest.approx([-mean / std, (1 - mean) / std] * 2, abs=1e-4)


def test_constant_aggregation_divides_by_the_maximum_response_length() -> None:
    rank, engine = recorder(aggregate="constant", minibatches=2)
    step(rank, batch(2, 4, 1, 2), 1)
    assert engine.denominators == [2 * rank.recipe.rollout.max_tokens] * 2


@pytest.mark.parametrize(("aggregate", "constant"), [("sequence", 1), ("constant", 16)])
def test_empty_and_masked_trajectories_count(aggregate: str, constant: int) -> None:
    """Dr. GRPO divides by the number of responses of a group, including empty and fully masked ones."""
    rank, engine = recorder(aggregate=aggregate)
    rank.recipe = rank.recipe.model_copy(update={"rollout": rank.recipe.rollout.model_copy(update={"max_tokens": 16})})
    samples = batch(2, 0, 3, 1)
    samples[2].loss_mask = mask_of([0, 0, 0])
    step(rank, samples, 1)
    assert [len(part) for part in engine.batches] == [3] and engine.denominators == [4 * constant]


@pytest.mark.parametrize("aggregate", ["sequence", "constant", "token"])
def test_forked_trajectory_has_the_weight_of_an_unforked_one(aggregate: str) -> None:
    """Two trajectories of 12 tokens, the second in three samples: their gradient weights have the same sum."""
    rank, engine = recorder(aggregate=aggregate, advantage="grpo_no_std")
    whole, *parts = batch(12, 2, 3, 7)
    for part in parts:
        part.prompt_id, part.group_id, part.index, part.reward = whole.prompt_id, whole.group_id, 1, 1.0
    step(rank, [whole, *parts], 1)
    weights = []
    for sequence in engine.batches[0]:
        micro = pack([sequence], [0], 0, "cpu")
        objective = PolicyObjective(rank.recipe.rl, max_tokens=rank.recipe.rollout.max_tokens)
        terms = token_terms(objective._inputs(micro, micro.columns["old"], None), rank.recipe.rl)
        weights.append(terms.aggregation.sum().item())
    assert weights[0] == pytest.approx(sum(weights[1:]))
    tokens = {"sequence": 2.0, "constant": 2.0 * rank.recipe.rollout.max_tokens, "token": 24.0}
    assert engine.denominators == [tokens[aggregate]]


@pytest.mark.parametrize("context", [6, None])
def test_response_truncated_by_the_context_gets_the_overlong_penalty(context: int | None) -> None:
    """The context of the recipe or the model may be reached before `rollout.max_tokens`."""
    rank, engine = recorder(overlong={"enabled": True, "buffer": 2, "penalty": 0.5})
    rank.recipe = rank.recipe.model_copy(update={"rollout": rank.recipe.rollout.model_copy(update={"context": context})})
    engine.folder.shape.max_positions = 6 if context is None else 64
    step(rank, batch(2, 4), 1)
    assert [s.columns["advantage"][0] for s in engine.batches[0]] == [-0.25, 0.25]


def test_same_version_mismatch_is_logged_only_if_the_scoring_weights_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two syncs the weights are updated, and the difference is not only numerical."""
    rank, _ = recorder(old_logprobs="recompute")
    monkeypatch.setattr(WeightExporter, "plan_weights", lambda *_: None)
    name = "rollout_corr/abs_diff_same_version"
    assert step(rank, batch(2, 2), 1)[name] == 0.5
    assert name not in step(rank, batch(2, 2), 1)
    rank.plan_weights(2, "", [], False, ("target",))
    assert step(rank, batch(2, 2), 1)[name] == 0.5


def test_tokens_with_a_stale_cache_are_not_in_the_same_version_mismatch() -> None:
    """The recorder's old log-probs are -1.5, the engine's -1 and -3."""
    rank, _ = recorder(old_logprobs="recompute")
    samples = batch(2, 2)
    samples[0].append([4, 4], [-3.0, -3.0], samples[0].version_spans[-1].version, stale_kv=True)
    metrics = step(rank, samples, 1)
    assert metrics["rollout_corr/abs_diff_same_version"] == 0.5
    assert metrics["rollout_corr/abs_diff_stale_kv"] == 1.5
    assert metrics["rollout_corr/stale_kv_fraction"] == pytest.approx(2 / 6)


@pytest.mark.parametrize(("quantization", "mode", "weight"), [("fp8", "truncate", 2.0), ("none", "off", math.exp(1.5))])
def test_samples_of_quantized_engines_are_corrected_by_default(quantization: str, mode: str, weight: float) -> None:
    """The recorder's old log-probs are -1.5, the engine's -3."""
    rank, engine = recorder(old_logprobs="recompute")
    rank.recipe = rank.recipe.model_copy(update={"rollout": rank.recipe.rollout.model_copy(update={"quantization": quantization})})
    samples = batch(0, 0)
    for sample in samples:
        sample.append([3, 3], [-3.0, -3.0], 1)
    assert step(rank, samples, 1)["rollout_corr/is_mean"] == pytest.approx(weight)
    assert engine.corrections == [mode]


def test_update_without_recomputed_logprobs_compares_policies_in_its_first_minibatch() -> None:
    """Tokens of the trained version are marked while the trainer has the weights of that version."""
    rank, engine = recorder(minibatches=2, old_logprobs="behaviour")
    samples = batch(2, 2, 2, 2)
    samples[0].append([4], [-1.0], 2)
    samples[1].append([4], [-1.0], 2, stale_kv=True)
    step(rank, samples, 2)
    assert [s.columns["stale_kv"].tolist() for s in engine.batches[0]] == [[0, 0, 0], [0, 0, 1]]
    assert [s.columns["same_weights"].tolist() if "same_weights" in s.columns else None for part in engine.batches for s in part] == [
        [0, 0, 1],
        [0, 0, 1],
        None,
        None,
    ]
    assert all(s.columns["old"].tolist() == s.columns["behaviour"].tolist() for part in engine.batches for s in part)
    engine.batches.clear()
    step(rank, batch(2, 2), 2)
    assert [s.columns["same_weights"].tolist() for s in engine.batches[0]] == [[0, 0], [0, 0]], "it is ahead of version 2 now"


@pytest.mark.parametrize(
    ("sets", "stage", "threads"),
    [
        ([], "sft", 8),
        ([], "rl", 1),
        (["async.deterministic=true"], "sft", 1),
        (["train.parallel.dp=2"], "sft", 4),
        (["train.parallel.dp=16"], "sft", 1),
        (["cluster.device=cuda", "sync.transport=ipc"], "sft", 1),
    ],
)
def test_sft_stage_uses_the_cores_of_idle_engines(sets: list[str], stage: str, threads: int) -> None:
    assert threads_for_stage(load_recipe("tiny_mtp", sets=sets).recipe, stage, cores=8) == threads


def test_samples_that_the_server_scored_are_compared_between_two_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer scores the other samples with weights that were never published. The recorder's old log-probs are -1.5."""
    rank, _ = recorder(old_logprobs="recompute")
    monkeypatch.setattr(WeightExporter, "plan_weights", lambda *_: None)
    step(rank, batch(2, 2), 1)
    samples = batch(2, 2)
    samples[0].old_logprobs, samples[0].old_version = logprobs_of([-1.25, -1.25]), 1
    assert step(rank, samples, 1)["rollout_corr/abs_diff_same_version"] == 0.25
