"""A resumed run equals one that was never stopped, and damaged or foreign checkpoints are rejected."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import threading

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import FileSystemReader

from mtpctl.checkpoint.finding import list_checkpoints, newest_checkpoint, prepare_resume, publish_checkpoint
from mtpctl.checkpoint.listing import entry_of, entry_of_text, files_in, read_listing
from mtpctl.errors import SaveFailed, UserError
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.trainer.objective import NextToken
from tests.fakes.checkpoint_folders import flip
from tests.fakes.forked import exit_code
from tests.fakes.full_disk import full_disk
from tests.fakes.tiny import engine, mimo, sequences

ADAM = OptimizerConfig(lr=1e-2, warmup_steps=6, clip_grad=0.5)


def steps(trainer, count):
    return [
        tuple(trainer.update(sequences(), NextToken(), total_steps=20)[k] for k in ("sft/loss", "mtp/loss_1", "actor/lr"))
        for _ in range(count)
    ]


def test_resumed_run_repeats_the_next_five_steps_bit_for_bit(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder) as trainer:
        trainer.set_optimizer(ADAM)
        steps(trainer, 3)
        trainer.save(tmp_path / "checkpoint", {"stage": "sft", "step": 3})
        expected = steps(trainer, 5)
    with engine(folder) as trainer:
        trainer.set_optimizer(ADAM)
        assert trainer.restore(tmp_path / "checkpoint") == {"stage": "sft", "step": 3}
        assert steps(trainer, 5) == expected


def test_checkpoint_before_the_first_step_is_restored(tmp_path):
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.set_optimizer(ADAM)
        trainer.save(tmp_path / "checkpoint")
        expected = steps(trainer, 2)
        trainer.set_optimizer(ADAM)
        trainer.restore(tmp_path / "checkpoint")
        assert steps(trainer, 2) == expected


def test_restore_without_an_optimizer_loads_only_weights(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder) as trainer:
        trainer.set_optimizer(ADAM)
        steps(trainer, 1)
        trainer.save(tmp_path / "checkpoint")
        expected = dict(trainer.export())
    with engine(folder, train=False) as trainer:
        trainer.restore(tmp_path / "checkpoint")
        assert all(torch.equal(value, expected[name]) for name, value in trainer.export())


def test_restored_optimizer_keeps_the_new_hyperparameters(tmp_path):
    """A checkpoint of SFT can be restored with RL's optimizer: moments are kept, learning rates are RL's."""
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.set_optimizer(ADAM)
        steps(trainer, 1)
        trainer.save(tmp_path / "checkpoint")
        trainer.set_optimizer(OptimizerConfig(lr=1e-4, mtp_lr=1e-5))
        trainer.restore(tmp_path / "checkpoint")
        assert steps(trainer, 1)[0][2] == 1e-4
        assert {group["lr"] for group in trainer.optimizer.inner.param_groups} == {1e-4, 1e-5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intermediate_size": 64}, r"decoder.layers.mlp.linear_fc1.weight: saved with shape \(2, 96, 32\), expected \(2, 128, 32\)"),
        (
            {"num_hidden_layers": 3},
            r"decoder.layers.self_attention.linear_proj.weight: saved with shape \(2, 32, 32\), expected \(3, 32, 32\)",
        ),
        ({"num_nextn_predict_layers": 2}, r"mtp.layers.1.enorm.weight: not saved"),
    ],
)
def test_checkpoint_of_another_model_is_rejected_before_anything_is_overwritten(tmp_path, fields, message):
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.save(tmp_path / "checkpoint")
    with engine(mimo(tmp_path / "other", **fields)) as trainer:
        before = {name: value.clone() for name, value in trainer.export()}
        with pytest.raises(UserError, match=message):
            trainer.restore(tmp_path / "checkpoint")
        assert all(torch.equal(value, before[name]) for name, value in trainer.export())


def test_checkpoint_with_mtp_is_rejected_by_a_model_without(tmp_path):
    folder = mimo(tmp_path / "model")
    with engine(folder) as trainer:
        trainer.save(tmp_path / "checkpoint")
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer, pytest.raises(UserError, match=r"mtp.layers.0.*saved, but not in the model"):
        trainer.restore(tmp_path / "checkpoint")


def test_missing_optimizer_state_is_reported_as_such(tmp_path):
    """A run that trains MTP layers cannot resume one with frozen layers; the reverse works."""
    folder = mimo(tmp_path / "hf")
    with engine(folder) as trainer:
        for trained in (False, True):
            trainer.trains_mtp = trained
            trainer.set_optimizer(ADAM)
            trainer.save(tmp_path / f"trained-{trained}")
        lacks = r"trained-False: its optimizer lacks 22 tensor\(s\) .* such as exp_avg\.mtp\..* use the saved run's train"
        with pytest.raises(UserError, match=lacks):
            trainer.restore(tmp_path / "trained-False")
        trainer.trains_mtp = False
        trainer.set_optimizer(ADAM)
        trainer.restore(tmp_path / "trained-True")


def test_checkpoint_without_an_optimizer_is_rejected_if_one_is_set(tmp_path):
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.save(tmp_path / "checkpoint")
        trainer.set_optimizer(ADAM)
        with pytest.raises(UserError, match="without an optimizer"):
            trainer.restore(tmp_path / "checkpoint")


def test_failed_save_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.save(tmp_path / "checkpoint", {"step": 1})
        with monkeypatch.context() as patch, pytest.raises(SaveFailed, match="rank 0: OSError: disk full"):
            patch.setattr(json, "dumps", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            trainer.save(tmp_path / "checkpoint", {"step": 2})
        assert trainer.restore(tmp_path / "checkpoint") == {"step": 1}
        trainer.save(tmp_path / "checkpoint", {"step": 3})
        assert trainer.restore(tmp_path / "checkpoint") == {"step": 3}
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_abandoned_save_leaves_nothing_and_the_next_one_succeeds(tmp_path):
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.set_optimizer(ADAM)
        trainer.save(tmp_path / "checkpoint", {"step": 1})
        trainer.begin_save(tmp_path / "checkpoint", {"step": 2}).abandon()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "model"]
        steps(trainer, 1)
        trainer.save(tmp_path / "next", {"step": 3})
        expected = steps(trainer, 2)
        assert trainer.restore(tmp_path / "checkpoint") == {"step": 1}
        assert trainer.restore(tmp_path / "next") == {"step": 3}
        assert steps(trainer, 2) == expected


@pytest.mark.parametrize("most", [0, 100_000])
def test_save_succeeds_after_one_on_a_full_disk(tmp_path, most):
    """Whether the disk is full at once, or after a part is written."""
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.set_optimizer(ADAM)
        steps(trainer, 1)
        with full_disk(most), pytest.raises(SaveFailed, match=r"a was not written: .*File too large"):
            trainer.save(tmp_path / "a", {"step": 1})
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
        trainer.save(tmp_path / "b", {"step": 2})
        expected = steps(trainer, 2)
        assert trainer.restore(tmp_path / "b") == {"step": 2}
        assert steps(trainer, 2) == expected


def test_kill_during_replacement_keeps_a_complete_checkpoint(tmp_path, monkeypatch):
    """As when a stop saves again at the step of the last checkpoint."""

    class Killed(BaseException):
        pass

    def take_away(path, **_):
        if path.exists():
            (path / "engine.json").unlink()
            raise Killed

    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.save(tmp_path / "checkpoint", {"step": 1})
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(shutil, "rmtree", take_away)
            trainer.save(tmp_path / "checkpoint", {"step": 2})
        assert trainer.restore(tmp_path / "checkpoint") == {"step": 2}
        publish_checkpoint(tmp_path / "checkpoint", keep=1)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "latest", "model"]


class TestCheckpointPublishing:
    """The newest complete checkpoint is found from its contents, and publishing deletes only older ones."""

    @staticmethod
    def save(trainer, root, name, keep=None):
        trainer.save(root / name)
        state = {"stage": "rl", "step": int(name.partition("-")[2]), "ended": []}
        (root / name / "run.json").write_text(json.dumps(state))
        if keep is not None:
            publish_checkpoint(root / name, keep=keep)

    def test_publishing_keeps_the_newest_and_damaged_checkpoints(self, tmp_path):
        root = tmp_path / "checkpoints"
        assert newest_checkpoint(root) is None
        with engine(mimo(tmp_path / "model")) as trainer:
            for name in ("sft-1", "sft-2", "rl-1", "rl-2"):
                self.save(trainer, root, name, keep=2)
                (root / "rl-0.partial").mkdir(exist_ok=True)
                assert newest_checkpoint(root) == root / name
            flip(root / "rl-2" / "__0_0.distcp")
            assert prepare_resume(root).path == root / "rl-1"
            self.save(trainer, root, "rl-2", keep=1)
        assert sorted(p.name for p in root.iterdir()) == ["latest", "rl-0.partial", "rl-2", "rl-2.damaged"]

    def test_publishing_an_older_checkpoint_keeps_newer_ones(self, tmp_path):
        root = tmp_path / "checkpoints"
        with engine(mimo(tmp_path / "model")) as trainer:
            for name in ("rl-1", "rl-2", "rl-3"):
                self.save(trainer, root, name)
        publish_checkpoint(root / "rl-2", keep=1)
        assert [path.name for path in list_checkpoints(root)] == ["rl-3", "rl-2"]

    def test_newest_checkpoint_may_be_unpublished(self, tmp_path):
        """A run that is killed between saving and publishing loses nothing."""
        root = tmp_path / "checkpoints"
        with engine(mimo(tmp_path / "model")) as trainer:
            self.save(trainer, root, "rl-1", keep=2)
            self.save(trainer, root, "rl-2")
        assert newest_checkpoint(root) == root / "rl-2"


class TestCheckpointChecksums:
    """Each file of a checkpoint is listed with its size and checksum, which the writing thread computes."""

    @pytest.mark.parametrize("concurrent", [False, True])
    def test_checksums_match_the_files(self, tmp_path, concurrent):
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.set_optimizer(ADAM)
            saving = trainer.begin_save(tmp_path / "a", {"step": 1}, concurrent=concurrent)
            (saving.folder / "run.json").write_text("{}")
            saving.finish({"run.json": entry_of_text("{}")})
            trainer.save(tmp_path / "b")
        for number, path in enumerate((tmp_path / "a", tmp_path / "b"), 1):
            files = {file.relative_to(path).as_posix(): entry_of(file) for file in files_in(path)}
            assert read_listing(path).files == files and {"__0_0.distcp", ".metadata", "metadata.json", "engine.json"} <= set(files)
            assert read_listing(path).number == json.loads((path / "engine.json").read_text())["number"] == number

    def test_shards_are_not_read_back(self, tmp_path, monkeypatch):
        read = []
        monkeypatch.setattr("mtpctl.checkpoint.listing.entry_of", lambda file: read.append(file.name) or entry_of(file))
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.save(tmp_path / "a")
        assert sorted(read) == [".metadata", "engine.json", "metadata.json"]

    def test_save_after_one_that_failed_has_its_own_checksums(self, tmp_path):
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.set_optimizer(ADAM)
            with full_disk(100_000), pytest.raises(SaveFailed):
                trainer.save(tmp_path / "a")
            steps(trainer, 1)
            trainer.save(tmp_path / "a")
        path = tmp_path / "a"
        assert read_listing(path).files == {file.name: entry_of(file) for file in files_in(path)}


class TestUnreadableCheckpoint:
    """An unreadable checkpoint is reported in one line, and no code in it is run."""

    @pytest.fixture
    def saved(self, tmp_path):
        with engine(mimo(tmp_path / "model")) as trainer:
            trainer.save(tmp_path / "saved")
            yield trainer, tmp_path / "saved"

    @pytest.mark.parametrize(
        "damage",
        [
            lambda path: os.truncate(path / "__0_0.distcp", 5000),
            lambda path: (path / "__0_0.distcp").unlink(),
            lambda path: os.truncate(path / ".metadata", 300),
            lambda path: (path / ".metadata").unlink(),
            lambda path: (path / "engine.json").write_text("{"),
            lambda path: (path / "engine.json").unlink(),
            lambda path: (path / "metadata.json").write_text(""),
        ],
    )
    def test_damaged_checkpoint_gives_a_one_line_error(self, saved, damage):
        trainer, path = saved
        damage(path)
        with pytest.raises(UserError, match=r"^/.*saved.*cannot be read \(.*\); if it is damaged, name another checkpoint$") as lines:
            trainer.restore(path)
        assert "\n" not in str(lines.value) and "dict_keys" not in str(lines.value)

    def test_metadata_with_code_is_rejected(self, saved, tmp_path):
        trainer, path = saved

        class Attack:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/executed",)

        (path / ".metadata").write_bytes(pickle.dumps(Attack()))
        with pytest.raises(UserError, match=r"\.metadata: contains posix\.system, which no checkpoint needs"):
            trainer.restore(path)
        assert not (tmp_path / "executed").exists()

    def test_shard_objects_with_code_are_rejected(self, saved, tmp_path):
        trainer, path = saved

        class Attack:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/executed",)

        buffer = io.BytesIO()
        torch.save([Attack()], buffer)
        metadata = FileSystemReader(path).read_metadata()
        for index, stored in metadata.storage_data.items():
            if index.fqn.startswith("common_state"):
                (path / "other.distcp").write_bytes(buffer.getvalue())
                stored.relative_path, stored.offset, stored.length = "other.distcp", 0, len(buffer.getvalue())
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(UserError, match="cannot be read"):
            trainer.restore(path)
        assert not (tmp_path / "executed").exists()


class TestConcurrentSave:
    """A checkpoint that is written while training continues."""

    def test_has_the_state_at_its_start(self, tmp_path):
        folder = mimo(tmp_path / "model")
        with engine(folder) as trainer:
            trainer.set_optimizer(ADAM)
            steps(trainer, 2)
            saving = trainer.begin_save(tmp_path / "checkpoint", {"step": 2}, concurrent=True)
            expected = steps(trainer, 5)
            saving.finish()
            trainer.set_optimizer(ADAM)
            assert trainer.restore(tmp_path / "checkpoint") == {"step": 2}
            assert steps(trainer, 5) == expected

    def test_does_not_exist_until_it_is_complete(self, tmp_path, monkeypatch):
        go = threading.Event()
        write = FileSystemWriterAsync.write_preloaded_data_multithread
        monkeypatch.setattr(
            FileSystemWriterAsync, "write_preloaded_data_multithread", staticmethod(lambda *args: go.wait() and write(*args))
        )
        with engine(mimo(tmp_path / "model")) as trainer:
            saving = trainer.begin_save(tmp_path / "checkpoint", concurrent=True)
            assert not saving.is_written()
            assert not (tmp_path / "checkpoint").exists()
            go.set()
            saving.finish()
            assert trainer.restore(tmp_path / "checkpoint") == {}

    def test_failure_is_raised_by_finish(self, tmp_path, monkeypatch):
        @staticmethod
        def fail(*_):
            raise OSError("disk full")

        with engine(mimo(tmp_path / "model")) as trainer:
            with monkeypatch.context() as patch:
                patch.setattr(FileSystemWriterAsync, "write_preloaded_data_multithread", fail)
                saving = trainer.begin_save(tmp_path / "checkpoint", concurrent=True)
                with pytest.raises(SaveFailed, match="checkpoint was not written: rank 0: OSError: disk full"):
                    saving.finish()
            assert [p.name for p in tmp_path.iterdir()] == ["model"], "the room of what was written is free again"
            trainer.save(tmp_path / "checkpoint", {"step": 1})
            assert trainer.restore(tmp_path / "checkpoint") == {"step": 1}

    def test_killed_writer_keeps_the_last_checkpoint(self, tmp_path):
        """The process dies in the middle of the second checkpoint's shard."""
        folder, root = mimo(tmp_path / "model"), tmp_path / "checkpoints"
        assert exit_code(lambda: die_while_writing(folder, root), 120) == -signal.SIGKILL
        assert any((root / "second.partial").iterdir())
        assert newest_checkpoint(root) == root / "first"
        with engine(folder) as trainer:
            assert trainer.restore(root / "first") == {"step": 1}
            trainer.save(root / "second", {"step": 2})
            assert trainer.restore(root / "second") == {"step": 2}
        assert sorted(p.name for p in root.iterdir()) == ["first", "latest", "second"]


def die_while_writing(folder, root):
    with engine(folder) as trainer:
        trainer.save(root / "first", {"step": 1})
        publish_checkpoint(root / "first", keep=2)
        filesystem_async.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        trainer.begin_save(root / "second", {"step": 2}, concurrent=True).finish()
