"""A run that stops and goes on does not differ from one that never stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from mtpctl.checkpoint.sharded import latest_checkpoint, publish_checkpoint
from mtpctl.errors import SaveFailed, UserError
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.optimizer import OptimizerConfig
from mtpctl.recipe.train import OffloadConfig
from mtpctl.trainer.objective import NextToken
from mtpctl.trainer.optimizer_state import group_of
from tests.full_disk import full_disk
from tests.trainer.tiny import engine, mimo, sequences

ADAM = OptimizerConfig(lr=1e-2, warmup_steps=6, clip_grad=0.5)


def steps(made, count):
    return [
        tuple(made.update(sequences(), NextToken(), total_steps=20)[k] for k in ("sft/loss", "mtp/loss_1", "actor/lr"))
        for _ in range(count)
    ]


def test_resumed_run_repeats_the_next_five_steps_to_the_bit(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder) as made:
        made.set_optimizer(ADAM)
        steps(made, 3)
        made.save(tmp_path / "checkpoint", {"stage": "sft", "step": 3})
        expected = steps(made, 5)
    with engine(folder) as made:
        made.set_optimizer(ADAM)
        assert made.restore(tmp_path / "checkpoint") == {"stage": "sft", "step": 3}
        assert steps(made, 5) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"distributed_optimizer": True}, {"offload": OffloadConfig(optimizer=True)}])
def test_resume_is_to_the_bit_after_the_mtp_layers_were_frozen_for_some_steps(tmp_path, fields, precision):
    """Adam's bias correction is that of the steps that each group of parameters has taken: 5 of the trunk, 2 of the MTP layers."""
    folder, fields = mimo(tmp_path / "model"), fields | {"precision": precision}
    trains = [True, True, False, False, False]

    def adam_steps(made):
        found = {}
        for part in made.optimizer._parts():
            for parameter, state in part.optimizer.state.items():
                found.setdefault(group_of(parameter), set()).add(int(state["step"]))
        return found

    def weights(made):
        made.update(sequences(), NextToken(), total_steps=20)
        return {name: value.clone() for name, value in made.export()}

    with engine(folder, **fields) as made:
        made.set_optimizer(ADAM)
        for trained in trains:
            made.update(sequences(), NextToken(), total_steps=20, train_mtp=trained)
        assert adam_steps(made) == {"trunk": {5}, "mtp": {2}}
        made.save(tmp_path / "checkpoint")
        expected = weights(made)
    with engine(folder, **fields) as made:
        made.set_optimizer(ADAM)
        made.restore(tmp_path / "checkpoint")
        assert adam_steps(made) == {"trunk": {5}, "mtp": {2}}
        assert (made.optimizer.steps, made.optimizer.group_steps) == (5, {"trunk": 5, "mtp": 2})
        found = weights(made)
    assert all(value.equal(expected[name]) for name, value in found.items())


def test_a_checkpoint_without_steps_of_groups_has_those_of_all(tmp_path):
    """As earlier releases wrote them."""
    with engine(mimo(tmp_path / "model")) as made:
        made.set_optimizer(ADAM)
        steps(made, 2)
        made.save(tmp_path / "checkpoint")
        file = tmp_path / "checkpoint" / "engine.json"
        record = json.loads(file.read_text())
        assert record.pop("group_steps") == {"trunk": 6, "mtp": 6}
        file.write_text(json.dumps(record))
        expected = steps(made, 2)
        made.set_optimizer(ADAM)
        made.restore(tmp_path / "checkpoint")
        assert steps(made, 2) == expected


def test_saved_before_the_first_step(tmp_path):
    with engine(mimo(tmp_path / "model")) as made:
        made.set_optimizer(ADAM)
        made.save(tmp_path / "checkpoint")
        expected = steps(made, 2)
        made.set_optimizer(ADAM)
        made.restore(tmp_path / "checkpoint")
        assert steps(made, 2) == expected


def test_restore_without_an_optimizer_takes_the_weights_alone(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder) as made:
        made.set_optimizer(ADAM)
        steps(made, 1)
        made.save(tmp_path / "checkpoint")
        expected = dict(made.export())
    with engine(folder, train=False) as made:
        made.restore(tmp_path / "checkpoint")
        assert all(torch.equal(value, expected[name]) for name, value in made.export())


