"""`mtpctl bench update`, and the checks of options that it shares with `bench train-step`."""

from __future__ import annotations

from typing import Annotated

import typer

from mtpctl.cli.options import Json, answer

_PARTS = ("params", "optimizer", "grads")
_RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("fp32", "bf16")


def check_step(precision: str, tokens: int, samples: int, recompute: str) -> None:
    """Raise UserError for options of an update that do not fit together."""
    from mtpctl.errors import UserError

    if precision not in PRECISIONS:
        raise UserError(f"--precision: {precision} is none of {', '.join(PRECISIONS)}")
    if recompute not in _RECOMPUTE:
        raise UserError(f"--recompute: {recompute} is none of {', '.join(_RECOMPUTE)}")
    if tokens < 4 * samples:
        raise UserError(f"--samples: {tokens} tokens are too few for {samples} samples of prompt and response; at most {tokens // 4} fit")


def measured_config(model: str) -> dict[str, object]:
    """The config of the model that a bench measures, by default MiMo-7B's; on a CPU Megatron is made to run there first.

    Raises UserError for an unknown model, and for none on a CPU.
    """
    from mtpctl.compat import cpu_device
    from mtpctl.errors import UserError
    from mtpctl.recipe.model import ModelConfig, hf_config

    cpu = cpu_device.install()
    config = hf_config(ModelConfig(path=model or "XiaomiMiMo/MiMo-7B-RL"), fetch=False)
    if config is None:
        raise UserError(f"--model: {model} is neither a folder with config.json nor a hub id whose sizes are known")
    if cpu and not model:
        raise UserError("--model: the default shape has 7.8 billion parameters and this machine no card; name a small model's folder")
    return config


def update(
    model: Annotated[str, typer.Option("--model", help="Folder, or hub id whose sizes are known; its weights are not read.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Packed tokens of the update.")] = 8192,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples of equal length that fill them.")] = 8,
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16.")] = "bf16",
    lora: Annotated[int, typer.Option("--lora", min=0, help="Rank of the adapter that is trained; 0: all weights.")] = 0,
    offload: Annotated[str, typer.Option("--offload", help="What is kept in host memory, by commas: params, optimizer, grads.")] = "",
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    workspace_gib: Annotated[float, typer.Option("--workspace-gib", min=0.01, help="kernels.workspace_bytes.")] = 1.0,
    json: Json = False,
) -> None:
    """Whole updates with MTP on one device, weights random: time and memory, with an adapter or with offloading."""
    check_step(precision, tokens, samples, recompute)
    import tempfile
    from pathlib import Path

    from mtpctl.errors import UserError
    from mtpctl.recipe.train import LoraConfig, OffloadConfig

    parts = [part for part in offload.split(",") if part]
    if unknown := [part for part in parts if part not in _PARTS]:
        raise UserError(f"--offload: {unknown[0]} is none of {', '.join(_PARTS)}")
    config = measured_config(model)
    from mtpctl.bench import document, train_step
    from mtpctl.bench import update as bench
    from mtpctl.bench.machine import machine

    with tempfile.TemporaryDirectory() as scratch:
        result = bench.measure(
            train_step.shape_folder(config, Path(scratch)),
            tokens=tokens,
            count=samples,
            precision=precision,
            lora=LoraConfig(rank=lora, alpha=2.0 * lora) if lora else None,
            offload=OffloadConfig(params="params" in parts, optimizer="optimizer" in parts, grads="grads" in parts),
            workspace_bytes=int(workspace_gib * (1 << 30)),
            recompute=recompute,
        )
    options = {
        "model": model,
        "tokens": tokens,
        "samples": samples,
        "precision": precision,
        "lora": lora,
        "offload": parts,
        "recompute": recompute,
        "workspace_gib": workspace_gib,
    }
    answer(document.answer(bench.as_json(result, machine(), options), bench.table(result), as_json=json))
