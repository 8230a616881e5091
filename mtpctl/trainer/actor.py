"""Trainer ranks as Ray actors, and the group of them that the controller talks to."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from pathlib import Path
from typing import Any

from mtpctl.cluster.heap import importing, settle_heap
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Sample
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import Section
from mtpctl.sync.transports.base import Sent
from mtpctl.trainer.profile import UpdateProfile
from mtpctl.trainer.sending import WeightSource


def threads_in(recipe: Recipe, stage: str, cores: int) -> int:
    """CPU threads of a trainer rank in a stage. `train.threads` leaves cores to the engines, of which none works in the supervised stage.

    A deterministic run keeps to one number, since a sum may be rounded otherwise by another.
    """
    train = recipe.train
    if stage == "rl" or recipe.device != "cpu" or recipe.async_.deterministic:
        return train.threads
    return max(train.threads, cores // train.parallel.world_size)


class TrainerRank:
    """One rank: an engine, and what one update of each stage needs of it. Ranks are called together, with the same arguments."""

    def __init__(self, recipe_json: str, rank: int, world_size: int) -> None:
        self.recipe = Recipe.model_validate_json(recipe_json)
        self.rank, self.world_size = rank, world_size
        self.reference: list[Any] | None = None
        self.ahead = False  # of the version published last
        self.saving: Any = None
        self.profile = UpdateProfile(self.recipe.run_path / "logs", rank) if self.recipe.telemetry.profile else None

    def address(self) -> str:
        """Where the ranks meet: a store that this rank holds from now on."""
        from mtpctl.cluster.meeting import address_of, host_store

        self.meeting = host_store()
        return address_of(self.meeting)

    def build(self, folder: str, master: str) -> dict[str, Any]:
        """Make the engine from a Hugging Face folder. Returns what the panel tells of it."""
        with importing():
            import torch

            from mtpctl.convert.hf_folder import HfFolder
            from mtpctl.model.parallel import Rank
            from mtpctl.trainer.config import EngineConfig
            from mtpctl.trainer.engine import MegatronEngine

        train = self.recipe.train
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
            adapter_seed=self.recipe.seed,
        )
        self.engine = MegatronEngine(HfFolder.open(folder), config, Rank(self.rank, self.world_size, master))
        self.weights = WeightSource(self.recipe, self.engine, self.rank)
        settle_heap()
        held, trained = self.engine.parameters
        return {"parameters": held, "trained": trained}

    def begin_stage(self, stage: str, reference: str, resumed: bool) -> None:
        """A fresh optimizer for `sft` or `rl`.

        RL with a KL penalty also keeps the policy it began with, in memory, and at `reference`, where a run that is resumed within RL
        finds it. Raises UserError where it should be there and is not.
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
                self.engine.optimizer = None  # the last stage's is no part of the policy
                self.engine.save(Path(reference))
        self.engine.set_optimizer(train.sft.optimizer if stage == "sft" else train.rl.optimizer)
        if stage == "rl" and train.rl.kl_coef:
            with self.engine.resident():  # what moves is known once the optimizer is set
                self.reference = [p.detach().clone() for p in self._moving()]

    def _restore_reference(self, path: Path) -> None:
        if not path.exists():
            raise UserError(
                f"train.rl.kl_coef: {path} is not there, the policy that RL began with; set it to 0, or start in another run_dir"
            )
        self.engine.restore(path)

    def sft_step(self, pairs: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        """One supervised update on token ids of prompts and of their targets."""
        from mtpctl.trainer.batch import Sequence
        from mtpctl.trainer.objective import NextToken

        sequences = [Sequence(prompt + target, len(prompt), [1] * len(target)) for prompt, target in pairs]
        with self._profiled("sft"):
            return self.engine.update(sequences, NextToken(), total_steps=self.recipe.train.sft.steps)

    def score(self, samples: list[Sample], version: int) -> list[Sample]:
        """Old log-probs and entropy of the samples, under the current weights."""
        from mtpctl.trainer.policy_objective import scoring_sequence

        temperature = self.recipe.rollout.temperature
        for sample, scores in zip(samples, self.engine.score([scoring_sequence(s) for s in samples], temperature=temperature), strict=True):
            sample.old_logprobs, sample.old_entropy, sample.old_version = scores.logprobs, scores.entropy, version
        return samples

    def rl_step(self, samples: list[Sample], version: int) -> dict[str, float]:
        """One policy update, of as many optimizer steps as `train.rl.minibatches` says. Samples come group by group."""
        with self._profiled("rl"):
            return self._rl_step(samples, version)

    def _profiled(self, stage: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.profile is None else self.profile.update(stage)

    def _rl_step(self, samples: list[Sample], version: int) -> dict[str, float]:
        from torch.profiler import record_function

        from mtpctl.trainer.policy_objective import PolicyObjective, advantages, training_sequence

        recipe, rl = self.recipe, self.recipe.train.rl
        began = time.perf_counter()
        # One that its deadline left without a token has a reward, which its group's baseline counts, and nothing to train on.
        answered = [s for s in samples if s.response_ids]
        if not answered:
            raise RuntimeFailure("rollout.deadline_s: no response of a whole batch has a token; raise it, or lower rollout.max_in_flight")
        if recipe.old_logprobs == "behaviour":
            for sample in answered:
                sample.old_logprobs = sample.behaviour_logprobs
        unscored = [s for s in answered if s.old_logprobs is None]
        if unscored:
            with record_function("mtpctl/old log-probs"):
                self.score(unscored, version)
        scored = time.perf_counter()
        reference = iter(self._reference_logprobs(answered)) if self.reference is not None else itertools.repeat(None)
        context = recipe.rollout.context or self.engine.folder.shape.max_positions
        gains = advantages(samples, rl, max_tokens=recipe.rollout.max_tokens, context=context)
        objective = PolicyObjective(rl)
        # Groups that a checkpoint kept may be of another size than those that came after it.
        parts, size = [], math.ceil(len(samples) / rl.minibatches)
        # Where nothing is recomputed, the loss itself compares policies, in the first part alone: later ones have moved on.
        weights = None if recipe.old_logprobs == "recompute" else -1 if self.ahead else version
        for start in range(0, len(samples), size):
            batch = [
                training_sequence(sample, gain, next(reference), weights)
                for sample, gain in zip(samples[start : start + size], gains[start : start + size], strict=True)
                if sample.response_ids
            ]
            if batch:
                parts.append(
                    self.engine.update(batch, objective, temperature=recipe.rollout.temperature, total_steps=rl.steps * rl.minibatches)
                )
                weights = None
        metrics = mean_of(parts)
        metrics |= {"timing_s/old_log_prob": scored - began, "timing_s/update": time.perf_counter() - scored}
        if recipe.old_logprobs == "recompute":
            metrics |= self._mismatch(samples, exact=not (unscored and self.ahead))
        self.ahead = True
        metrics["perf/tokens"] = sum(part["perf/tokens"] for part in parts)
        return metrics

    def _moving(self) -> list[Any]:
        """The parameters in which the policy and its reference differ."""
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def _reference_logprobs(self, samples: list[Sample]) -> list[list[float] | None]:
        import torch

        from mtpctl.trainer.policy_objective import scoring_sequence

        assert self.reference is not None
        with self.engine.resident(), torch.no_grad():
            parameters = self._moving()
            current = [p.detach().clone() for p in parameters]
            for parameter, value in zip(parameters, self.reference, strict=True):
                parameter.copy_(value)
            scores = self.engine.score([scoring_sequence(s) for s in samples], temperature=self.recipe.rollout.temperature)
            for parameter, value in zip(parameters, current, strict=True):
                parameter.copy_(value)
        return [s.logprobs for s in scores]

    def _mismatch(self, samples: list[Sample], *, exact: bool) -> dict[str, float]:
        """`rollout_corr/*` over all tokens, and the difference over those that the scoring weights themselves sampled.

        Not `exact`: the scoring weights were no version's, so that they sampled none.
        """
        import torch

        from mtpctl.rl.mismatch import mismatch_metrics, mismatch_sums

        old = torch.tensor([x for s in samples for x in s.old_logprobs or []])
        behaviour = torch.tensor([x for s in samples for x in s.behaviour_logprobs])
        mask = torch.tensor([float(m) for s in samples for m in s.loss_mask])
        seq_ids = torch.tensor([i for i, s in enumerate(samples) for _ in s.response_ids])
        sums = mismatch_sums(old, behaviour, mask, seq_ids, len(samples), self.recipe.train.rl.correction)
        metrics = mismatch_metrics(sums)
        same = torch.tensor(
            [float(span.version == s.old_version) for s in samples for span in s.version_spans for _ in range(span.end - span.start)]
        )
        same = same * mask
        if exact and same.sum():
            metrics["rollout_corr/abs_diff_same_version"] = float(((old - behaviour).abs() * same).sum() / same.sum())
        return metrics

    def publish(self, version: int, store: str, checksums: bool, sections: tuple[Section, ...]) -> Manifest | None:
        """See `WeightSource.publish`."""
        self.ahead = False
        return self.weights.publish(version, store, checksums, sections)

    def announce(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest | None:
        """See `WeightSource.announce`."""
        self.ahead = False
        return self.weights.announce(version, store, members, checksums, sections)

    def send(self) -> Sent | None:
        """See `WeightSource.send`."""
        return self.weights.send()

    def keep(self) -> None:
        """See `WeightSource.keep`."""
        self.weights.keep()

    def begin_save(self, path: str) -> str:
        """Start a checkpoint of the engine. Returns the folder where it lies until it is whole; what is put there comes along."""
        self.saving = self.engine.begin_save(Path(path), beside=self.recipe.train.async_save)
        return str(self.saving.folder)

    def finish_save(self, wait: bool) -> bool:
        """Put the checkpoint in its place, unless it is still being written and nobody waits. Returns whether it is there."""
        if not wait and not self.saving.written():
            return False
        self.saving.finish()
        return True

    def restore(self, path: str) -> None:
        """Load a checkpoint: the model, and the optimizer once a stage has begun."""
        self.engine.restore(Path(path))

    def latest_checkpoint(self, root: str) -> str | None:
        """The newest whole checkpoint under `root`."""
        from mtpctl.checkpoint.sharded import latest_checkpoint

        found = latest_checkpoint(Path(root))
        return None if found is None else str(found)

    def publish_checkpoint(self, path: str, keep: int) -> None:
        """Make `path` the newest checkpoint, and drop all but the `keep` newest."""
        from mtpctl.checkpoint.sharded import publish_checkpoint

        if self.rank == 0:
            publish_checkpoint(Path(path), keep=keep)


def mean_of(parts: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the parts that have it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(values) / len(values) for name in names if (values := [p[name] for p in parts if name in p])}
