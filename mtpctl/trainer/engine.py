"""The Megatron engine of one rank: updates, log-probs, export and checkpoints, with gloo or NCCL."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.profiler import record_function

from mtpctl.checkpoint import sharded
from mtpctl.convert.adapters import export_adapter, hash_base_weights
from mtpctl.convert.bridge import WeightBridge
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.kernels.dispatch import ONE_PASS
from mtpctl.model.build import build_model, complete_config, init_random_weights
from mtpctl.model.gpt import MtpModel
from mtpctl.model.lora import attach_adapters
from mtpctl.model.parallel import ProcessGroups, Rank, max_over_ranks, sum_over_ranks
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import DTYPES
from mtpctl.recipe.numerics import check_gpu
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.routes import RouteShape
from mtpctl.trainer.batch import MicroBatch, Sequence, Totals, utilization
from mtpctl.trainer.config import EngineConfig, ScoreOptions, TokenScores
from mtpctl.trainer.data_parallel import ExpertBalance, Gradients
from mtpctl.trainer.head import Head
from mtpctl.trainer.objective import Objective, Sums
from mtpctl.trainer.offload import HostMemory
from mtpctl.trainer.optimizer import Optimizer
from mtpctl.trainer.passes import (
    Microbatches,
    MicroBatchLoss,
    Scorer,
    assign_microbatches,
    pack_microbatches,
    recorded_routes,
    run_passes,
    with_recording,
)
from mtpctl.trainer.update_loss import UpdateLoss


class MegatronEngine:
    """The model on this rank, its optimizer, and scoring. Methods are collective.

    All ranks pass the same arguments, except that each dp rank may pass only its share of the sequences.
    """

    def __init__(self, folder: HfFolder, config: EngineConfig, rank: Rank | None = None) -> None:
        self.config, self.folder = config, folder
        self.groups = ProcessGroups(rank or Rank(), config.parallel)
        try:
            self._build()
        except BaseException:
            self.groups.close()
            raise

    def _build(self) -> None:
        folder, config = self.folder, self.config
        self.device = torch.device(torch.cuda.current_device())
        if config.numerics == "bitwise" and self.device.type == "cuda":
            check_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), DTYPES[config.precision])
        self.bridge = WeightBridge(folder)
        self.transformer = complete_config(
            self.bridge.config(),
            folder.shape,
            parallel=config.parallel,
            precision=config.precision,
            mtp=config.mtp,
            recompute=config.recompute,
            moe=config.moe,
            numerics=config.numerics,
        )
        model = build_model(self.transformer, folder.shape, config.mtp)
        if config.random_seed is None:
            self.bridge.load([model])
        else:
            init_random_weights(model, config.random_seed)
        self.base_fingerprint = ""
        if config.lora is not None:
            attach_adapters(model, config.lora, config.adapter_seed)
            self._set_base_fingerprint(folder.path)
        self.trained_names = {name for name, p in model.named_parameters() if p.requires_grad} if config.lora else None
        self.depths = self.transformer.mtp_num_layers or 0
        self.can_train_mtp = config.train and config.mtp.trains and self.depths > 0
        self.trains_mtp = self.can_train_mtp
        self.optimizer: Optimizer | None = None
        self.model: MtpModel | DistributedDataParallel = model
        self._trunk_is_frozen = config.only_drafter
        if config.only_drafter:
            freeze_trunk(model)
        if config.train:
            self.gradients = Gradients(
                model,
                self.transformer,
                distributed_optimizer=config.distributed_optimizer,
                head_uses_kernels=config.kernels.linear_logprob in ONE_PASS,
            )
            self.model = self.gradients.model
        self.host_memory = HostMemory(self.module.parameters()) if config.offload.params else None
        self.balance = ExpertBalance(model, config.moe.bias_update)
        self.head = Head(
            config.kernels, folder.shape, config.parallel, sequence_parallel=self.transformer.sequence_parallel, numerics=config.numerics
        )
        self._resident_blocks = 0
        with self.resident():
            pass

    @property
    def module(self) -> MtpModel:
        """The model without its data-parallel wrapper."""
        return self.model.module if self.config.train else self.model

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Load the parameters to the device. Offloaded parameters return to host memory when the outermost block ends."""
        self._resident_blocks += 1
        try:
            if self.host_memory is not None:
                self.host_memory.load(self.module.parameters())
            yield
        finally:
            self._resident_blocks -= 1
            if self.host_memory is not None and not self._resident_blocks:
                self.host_memory.offload(self.module.parameters())

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Number of parameters on this rank: all, and those that are trained."""
        sizes = [(p.numel(), p.requires_grad) for p in self.module.parameters()]
        return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)

    def _set_base_fingerprint(self, path: Path) -> None:
        seed = self.config.random_seed
        self.base_fingerprint = hash_base_weights(path) if seed is None else f"random weights of seed {seed}"

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Create a new optimizer.

        It has no state for MTP layers that are not trained, with one exception: a distributed optimizer must have every parameter of the
        gradient buffers, so it includes MTP layers that are frozen only in this stage, with a learning rate of 0.
        """
        assert self.config.train
        self.optimizer = None  # Frees its memory before the next one is allocated.
        includes_mtp = self.trains_mtp or (self.config.mtp.trains and self.config.distributed_optimizer)
        for name, parameter in self.module.named_parameters():
            if name.startswith("mtp."):
                parameter.requires_grad_(includes_mtp)
        with self.resident():
            self.optimizer = Optimizer(
                self.model,
                config,
                mtp_clip=self.config.mtp.clip_grad,
                bf16=self.config.precision == "bf16",
                distributed=self.config.distributed_optimizer,
                offload=self.config.offload.optimizer,
                mtp_frozen=includes_mtp and not self.trains_mtp,
            )

    def set_trunk_frozen(self, frozen: bool) -> None:
        """Freeze the trunk, or train it again unless only the drafter is trained. Takes effect with `set_optimizer`."""
        freeze_trunk(self.module)
        self._trunk_is_frozen = frozen or self.config.only_drafter
        if not self._trunk_is_frozen:
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(name.startswith("mtp.") or self.trained_names is None or name in self.trained_names)

    # ------------------------------------------------------------------------------------------------------- updates

    def update(
        self,
        sequences: list[Sequence],
        objective: Objective,
        *,
        temperature: float = 1.0,
        total_steps: int = 1,
        microbatches: Microbatches | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step on these sequences. Returns metrics.

        microbatches: if `sequences` are only this dp rank's share, their indices by microbatch. With expert parallelism, every dp rank must
        have the same number of microbatches. Sequences in no microbatch are not trained on. None: every rank passes all sequences.

        The metric `skipped` is 1 if the loss or gradients were not finite. The step is then skipped, and non-finite metrics are dropped.
        """
        assert self.optimizer is not None, "set_optimizer comes first"
        start = time.perf_counter()
        self.optimizer.inner.zero_grad()
        with self.resident():
            with record_function("mtpctl/forward and backward"):
                metrics = self.forward_backward(sequences, objective, temperature=temperature, microbatches=microbatches)
            with record_function("mtpctl/optimizer"):
                result = self.optimizer.step(total_steps, loss_is_finite=not metrics["skipped"])
                metrics |= self.balance.finish(applied=result.applied)
        if self.config.offload.grads:
            self.optimizer.inner.zero_grad()
            self.gradients.release()
        metrics |= {"actor/grad_norm": result.grad_norm} | ({"mtp/grad_norm": result.mtp_grad_norm} if self.trains_mtp else {})
        if not result.applied:
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        # Wait for copies of offloaded state. Otherwise their time would be attributed to the weight sync.
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        metrics |= {"actor/lr": result.lr, "skipped": float(not result.applied), "timing_s/update": seconds}
        mfu = self._utilization(_assigned_sequences(sequences, microbatches), seconds, self.depths if self.trains_mtp else 0)
        if mfu is not None:
            metrics["perf/mfu"] = mfu if microbatches is None else sum_over_ranks([mfu])[0]
        return metrics

    def peak_memory(self) -> dict[str, float]:
        """The metrics `perf/memory_*_gib`; empty on a CPU. Collective."""
        if self.device.type != "cuda":
            return {}
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return {f"perf/memory_{name}_gib": max_over_ranks(peak) / GIB for name, peak in peaks.items()}

    def _utilization(self, sequences: list[Sequence], seconds: float, depths: int) -> float | None:
        """`perf/mfu` of an update; None without bf16, or if the device's rate is unknown."""
        if self.config.precision != "bf16":
            return None
        return utilization(
            self.folder.shape,
            sequences,
            depths,
            isolated=self.config.mtp.mode == "isolated",
            trunk="none" if self._trunk_is_frozen else "all" if self.config.lora is None else "adapter",
            seconds=seconds,
            gpu=torch.cuda.get_device_name() if self.device.type == "cuda" else self.device.type,
            gpus=dist.get_world_size(),
        )

    def forward_backward(
        self, sequences: list[Sequence], objective: Objective, *, temperature: float = 1.0, microbatches: Microbatches | None = None
    ) -> dict[str, float]:
        """Compute the gradients of all losses and write them to the gradient buffers.

        Returns metrics. `skipped` is 1 if a loss is not finite; then the gradients must not be applied.
        """
        depths = self.depths if self.trains_mtp else 0
        totals = Totals.of(_assigned_sequences(sequences, microbatches), depths)
        if microbatches is not None:
            totals = totals.sum_over_ranks()
        loss = UpdateLoss(self.head, self.config, objective, totals, temperature=temperature)
        micros = self._micro_batches(sequences, depths, microbatches)
        self.balance.begin(totals.tokens)
        if not self.model.training:  # Iterating over thousands of experts is slow.
            self.model.train()
        self.gradients.clear(len(micros))
        sums = self._run(micros, loss, forward_only=False)
        return loss.metrics(sums) | {"skipped": float(not loss.is_finite(sums)), "perf/tokens": float(totals.tokens)}

    # ------------------------------------------------------------------------------------------------------- scoring

    @torch.no_grad()
    def score(
        self,
        sequences: list[Sequence],
        *,
        temperature: float = 1.0,
        options: list[ScoreOptions] | None = None,
        record_routes: bool = False,
        local: bool = False,
    ) -> list[TokenScores]:
        """Log-probs and entropy of the response tokens, in the order of `sequences`; every rank gets all of them.

        options: one per sequence; tokens outside the mask then get zeros. None: every response token is scored at `temperature`.
        record_routes: also return the routes of the pass.
        local: `sequences` and the result are only this dp rank's; a rank without sequences must still call.
        """
        if not sequences and not local:
            return []
        self.model.eval()
        scorer = Scorer(self.head, temperature, options)
        depths = self.depths if any(option.mtp for option in options or ()) else 0
        micros = self._micro_batches(sequences, depths, assign_microbatches(sequences, self.config) if local else None)
        routes = RouteShape.of(self.folder.shape) if record_routes else None
        if routes:
            micros = with_recording(micros)
        self._run(micros, scorer, forward_only=True)
        scores = scorer.gather(len(sequences), local=local)
        if routes:
            for score, recorded in zip(scores, recorded_routes(self.module, micros, routes, len(sequences), local=local), strict=True):
                score.routes = recorded
        return scores

    def _micro_batches(self, sequences: list[Sequence], depths: int, microbatches: Microbatches | None = None) -> list[MicroBatch]:
        return pack_microbatches(
            sequences,
            depths,
            self.config,
            self.folder.shape,
            self.device,
            sequence_parallel=self.transformer.sequence_parallel,
            microbatches=microbatches,
        )

    def _run(self, micros: list[MicroBatch], loss: MicroBatchLoss, *, forward_only: bool) -> Sums:
        with self.resident():
            return run_passes(self.model, micros, loss, tokens=self.config.tokens_per_microbatch, forward_only=forward_only)

    # ------------------------------------------------------------------------------------------------------- weights

    def export(self, sections: Collection[str] = ("target", "draft"), *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors, in the engine's precision. Every rank must iterate to the end.

        sections: the trunk (`target`), the MTP layers (`draft`) or both. Adapters are merged into the trunk unless `merged` is False.
        """
        with self.resident():
            yield from self.bridge.export([self.module], sections=sections, merged=merged)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield PEFT's names and full tensors of the adapters. Every rank must iterate to the end.

        Raises UserError if PEFT has no names for a target.
        """
        assert self.config.lora is not None, "there is no adapter"
        with self.resident():
            yield from export_adapter(self.bridge, [self.module], self.config.lora)

    def load(self, path: Path) -> None:
        """Load weights from another folder of the same model. Adapters are kept and apply to the new base weights."""
        with self.resident():
            self.bridge.load([self.module], path)
            if self.config.lora is not None:
                self._set_base_fingerprint(path)
            if self.optimizer is not None:
                self.optimizer.reload()

    def save(self, path: Path, state: dict[str, object] | None = None) -> None:
        """Atomically write a checkpoint of the model, the optimizer if one is set, and `state`, which must be JSON-serializable.

        With adapters the checkpoint has only trained parameters (adapters and MTP layers), and a fingerprint of the base weights.
        """
        self.begin_save(path, state).finish()

    def begin_save(self, path: Path, state: dict[str, object] | None = None, *, concurrent: bool = False) -> sharded.Save:
        """Start writing a checkpoint. All ranks must call `finish` on the result. concurrent: training continues in the meantime."""
        with self.resident():
            # Offloaded parameters leave the device when this block ends, so they must be copied even if training waits.
            return sharded.Save(path, self._checkpoint_contents(), state or {}, concurrent=concurrent or self.host_memory is not None)

    def restore(self, path: Path) -> dict[str, object]:
        """Load a checkpoint of any parallel layout. Returns the `state` it was saved with.

        If an optimizer is set, its state is restored, but its learning rates and clips are kept. Raises UserError if the checkpoint is
        incomplete, of another model, or has adapters for other base weights.
        """
        with self.resident():
            saved = sharded.restore(path, self._checkpoint_contents())
        if self.optimizer is not None:
            self.optimizer.set_steps(saved["steps"])
        return saved["state"]

    def _checkpoint_contents(self) -> sharded.Contents:
        lora = self.config.lora
        optimizer_slots, steps = (self.optimizer.slots(), self.optimizer.steps) if self.optimizer else (None, 0)
        adapter: sharded.AdapterRecord | None = None
        if lora is not None:
            adapter = {"base": self.base_fingerprint, "rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
        return sharded.Contents(self.module, optimizer_slots, steps, self.trained_names, adapter)

    def close(self) -> None:
        """Destroy the process groups. The engine cannot be used afterwards."""
        self.groups.close()


def freeze_trunk(model: MtpModel) -> None:
    """Exclude all parameters but those of the MTP layers from training."""
    for name, parameter in model.named_parameters():
        if not name.startswith("mtp."):
            parameter.requires_grad_(False)


def _assigned_sequences(sequences: list[Sequence], microbatches: Microbatches | None) -> list[Sequence]:
    """The sequences in `microbatches`; all sequences if None."""
    return sequences if microbatches is None else [sequences[i] for part in microbatches for i in part]
