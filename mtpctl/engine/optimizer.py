"""The optimizer: megatron-core's Adam, with the MTP head's gradients measured and clipped on their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

from mtpctl.compat import cpu_device
from mtpctl.recipe.schema import OptimizerConfig


@dataclass
class StepResult:
    """One optimizer step. Norms are before clipping; a step with a norm that is not finite is skipped."""

    applied: bool
    grad_norm: float
    mtp_grad_norm: float
    lr: float


class Optimizer:
    """Adam over a model's parameters in two groups, the trunk's and the MTP head's, each with its own clip and rate."""

    def __init__(self, model: DistributedDataParallel, config: OptimizerConfig, *, mtp_clip: float, bf16: bool, distributed: bool) -> None:
        self.config, self.mtp_clip = config, mtp_clip
        self.steps = 0
        for name, parameter in model.named_parameters():
            if ".mtp." in name:
                parameter.grad_norm_group = "mtp"  # type: ignore[attr-defined]
        overrides: dict[ParamKey, Any] = {}
        if config.mtp_lr is not None:
            overrides[ParamKey(name="*.mtp.*")] = {"max_lr": config.mtp_lr, "min_lr": config.mtp_lr * config.min_lr_ratio}
        with cpu_device.cuda_type_names():
            self.inner = get_megatron_optimizer(
                MegatronOptimizerConfig(
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
                ),
                [model],
                config_overrides=overrides or None,
            )

    def rate(self, total_steps: int) -> float:
        """Share of the peak learning rate at the current step: linear warm-up, then a cosine to `min_lr_ratio`."""
        c = self.config
        if self.steps < c.warmup_steps:
            return (self.steps + 1) / c.warmup_steps
        progress = min(1.0, (self.steps - c.warmup_steps) / max(1, total_steps - c.warmup_steps))
        return c.min_lr_ratio + (1 - c.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    def step(self, total_steps: int) -> StepResult:
        """Clip and apply the gradients that a backward pass left. Not finite: nothing is applied."""
        share = self.rate(total_steps)
        for group in self.inner.param_groups:
            group["lr"] = group.get("max_lr", self.config.lr) * share
        overflow = self.inner.prepare_grads()
        norms = {name: self._norm(name) for name in (None, "mtp")}
        finite = not overflow and all(math.isfinite(norm) for norm in norms.values())
        if finite:
            for name, clip in ((None, self.config.clip_grad), ("mtp", self.mtp_clip)):
                if clip and norms[name] > clip:
                    grads = [p.grad for p in self.inner.get_parameters() if getattr(p, "grad_norm_group", None) == name]
                    torch._foreach_mul_([g for g in grads if g is not None], clip / norms[name])
            self.inner.step_with_ready_grads()
            self.steps += 1
        return StepResult(finite, norms[None], norms["mtp"], self.config.lr * share)

    def _norm(self, group: str | None) -> float:
        squares = 0.0
        for part in self.inner.chained_optimizers:  # experts are a part of their own, on ranks of their own
            if not part.is_stub_optimizer:
                grads = part.get_grads_for_grad_norm(group)
                squares += float(get_grad_norm_fp32(grads, grad_stats_parallel_group=part.get_grad_stats_parallel_group())) ** 2
        return squares**0.5
