"""Losses and gradients of an update match a plain reference for all packings, modes and depths."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.compat import cpu_device
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import UserError
from mtpctl.families.tensors import aliases, section_of
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.train import LoraConfig, MoeConfig, OffloadConfig
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.objective import DraftsOnly, NextToken
from tests.fakes import mimo_reference
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences
from tests.fakes.toys import GLM4_MOE, LLAMA_DFLASH, LLAMA_EAGLE3, MIMO, QWEN3_MOE_EAGLE3, TOYS, toy_folder
from tests.fakes.updates import Nothing, reference, sampled


def test_bitwise_trainer_checks_its_gpu_before_it_is_built(tmp_path, monkeypatch):
    folder = mimo(tmp_path / "model")
    cpu_device.install()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with (
        pytest.raises(UserError, match=r"numerics: bitwise needs a GPU of compute capability 9\.0 \(Hopper\), got NVIDIA A100"),
        engine(folder, numerics="bitwise", precision="bf16"),
    ):
        pass


def test_exact_sums_match_the_reference(tmp_path):
    """Products read factors of 21 bits and more, relative to the largest of their row, and add up to 128 of them in two layers."""
    folder, batch = mimo(tmp_path / "model"), sequences()
    losses, expected = reference(folder, batch, depths=1, isolated=True, loss_scale=0.3)
    with engine(
        folder, mtp=MtpConfig(mode="isolated", loss_scale=0.3, clip_grad=0), tokens_per_microbatch=40, numerics="bitwise"
    ) as trainer:
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update(batch, NextToken())
        result = gradients(trainer)
    assert [metrics["sft/loss"], metrics["mtp/loss_1"]] == pytest.approx(losses, rel=2e-6)
    assert_close(result, expected, 2e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depths", [1, 2, 3])
@pytest.mark.parametrize("mode", ["joint", "isolated"])
def test_losses_and_gradients_match_the_reference(tmp_path, mode, depths, tied):
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=depths, tie_word_embeddings=tied)
    batch = sequences()
    losses, expected = reference(folder, batch, depths=depths, isolated=mode == "isolated", loss_scale=0.3)
    with engine(folder, mtp=MtpConfig(mode=mode, loss_scale=0.3, clip_grad=0), tokens_per_microbatch=40) as trainer:
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update(batch, NextToken())
        result = gradients(trainer)
    assert [metrics["sft/loss"], *(metrics[f"mtp/loss_{k}"] for k in range(1, depths + 1))] == pytest.approx(losses, rel=1e-6)
    assert_close(result, expected, 1e-5)
    draft, target = (sum(float(g.norm()) ** 2 for n, g in expected.items() if ("mtp" in n) is is_mtp) ** 0.5 for is_mtp in (True, False))
    assert (metrics["mtp/grad_norm"], metrics["actor/grad_norm"]) == pytest.approx((draft, target), rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depths", [1, 2, 3])
def test_isolated_loss_has_gradients_on_mtp_only(tmp_path, depths, tied):
    """Other gradients are exactly 0, and every MTP parameter has a gradient."""
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=depths, tie_word_embeddings=tied)
    with engine(folder, mtp=MtpConfig(mode="isolated", clip_grad=0)) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.update(sequences(), Nothing())
        for name, grad in gradients(trainer).items():
            assert bool(grad.any()) is ("mtp" in name), name


@pytest.mark.parametrize("sharded", [False, True])
def test_gradient_spike_of_the_drafter_does_not_clip_the_policy(tmp_path, sharded):
    """Both norms exceed their clips, and the trunk's weights are bit-equal."""
    folder, result = mimo(tmp_path / "model"), []
    for scale in (1.0, 1e4):
        with engine(folder, mtp=MtpConfig(mode="isolated", loss_scale=scale, clip_grad=0.1), distributed_optimizer=sharded) as trainer:
            trainer.set_optimizer(GENTLE.model_copy(update={"clip_grad": 0.1}))
            metrics = [trainer.update(sequences(), NextToken()) for _ in range(2)]
            result.append({name: value.clone() for name, value in trainer.export()})
            assert all(each["actor/grad_norm"] > 0.1 and each["mtp/grad_norm"] > 0.1 for each in metrics)
    assert all(value.equal(result[0][name]) for name, value in result[1].items() if "mtp" not in name)