def test_hyperparameters_are_those_of_the_new_optimizer(tmp_path):
    """What SFT saved may be taken up with the optimizer of RL: moments go on, rates are RL's."""
    with engine(mimo(tmp_path / "model")) as made:
        made.set_optimizer(ADAM)
        steps(made, 1)
        made.save(tmp_path / "checkpoint")
        made.set_optimizer(OptimizerConfig(lr=1e-4, mtp_lr=1e-5))
        made.restore(tmp_path / "checkpoint")
        assert steps(made, 1)[0][2] == 1e-4
        assert {group["lr"] for group in made.optimizer.inner.param_groups} == {1e-4, 1e-5}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"intermediate_size": 64}, r"decoder.layers.mlp.linear_fc1.weight: \(2, 96, 32\) saved, \(2, 128, 32\) wanted"),
        ({"num_hidden_layers": 3}, r"decoder.layers.self_attention.linear_proj.weight: \(2, 32, 32\) saved, \(3, 32, 32\) wanted"),
        ({"num_nextn_predict_layers": 2}, r"mtp.layers.1.enorm.weight: not saved"),
    ],
)
def test_checkpoint_of_another_model_is_refused_and_nothing_is_overwritten(tmp_path, fields, said):
    with engine(mimo(tmp_path / "model")) as made:
        made.save(tmp_path / "checkpoint")
    with engine(mimo(tmp_path / "other", **fields)) as made:
        before = {name: value.clone() for name, value in made.export()}
        with pytest.raises(UserError, match=said):
            made.restore(tmp_path / "checkpoint")
        assert all(torch.equal(value, before[name]) for name, value in made.export())


def test_checkpoint_with_mtp_does_not_fit_a_model_without(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder) as made:
        made.save(tmp_path / "checkpoint")
    with engine(folder, mtp=MtpConfig(mode="off")) as made, pytest.raises(UserError, match=r"mtp.layers.0.*saved, not wanted"):
        made.restore(tmp_path / "checkpoint")


def test_optimizer_that_stepped_with_less_is_told_as_that_and_not_as_another_model(tmp_path):
    """A run whose MTP layers stood still, taken up by one that trains them; the other way round nothing is missing."""
    folder = mimo(tmp_path / "hf")
    with engine(folder) as made:
        for trained in (False, True):
            made.trains_mtp = trained
            made.set_optimizer(ADAM)
            made.save(tmp_path / f"trained-{trained}")
        with pytest.raises(
            UserError, match=r"trained-False: its optimizer does not remember exp_avg\.mtp\..* train what it trained \(train"
        ):
            made.restore(tmp_path / "trained-False")
        made.trains_mtp = False
        made.set_optimizer(ADAM)
        made.restore(tmp_path / "trained-True")


def test_optimizer_asked_of_a_checkpoint_without(tmp_path):
    with engine(mimo(tmp_path / "model")) as made:
        made.save(tmp_path / "checkpoint")
        made.set_optimizer(ADAM)
        with pytest.raises(UserError, match="without an optimizer"):
            made.restore(tmp_path / "checkpoint")


def test_torn_save_leaves_the_last_checkpoint_as_it_was(tmp_path, monkeypatch):
    with engine(mimo(tmp_path / "model")) as made:
        made.save(tmp_path / "checkpoint", {"step": 1})
        with monkeypatch.context() as patch, pytest.raises(SaveFailed, match="rank 0: OSError: disk full"):
            patch.setattr(json, "dumps", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            made.save(tmp_path / "checkpoint", {"step": 2})
        assert made.restore(tmp_path / "checkpoint") == {"step": 1}
        made.save(tmp_path / "checkpoint", {"step": 3})
        assert made.restore(tmp_path / "checkpoint") == {"step": 3}
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_a_save_that_is_given_up_leaves_nothing_and_the_next_one_is_whole(tmp_path):
    with engine(mimo(tmp_path / "model")) as made:
        made.set_optimizer(ADAM)
        made.save(tmp_path / "checkpoint", {"step": 1})
        made.begin_save(tmp_path / "checkpoint", {"step": 2}).abandon()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "model"]
        steps(made, 1)
        made.save(tmp_path / "next", {"step": 3})
        expected = steps(made, 2)
        assert made.restore(tmp_path / "checkpoint") == {"step": 1}
        assert made.restore(tmp_path / "next") == {"step": 3}
        assert steps(made, 2) == expected


@pytest.mark.parametrize("most", [0, 100_000])
def test_a_full_disk_fails_a_save_and_not_the_next_one(tmp_path, most):
    """Whether it has no room at all, or is full after some of it is written."""
    with engine(mimo(tmp_path / "model")) as made:
        made.set_optimizer(ADAM)
        steps(made, 1)
        with full_disk(most), pytest.raises(SaveFailed, match=r"a was not written: .*File too large"):
            made.save(tmp_path / "a", {"step": 1})
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
        made.save(tmp_path / "b", {"step": 2})
        expected = steps(made, 2)
        assert made.restore(tmp_path / "b") == {"step": 2}
        assert steps(made, 2) == expected


def test_kill_while_the_one_before_is_taken_away_leaves_a_whole_one(tmp_path, monkeypatch):
    """As a stop saves once more at the step that was just saved."""

    class Killed(BaseException):
        pass

    def take_away(path, **_):
        if path.exists():
            (path / "engine.json").unlink()
            raise Killed

    with engine(mimo(tmp_path / "model")) as made:
        made.save(tmp_path / "checkpoint", {"step": 1})
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(shutil, "rmtree", take_away)
            made.save(tmp_path / "checkpoint", {"step": 2})
        assert made.restore(tmp_path / "checkpoint") == {"step": 2}
        publish_checkpoint(tmp_path / "checkpoint", keep=1)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "latest", "model"]


