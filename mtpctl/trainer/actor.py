"""One trainer rank: the Ray actor that holds the Megatron engine, trains it, and sends its weights."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from mtpctl.checkpoint.listing import Entry
from mtpctl.cluster.bundles import ActorLocation, current_location
from mtpctl.cluster.process import importing, settle_heap, write_to_run
from mtpctl.errors import RuntimeFailure, SaveFailed, UserError
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.train import Replay
from mtpctl.samples import Logprobs, Sample
from mtpctl.sync.protocol import Manifest, Section
from mtpctl.trainer.sending import WeightSource
from mtpctl.trainer.share import BatchTable, Share

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from mtpctl.checkpoint.sharded import Save
    from mtpctl.trainer.engine import MegatronEngine
if TYPE_CHECKING:
    from torch.autograd.profiler_util import EventList


def threads_in(recipe: Recipe, stage: str, cores: int) -> int:
    """CPU threads of a trainer rank in a stage. `train.threads` leaves cores to the inference engines, which are idle in the SFT stage.

    A deterministic run uses the same number in both stages, since the number of threads can change how a sum is rounded.
    """
    train = recipe.train
    if stage == "rl" or recipe.device != "cpu" or recipe.async_.deterministic:
        return train.threads
    return max(train.threads, cores // train.parallel.world_size)


class Parameters(TypedDict):
    """How many parameters a rank holds, and how many of them train."""

    parameters: int
    trained: int


class TrainerRank(WeightSource):
    """One rank of the trainer: an engine, the updates of both stages, and the source of its weights.

    All ranks are called together, with the same arguments but for their shares of a batch.
    """

    engine: MegatronEngine

    def __init__(self, recipe_json: str, rank: int, world_size: int) -> None:
        write_to_run()
        super().__init__(Recipe.model_validate_json(recipe_json), rank)
        self.world_size = world_size
        self.reference: list[torch.Tensor] | None = None
        self.ahead = False  # whether the weights were updated after the version published last
        self.saving: Save
        self.profile = UpdateProfile(self.recipe.run_path / "logs", rank) if self.recipe.telemetry.profile else None

    def here(self) -> ActorLocation:
        """Where the rank is. It answers once it has ended the calls before."""
        return current_location()

    def address(self) -> str:
        """The address at which the ranks meet: that of a store which this rank hosts from now on."""
        from mtpctl.cluster.rendezvous import address_of, host_store

        self.meeting = host_store()
        return address_of(self.meeting)

    def build(self, folder: str, master: str) -> Parameters:
        """Make the engine from a Hugging Face folder; `master` is the address of rank 0.

        Raises UserError if a user-defined loss or advantage cannot be loaded on this host or fails its check.
        """
        with importing():
            import torch

            from mtpctl.cluster.rendezvous import use_own_interface
            from mtpctl.convert.hf_folder import HfFolder
            from mtpctl.model.parallel import Rank
            from mtpctl.rl.user_objective import check_objective
            from mtpctl.trainer.config import EngineConfig
            from mtpctl.trainer.engine import MegatronEngine

        train = self.recipe.train
        if "rl" in train.stages:
            check_objective(train.rl)
        if train.threads:
            torch.set_num_threads(train.threads)
        config = EngineConfig(
            parallel=train.parallel,
            precision=train.precision,
            mtp=self.recipe.mtp,
            kernels=self.recipe.kernels,
            tokens_per_microbatch=train.tokens_per_microbatch,
            recompute=train.recompute,
            distributed_optimizer=train.distributed_optimizer,
            offload=train.offload,
            lora=train.lora,
            moe=train.moe,
            adapter_seed=self.recipe.seed,
            drafts=self.recipe.rollout.speculation.num_tokens,
        )
        if self.world_size > 1:
            use_own_interface()
        rank = Rank(self.rank, self.world_size, master, deadline_s=self.recipe.cluster.step_deadline_s)
        self.engine = MegatronEngine(HfFolder.open(folder), config, rank)
        settle_heap()
        held, trained = self.engine.parameters
        return {"parameters": held, "trained": trained}

    def begin_stage(self, stage: str, reference: str, resumed: bool) -> None:
        """Start the stage `sft` or `rl` with a fresh optimizer.

        RL with a KL penalty also keeps a copy of the policy it starts from, in memory and at the path `reference`, from which a run that
        is resumed within RL loads it. Raises UserError where the file is missing then.
        """
        train = self.recipe.train
        if train.threads:
            import torch

            torch.set_num_threads(threads_in(self.recipe, stage, len(os.sched_getaffinity(0))))
        self.engine.trains_mtp = self.engine.can_train_mtp and (stage == "sft" or train.rl.train_mtp)
        if stage == "rl" and train.rl.kl_coef:
            if resumed:
                self._restore_reference(Path(reference))
            elif train.keep_checkpoints:
                self.engine.optimizer = None  # the last stage's optimizer does not belong in this checkpoint
                self.engine.save(Path(reference))
        self.engine.set_optimizer(train.sft.optimizer if stage == "sft" else train.rl.optimizer)
        if stage == "rl" and train.rl.kl_coef:
            with self.engine.resident():  # after set_optimizer, which decides what trains
                self.reference = [p.detach().clone() for p in self._trained()]

    def _restore_reference(self, path: Path) -> None:
        if not path.exists():
            raise UserError(
                f"train.rl.kl_coef: {path} is not there, the policy that RL began with; set it to 0, or start in another run_dir"
            )
        self.engine.restore(path)

    def sft_step(self, rows: Sequence[tuple[list[int], list[int], list[int]]]) -> dict[str, float]:
        """One supervised update on rows: token ids of a prompt, those of its target, and the target's mask, 1 where it is trained on."""
        from mtpctl.trainer import batch
        from mtpctl.trainer.objective import NextToken

        sequences = [batch.Sequence(prompt + target, len(prompt), mask) for prompt, target, mask in rows]
        with self._profiled("sft"):
            return self.engine.update(sequences, NextToken(), total_steps=self.recipe.train.sft.steps)

    @property
    def replay(self) -> Replay:
        """`train.moe.replay`, as it is for this model."""
        return self.recipe.replay(self.engine.folder.shape)

    def score(self, samples: list[Sample], version: int) -> None:
        """Write old log-probs under the current weights into samples of this dp rank, and with `train.moe.replay: recompute` the routes of
        the pass. All ranks call together, one without samples too.

        `version`: the version that these weights are.
        """
        from mtpctl.trainer.objective import scoring_sequence

        sequences = [scoring_sequence(s, replay=self.replay == "rollout") for s in samples]
        record = self.replay == "recompute"
        found = self.engine.score(sequences, temperature=self.recipe.rollout.temperature, record=record, own=True)
        for sample, scores in zip(samples, found, strict=True):
            sample.old_logprobs, sample.old_version = scores.logprobs, version
            if record:
                sample.routes = scores.routes

    def rl_step(self, table: BatchTable, share: Share, version: int) -> dict[str, float]:
        """One policy update of `train.rl.minibatches` optimizer steps, on the samples of `table`, of which this rank has its `share`.

        version: the version of the weights before the update. Returns metrics. Raises RuntimeFailure if no response has a token.
        """
        with self._profiled("rl"):
            return self._rl_step(table, share, version)

    def _profiled(self, stage: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.profile is None else self.profile.update(stage)

    def _rl_step(self, table: BatchTable, share: Share, version: int) -> dict[str, float]:
        from torch.profiler import record_function

        from mtpctl.trainer.objective import PolicyObjective, advantages, stand_in, training_sequence

        recipe, rl = self.recipe, self.recipe.train.rl
        began = time.perf_counter()
        assert share.dp_rank == recipe.train.parallel.dp_rank(self.rank), "the share of another rank"
        if not share.minibatches:
            raise RuntimeFailure(
                "rollout.deadline_s: no response of a whole batch has a sampled token; raise it, or lower rollout.max_in_flight"
            )
        samples = share.samples()
        if recipe.old_logprobs == "behaviour":
            for sample in samples:
                sample.old_logprobs = sample.behaviour_logprobs
        unscored = recipe.old_logprobs == "recompute" and table.unscored
        if unscored:
            with record_function("mtpctl/old log-probs"):
                self.score([s for s in samples if s.old_logprobs is None], version)
        scored = time.perf_counter()
        reference = self._reference_logprobs(samples) if self.reference is not None else [None] * len(samples)
        context = recipe.rollout.context or self.engine.folder.shape.max_positions
        gains = advantages(table, rl, max_tokens=recipe.rollout.max_tokens, context=context)
        if rl.teacher is not None and not rl.teacher.rewards:
            gains = [0.0] * len(gains)
        parts = []
        # Without recomputed old log-probs the loss itself compares behaviour and trained policy. It can do so in the first minibatch
        # alone: after it the weights are no published version's.
        weights = None if recipe.old_logprobs == "recompute" else -1 if self.ahead else version
        by_trajectory = rl.aggregate == "sequence"
        for minibatch in share.minibatches:
            batch = [
                training_sequence(
                    samples[i],
                    gains[share.places[i]],
                    reference[i],
                    weights,
                    replay=self.replay != "off",
                    teacher=rl.teacher,
                    trajectory_tokens=int(share.trajectory_tokens[i]) if by_trajectory else None,
                )
                for i in minibatch.members
            ]
            spare = stand_in(reference=self.reference is not None, weights=weights, teacher=rl.teacher, by_trajectory=by_trajectory)
            parts.append(
                self.engine.update(
                    batch or [spare],
                    PolicyObjective(rl, max_tokens=recipe.rollout.max_tokens, trajectories=minibatch.trajectories),
                    temperature=recipe.rollout.temperature,
                    total_steps=rl.steps * rl.minibatches,
                    passes=minibatch.passes,
                )
            )
            weights = None
        metrics = mean_of(parts)
        metrics |= {"timing_s/old_log_prob": scored - began, "timing_s/update": time.perf_counter() - scored}
        if recipe.old_logprobs == "recompute":
            metrics |= self._mismatch(samples, exact=not (unscored and self.ahead))
        self.ahead = True
        metrics["perf/tokens"] = sum(part["perf/tokens"] for part in parts)
        return metrics

    def _trained(self) -> list[torch.nn.Parameter]:
        """The parameters that train, in which policy and reference differ."""
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def _reference_logprobs(self, samples: list[Sample]) -> list[Logprobs]:
        import torch

        from mtpctl.trainer.objective import scoring_sequence

        assert self.reference is not None
        with self.engine.resident(), torch.no_grad():
            parameters = self._trained()
            current = [p.detach().clone() for p in parameters]
            for parameter, value in zip(parameters, self.reference, strict=True):
                parameter.copy_(value)
            scores = self.engine.score([scoring_sequence(s) for s in samples], temperature=self.recipe.rollout.temperature, own=True)
            for parameter, value in zip(parameters, current, strict=True):
                parameter.copy_(value)
        return [s.logprobs for s in scores]

    def _mismatch(self, samples: list[Sample], *, exact: bool) -> dict[str, float]:
        """`rollout_corr/*` over all tokens, and the mean difference over those that the scoring weights themselves sampled.

        `samples` are those of this dp rank. `exact` is False where the scoring weights were never published, so that they sampled no token.
        """
        import numpy as np
        import torch

        from mtpctl.model.parallel import summed
        from mtpctl.rl.corrections import mismatch_metrics, mismatch_sums

        def joined(columns: Sequence[npt.ArrayLike]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *columns], dtype=np.float32))

        old = joined([s.old_logprobs for s in samples if s.old_logprobs is not None])
        behaviour = joined([s.behaviour_logprobs for s in samples])
        mask = joined([s.loss_mask for s in samples])
        seq_ids = torch.from_numpy(np.repeat(np.arange(len(samples)), [len(s.response_ids) for s in samples]))
        sums = mismatch_sums(old, behaviour, mask, seq_ids, len(samples), self.recipe.train.rl.correction)
        same = mask * joined([_sampled_under(s, s.old_version) for s in samples])
        sums |= {"same": same.sum(), "same_abs_diff": ((old - behaviour).abs() * same).sum()}
        found = dict(zip(sums, summed([float(value) for value in sums.values()]), strict=True))
        metrics = mismatch_metrics(found)
        if exact and found["same"]:
            metrics["rollout_corr/abs_diff_same_version"] = found["same_abs_diff"] / found["same"]
        return metrics

    def plan_weights(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest | None:
        self.ahead = False
        return super().plan_weights(version, store, members, checksums, sections)

    def begin_save(self, path: str) -> str:
        """Start writing a checkpoint of the engine. Returns the temporary folder; files put there become part of the checkpoint."""
        self.saving = self.engine.begin_save(Path(path), beside=self.recipe.train.async_save)
        return str(self.saving.folder)

    def finish_save(self, wait: bool, entries: Mapping[str, Entry]) -> bool:
        """Rename the checkpoint to its final name once it is written. Returns whether that is done; without `wait` it may still be running.

        `entries`: sizes and checksums of the files that the controller has added.
        """
        if not wait and not self.saving.written():
            return False
        self.saving.finish(entries)
        return True

    def abandon_save(self) -> None:
        """Leave nothing of the checkpoint that is being written."""
        self.saving.abandon()

    def restore(self, path: str) -> None:
        """Load a checkpoint: the model, and the optimizer's state if a stage has begun."""
        self.engine.restore(Path(path))

    def publish_checkpoint(self, path: str, keep: int, needed: Sequence[str] = ()) -> None:
        """Point `latest` to `path`, and delete older checkpoints except the `keep` newest and those whose names are in `needed`.

        Raises SaveFailed if these cannot be deleted.
        """
        from mtpctl.checkpoint.finding import publish_checkpoint

        if self.rank == 0:
            try:
                publish_checkpoint(Path(path), keep=keep, needed=needed)
            except OSError as error:
                raise SaveFailed(f"checkpoint {path} was written, but older ones could not be deleted: {error.strerror}") from error


def _sampled_under(sample: Sample, version: int | None) -> npt.NDArray[np.bool_]:
    """For each response token, whether weight version `version` sampled it."""
    import numpy as np

    spans = sample.version_spans
    return np.repeat([span.version == version for span in spans], [span.end - span.start for span in spans])


def mean_of(parts: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the parts that have it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(values) / len(values) for name in names if (values := [p[name] for p in parts if name in p])}


# `telemetry.profile`: where one update's time goes, as a trace for a viewer and as two tables to read.
#
# The third update of each stage is profiled on every rank: by then shapes, caches and the allocator have settled. Phases are
# the ranges that the engine and the trainer name themselves (`mtpctl/…`); they nest, so their times do not add up. On a card
# a phase's device time is that of the kernels launched within it, on a CPU both columns are the same clock's.

PROFILED_UPDATE = 3
PREFIX = "mtpctl/"
MOST_OPERATIONS = 20


class UpdateProfile:
    """Counts a rank's updates, stage by stage, and profiles one of each.

    Writes `profile-STAGE-rankN.json.gz` (Chrome trace) and `profile-STAGE-rankN.txt` to `folder`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._seen: dict[str, int] = {}

    @contextmanager
    def update(self, stage: str) -> Iterator[None]:
        """Around one update of `stage`."""
        self._seen[stage] = self._seen.get(stage, 0) + 1
        if self._seen[stage] != PROFILED_UPDATE:
            yield
            return
        import torch

        cuda = torch.cuda.is_available()
        activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if cuda else [])
        with torch.profiler.profile(activities=activities) as profile:
            yield
            if cuda:
                torch.cuda.synchronize()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"profile-{stage}-rank{self.rank}"
        profile.export_chrome_trace(str(self.folder / f"{name}.json.gz"))
        (self.folder / f"{name}.txt").write_text(tables(profile.key_averages(), cuda=cuda))


def tables(averages: EventList, *, cuda: bool) -> str:
    """Two Markdown tables from a profiler's `key_averages()`: phases by time, and the operations with most time of their own. In ms."""
    whole = "device_time_total" if cuda else "cpu_time_total"
    own = "self_device_time_total" if cuda else "self_cpu_time_total"
    phases = sorted((e for e in averages if e.key.startswith(PREFIX)), key=lambda e: -e.cpu_time_total)
    lines = ["| phase | times | host ms | device ms |", "|---|---|---|---|"]
    lines += [
        f"| {e.key.removeprefix(PREFIX)} | {e.count} | {e.cpu_time_total / 1000:.2f} | {getattr(e, whole) / 1000:.2f} |" for e in phases
    ]
    operations = sorted((e for e in averages if not e.key.startswith(PREFIX)), key=lambda e: -getattr(e, own))
    total = sum(getattr(e, own) for e in operations) or 1.0
    lines += ["", f"| operation | times | {'device' if cuda else 'host'} ms of its own | share |", "|---|---|---|---|"]
    lines += [
        f"| {e.key[:90]} | {e.count} | {getattr(e, own) / 1000:.2f} | {getattr(e, own) / total:.1%} |" for e in operations[:MOST_OPERATIONS]
    ]
    return "\n".join(lines) + "\n"
