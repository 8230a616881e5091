"""The optimizer: megatron-core's Adam with a separate gradient norm and clip for the MTP head, and its state for checkpoints.

megatron-core's optimizer checkpoints number parameter groups rank by rank, so they cannot be loaded with another pipeline layout. Here the
moments (and the fp32 master weights for bf16) are named after their parameter, and hyperparameters come from the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mtpctl.checkpoint.sharded import Slot
from mtpctl.compat import cpu_device
from mtpctl.plan.memory import OPTIMIZER_SLICE
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.trainer.offload import HostMemory, release


@dataclass
class StepResult:
    """Result of an optimizer step. Norms are before clipping. applied: False if the step was skipped, see `Optimizer.step`."""

    applied: bool
    grad_norm: float
    mtp_grad_norm: float
    lr: float


class Optimizer:
    """Adam for two groups of parameters, the trunk's and the MTP head's, each with its own clip and learning rate.

    Norms and biases have no weight decay. With `mtp_frozen` the MTP head's parameters have a learning rate of 0.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: OptimizerConfig,
        *,
        mtp_clip: float,
        bf16: bool,
        distributed: bool,
        offload: bool = False,
        mtp_frozen: bool = False,
    ) -> None:
        self.config, self.mtp_clip, self.model = config, mtp_clip, model
        self.steps = 0
        for name, parameter in model.named_parameters():
            if ".mtp." in name:
                parameter.grad_norm_group = "mtp"  # type: ignore[attr-defined]
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr * config.min_lr_ratio,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=0.0,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=distributed,
        )
        # Passing overrides replaces the standard ones (no decay of norms and biases), so these are included here.
        overrides: dict[ParamKey, dict[str, float]] = dict(get_standard_config_overrides(settings))
        mtp_lr = 0.0 if mtp_frozen else config.mtp_lr
        if mtp_lr is not None:
            overrides[ParamKey(name="*.mtp.*")] = {"max_lr": mtp_lr, "min_lr": mtp_lr * config.min_lr_ratio}
        with cpu_device.use_cuda_type_names():
            self.inner = get_megatron_optimizer(settings, [model], config_overrides=overrides)
        self.host_memory: HostMemory | None = None
        if offload:
            for sub_optimizer in self._sub_optimizers():
                init_moments(sub_optimizer.optimizer, offloaded=True)
            tensors = [tensor for slot in slots(model, self.inner) for tensor in slot.tensors.values()]
            self.host_memory = HostMemory(tensors)
            self.host_memory.offload(tensors)

    def _sub_optimizers(self) -> list[MegatronOptimizer]:
        return [sub_optimizer for sub_optimizer in self.inner.chained_optimizers if not sub_optimizer.is_stub_optimizer]

    def slots(self) -> list[Slot]:
        """The moments and master weight of each parameter; in host memory if they are offloaded."""
        result = list(slots(self.model, self.inner))
        if self.host_memory is not None:
            for slot in result:
                slot.tensors = {kind: self.host_memory.host_view(tensor) for kind, tensor in slot.tensors.items()}
        return result

    def reload(self) -> None:
        """Update the fp32 master weights after the model's parameters were loaded."""
        with self._resident_masters():
            self.inner.reload_model_params()

    @contextmanager
    def _resident_masters(self) -> Iterator[None]:
        """Load the fp32 master weights to the device. Adam updates these, or the model's parameters if they are fp32."""
        if self.host_memory is None:
            yield
            return
        masters = [slot.tensors["master"] for slot in slots(self.model, self.inner) if "master" in slot.tensors]
        self.host_memory.load(masters)
        yield
        self.host_memory.offload(masters)

    def lr_factor(self, total_steps: int) -> float:
        """Fraction of the peak learning rate at the current step: linear warm-up, then cosine decay to `min_lr_ratio`."""
        c = self.config
        if self.steps < c.warmup_steps:
            return (self.steps + 1) / c.warmup_steps
        progress = min(1.0, (self.steps - c.warmup_steps) / max(1, total_steps - c.warmup_steps))
        return c.min_lr_ratio + (1 - c.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    def step(self, total_steps: int, *, loss_is_finite: bool) -> StepResult:
        """Clip and apply the gradients of the last backward pass. If the loss or a norm is not finite, nothing is applied."""
        lr_factor = self.lr_factor(total_steps)
        for group in self.inner.param_groups:
            group["lr"] = group.get("max_lr", self.config.lr) * lr_factor
            # megatron-core applies this multiplier in its own scheduler, which is not used here.
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        overflow = self.inner.prepare_grads()
        norms = {name: self._grad_norm(name) for name in (None, "mtp")}  # None: the trunk, whose parameters have no `grad_norm_group`.
        applied = loss_is_finite and not overflow and all(math.isfinite(norm) for norm in norms.values())
        if applied:
            for name, clip in ((None, self.config.clip_grad), ("mtp", self.mtp_clip)):
                if clip and norms[name] > clip:
                    parameters = [p for p in self.inner.get_parameters() if getattr(p, "grad_norm_group", None) == name]
                    # A rank may have no gradients of a group: its pipeline stage has no MTP layers, or its shard has other parameters.
                    if grads := [p.grad for p in parameters if p.grad is not None]:
                        torch._foreach_mul_(grads, clip / norms[name])
            self._apply()
            self.steps += 1
        return StepResult(applied, norms[None], norms["mtp"], self.config.lr * lr_factor)

    def set_steps(self, steps: int) -> None:
        """Continue after this number of steps."""
        self.steps = steps
        for sub_optimizer in self._sub_optimizers():
            for state in sub_optimizer.optimizer.state.values():
                state["step"].fill_(steps)

    def _apply(self) -> None:
        """Run Adam on a slice of the parameters at a time, which bounds temporaries and the moments loaded to the device."""
        sub_optimizers = self._sub_optimizers()
        groups = [sub_optimizer.optimizer.param_groups for sub_optimizer in sub_optimizers]
        with self._resident_masters():
            for sub_optimizer, param_groups in zip(sub_optimizers, groups, strict=True):
                adam = sub_optimizer.optimizer
                for group in param_groups:
                    for parameters in _slices(group["params"]):
                        moments = [adam.state[p][kind] for p in parameters for kind in MOMENTS if p in adam.state]
                        if self.host_memory is not None:
                            self.host_memory.load(moments)
                        adam.param_groups = [{**group, "params": parameters}]
                        adam.step()
                        if self.host_memory is not None:
                            self.host_memory.offload(moments)
                adam.param_groups = []
            # Adam's groups are empty now, so this only copies master weights to parameters and gathers sharded parameters.
            self.inner.step_with_ready_grads()
            for sub_optimizer, param_groups in zip(sub_optimizers, groups, strict=True):
                sub_optimizer.optimizer.param_groups = param_groups

    def _grad_norm(self, group: str | None) -> float:
        squares = 0.0
        for sub_optimizer in self._sub_optimizers():  # Experts have a separate optimizer, sharded over other ranks.
            grads = sub_optimizer.get_grads_for_grad_norm(group)
            squares += float(get_grad_norm_fp32(grads, grad_stats_parallel_group=sub_optimizer.get_grad_stats_parallel_group())) ** 2
        return squares**0.5


def _slices(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split the parameters into consecutive slices of at most `OPTIMIZER_SLICE` bytes; a larger parameter is a slice by itself."""
    current: list[Tensor] = []
    for parameter in parameters:
        if current and sum(p.nbytes for p in current) + parameter.nbytes > OPTIMIZER_SLICE:
            yield current
            current = []
        current.append(parameter)
    if current:
        yield current


MOMENTS = ("exp_avg", "exp_avg_sq")


def slots(model: torch.nn.Module, optimizer: ChainedOptimizer) -> Iterator[Slot]:
    """The slot of every parameter of `model` that the optimizer updates, in the same order on all ranks of a dp group."""
    parameter_of: dict[int, Tensor] = {id(getattr(p, "main_param", p)): p for p in model.parameters()}
    for sub_optimizer in optimizer.chained_optimizers:
        if sub_optimizer.is_stub_optimizer:
            continue
        init_moments(sub_optimizer.optimizer)
        yield from (
            _sharded_slots(sub_optimizer)
            if isinstance(sub_optimizer, DistributedOptimizer)
            else _unsharded_slots(sub_optimizer, parameter_of)
        )


def init_moments(adam: torch.optim.Optimizer, *, offloaded: bool = False) -> None:
    """Create zero moments, as Adam does in its first step, unless they exist. offloaded: free their device memory."""
    assert isinstance(adam, torch.optim.Adam), f"{type(adam).__name__} is not supported"
    for group in adam.param_groups:
        for parameter in group["params"]:
            state: dict[str, Tensor] = adam.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                for kind in MOMENTS:
                    state[kind] = torch.zeros_like(parameter)
                    if offloaded:
                        release([state[kind]])


def _slot_kinds(parameter: Tensor) -> tuple[str, ...]:
    return MOMENTS if parameter.dtype == torch.float32 else (*MOMENTS, "master")


def _unsharded_slots(sub_optimizer: MegatronOptimizer, parameter_of: dict[int, Tensor]) -> Iterator[Slot]:
    for master in [p for group in sub_optimizer.optimizer.param_groups for p in group["params"]]:
        parameter = parameter_of[id(master)]
        state = sub_optimizer.optimizer.state[master]
        kinds = _slot_kinds(parameter)
        yield Slot(parameter, {kind: master.detach() if kind == "master" else state[kind] for kind in kinds}, kinds)


def _sharded_slots(sub_optimizer: DistributedOptimizer) -> Iterator[Slot]:
    buckets = [bucket for by_dtype in sub_optimizer.gbuf_ranges for group in by_dtype.values() for bucket in group]
    ranges = {parameter: entry["param"] for bucket in buckets for parameter, entry in bucket["param_map"].items()}
    for buffer in sub_optimizer.buffers:
        for parameter in buffer.params:
            kinds = _slot_kinds(parameter)
            shard = ranges.get(parameter)
            if shard is None:
                yield Slot(parameter, {}, kinds, group=sub_optimizer.data_parallel_group)
                continue
            state = sub_optimizer._get_main_param_and_optimizer_states(parameter)
            tensors = {kind: state["param" if kind == "master" else kind].detach() for kind in kinds}
            yield Slot(parameter, tensors, kinds, shard.start, shard.end, sub_optimizer.data_parallel_group)
