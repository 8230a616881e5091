"""One trainer rank: the Ray actor that owns the Megatron engine, runs its updates, and sends its weights."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

from mtpctl.checkpoint.listing import Entry
from mtpctl.cluster.bundles import ActorLocation, get_current_location
from mtpctl.cluster.process import freeze_heap, gc_paused_for_imports, redirect_output
from mtpctl.errors import RuntimeFailure, SaveFailed, UserError
from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Manifest, Section
from mtpctl.trainer.sending import WeightExporter
from mtpctl.trainer.share import BatchTable, Minibatch, Share

if TYPE_CHECKING:
    import torch

    from mtpctl.checkpoint.sharded import Save
    from mtpctl.trainer import batch
    from mtpctl.trainer.engine import MegatronEngine
    from mtpctl.trainer.profile import UpdateProfile


def threads_for_stage(recipe: Recipe, stage: str, cores: int) -> int:
    """CPU threads of a trainer rank in a stage. `train.threads` leaves cores to the inference engines, which are idle during the
    updates of the draft and SFT stages.

    A deterministic run uses the same number in all stages, since the number of threads can change how a sum is rounded.
    """
    train = recipe.train
    if stage == "rl" or recipe.device != "cpu" or recipe.async_.deterministic:
        return train.threads
    return max(train.threads, cores // train.parallel.world_size)


class Parameters(TypedDict):
    """Number of parameters on a rank: all, and those that are trained."""

    parameters: int
    trained: int


class TrainerRank(WeightExporter):
    """One rank of the trainer: an engine, the updates of all stages, and the export of its weights.

    Every method except `address` is called on all ranks, with the same arguments except for their shares of a batch.
    """

    engine: MegatronEngine

    def __init__(self, recipe_json: str, rank: int, world_size: int) -> None:
        redirect_output()
        super().__init__(Recipe.model_validate_json(recipe_json), rank)
        self.world_size = world_size
        self.reference: list[torch.Tensor] | None = None
        self.has_unpublished_update = False  # Whether the weights were updated since the last published version.
        self.pending_save: Save
        self.profile: UpdateProfile | None = None
        if self.recipe.telemetry.profile:
            from mtpctl.trainer.profile import UpdateProfile

            self.profile = UpdateProfile(self.recipe.run_path / "logs", rank)

    def location(self) -> ActorLocation:
        """Return the host and devices of this rank. Actor calls are ordered, so this also waits for the preceding calls."""
        return get_current_location()

    def address(self) -> str:
        """Start the rendezvous store and return its address."""
        from mtpctl.cluster.rendezvous import address_of, host_store

        self.rendezvous_store = host_store()
        return address_of(self.rendezvous_store)

    def build(self, folder: str, master: str) -> Parameters:
        """Build the engine from a Hugging Face folder; `master` is the address of rank 0.

        Raises UserError if a user-defined loss or advantage cannot be loaded on this host or fails its check.
        """
        with gc_paused_for_imports():
            import torch

            from mtpctl.cluster.rendezvous import use_own_interface
            from mtpctl.convert.hf_folder import HfFolder
            from mtpctl.model.parallel import Rank
            from mtpctl.rl.user_objective import check_objective
            from mtpctl.trainer.config import EngineConfig
            from mtpctl.trainer.engine import MegatronEngine

        train = self.recipe.train
        if "rl" in train.stages:
            check_objective(self.recipe.rl)
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
            drafts=self.recipe.rollout.speculation.model_tokens,
            greedy_drafts=self.recipe.rollout.speculation.draft_method == "greedy",
            only_drafter=train.stages == ["draft"],
            numerics=self.recipe.numerics,
        )
        if self.world_size > 1:
            use_own_interface()
        rank = Rank(self.rank, self.world_size, master, deadline_s=self.recipe.cluster.step_deadline_s)
        self.engine = MegatronEngine(HfFolder.open(folder), config, rank)
        freeze_heap()
        parameters, trained = self.engine.parameter_counts
        return {"parameters": parameters, "trained": trained}

    def begin_stage(self, stage: str, reference: str, resumed: bool) -> None:
        """Start the stage `draft`, `sft` or `rl` with a new optimizer.

        RL with a KL penalty also stores a copy of the initial policy in memory and, if the run keeps checkpoints, at the path `reference`.
        A run that is resumed within RL loads the copy from there; raises UserError if it is missing.
        """
        train = self.recipe.train
        if train.threads:
            import torch

            torch.set_num_threads(threads_for_stage(self.recipe, stage, len(os.sched_getaffinity(0))))
        self.engine.trains_mtp = self.engine.can_train_mtp and (stage != "rl" or train.rl.train_mtp)
        self.engine.set_trunk_frozen(stage == "draft")
        penalized = stage == "rl" and bool(train.rl.kl_coef)
        if penalized and resumed:
            self._restore_reference(Path(reference))
        elif penalized and train.keep_checkpoints:
            self.engine.optimizer = None  # that of the previous stage, which would be saved too
            self.engine.save(Path(reference))
        self.engine.set_optimizer({"draft": train.draft.optimizer, "sft": train.sft.optimizer, "rl": train.rl.optimizer}[stage])
        if penalized:
            with self.engine.resident():  # After set_optimizer, which decides which parameters train.
                self.reference = [p.detach().clone() for p in self._trained_parameters()]

    def _restore_reference(self, path: Path) -> None:
        if not path.exists():
            raise UserError(
                f"train.rl.kl_coef: the initial policy of RL, {path}, is missing; set kl_coef to 0, or start in another run_dir"
            )
        self.engine.restore(path)

    def sft_step(self, rows: Sequence[tuple[list[int], list[int], list[int]]]) -> dict[str, float]:
        """Run one supervised update. A row has the token ids of a prompt and its target, and the target's mask: 1 for trained tokens."""
        from mtpctl.trainer import batch
        from mtpctl.trainer.objective import NextToken

        sequences = [batch.Sequence(prompt + target, len(prompt), mask) for prompt, target, mask in rows]
        with self._profiled("sft"):
            return self.engine.update(sequences, NextToken(), total_steps=self.recipe.train.sft.steps) | self.engine.peak_memory()

    def draft_step(self, rows: Sequence[tuple[list[int], list[int], list[int]]]) -> dict[str, float]:
        """Run one update of the MTP layers alone. `rows`: as in `sft_step`; the responses were sampled at `rollout.temperature`."""
        from mtpctl.trainer import batch
        from mtpctl.trainer.objective import DraftsOnly

        sequences = [batch.Sequence(prompt + target, len(prompt), mask) for prompt, target, mask in rows]
        with self._profiled("draft"):
            metrics = self.engine.update(
                sequences, DraftsOnly(), temperature=self.recipe.rollout.temperature, total_steps=self.recipe.train.draft.steps
            )
            return metrics | self.engine.peak_memory()

    def rl_step(self, table: BatchTable, share: Share, version: int) -> dict[str, float]:
        """Run one policy update of `train.rl.minibatches` optimizer steps on the samples of `table`; `share` is this rank's part of them.

        version: the version of the weights before the update. Returns metrics. Raises RuntimeFailure if no response has a token.
        """
        with self._profiled("rl"):
            return self._rl_step(table, share, version)

    def _profiled(self, stage: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.profile is None else self.profile.update(stage)

    def _rl_step(self, table: BatchTable, share: Share, version: int) -> dict[str, float]:
        from torch.profiler import record_function

        from mtpctl.trainer.objective import PolicyObjective, estimate_advantages

        recipe, rl = self.recipe, self.recipe.rl
        start = time.perf_counter()
        assert share.dp_rank == recipe.train.parallel.dp_rank(self.rank), "the share of another rank"
        if not share.minibatches:
            fix = "raise the deadline, or lower rollout.max_in_flight"
            if recipe.rollout.uses_agents or recipe.rollout.environment != "single":
                fix += "; if the agent or environment failed before the first answer, its error is in the log"
            raise RuntimeFailure(f"rollout.deadline_s: no response of the batch has a sampled token; {fix}")
        sequences, versions, stale_kv = share.sequences(), share.versions(), share.stale_kv()
        old_versions = share.old_versions.copy()
        replay = recipe.replay(self.engine.folder.shape)
        if recipe.old_logprobs == "behaviour":
            for sequence in sequences:
                sequence.columns["old"] = sequence.columns["behaviour"]
        recompute = recipe.old_logprobs == "recompute"
        if recompute and table.has_unscored:
            with record_function("mtpctl/old log-probs"):
                self._add_old_logprobs([s for s in sequences if "old" not in s.columns], replay)
            # -1: no token was sampled with these weights.
            old_versions[~share.scored] = -1 if self.has_unpublished_update else version
        scored_at = time.perf_counter()
        reference = self._reference_logprobs(sequences) if self.reference is not None else None
        context = recipe.rollout.context or self.engine.folder.shape.max_positions
        sample_advantages = estimate_advantages(table, rl, max_tokens=recipe.rollout.max_tokens, context=context)
        if rl.teacher is not None and not rl.teacher.rewards:
            sample_advantages = [0.0] * len(sample_advantages)
        if replay == "off":
            sequences = [replace(s, routes=None) for s in sequences]
        # If old log-probs are not recomputed, the loss measures the mismatch between rollout engine and trainer. This is possible only in
        # the first minibatch: later weights match no published version.
        current_version = -1 if self.has_unpublished_update else version  # -1: no token was sampled with these weights
        same_weights = [token_versions == current_version for token_versions in versions]
        mismatch_masks = None if recompute else list(zip(same_weights, stale_kv, strict=True))
        minibatch_metrics = []
        for minibatch in share.minibatches:
            minibatch_metrics.append(
                self.engine.update(
                    self._training_batch(share, minibatch, sequences, sample_advantages, reference, mismatch_masks),
                    PolicyObjective(rl, max_tokens=recipe.rollout.max_tokens, trajectories=minibatch.trajectories),
                    temperature=recipe.rollout.temperature,
                    total_steps=rl.steps * rl.minibatches,
                    microbatches=minibatch.microbatches,
                )
            )
            mismatch_masks = None
        metrics = mean_metrics(minibatch_metrics) | self.engine.peak_memory()
        metrics |= {"timing_s/old_log_prob": scored_at - start, "timing_s/update": time.perf_counter() - scored_at}
        if recompute:
            metrics |= self._mismatch_metrics(sequences, versions, stale_kv, old_versions)
        self.has_unpublished_update = True
        metrics["perf/tokens"] = sum(minibatch["perf/tokens"] for minibatch in minibatch_metrics)
        return metrics

    def _training_batch(
        self,
        share: Share,
        minibatch: Minibatch,
        sequences: list[batch.Sequence],
        sample_advantages: list[float],
        reference: list[np.ndarray] | None,
        mismatch_masks: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]] | None,
    ) -> list[batch.Sequence]:
        """The sequences of a minibatch with the columns that the policy loss needs; a dummy sequence if this rank has none.

        mismatch_masks: `same_weights` and `stale_kv` of each sequence, if the loss measures the mismatch.
        """
        from mtpctl.trainer.objective import dummy_sequence, training_sequence

        rl = self.recipe.train.rl
        by_trajectory = rl.aggregate == "sequence"
        rows = [
            training_sequence(
                sequences[i],
                sample_advantages[share.indices[i]],
                reference=None if reference is None else reference[i],
                same_weights=None if mismatch_masks is None else mismatch_masks[i][0],
                stale_kv=None if mismatch_masks is None else mismatch_masks[i][1],
                teacher=rl.teacher,
                trajectory_tokens=int(share.trajectory_tokens[i]) if by_trajectory else None,
            )
            for i in minibatch.members
        ]
        if rows:
            return rows
        zero = np.zeros(1, np.float32)
        return [
            training_sequence(
                dummy_sequence(rl.teacher.topk if rl.teacher else 0),
                0.0,
                reference=None if reference is None else zero,
                same_weights=None if mismatch_masks is None else zero,
                stale_kv=None if mismatch_masks is None else zero,
                teacher=rl.teacher,
                trajectory_tokens=0 if by_trajectory else None,
            )
        ]

    def _add_old_logprobs(self, sequences: list[batch.Sequence], replay: str) -> None:
        """Add old log-probs under the current weights and, if `train.moe.replay` is `recompute`, the routes of the pass. Collective."""
        record_routes = replay == "recompute"
        inputs = [replace(s, routes=s.routes if replay == "rollout" else None) for s in sequences]
        scores = self.engine.score(inputs, temperature=self.recipe.rollout.temperature, record_routes=record_routes, local=True)
        for sequence, score in zip(sequences, scores, strict=True):
            sequence.columns["old"] = np.asarray(score.logprobs, np.float32)
            if record_routes:
                sequence.routes = score.routes

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that differ between policy and reference."""
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def _reference_logprobs(self, sequences: list[batch.Sequence]) -> list[np.ndarray]:
        import torch

        assert self.reference is not None
        with self.engine.resident(), torch.no_grad():
            parameters = self._trained_parameters()
            current = [p.detach().clone() for p in parameters]
            try:
                for parameter, value in zip(parameters, self.reference, strict=True):
                    parameter.copy_(value)
                inputs = [replace(s, routes=None) for s in sequences]
                scores = self.engine.score(inputs, temperature=self.recipe.rollout.temperature, local=True)
            finally:
                for parameter, value in zip(parameters, current, strict=True):
                    parameter.copy_(value)
        return [np.asarray(s.logprobs, np.float32) for s in scores]

    def _mismatch_metrics(
        self,
        sequences: list[batch.Sequence],
        versions: list[npt.NDArray[np.int32]],
        stale_kv: list[npt.NDArray[np.bool_]],
        old_versions: npt.NDArray[np.int32],
    ) -> dict[str, float]:
        """`rollout_corr/*` over all tokens, and the mean difference over the tokens that were sampled with the scoring weights.

        versions, old_versions: versions of the weights that sampled each token, and that scored each sample; -1: never published. stale_kv:
        whether each token was sampled with a stale KV cache.
        """
        import torch

        from mtpctl.model.parallel import sum_over_ranks
        from mtpctl.rl.corrections import cause_metrics, cause_sums, mismatch_metrics, mismatch_sums

        def concatenate(columns: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *columns], dtype=np.float32))

        old = concatenate([s.columns["old"] for s in sequences])
        behaviour = concatenate([s.columns["behaviour"] for s in sequences])
        mask = concatenate([s.loss_mask for s in sequences])
        seq_ids = torch.from_numpy(np.repeat(np.arange(len(sequences)), [len(s.loss_mask) for s in sequences]))
        sums = mismatch_sums(old, behaviour, mask, seq_ids, len(sequences), self.recipe.rl.correction)
        same_weights = concatenate(
            [token_versions == old_version for token_versions, old_version in zip(versions, old_versions, strict=True)]
        )
        sums |= cause_sums(old, behaviour, mask, same_weights, concatenate(stale_kv))
        totals = dict(zip(sums, sum_over_ranks([float(value) for value in sums.values()]), strict=True))
        return mismatch_metrics(totals) | cause_metrics(totals, tokens=totals["tokens"])

    def plan_weights(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest | None:
        self.has_unpublished_update = False
        return super().plan_weights(version, store, members, checksums, sections)

    def begin_save(self, path: str) -> str:
        """Start writing a checkpoint of the engine. Returns its temporary folder; files added there become part of the checkpoint."""
        self.pending_save = self.engine.begin_save(Path(path), concurrent=self.recipe.train.async_save)
        return str(self.pending_save.folder)

    def finish_save(self, wait: bool, entries: Mapping[str, Entry]) -> bool:
        """Rename the checkpoint to its final name if it is written; with `wait`, first wait for that. Returns whether it was renamed.

        entries: sizes and checksums of the files that the controller added.
        """
        if not wait and not self.pending_save.is_written():
            return False
        self.pending_save.finish(entries)
        return True

    def abandon_save(self) -> None:
        """Delete the checkpoint that is being written."""
        self.pending_save.abandon()

    def restore(self, path: str) -> None:
        """Load a checkpoint: the model, and the optimizer's state if a stage has begun."""
        self.engine.restore(Path(path))

    def publish_checkpoint(self, path: str, keep: int, needed: Sequence[str] = ()) -> None:
        """Point `latest` to `path` and delete old checkpoints, except the `keep` newest and those named in `needed`. Rank 0 only.

        Raises SaveFailed if a checkpoint cannot be deleted.
        """
        from mtpctl.checkpoint.finding import publish_checkpoint

        if self.rank == 0:
            try:
                publish_checkpoint(Path(path), keep=keep, needed=needed)
            except OSError as error:
                raise SaveFailed(
                    f"checkpoint {path} was written, but `latest` was not updated, or older checkpoints were not deleted: {error.strerror}"
                ) from error


def mean_metrics(metric_sets: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for metrics in metric_sets for name in metrics)
    return {name: fmean(metrics[name] for metrics in metric_sets if name in metrics) for name in names}
