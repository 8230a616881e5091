"""The Megatron engine of one rank: updates, log-probs, export.

One engine serves SFT, RL updates and log-prob recompute, with and without MTP, on gloo and NCCL.
"""

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
from mtpctl.convert.adapters import export_adapter, fingerprint
from mtpctl.convert.bridge import WeightBridge
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.kernels.choice import ONE_PASS
from mtpctl.model import parallel as groups
from mtpctl.model.build import build_model, complete_config
from mtpctl.model.gpt import MtpModel
from mtpctl.model.lora import attach_adapters
from mtpctl.model.parallel import summed
from mtpctl.model.weights import draw_weights
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.routes import RouteShape
from mtpctl.trainer.batch import MicroBatch, Sequence, Totals, utilisation
from mtpctl.trainer.config import EngineConfig, ScoreOptions, TokenScores
from mtpctl.trainer.data_parallel import Balance, Gradients
from mtpctl.trainer.head import Head
from mtpctl.trainer.objective import Objective, Sums
from mtpctl.trainer.offload import HostMemory
from mtpctl.trainer.optimizer import Optimizer
from mtpctl.trainer.passes import MicroBatchLoss, Passes, micro_batches, passes_of, run_passes
from mtpctl.trainer.scoring import Scorer, recorded_routes, recording
from mtpctl.trainer.update_loss import UpdateLoss