@pytest.mark.parametrize(
    "fields",
    [{}, {"offload": OffloadConfig(optimizer=True)}, {"distributed_optimizer": True}, {"lora": LoraConfig(rank=4, alpha=8.0)}],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_every_mtp_tensor_is_trained_before_and_after_a_resume(tmp_path, fields):
    """And no other tensor, if the policy loss has no gradient."""
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    fields = fields | {"mtp": MtpConfig(mode="isolated", clip_grad=0)}

    def moved(trainer, before):
        for _ in range(2):
            trainer.update(sequences(), Nothing())
        after = {name: value.clone() for name, value in trainer.export()}
        assert {name for name, value in after.items() if not value.equal(before[name])} == {name for name in after if "mtp" in name}
        return after

    with engine(folder, **fields) as trainer:
        trainer.set_optimizer(GENTLE)
        trained = moved(trainer, load_file(folder.path / "model.safetensors"))
        trainer.save(tmp_path / "checkpoint")
    with engine(folder, **fields) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.restore(tmp_path / "checkpoint")
        moved(trainer, trained)


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "tv"])
def test_number_of_microbatches_does_not_scale_the_drafter_loss(tmp_path, loss):
    folder, result = mimo(tmp_path / "model", num_nextn_predict_layers=3), []
    for budget in (1, 40, 4096):
        with engine(folder, mtp=MtpConfig(mode="joint", loss=loss, clip_grad=0), tokens_per_microbatch=budget) as trainer:
            trainer.set_optimizer(GENTLE)
            metrics = trainer.update(sequences(9, seed=3), NextToken())
            result.append(([metrics[f"mtp/loss_{depth}"] for depth in (1, 2, 3)], gradients(trainer)))
    for losses, grads in result[:2]:
        assert losses == pytest.approx(result[2][0], rel=1e-5)
        assert_close(grads, result[2][1], 1e-5)


def test_gradients_pass_through_the_chain_of_depths(tmp_path):
    """The second depth's loss has a gradient on the first depth's layer."""
    folder, name = mimo(tmp_path / "model", num_nextn_predict_layers=2), "model.mtp_layers.0.input_proj.weight"
    batch = [Sequence([3, 5, 7], 1, [0, 0]), Sequence([2, 4, 6, 8], 1, [1, 1, 1])]
    with engine(folder, mtp=MtpConfig(mode="isolated", clip_grad=0)) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.update(batch, Nothing())
        both = gradients(trainer)[name]
    _, expected = reference(folder, batch, depths=2, isolated=True, loss_scale=0.1)
    _, alone = reference(folder, batch, depths=1, isolated=True, loss_scale=0.05)
    assert_close({"first": both}, {"first": expected[name]}, 1e-5)
    assert float((both - alone[name]).norm()) > 0.01 * float(both.norm())


@pytest.mark.parametrize("mode", ["off", "load"])
def test_mtp_is_frozen_in_modes_that_do_not_train_it(tmp_path, mode):
    """The trunk trains; MTP weights are exported unchanged if they are loaded."""
    folder = mimo(tmp_path / "model")
    batch = sequences()
    with engine(folder, mtp=MtpConfig(mode="joint", loss_scale=0.0)) as trainer:
        trainer.set_optimizer(GENTLE)
        expected = [trainer.update(batch, NextToken())["sft/loss"] for _ in range(3)]
    with engine(folder, mtp=MtpConfig(mode=mode)) as trainer:
        trainer.set_optimizer(GENTLE.model_copy(update={"weight_decay": 0.1}))
        metrics = [trainer.update(batch, NextToken()) for _ in range(3)]
        exported = {name: value.clone() for name, value in trainer.export()}
    assert metrics[0]["sft/loss"] == expected[0]
    assert not [name for name in metrics[0] if name.startswith("mtp/")]
    weights = load_file(folder.path / "model.safetensors")
    draft = {name for name in weights if "mtp" in name}
    assert {name for name in exported if "mtp" in name} == (draft if mode == "load" else set())
    assert all(torch.equal(exported[name], weights[name]) is ("mtp" in name) for name in exported)


@pytest.mark.parametrize("sharded", [False, True])
def test_mtp_trained_in_one_stage_is_frozen_in_the_next(tmp_path, sharded):
    """As in SFT and RL with `train_mtp: false`: MTP weights are unchanged after the second stage."""
    with engine(mimo(tmp_path / "model"), distributed_optimizer=sharded) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.update(sequences(), NextToken())
        before = {name: value.clone() for name, value in trainer.export()}
        trainer.trains_mtp = False
        trainer.set_optimizer(GENTLE.model_copy(update={"weight_decay": 0.1, "mtp_lr": 1e-2}))
        metrics = trainer.update(sequences(), NextToken())
        assert not [name for name in metrics if name.startswith("mtp/")]
        assert all(torch.equal(value, before[name]) is ("mtp" in name) for name, value in trainer.export())


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "tv"])
def test_drafter_loss_has_no_gradient_on_the_trunk_distribution(tmp_path, loss):
    """An isolated head that learns the trunk's distribution has no gradient on it, and approaches it."""
    folder = mimo(tmp_path / "model")
    with engine(folder, mtp=MtpConfig(mode="isolated", loss=loss, clip_grad=0)) as trainer:
        trainer.set_optimizer(GENTLE.model_copy(update={"lr": 1e-9, "mtp_lr": 1e-2}))
        steps = [trainer.update(sequences(), NextToken(), total_steps=50) for _ in range(10)]
        result = gradients(trainer)
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        trainer.set_optimizer(GENTLE.model_copy(update={"lr": 1e-9}))
        trainer.update(sequences(), NextToken())
        alone = gradients(trainer)
    assert_close({name: result[name] for name in alone}, alone, 1e-4)
    assert steps[-1]["mtp/loss_1"] < steps[0]["mtp/loss_1"]
    assert steps[-1]["mtp/expected_accept_1"] > steps[0]["mtp/expected_accept_1"]
    if loss == "tv":
        assert steps[0]["mtp/loss_1"] == pytest.approx(1 - steps[0]["mtp/expected_accept_1"], abs=1e-6)


