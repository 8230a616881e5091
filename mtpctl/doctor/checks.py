"""The checks of `mtpctl doctor`. Each returns a finding: a sentence, and data for JSON."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mtpctl.checkpoint.finding import check_checkpoint, damaged_in, list_checkpoints
from mtpctl.checkpoint.listing import Damaged, read_listing
from mtpctl.cluster import leftovers
from mtpctl.cluster.links import Link, find_slow, measure_links
from mtpctl.cluster.local import cluster
from mtpctl.controller.resume import REFERENCE
from mtpctl.doctor import stack
from mtpctl.doctor.parts import Agreement, PartTimeout, run_part
from mtpctl.errors import MtpctlError, PrerequisiteMissing, ThresholdMissed, UserError
from mtpctl.families.configs import HUB_CONFIGS
from mtpctl.families.drafters import Support, check_support
from mtpctl.families.tensors import count_parameters
from mtpctl.recipe.model import ModelConfig, hf_config, read_config
from mtpctl.recipe.schema import ClusterConfig
from mtpctl.sandbox.sandbox import Sandbox, describe_layers
from mtpctl.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    from mtpctl.doctor.parts import Trial

LANES = 2
"""Number of checks that run concurrently."""

DEADLINE_S = {"kernels": 240.0, "transports": 120.0, "ray": 120.0, "families": 120.0, "sample": 300.0, "score": 300.0}
"""Deadlines of the parts. They allow for compilation of kernels and for a busy machine."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, as a sentence and as JSON-ready data.

    state: `absent` if something optional is missing; `loaded` if the check timed out because the machine is busy. error: set for `failed`
    and `loaded`.
    """

    state: Literal["ok", "absent", "skipped", "loaded", "failed"]
    summary: str
    data: object = None
    error: MtpctlError | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its finding and duration."""

    name: str
    finding: Finding
    seconds: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks in order, and the total duration. `failure`: the verdict if a check failed; `success`: if none did."""

    checks: list[Check]
    seconds: float
    failure: str = "not fit to run"
    success: str = "all well"

    @property
    def verdict(self) -> str:
        """The outcome of all checks, in a few words."""
        states = {check.finding.state for check in self.checks}
        if "failed" in states:
            return self.failure
        return "the machine is too loaded for a verdict" if "loaded" in states else self.success

    @property
    def error(self) -> MtpctlError | None:
        """The first error, with the names of the other checks that have one; None if there is none."""
        failed = {check.name: check.finding.error for check in self.checks if check.finding.error is not None}
        if len(failed) <= 1:
            return next(iter(failed.values()), None)
        (_, first), *others = failed.items()
        return type(first)(f"{first} (also failed: {', '.join(name for name, _ in others)})")

    def to_dict(self) -> dict[str, object]:
        """JSON-ready: the checks by name, the total duration, and the exit code."""
        checks = {
            check.name: {
                "state": check.finding.state,
                "finding": check.finding.summary,
                "data": check.finding.data,
                "error": None if check.finding.error is None else str(check.finding.error),
                "seconds": round(check.seconds, 3),
            }
            for check in self.checks
        }
        return {"checks": checks, "seconds": round(self.seconds, 3), "exit_code": 0 if self.error is None else self.error.exit_code}


Report = Callable[[Check], None]


def examine(*, quick: bool = False, on_check: Report = lambda check: None) -> Diagnosis:
    """Run all checks, even if some fail. Raises PrerequisiteMissing if the project is not installed.

    `quick`: skip the self-check. `on_check`: called with each check when it ends.
    """
    devices, no_gpu_reason = stack.gpus()
    requirements = stack.packages(stack.project_requirements(), "gpu" if devices else "cpu")
    with tempfile.TemporaryDirectory(prefix="mtpctl-doctor-") as scratch:
        folder = Path(scratch)
        # Two lanes, because a part spends most of its time importing packages on one core.
        lanes: list[dict[str, Callable[[], Awaitable[Finding]]]] = [
            {
                "python": python,
                "machine": machine,
                "gpus": lambda: gpus(devices, no_gpu_reason),
                "packages": lambda: packages(requirements),
                "kernels": lambda: kernels(folder),
                "transports": lambda: transports(folder),
                "ray": lambda: ray(folder),
                "sandbox": sandbox,
                "families": lambda: families(folder, on_cpu=not devices),
            },
            {"self-check": lambda: self_check(folder, quick)},
        ]

        async def run_lanes() -> list[list[Check]]:
            return await asyncio.gather(*(_run_lane(lane, on_check) for lane in lanes))

        started_at = time.perf_counter()
        checks = asyncio.run(run_lanes())
        return Diagnosis([check for lane in checks for check in lane], time.perf_counter() - started_at)


async def _run_lane(lane: dict[str, Callable[[], Awaitable[Finding]]], on_check: Report) -> list[Check]:
    checks = []
    for name, check in lane.items():
        started_at = time.perf_counter()
        try:
            finding = await check()
        except MtpctlError as error:
            finding = _failure(error)
        checks.append(Check(name, finding, time.perf_counter() - started_at))
        on_check(checks[-1])
    return checks


def _failure(error: MtpctlError) -> Finding:
    """The finding of a failed check: `loaded` if it timed out on a busy machine."""
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    # Ray has a separate deadline for its processes, with another message.
    timed_out = isinstance(error, PartTimeout) or "timed out" in str(error)
    if not timed_out or load - LANES < cpus:
        return Finding("failed", str(error), error=error)
    summary = f"{error}; the machine is loaded ({load:.1f} processes want its {cpus} CPUs): run doctor again when it is less busy"
    return Finding("loaded", summary, error=type(error)(summary))


async def python() -> Finding:
    """Is this Python version supported?"""
    running = stack.python()
    if running.state == "other":
        raise PrerequisiteMissing(
            f"Python: {running.installed} is running, {running.specifier} is needed; create the environment with a supported version"
        )
    return Finding(
        "ok", f"{running.installed} ({running.specifier} is needed)", {"version": running.installed, "needed": running.specifier}
    )


async def machine() -> Finding:
    """How many CPUs and how much memory does the machine have, and which files did killed runs leave? Never fails."""
    host, leftover_folders = stack.machine(), leftovers.find()
    size = sum(folder.nbytes for folder in leftover_folders) / 2**30
    summary = (
        f"{host['cpus']} CPUs, {host['memory_gib']:g} GiB memory, {host['memory_available_gib']:g} of it free, "
        f"{host['shared_memory_free_gib']:g} GiB free in /dev/shm; {host['system']}, {host['arch']}; limits: "
        + ", ".join(f"{'unlimited' if value is None else value} {name}" for name, value in host["limits"].items())
        + "".join(f"; {name}={value}" for name, value in sorted(host["nccl"].items()))
    )
    if leftover_folders:
        summary += f"; killed runs left {len(leftover_folders)} folder(s), {size:.3g} GiB: the next start removes them, or mtpctl clean"
    return Finding(
        "ok", summary, {**host, "leftovers": [{"path": str(folder.path), "bytes": folder.nbytes} for folder in leftover_folders]}
    )


async def gpus(devices: list[stack.Gpu], reason: str) -> Finding:
    """Which GPUs does the machine have? `reason`: why there are none."""
    if not devices:
        return Finding("absent", f"none ({reason}): everything runs on the CPU", [])
    models = [(gpu["name"], gpu["memory_gib"]) for gpu in devices]
    summary = "; ".join(f"{models.count(model)} x {model[0]}, {model[1]:g} GiB each" for model in dict.fromkeys(models))
    return Finding("ok", f"{summary}; driver {devices[0]['driver']}", devices)


async def packages(requirements: list[stack.Package]) -> Finding:
    """Are all required packages installed, in the required versions?"""
    data = [asdict(package) | {"state": package.state} for package in requirements]
    unmet = [package for package in requirements if package.required and package.state != "ok"]
    if unmet:
        others = f" (also: {', '.join(package.name for package in unmet[1:])})" if unmet[1:] else ""
        return Finding("failed", "; ".join(package.fix for package in unmet), data, PrerequisiteMissing(unmet[0].fix + others))
    pinned = [f"{package.name} {package.installed}" for package in requirements if package.pinned and package.state == "ok"]
    optional = [package for package in requirements if not package.required]
    missing = sum(package.state != "ok" for package in optional)
    summary = [f"all {len(requirements) - missing} in the required versions, pinned: {', '.join(pinned)}"]
    for package in optional:
        purpose = stack.OPTIONAL.get(package.name, "speed only")
        states = {
            "ok": "installed",
            "missing": "not installed",
            "other": f"{package.installed} is installed, {package.specifier} is needed",
        }
        summary.append(f"optional: {package.name} {states[package.state]} (for {purpose})")
    return Finding("ok", "; ".join(summary), data)


async def kernels(folder: Path) -> Finding:
    """Which implementations of `linear_logprob` agree with the reference here? Fails if the one that `auto` selects does not."""
    result = await run_part("kernels", folder, DEADLINE_S["kernels"])
    text = f"{_summarize_trials(result['implementations'])}; auto runs {result['auto']}"
    if not any(row["live"] for row in result["implementations"] if row["name"] == result["auto"].split()[0]):
        error = ThresholdMissed(f"kernels: the implementation that auto runs here does not agree with the reference: {text}")
        return Finding("failed", text, result, error)
    return Finding("ok", text, result)


async def transports(folder: Path) -> Finding:
    """Which transports between trainer and engines work here?"""
    rows = (await run_part("transports", folder, DEADLINE_S["transports"]))["transports"]
    text = _summarize_trials(rows)
    if not any(row["live"] for row in rows):
        return Finding("failed", text, rows, PrerequisiteMissing(f"transports: none works here: {text}"))
    return Finding("ok", text, rows)


async def ray(folder: Path) -> Finding:
    """Does Ray start on this machine and run a task?"""
    result = await run_part("ray", folder, DEADLINE_S["ray"])
    return Finding("ok", f"{result['version']} starts here, and a task answers", result)


async def sandbox() -> Finding:
    """Which layers isolate code written by the model, which some rewards and environments run?"""
    try:
        with Sandbox() as box:
            available = await asyncio.to_thread(describe_layers, box)
            mechanism = box.mechanism()
    except PrerequisiteMissing as error:
        return Finding("absent", f"{error}; the reward code and the environment python refuse to start", [])
    summary = "; ".join([str(mechanism), *(f"{layer.name}: {layer.by}" for layer in available)])
    return Finding("ok", summary, [asdict(layer) for layer in available])


async def families(folder: Path, *, on_cpu: bool) -> Finding:
    """Which model families can vLLM serve here?"""
    if find_spec("vllm") is None:
        return Finding("skipped", "vLLM is not installed")
    rows = (await run_part("families", folder, DEADLINE_S["families"]))["families"]
    failed = [row for row in rows if not row["live"]]
    text = f"vLLM serves {', '.join(row['name'] for row in rows if row['live']) or 'none'}"
    if failed:
        missing = next((row["lacks"] for row in failed if row["lacks"]), None)
        fix = f"install {missing} in the release that pyproject.toml names" if missing else "reinstall the project"
        names = ", ".join(row["name"] for row in failed)
        return Finding("failed", text, rows, PrerequisiteMissing(f"families: vLLM cannot serve {names} here: {failed[0]['reason']}; {fix}"))
    return Finding("ok", text + ("; on a CPU, linear attention runs in bf16 only" if on_cpu else ""), rows)


async def self_check(folder: Path, quick: bool) -> Finding:
    """Do vLLM and Megatron compute the same log-probs for the same tokens?"""
    if quick:
        return Finding("skipped", "skipped by --quick: vLLM's log-probs were not compared with the trainer's")
    if find_spec("vllm") is None:
        return Finding("skipped", "vLLM is not installed")
    sampled = await run_part("sample", folder, DEADLINE_S["sample"])
    agreement = Agreement(**await run_part("score", folder, DEADLINE_S["score"]))
    summary = (
        f"{agreement.tokens:,} tokens of {agreement.responses} responses, sampled at T={agreement.temperature:g} with speculation: the "
        f"log-probs of vLLM and of the trainer differ by {agreement.mean_abs:.1e} on average, {agreement.max_abs:.1e} at most (bound "
        f"{agreement.bound:g} for the average, {agreement.precision}); {agreement.accepted:,} of {agreement.drafted:,} drafts accepted"
    )
    data = asdict(agreement) | {"tokens_per_s": sampled["tokens"] / sampled["seconds"]}
    try:
        agreement.check()
    except ThresholdMissed as error:
        return Finding("failed", summary, data, error)
    return Finding("ok", summary, data)


def _summarize_trials(rows: list[Trial]) -> str:
    live = [row["name"] for row in rows if row["live"]]
    return "; ".join([f"{', '.join(live) or 'none'} live", *(f"{row['name']} {row['reason']}" for row in rows if not row["live"])])


def examine_cluster(address: str) -> Diagnosis:
    """Measure the network between all pairs of hosts of the cluster at `address`. Raises PrerequisiteMissing if there is no cluster."""
    started_at = time.perf_counter()
    with cluster(ClusterConfig(address=address), cpus=0, gpus=0, remove_leftovers=False):
        all_links = asyncio.run(measure_links())
    seconds = time.perf_counter() - started_at
    return Diagnosis([Check("links", links(all_links), seconds)], seconds)


def links(all_links: list[Link]) -> Finding:
    """Which links between hosts are slow or dead?"""
    data = [asdict(link) for link in all_links]
    if not all_links:
        return Finding("absent", "the cluster has one host", data)
    rates = sorted(link.rate for link in all_links if not link.error)
    overview = f"{len(all_links)} pairs of hosts" + (f", {rates[len(rates) // 2] / 1e9:.2f} GB/s in the median" if rates else "")
    slow_links = find_slow(all_links)
    if not slow_links:
        return Finding("ok", overview, data)
    summary = f"{overview}; slow: {'; '.join(map(str, slow_links))}"
    kind = PrerequisiteMissing if any(link.error for link in slow_links) else ThresholdMissed
    return Finding("failed", summary, data, kind(f"links: {summary}; check their cables and routes, or set cluster.interface"))


def examine_run(run: Path) -> Diagnosis:
    """Compare the checkpoints of a run, newest first, and the reference policy of its RL with their checksums.

    Raises UserError if `run` is not a run directory.
    """
    directory, started_at = RunDirectory(run), time.perf_counter()
    if not directory.recipe.is_file():
        raise UserError(f"{run}: is not a run directory; name one that has {directory.recipe.name}")
    checks = [_verify(path) for path in list_checkpoints(directory.checkpoints)]
    if (reference := directory.path / REFERENCE).is_dir():
        checks.append(_verify(reference))
    renamed = "is damaged, and was renamed by an earlier start: no run resumes from it"
    checks += [Check(path.name, Finding("absent", renamed), 0.0) for path in damaged_in(directory.checkpoints)]
    if not checks:
        checks = [Check("checkpoints", Finding("absent", "the run has none yet"), 0.0)]
    return Diagnosis(checks, time.perf_counter() - started_at, failure="damaged")


def _verify(path: Path) -> Check:
    started_at = time.perf_counter()
    try:
        check_checkpoint(path, verify_checksums=True)
        listing = read_listing(path)
        assert listing is not None
    except Damaged as damage:
        error = ThresholdMissed(f"{path}/{damage}; restore it, or resume: the run uses its newest undamaged checkpoint, and keeps this one")
        finding = Finding("failed", str(damage), {"file": damage.file, "damage": damage.damage}, error)
    else:
        size = f"{listing.nbytes / (1 << 30):,.2f} GiB" if listing.nbytes >= 1 << 30 else f"{listing.nbytes / (1 << 20):,.1f} MiB"
        data = {"files": len(listing.files), "bytes": listing.nbytes}
        finding = Finding("ok", f"{len(listing.files)} files, {size}, match their checksums", data)
    return Check(path.name, finding, time.perf_counter() - started_at)


NO_SGLANG_DRAFTER = "does not draft: EAGLE-3 and DFlash drafters cannot be synced to it"


def examine_model(name: str) -> Diagnosis:
    """Check a model by its config. Raises UserError if it is not supported.

    name: a Hugging Face folder, a config.json, a hub id, or the last part of a hub id that mtpctl knows, such as GLM-4.5-Air.
    """
    started_at = time.perf_counter()
    findings = _findings(check_support(_config(name)))
    seconds = time.perf_counter() - started_at
    return Diagnosis([Check(check, finding, seconds) for check, finding in findings.items()], seconds, success="supported")


def _config(name: str) -> dict[str, object]:
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return read_config(path.parent, "--model", path.name)
    hub_ids = {hub_id.rpartition("/")[2].lower(): hub_id for hub_id in HUB_CONFIGS}
    config = hf_config(ModelConfig(path=name if path.is_dir() else hub_ids.get(name.lower(), name)), field="--model")
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
        "SGLang": Finding(state, f"drafts with {drafting.sglang}") if drafting.sglang else Finding("absent", NO_SGLANG_DRAFTER),
    }
    if support.cpu_limits:
        findings["vLLM on a CPU"] = Finding("absent", "; ".join(support.cpu_limits), list(support.cpu_limits))
    return findings
