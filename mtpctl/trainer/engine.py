"""The Megatron engine of one rank: updates, log-probs, export.

One engine serves SFT, RL updates and log-prob recompute, with and without MTP, on gloo and NCCL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from mtpctl.checkpoint import sharded
from mtpctl.convert.adapters import export_adapter, fingerprint
from mtpctl.convert.bridge import WeightBridge
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.model import parallel as groups
from mtpctl.model.build import build_model, complete_config
from mtpctl.model.gpt import Hidden, MtpModel
from mtpctl.model.lora import attach_adapters
from mtpctl.model.weights import draw_weights
from mtpctl.recipe.optimizer import OptimizerConfig
from mtpctl.trainer import data_parallel
from mtpctl.trainer.batch import MicroBatch, Sequence, check, idle, pack, partition
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.head import HITS, Head
from mtpctl.trainer.objective import Objective, Sums
from mtpctl.trainer.offload import HostMemory, hold, release
from mtpctl.trainer.optimizer import Optimizer
from mtpctl.trainer.optimizer_state import set_step
from mtpctl.trainer.utilisation import utilisation


@dataclass
class Scores:
    """Of one sequence, over its response tokens: log-prob of each, and entropy of the distribution it was drawn from (nats)."""

    logprobs: list[float]
    entropy: list[float]


class MegatronEngine:
    """A model on this rank, with what trains and scores it. All ranks call every method together, with the same arguments."""

    def __init__(self, folder: HfFolder, config: EngineConfig, rank: groups.Rank | None = None) -> None:
        self.config, self.folder = config, folder
        groups.start(rank or groups.Rank(), config.parallel)
        try:
            self._build()
        except BaseException:
            groups.stop()
            raise

    def _build(self) -> None:
        folder, config = self.folder, self.config
        self.device = torch.device(torch.cuda.current_device())
        self.bridge = WeightBridge(folder)
        self.transformer = complete_config(
            self.bridge.config(),
            folder.shape,
            parallel=config.parallel,
            precision=config.precision,
            mtp=config.mtp,
            recompute=config.recompute,
        )
        model = build_model(self.transformer, folder.shape, config.mtp)
        if config.random_seed is None:
            self.bridge.load([model])
        else:
            draw_weights(model, config.random_seed)
        self.base = ""
        if config.lora is not None:
            attach_adapters(model, config.lora, config.adapter_seed)
            self._name_base(folder.path)
        self.kept = {name for name, p in model.named_parameters() if p.requires_grad} if config.lora else None
        self.depths = self.transformer.mtp_num_layers or 0
        self.can_train_mtp = config.train and config.mtp.trains and self.depths > 0
        self.trains_mtp = self.can_train_mtp
        self.optimizer: Optimizer | None = None
        self.model: Any = model
        if config.train:
            self.model = data_parallel.wrapped(model, self.transformer, distributed_optimizer=config.distributed_optimizer)
        self.host = HostMemory(self.module.parameters()) if config.offload.params else None
        self.head = Head(config.kernels, folder.shape, config.parallel, sequence_parallel=self.transformer.sequence_parallel)
        self._users = 0
        with self.resident():
            pass

    @property
    def module(self) -> MtpModel:
        """The model without its data-parallel wrapping."""
        return self.model.module if self.config.train else self.model

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Parameters on the device, whoever asked first; afterwards back in host memory, where they are offloaded."""
        self._users += 1
        if self.host is not None:
            self.host.back(self.module.parameters())
        try:
            yield
        finally:
            self._users -= 1
            if self.host is not None and not self._users:
                self.host.leave(self.module.parameters())

    @property
    def parameters(self) -> tuple[int, int]:
        """Parameters that this rank holds, and of them those that train."""
        sizes = [(p.numel(), p.requires_grad) for p in self.module.parameters()]
        return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)

    def _name_base(self, path: Path) -> None:
        seed = self.config.random_seed
        self.base = fingerprint(path) if seed is None else f"random weights of seed {seed}"

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Start with a fresh optimizer: one for SFT, one for RL. MTP layers that are not trained are not its business.

        But where it is sharded: it wants all that the gradient buffers were made for, and lets MTP layers stand still.
        """
        assert self.config.train
        self.optimizer = None  # the last one's memory goes before the next one's is taken
        held = self.trains_mtp or (self.config.mtp.trains and self.config.distributed_optimizer)
        for name, parameter in self.module.named_parameters():
            if name.startswith("mtp."):
                parameter.requires_grad_(held)
        with self.resident():
            self.optimizer = Optimizer(
                self.model,
                config,
                mtp_clip=self.config.mtp.clip_grad,
                bf16=self.config.precision == "bf16",
                distributed=self.config.distributed_optimizer,
                offload=self.config.offload.optimizer,
                mtp_frozen=held and not self.trains_mtp,
            )

    # ------------------------------------------------------------------------------------------------------- updates

    def update(
        self, sequences: list[Sequence], objective: Objective, *, temperature: float = 1.0, total_steps: int = 1
    ) -> dict[str, float]:
        """One optimizer step on these sequences. Returns metrics, means over what they count.

        `skipped` is 1 where loss or gradients were not finite: then nothing was applied, and metrics that are not finite are left out.
        """
        assert self.optimizer is not None, "set_optimizer comes first"
        began = time.perf_counter()
        self.optimizer.inner.zero_grad()
        with self.resident():
            with record_function("mtpctl/forward and backward"):
                metrics = self.forward_backward(sequences, objective, temperature=temperature)
            with record_function("mtpctl/optimizer"):
                result = self.optimizer.step(total_steps)
        if self.config.offload.grads:
            self.optimizer.inner.zero_grad()
            release(data_parallel.gradients(self.model))
        metrics |= {"actor/grad_norm": result.grad_norm} | ({"mtp/grad_norm": result.mtp_grad_norm} if self.trains_mtp else {})
        if not result.applied:
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        # Copies of offloaded state that are under way belong to this update, and not to a sync, for which generation stands.
        torch.cuda.synchronize()
        seconds, tokens = time.perf_counter() - began, sum(len(s.token_ids) for s in sequences)
        metrics |= {"actor/lr": result.lr, "skipped": float(not result.applied), "timing_s/update": seconds, "perf/tokens": float(tokens)}
        if (share := self._utilisation(sequences, seconds)) is not None:
            metrics["perf/mfu"] = share
        return metrics

    def _utilisation(self, sequences: list[Sequence], seconds: float) -> float | None:
        """`perf/mfu` of an update, where it is one of all weights in bf16."""
        if self.config.lora or self.config.precision != "bf16":
            return None
        return utilisation(
            self.folder.shape,
            sequences,
            self.depths if self.trains_mtp else 0,
            isolated=self.config.mtp.mode == "isolated",
            seconds=seconds,
            card=torch.cuda.get_device_name() if self.device.type == "cuda" else self.device.type,
            cards=dist.get_world_size(),
        )

    def forward_backward(self, sequences: list[Sequence], objective: Objective, *, temperature: float = 1.0) -> dict[str, float]:
        """Gradients of the policy and MTP losses, in the gradient buffers. Returns metrics."""
        denominator = objective.denominator(sequences)
        drafts = self._draft_counts(sequences) if self.trains_mtp else []
        micros = self._micro_batches(sequences, self.depths if self.trains_mtp else 0)
        self.model.train()
        hold(data_parallel.gradients(self.model))
        self.model.zero_grad_buffer()
        loss = partial(self._loss, objective=objective, temperature=temperature, denominator=denominator, drafts=drafts)
        sums = self._run(micros, loss, forward_only=False)
        metrics = objective.metrics({name: float(value) for name, value in sums.items() if not name.startswith("mtp/")})
        return metrics | {
            name: float(value) / drafts[int(name.rpartition("_")[2]) - 1] for name, value in sums.items() if name.startswith("mtp/")
        }

    def _draft_counts(self, sequences: list[Sequence]) -> list[int]:
        """For each depth, how many tokens a drafter can be asked for, in the whole batch."""
        return [max(1, sum(s.drafted(depth) for s in sequences)) for depth in range(1, self.depths + 1)]

    def _loss(
        self, micro: MicroBatch, hidden: Hidden, *, objective: Objective, temperature: float, denominator: float, drafts: list[int]
    ) -> tuple[Tensor, Sums]:
        states = (hidden.trunk, *hidden.mtp)
        finite = self._finite(states)
        if not finite:
            hidden = Hidden(torch.zeros_like(hidden.trunk), hidden.head, [torch.zeros_like(state) for state in hidden.mtp])
        # MTP first: gradients of the head are added up in the order in which a backward pass would have come by.
        parts: list[Tensor] = []
        sums: Sums = {}
        for depth, (state, draft) in reversed(list(enumerate(zip(hidden.mtp, micro.drafts, strict=True), start=1))):
            loss, found = self.head.loss(
                micro.packing,
                state,
                hidden.head,
                draft.rows,
                draft.labels,
                temperature,
                _likelihood,
                # In fp32, as the gradient that will come: it is made beforehand.
                scale=torch.tensor(1 / (drafts[depth - 1] * len(drafts))).mul(self.config.mtp.loss_scale).item(),
                hit=True,
                detach_weight=self.config.mtp.mode == "isolated",
            )
            parts.append(loss)
            sums |= {f"mtp/loss_{depth}": found["loss"], f"mtp/accept_{depth}": found[HITS]}
        loss, found = self.head.loss(
            micro.packing,
            hidden.trunk,
            hidden.head,
            micro.rows,
            micro.labels,
            temperature,
            objective.token_loss(micro),
            scale=1 / denominator,
            couples_tokens=objective.couples_tokens,
            entropy=objective.needs_entropy,
        )
        total = torch.stack([loss, *parts]).sum()
        sums |= found
        if self.config.parallel.cp > 1:
            # A rank without a supervised token still owes the others its part of the collectives of a backward pass.
            for state in states:
                total = total + 0.0 * state.sum()
        if not finite:
            # It takes its way through all collectives to gradients by which every rank skips the step.
            total = torch.nan * torch.stack([state.sum() for state in states]).sum()
            sums = {name: torch.nan * value for name, value in sums.items()}
        return total, sums

    def _finite(self, states: tuple[Tensor, ...]) -> bool:
        """Whether all states are, on all ranks that share this micro-batch's loss."""
        bad = torch.stack([~torch.isfinite(state).all() for state in states]).any().float()
        if self.config.parallel.tp * self.config.parallel.cp > 1:
            dist.all_reduce(bad, group=parallel_state.get_tensor_and_context_parallel_group())
        return not bad

    # ------------------------------------------------------------------------------------------------------- scoring

    @torch.no_grad()
    def score(self, sequences: list[Sequence], *, temperature: float = 1.0) -> list[Scores]:
        """Log-probs and entropy of every response token, in the order of `sequences`."""
        if not sequences:
            return []
        self.model.eval()
        found: dict[int, Scores] = {}

        def collect(micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
            out = self.head.logprob(micro.packing, hidden.trunk, hidden.head, micro.rows, micro.labels, temperature, entropy=True)
            assert out.entropy is not None
            logprobs = out.logprob.float().cpu().split(micro.lengths)
            entropies = out.entropy.float().cpu().split(micro.lengths)
            for i, logprob, entropy in zip(micro.order, logprobs, entropies, strict=True):
                found[i] = Scores(logprob.tolist(), entropy.tolist())
            return out.logprob.sum(), {}

        self._run(self._micro_batches(sequences, 0), collect, forward_only=True)
        if dist.get_world_size() > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, found)
            found = {i: scores for part in parts for i, scores in part.items()}
        return [found[i] for i in range(len(sequences))]

    # ------------------------------------------------------------------------------------------------------- weights

    def export(self, sections: Collection[str] = ("target", "draft"), *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors, in the engine's precision; every rank iterates.

        `sections`: the trunk (`target`), the MTP layers (`draft`) or both. Adapters come merged into the trunk, or with
        `merged` false are left out.
        """
        with self.resident():
            yield from self.bridge.export([self.module], sections=sections, merged=merged)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """PEFT's names and full tensors of the adapters (`peft_config` says the rest); every rank iterates.

        Raises UserError where PEFT has no names for a target.
        """
        assert self.config.lora is not None, "there is no adapter"
        with self.resident():
            yield from export_adapter(self.bridge, [self.module], self.config.lora)

    def load(self, path: Path) -> None:
        """Replace the weights (with adapters: those beneath them) by those of another folder of the same model."""
        with self.resident():
            self.bridge.load([self.module], path)
            if self.config.lora is not None:
                self._name_base(path)
            if self.optimizer is not None:
                self.optimizer.reload()

    def save(self, path: Path, state: dict[str, Any] | None = None) -> None:
        """Checkpoint the model, the optimizer where one is set, and `state`; whole or not at all.

        With adapters, of the model only what trains: adapters and MTP layers, and which weights they were trained on.
        """
        self.begin_save(path, state).finish()

    def begin_save(self, path: Path, state: dict[str, Any] | None = None, *, beside: bool = False) -> sharded.Save:
        """The same in two halves: what this returns has to be finished, by all ranks. `beside`: training goes on until then."""
        with self.resident():
            # Parameters that leave the device at the end of this are written from a copy too.
            return sharded.Save(path, self._contents(), state or {}, beside=beside or self.host is not None)

    def restore(self, path: Path) -> dict[str, Any]:
        """Take up a checkpoint, written under any layout. Returns the `state` it was saved with.

        The optimizer is restored where one is set; its learning rates and clips stay those it was set with. Raises
        UserError where the checkpoint is not whole, is of another model, or has adapters for other weights than these.
        """
        with self.resident():
            steps, state = sharded.restore(path, self._contents())
        if self.optimizer is not None:
            self.optimizer.steps = steps
            set_step(self.optimizer.inner, steps)
        return state

    def _contents(self) -> sharded.Contents:
        lora = self.config.lora
        slots, steps = (self.optimizer.slots(), self.optimizer.steps) if self.optimizer else (None, 0)
        adapter = None if lora is None else {"base": self.base, "rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
        return sharded.Contents(self.module, slots, steps, self.kept, adapter)

    # -------------------------------------------------------------------------------------------------------- passes

    def _micro_batches(self, sequences: list[Sequence], depths: int) -> list[MicroBatch]:
        check(sequences, self.folder.shape)
        lengths = [len(s.token_ids) for s in sequences]
        dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        parts = partition(lengths, self.config.tokens_per_microbatch, dp)[dp_rank]
        cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        layout = {"cp_rank": cp_rank, "cp": cp, "tp": self.config.parallel.tp if self.transformer.sequence_parallel else 1}
        if self.config.parallel.ep == 1:
            # A rank may be done before the others, but takes part in what they do together in the end.
            parts = [part for part in parts if part] or [[]]
        return [
            pack(sequences, part, depths, self.device, **layout) if part else idle(sequences, depths, self.device, **layout)
            for part in parts
        ]

    def _run(self, micros: list[MicroBatch], loss: Any, *, forward_only: bool) -> Sums:
        """Run the pipeline schedule over the micro-batches. Returns the metric sums over all of them and all dp ranks."""

        def finish(micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Tensor, Sums]:
            if micro.idle and forward_only:
                return hidden.trunk.sum(), torch.zeros((), dtype=torch.int), {}
            with record_function("mtpctl/log-probs and losses"):
                total, sums = loss(micro, hidden)
            return total, torch.zeros((), dtype=torch.int), sums

        def forward(iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
            micro = next(iterator)
            with record_function("mtpctl/forward"):
                return model(micro.input_ids, micro.packing, depths=len(micro.drafts)), partial(finish, micro)

        with self.resident():
            parts = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micros),
                model=self.model,
                num_microbatches=len(micros),
                seq_length=self.config.tokens_per_microbatch,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        sums: Sums = {}
        for part in parts:
            for name, value in part.items():
                sums[name] = sums[name] + value if name in sums else value
        return groups.reduced(sums)

    def close(self) -> None:
        """Leave the process groups."""
        groups.stop()


def _likelihood(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
    """The loss of an MTP depth: negative log-probs, added up."""
    loss = -logprob.sum()
    return loss, {"loss": loss.detach()}