@pytest.mark.parametrize("mtp_lr", [None, 1e-2])
def test_weight_decay_applies_to_matrices_only(tmp_path, mtp_lr):
    """Without a loss only weight decay acts, with each group's learning rate, and not on norms and biases."""
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.set_optimizer(GENTLE.model_copy(update={"weight_decay": 0.1, "mtp_lr": mtp_lr}))
        before = {name: value.clone() for name, value in trainer.export()}
        trainer.update([Sequence([3, 5, 7], 1, [0, 0])], NextToken())
        for name, value in trainer.export():
            rate = mtp_lr if mtp_lr and "mtp" in name else GENTLE.lr
            retained = 1 - 0.1 * rate if value.dim() > 1 else 1.0
            torch.testing.assert_close(value, retained * before[name], rtol=1e-6, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_loss_and_gradients_do_not_depend_on_microbatches(tmp_path):
    """Sequences alone, partly packed and all packed: gradients agree within 1e-6."""
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    batch = sequences(9, seed=3)
    _, exact = reference(folder, batch, depths=2, isolated=False, loss_scale=0.1)
    expected = torch.cat([exact[name].flatten() for name in sorted(exact)])
    losses = []
    for budget in (1, 40, 100_000):
        with engine(folder, mtp=MtpConfig(mode="joint", clip_grad=0), tokens_per_microbatch=budget) as trainer:
            trainer.set_optimizer(GENTLE)
            metrics = trainer.update(batch, NextToken())
            losses.append([metrics[name] for name in ("sft/loss", "mtp/loss_1", "mtp/loss_2", "mtp/accept_1")])
            grads = gradients(trainer)
        result = torch.cat([grads[name].flatten() for name in sorted(grads)])
        assert (result - expected).norm() <= 1e-6 * expected.norm()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) == losses[2]


def test_acceptance_counts_greedy_hits(tmp_path):
    """Computed by hand: how often the MTP head's most likely token is the sampled one."""
    folder = mimo(tmp_path / "model")
    batch = sequences(60)
    weights = load_file(folder.path / "model.safetensors")
    hits = total = 0
    for sequence in batch:
        (draft,) = mimo_reference.forward(weights, folder.config, sequence.token_ids, 1)[1]
        for position in range(sequence.prompt_length - 1, len(sequence.token_ids) - 2):
            if sampled(sequence, position + 1, position + 3):
                total += 1
                hits += int(draft[position].argmax()) == sequence.token_ids[position + 2]
    assert hits
    with engine(folder) as trainer:
        trainer.set_optimizer(GENTLE)
        assert trainer.update(batch, NextToken())["mtp/accept_1"] == pytest.approx(hits / total, rel=1e-6)


