"""Engines that receive weights over NCCL or IPC: on GPUs if there are any, otherwise on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.vllm.settings import VllmSettings, build_engine_settings
from tests.fakes.engine_checkpoints import Tensors, random_tensors, tiny_config

GPUS = torch.cuda.device_count()


DEVICE = "cuda" if GPUS else "cpu"


DTYPE = torch.bfloat16 if GPUS else torch.float32


CONFIG = tiny_config(vocab_size=256, torch_dtype=str(DTYPE).removeprefix("torch."))


KV_BYTES = 1 << 30 if GPUS else 64 << 20


def weights(seed: int) -> Tensors:
    return {name: tensor.to(DTYPE) for name, tensor in random_tensors(CONFIG, seed).items()}


BASE = weights(0)


def settings(folder: Path, *, tp: int = 1, **options: Any) -> VllmSettings:
    config = VllmConfig(
        max_in_flight=16,
        context=256,
        threads=0 if GPUS else 1,
        kv_cache_bytes=KV_BYTES,
        eager=True,
        gpu_memory=0.2,
        tp=tp,
        speculation=SpeculationConfig(num_tokens=1),
    )
    return build_engine_settings(config, model=str(folder), precision="bf16" if GPUS else "fp32", device=DEVICE, **options)  # type: ignore[arg-type]
