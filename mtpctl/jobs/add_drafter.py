"""The job of `mtpctl add-drafter`: adds a drafter to a model and trains only the drafter, in a run with the stage `draft`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mtpctl.checkpoint.finding import find_complete_checkpoint
from mtpctl.errors import MtpctlError, RuntimeFailure, UserError
from mtpctl.families.drafters import DrafterKind, add_drafter_config
from mtpctl.families.reading import DRAFTER, shape_of
from mtpctl.recipe.checks import validate
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.model import ModelConfig, MtpLoss, engine_method, has_drafter, read_config
from mtpctl.telemetry.run_directory import RunDirectory

Report = Callable[[str], None]

CONTEXT = 1024
"""Default of `rollout.context`, limited by the model's positions. `rollout.max_tokens` is half of it."""


@dataclass(frozen=True)
class DrafterOptions:
    """The options of `mtpctl add-drafter`.

    Attributes:
        data: rows with prompts, and with responses if `samples` is 0. Not needed if `steps` is 0.
        samples: number of responses that the model generates to train on.
        drafts: draft tokens per step that the drafter is trained for.
        sets: further keys of the run's recipe, as KEY=VALUE.
    """

    kind: DrafterKind | None = None
    layers: int = 1
    data: Path | None = None
    samples: int = 16384
    steps: int = 1000
    drafts: int = 3
    loss: MtpLoss = "soft_ce"
    sets: Sequence[str] = ()


def add_drafter(source: Path, target: Path, options: DrafterOptions, *, plain: bool, report: Report) -> int:
    """Create `target`, the model in `source` with a drafter: trained, unless `options.steps` is 0. Returns the exit code of the run.

    The run directory is `target` with the suffix `.run`. The same call resumes an interrupted run. Raises UserError before anything starts
    if the model does not exist or has a drafter, or if the data, the target or an option is invalid.
    """
    config = _check_arguments(source, target)
    add_drafter_config(config, options.kind, options.layers)
    if not options.steps:
        from mtpctl.convert.drafter import add_drafter as create
        from mtpctl.convert.drafter import copy_with_drafter

        # The new drafter is created in a folder of links to the model's files; then both are copied.
        linked_folder = target.with_name(target.name + ".links")
        shutil.rmtree(linked_folder, ignore_errors=True)
        try:
            create(source, linked_folder, options.kind, options.layers)
            copy_with_drafter(source, linked_folder, target)
        finally:
            shutil.rmtree(linked_folder, ignore_errors=True)
        return 0
    if options.data is None:
        raise UserError("--data: is required for training; name a file with prompts, or set --steps 0 for an untrained drafter")
    run = target.with_name(target.name + ".run")
    recipe_file = target.with_name(target.name + ".yaml")
    try:
        recipe_file.parent.mkdir(parents=True, exist_ok=True)
        recipe_file.write_text(yaml.safe_dump(_build_recipe(source, run, options, shape_of(config).max_positions), sort_keys=False))
    except OSError as error:
        raise UserError(f"{recipe_file}: cannot be written ({error.strerror}); free space, or name another DST") from error
    try:
        loaded = load_recipe(recipe_file, sets=options.sets)
        validate(loaded.recipe)
        for note in loaded.notes:
            report(note)
        from mtpctl.controller.train import run as train

        if code := train(loaded.recipe, plain=plain):
            return code
    except MtpctlError:
        if not run.exists():  # rejected before the run began
            recipe_file.unlink()
        raise
    _export(source, run, target)
    shutil.rmtree(run / "checkpoints")
    report(f"samples and curves are in {run}, the settings in {recipe_file}")
    return 0


def _check_arguments(source: Path, target: Path) -> dict[str, object]:
    if not source.is_dir():
        raise UserError(f"SRC: there is no folder {source}; name a Hugging Face folder")
    if target.exists():
        raise UserError(f"DST: {target} exists; name another folder")
    if target.resolve().is_relative_to(source.resolve()):
        raise UserError(f"DST: {target} is inside SRC; name a folder outside of it")
    config = read_config(source, "SRC")
    if has_drafter(ModelConfig(path=str(source))):
        raise UserError(f"SRC: {source} has a drafter already; train it with mtpctl train")
    return config


def _build_recipe(source: Path, run: Path, options: DrafterOptions, positions: int) -> dict[str, Any]:
    assert options.data is not None
    context = min(CONTEXT, positions)
    rollout: dict[str, Any] = {"engine": "vllm", "gpus": 0.5, "context": context, "max_tokens": context // 2, "max_in_flight": 256}
    rollout["speculation"] = {"num_tokens": 0}
    return {
        "name": "add-drafter",
        "run_dir": str(run.absolute()),
        "model": {"path": str(source.absolute()), "drafter": {"kind": options.kind, "layers": options.layers}},
        "data": {
            "path": str(options.data.absolute()),
            "chat_template": _has_chat_template(source),
            "columns": {"answer": None} if options.samples else {},
        },
        "mtp": {
            "mode": "isolated",
            "loss": options.loss,
            "repeat": options.drafts if options.layers == 1 or options.kind == "dflash" else 1,
        },
        # Trainer and engine share a GPU.
        "train": {"stages": ["draft"], "gpus": 0.5, "draft": {"steps": options.steps, "samples": options.samples}},
        "rollout": rollout,
    }


def _has_chat_template(source: Path) -> bool:
    tokenizer = source / "tokenizer_config.json"
    return (source / "chat_template.jinja").is_file() or (
        tokenizer.is_file() and '"chat_template"' in tokenizer.read_text(encoding="utf-8")
    )


def _export(source: Path, run: Path, target: Path) -> None:
    """Create `target`: a copy of the model's files with the trained drafter."""
    checkpoint = find_complete_checkpoint(RunDirectory(run).checkpoints, verify_checksums=True).path
    assert checkpoint is not None, "a run that has ended has a checkpoint"
    converted = run / "trained"
    # In a subprocess, because the conversion hides the GPUs from its process.
    command = [sys.executable, "-m", "mtpctl", "convert-hf", str(checkpoint), str(converted), "--force"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise RuntimeFailure(f"{checkpoint}: the conversion of the trained drafter failed; convert this checkpoint with mtpctl convert-hf")
    from mtpctl.convert.drafter import copy_with_drafter

    copy_with_drafter(source, converted, target)
    shutil.rmtree(converted)


def engine_commands(target: Path, drafts: int) -> list[str]:
    """The commands that serve `target` with its drafter: in vLLM and, except for DFlash, in SGLang."""
    drafter, method = target / DRAFTER, engine_method(target)
    model_option = "" if method == "mtp" else f', "model": "{drafter}"'
    vllm = (
        f"vllm serve {target} --speculative-config "
        f'\'{{"method": "{method}"{model_option}, "num_speculative_tokens": {drafts}, "draft_sample_method": "probabilistic"}}\''
    )
    if method == "dflash":
        return [vllm]
    algorithm = "NEXTN" if method == "mtp" else f"EAGLE3 --speculative-draft-model-path {drafter}"
    steps = f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}"
    return [vllm, f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} {steps}"]