@pytest.mark.parametrize("mode", ["joint", "isolated"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradients(tmp_path, recompute, mode):
    """Including MTP layers; the input of an isolated one has no gradient."""
    folder = mimo(tmp_path / "model", num_nextn_predict_layers=2)
    result = []
    for how in ("none", recompute):
        with engine(folder, mtp=MtpConfig(mode=mode, clip_grad=0), recompute=how) as trainer:
            trainer.set_optimizer(GENTLE)
            loss = trainer.update(sequences(), NextToken())["mtp/loss_2"]
            result.append((loss, gradients(trainer)))
    assert result[0][0] == result[1][0]
    assert_close(result[1][1], result[0][1], 1e-6)


@pytest.mark.parametrize("mode", ["joint", "isolated"])
def test_recomputed_depths_pass_on_the_state_before_the_norm(tmp_path, mode):
    """In GLM-4.5, the state that the last depth passes on is not in the loss."""
    folder = HfFolder.open(toy_folder(TOYS["glm4-moe"], tmp_path / "model", 0, "fp32"))
    result = []
    for recompute in ("none", "full"):
        with engine(folder, mtp=MtpConfig(mode=mode, repeat=2, clip_grad=0), recompute=recompute) as trainer:
            trainer.set_optimizer(GENTLE)
            loss = trainer.update(sequences(), NextToken())["mtp/loss_2"]
            result.append((loss, gradients(trainer)))
    assert result[0][0] == result[1][0]
    assert_close(result[1][1], result[0][1], 1e-6)


def test_bf16_follows_its_fp32_masters(tmp_path):
    """Steps below bf16 precision accumulate in the masters."""
    folder = mimo(tmp_path / "model")
    with engine(folder, precision="bf16") as trainer:
        trainer.set_optimizer(GENTLE.model_copy(update={"lr": 1e-4}))
        before = {name: value.clone() for name, value in trainer.module.named_parameters()}
        losses = [trainer.update(sequences(), NextToken())["sft/loss"] for _ in range(60)]
        moved = [name for name, value in trainer.module.named_parameters() if not torch.equal(value, before[name])]
    assert all(value.dtype == torch.bfloat16 for value in before.values())
    assert len(moved) == len(before)
    assert losses[-1] < losses[0]


FROZEN_TRUNK = {
    "dflash": LLAMA_DFLASH,
    "eagle3": LLAMA_EAGLE3,
    "eagle3 on experts": QWEN3_MOE_EAGLE3,
    "mtp": MIMO,
    "mtp with experts": GLM4_MOE,
}


@pytest.mark.parametrize("model", FROZEN_TRUNK)
def test_stage_draft_trains_the_drafter_and_leaves_the_trunk_bit_identical(tmp_path, model):
    """Router biases too. Without `freeze_trunk`, the trunk trains again."""
    folder = HfFolder.open(toy_folder(FROZEN_TRUNK[model], tmp_path / "model", 0, "fp32"))
    batch = sequences(5, vocab=256)
    moe = MoeConfig(aux_loss=0.1, bias_update=0.01) if model == "mtp with experts" else None
    with engine(folder, mtp=MtpConfig(loss="soft_ce", repeat=2, clip_grad=0), moe=moe or MoeConfig()) as trainer:

        def moved(objective):
            before = {name: value.clone() for name, value in trainer.export()}
            for _ in range(2):
                assert not trainer.update(batch, objective)["skipped"]
            return {name for name, value in trainer.export() if not torch.equal(value, before[name])}

        of_drafter = {name for name, _ in trainer.export() if section_of(name, folder.shape) == "draft"} - aliases(folder.shape).keys()
        routed = {name for name in of_drafter if ".mlp.experts." in name or "gate." in name}
        trainer.set_trunk_frozen(True)
        trainer.set_optimizer(GENTLE)
        first = moved(DraftsOnly())
        assert of_drafter - routed <= first <= of_drafter
        assert len(trainer.optimizer.inner.get_parameters()) == sum(
            name.startswith("mtp.") for name, _ in trainer.module.named_parameters()
        )
        trainer.set_trunk_frozen(False)
        trainer.set_optimizer(GENTLE)
        assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *first} <= moved(NextToken())


@pytest.mark.parametrize("fields", [{}, {"distributed_optimizer": True}], ids=["whole optimizer", "distributed optimizer"])
@pytest.mark.parametrize("model", ["eagle3", "mtp"])
def test_engine_that_trains_only_the_drafter_matches_one_with_a_frozen_trunk(tmp_path, model, fields):
    """It has gradient buffers for the drafter alone, and never trains the trunk."""
    folder = HfFolder.open(toy_folder(FROZEN_TRUNK[model], tmp_path / "model", 0, "fp32"))
    batch, mtp = sequences(5, vocab=256), MtpConfig(loss="soft_ce", repeat=2, clip_grad=0)

    def trained(**fields):
        with engine(folder, mtp=mtp, **fields) as trainer:
            for frozen in (True, False) if "only_drafter" in fields else (True,):
                trainer.set_trunk_frozen(frozen)
                trainer.set_optimizer(GENTLE)
            buffered = {name for name, p in trainer.module.named_parameters() if getattr(p, "main_grad", None) is not None}
            metrics = [trainer.update(batch, DraftsOnly()) for _ in range(2)]
            weights = {name: value.clone() for name, value in trainer.export()}
        return buffered, [{name: value for name, value in each.items() if "timing" not in name} for each in metrics], weights

    (_, expected_metrics, expected), (buffered, metrics, weights) = trained(), trained(only_drafter=True, **fields)
    assert buffered and all(name.startswith("mtp.") for name in buffered)
    for each, right in zip(metrics, expected_metrics, strict=True):
        assert each == pytest.approx(right, rel=1e-5, abs=1e-6)
    assert_close(weights, expected, 1e-6)
    trunk = [name for name in expected if section_of(name, folder.shape) == "target"]
    assert all(torch.equal(weights[name], expected[name]) for name in trunk)
