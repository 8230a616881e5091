"""`mtpctl doctor --model`: reports whether a model can be trained and served, and what each engine drafts with. Reads only its config."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from mtpctl.doctor.checks import Check, Diagnosis, Finding
from mtpctl.families.configs import HUB_CONFIGS
from mtpctl.families.support import Support, support_of
from mtpctl.families.tensors import count_parameters
from mtpctl.recipe.model import ModelConfig, hf_config, read_config

NOT_SYNCED = "does not draft: EAGLE-3 and DFlash drafters cannot be synced to it"


def examine_model(name: str) -> Diagnosis:
    """Check a model by its config.

    Args:
        name: a Hugging Face folder, a config.json, a hub id, or the last part of a hub id that mtpctl knows, such as GLM-4.5-Air.

    Raises:
        UserError: if the model is not supported.
    """
    began = time.perf_counter()
    findings = _findings(support_of(_config(name)))
    seconds = time.perf_counter() - began
    return Diagnosis([Check(check, finding, seconds) for check, finding in findings.items()], seconds, success="supported")


def _config(name: str) -> dict[str, object]:
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return read_config(path.parent, "--model", path.name)
    known = {hub_id.rpartition("/")[2].lower(): hub_id for hub_id in HUB_CONFIGS}
    config = hf_config(ModelConfig(path=name if path.is_dir() else known.get(name.lower(), name)), field="--model")
    assert config is not None
    return config


def _findings(support: Support) -> dict[str, Finding]:
    shape, drafting = support.shape, support.drafting
    counts = count_parameters(shape)
    model = f"{shape.architecture} ({shape.family}), {counts['total'] / 1e9:.2f} B parameters, {shape.max_positions} positions"
    state: Literal["ok", "absent"] = "ok" if shape.mtp_layers else "absent"
    findings = {
        "model": Finding("ok", model, {"family": shape.family, "architecture": shape.architecture, "parameters": counts}),
        "drafter": Finding(state, drafting.drafter, {"mtp_layers": shape.mtp_layers}),
        "vLLM": Finding(state, f"drafts with {drafting.vllm}"),
        "SGLang": Finding(state, f"drafts with {drafting.sglang}") if drafting.sglang else Finding("absent", NOT_SYNCED),
    }
    if support.cpu_limits:
        findings["vLLM on a CPU"] = Finding("absent", "; ".join(support.cpu_limits), list(support.cpu_limits))
    return findings