class TestLatest:
    """`latest` names the newest whole checkpoint."""

    @pytest.fixture
    def whole(self, tmp_path):
        with engine(mimo(tmp_path / "model")) as made:
            made.save(tmp_path / "whole")
        return tmp_path / "whole"

    def test_none_before_the_first(self, tmp_path):
        assert latest_checkpoint(tmp_path / "checkpoints") is None

    def test_moves_when_published_and_keeps_the_newest(self, tmp_path, whole):
        root = tmp_path / "checkpoints"
        for name in ("sft-1", "sft-2", "rl-1"):
            shutil.copytree(whole, root / name, copy_function=shutil.copy)
            if name == "sft-2":
                (root / "rl-0.partial").mkdir()
            publish_checkpoint(root / name, keep=2)
            assert latest_checkpoint(root) == root / name
        assert sorted(p.name for p in root.iterdir()) == ["latest", "rl-0.partial", "rl-1", "sft-2"]

    def test_unpublished_one_is_not_taken(self, tmp_path, whole):
        root = tmp_path / "checkpoints"
        shutil.copytree(whole, root / "a")
        publish_checkpoint(root / "a", keep=2)
        shutil.copytree(whole, root / "b")
        assert latest_checkpoint(root) == root / "a"

    def test_lost_folder_is_told(self, tmp_path, whole):
        root = tmp_path / "checkpoints"
        shutil.copytree(whole, root / "a")
        publish_checkpoint(root / "a", keep=2)
        (root / "a" / "metadata.json").unlink()
        with pytest.raises(UserError, match="a is not a whole checkpoint"):
            latest_checkpoint(root)
        shutil.rmtree(root / "a")
        with pytest.raises(UserError, match="a is not a whole checkpoint"):
            latest_checkpoint(root)


class TestWrittenBeside:
    """A checkpoint that is written while training goes on."""

    def test_holds_the_moment_it_was_begun(self, tmp_path):
        folder = mimo(tmp_path / "model")
        with engine(folder) as made:
            made.set_optimizer(ADAM)
            steps(made, 2)
            saving = made.begin_save(tmp_path / "checkpoint", {"step": 2}, beside=True)
            expected = steps(made, 5)
            saving.finish()
            made.set_optimizer(ADAM)
            assert made.restore(tmp_path / "checkpoint") == {"step": 2}
            assert steps(made, 5) == expected

    def test_is_not_there_before_it_is_whole(self, tmp_path, monkeypatch):
        go = threading.Event()
        write = FileSystemWriterAsync.write_preloaded_data_multithread
        monkeypatch.setattr(
            FileSystemWriterAsync, "write_preloaded_data_multithread", staticmethod(lambda *args: go.wait() and write(*args))
        )
        with engine(mimo(tmp_path / "model")) as made:
            saving = made.begin_save(tmp_path / "checkpoint", beside=True)
            assert not saving.written()
            assert not (tmp_path / "checkpoint").exists()
            go.set()
            saving.finish()
            assert made.restore(tmp_path / "checkpoint") == {}

    def test_failure_is_told_when_it_is_finished(self, tmp_path, monkeypatch):
        @staticmethod
        def fail(*_):
            raise OSError("disk full")

        with engine(mimo(tmp_path / "model")) as made:
            with monkeypatch.context() as patch:
                patch.setattr(FileSystemWriterAsync, "write_preloaded_data_multithread", fail)
                saving = made.begin_save(tmp_path / "checkpoint", beside=True)
                with pytest.raises(SaveFailed, match="checkpoint was not written: rank 0: OSError: disk full"):
                    saving.finish()
            assert [p.name for p in tmp_path.iterdir()] == ["model"], "the room of what was written is free again"
            made.save(tmp_path / "checkpoint", {"step": 1})
            assert made.restore(tmp_path / "checkpoint") == {"step": 1}

    def test_killed_writer_leaves_the_last_one(self, tmp_path):
        """The process dies in the middle of the second checkpoint's shard."""
        spawn = multiprocessing.get_context("spawn")
        folder, root = mimo(tmp_path / "model"), tmp_path / "checkpoints"
        child = spawn.Process(target=die_while_writing, args=(folder, root))
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
        assert any((root / "second.partial").iterdir())
        assert latest_checkpoint(root) == root / "first"
        with engine(folder) as made:
            assert made.restore(root / "first") == {"step": 1}
            made.save(root / "second", {"step": 2})
            assert made.restore(root / "second") == {"step": 2}
        assert sorted(p.name for p in root.iterdir()) == ["first", "latest", "second"]


def die_while_writing(folder, root):
    with engine(folder) as made:
        made.save(root / "first", {"step": 1})
        publish_checkpoint(root / "first", keep=2)
        filesystem_async.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        made.begin_save(root / "second", {"step": 2}, beside=True).finish()