class MegatronEngine:
    """A model on this rank, with what trains and scores it. All ranks call every method together, with the same arguments.

    Sequences alone may differ: a dp rank can be given its own, in the place of all.
    """

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
            moe=config.moe,
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
        self.trained_names = {name for name, p in model.named_parameters() if p.requires_grad} if config.lora else None
        self.depths = self.transformer.mtp_num_layers or 0
        self.can_train_mtp = config.train and config.mtp.trains and self.depths > 0
        self.trains_mtp = self.can_train_mtp
        self.optimizer: Optimizer | None = None
        self.model: MtpModel | DistributedDataParallel = model
        if config.train:
            self.gradients = Gradients(
                model,
                self.transformer,
                distributed_optimizer=config.distributed_optimizer,
                head_by_kernels=config.kernels.linear_logprob in ONE_PASS,
            )
            self.model = self.gradients.model
        self.host = HostMemory(self.module.parameters()) if config.offload.params else None
        self.balance = Balance(model, config.moe.bias_update)
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
        """Bring the parameters to the device. Where they are offloaded they go back to host memory when the outermost block ends."""
        self._users += 1
        if self.host is not None:
            self.host.load(self.module.parameters())
        try:
            yield
        finally:
            self._users -= 1
            if self.host is not None and not self._users:
                self.host.offload(self.module.parameters())

    @property
    def parameters(self) -> tuple[int, int]:
        """How many parameters this rank holds, and how many of them train."""
        sizes = [(p.numel(), p.requires_grad) for p in self.module.parameters()]
        return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)

    def _name_base(self, path: Path) -> None:
        seed = self.config.random_seed
        self.base = fingerprint(path) if seed is None else f"random weights of seed {seed}"

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Start with a fresh optimizer: one for SFT, one for RL. It holds no state for MTP layers that are not trained.

        A distributed optimizer is the exception: it needs every parameter that the gradient buffers were made for, so that frozen MTP
        layers are in it with a learning rate of 0.
        """
        assert self.config.train
        self.optimizer = None  # frees the last one's memory before the next one is allocated
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
        self,
        sequences: list[Sequence],
        objective: Objective,
        *,
        temperature: float = 1.0,
        total_steps: int = 1,
        passes: Passes | None = None,
    ) -> dict[str, float]:
        """One optimizer step on these sequences. Returns metrics, means over what they count.

        `passes`: micro-batches, where the sequences are this dp rank's own; without, every rank gives all of them. Every dp rank gives as
        many, and sequences that are in none of them are not trained on.

        `skipped` is 1 where loss or gradients were not finite: then nothing was applied, and metrics that are not finite are left out.
        """
        assert self.optimizer is not None, "set_optimizer comes first"
        began = time.perf_counter()
        self.optimizer.inner.zero_grad()
        with self.resident():
            with record_function("mtpctl/forward and backward"):
                metrics = self.forward_backward(sequences, objective, temperature=temperature, passes=passes)
            with record_function("mtpctl/optimizer"):
                result = self.optimizer.step(total_steps)
                metrics |= self.balance.finish(applied=result.applied)
        if self.config.offload.grads:
            self.optimizer.inner.zero_grad()
            self.gradients.release()
        metrics |= {"actor/grad_norm": result.grad_norm} | ({"mtp/grad_norm": result.mtp_grad_norm} if self.trains_mtp else {})
        if not result.applied:
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        # Copies of offloaded state still run. Their time belongs to this update and not to the weight sync, during which engines wait.
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        metrics |= {"actor/lr": result.lr, "skipped": float(not result.applied), "timing_s/update": seconds}
        if (share := self._utilisation(_in(sequences, passes), seconds, self.depths if self.trains_mtp else 0)) is not None:
            metrics["perf/mfu"] = share if passes is None else summed([share])[0]
        return metrics

    def _utilisation(self, sequences: list[Sequence], seconds: float, depths: int) -> float | None:
        """`perf/mfu` of an update; None unless it trains all weights in bf16."""
        if self.config.lora or self.config.precision != "bf16":
            return None
        return utilisation(
            self.folder.shape,
            sequences,
            depths,
            isolated=self.config.mtp.mode == "isolated",
            seconds=seconds,
            card=torch.cuda.get_device_name() if self.device.type == "cuda" else self.device.type,
            cards=dist.get_world_size(),
        )

    def forward_backward(
        self,
        sequences: list[Sequence],
        objective: Objective,
        *,
        temperature: float = 1.0,
        passes: Passes | None = None,
    ) -> dict[str, float]:
        """Compute the gradients of policy and MTP losses into the gradient buffers. Returns metrics."""
        depths = self.depths if self.trains_mtp else 0
        totals = Totals.of(_in(sequences, passes), depths)
        if passes is not None:
            totals = totals.over_ranks()
        loss = UpdateLoss(self.head, self.config, objective, totals, temperature=temperature)
        micros = self._micro_batches(sequences, depths, passes)
        self.balance.begin(totals.tokens)
        if not self.model.training:  # going over thousands of experts takes its time
            self.model.train()
        self.gradients.clear()
        return loss.metrics(self._run(micros, loss, forward_only=False)) | {"perf/tokens": float(totals.tokens)}

    # ------------------------------------------------------------------------------------------------------- scoring

    @torch.no_grad()
    def score(
        self,
        sequences: list[Sequence],
        *,
        temperature: float = 1.0,
        options: list[ScoreOptions] | None = None,
        record: bool = False,
        own: bool = False,
    ) -> list[TokenScores]:
        """Log-probs and entropy of the response tokens, in the order of `sequences`; every rank gets all of them.

        `own`: the sequences are this dp rank's, and so is the answer; a rank without any calls nevertheless.

        Without `options` every response token is scored at `temperature`. With them, one for each sequence, they say at which
        temperature and what else is wanted, and tokens outside the mask get zeros. `record`: tell the routes that the pass took too.
        """
        if not sequences and not own:
            return []
        self.model.eval()
        scorer = Scorer(self.head, temperature, options)
        depths = self.depths if any(each.mtp for each in options or ()) else 0
        micros = self._micro_batches(sequences, depths, passes_of(sequences, self.config) if own else None)
        routes = RouteShape.of(self.folder.shape) if record else None
        if routes:
            micros = recording(micros)
        self._run(micros, scorer, forward_only=True)
        scores = scorer.gather(len(sequences), own=own)
        if routes:
            for each, found in zip(scores, recorded_routes(self.module, micros, routes, len(sequences), own=own), strict=True):
                each.routes = found
        return scores

    def _micro_batches(self, sequences: list[Sequence], depths: int, passes: Passes | None = None) -> list[MicroBatch]:
        return micro_batches(
            sequences,
            depths,
            self.config,
            self.folder.shape,
            self.device,
            sequence_parallel=self.transformer.sequence_parallel,
            passes=passes,
        )

    def _run(self, micros: list[MicroBatch], loss: MicroBatchLoss, *, forward_only: bool) -> Sums:
        with self.resident():
            return run_passes(self.model, micros, loss, tokens=self.config.tokens_per_microbatch, forward_only=forward_only)

    # ------------------------------------------------------------------------------------------------------- weights

    def export(self, sections: Collection[str] = ("target", "draft"), *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors, in the engine's precision. Every rank has to iterate to the end.

        `sections`: the trunk (`target`), the MTP layers (`draft`) or both. Adapters are merged into the trunk, or left out where
        `merged` is false.
        """
        with self.resident():
            yield from self.bridge.export([self.module], sections=sections, merged=merged)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield PEFT's names and full tensors of the adapters. Every rank has to iterate to the end.

        Raises UserError where PEFT has no names for a target.
        """
        assert self.config.lora is not None, "there is no adapter"
        with self.resident():
            yield from export_adapter(self.bridge, [self.module], self.config.lora)

    def load(self, path: Path) -> None:
        """Replace the weights by those of another folder of the same model. Adapters stay, and are then applied to the new base weights."""
        with self.resident():
            self.bridge.load([self.module], path)
            if self.config.lora is not None:
                self._name_base(path)
            if self.optimizer is not None:
                self.optimizer.reload()

    def save(self, path: Path, state: dict[str, object] | None = None) -> None:
        """Write a checkpoint of the model, the optimizer where one is set, and `state` (as JSON can hold it); whole or not at all.

        With adapters the checkpoint holds only what trains (adapters and MTP layers), and a fingerprint of the base weights.
        """
        self.begin_save(path, state).finish()

    def begin_save(self, path: Path, state: dict[str, object] | None = None, *, beside: bool = False) -> sharded.Save:
        """Start writing a checkpoint, which ends when all ranks call `finish` on the result. `beside`: training goes on until then."""
        with self.resident():
            # Offloaded parameters leave the device when this block ends, so they are written from a copy as well.
            return sharded.Save(path, self._contents(), state or {}, beside=beside or self.host is not None)

    def restore(self, path: Path) -> dict[str, object]:
        """Load a checkpoint, whatever parallel layout wrote it. Returns the `state` it was saved with.

        The optimizer is restored where one is set; its learning rates and clips stay those it was set with. Raises
        UserError where the checkpoint is not whole, is of another model, or has adapters for other weights than these.
        """
        with self.resident():
            record = sharded.restore(path, self._contents())
        if self.optimizer is not None:
            self.optimizer.set_steps(record["steps"])
        return record["state"]

    def _contents(self) -> sharded.Contents:
        lora = self.config.lora
        slots, steps = (self.optimizer.slots(), self.optimizer.steps) if self.optimizer else (None, 0)
        adapter: sharded.AdapterRecord | None = None
        if lora is not None:
            adapter = {"base": self.base, "rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
        return sharded.Contents(self.module, slots, steps, self.trained_names, adapter)

    def close(self) -> None:
        """Leave the process groups."""
        groups.stop()


def _in(sequences: list[Sequence], passes: Passes | None) -> list[Sequence]:
    """The sequences that are in a micro-batch: all where the ranks share them out."""
    return sequences if passes is None else [sequences[i] for part in passes for i in part]
