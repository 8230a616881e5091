"""Run all checks of the doctor. Each has a finding in a sentence, its data, and the seconds it took."""

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

from mtpctl.bench.doctor import stack
from mtpctl.bench.doctor.part import NoAnswer, run_part
from mtpctl.bench.doctor.self_check import Agreement
from mtpctl.cluster import leftovers
from mtpctl.cluster.links import Link, slow, try_links
from mtpctl.cluster.local import cluster
from mtpctl.errors import EnvironmentMissing, MtpctlError, ThresholdMissed
from mtpctl.recipe.cluster import ClusterConfig
from mtpctl.sandbox.layers import layers
from mtpctl.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from mtpctl.bench.doctor.live import Trial

LANES = 2
"""Checks that run at a time."""

DEADLINE_S = {"kernels": 240.0, "transports": 120.0, "ray": 120.0, "families": 120.0, "sample": 300.0, "score": 300.0}
"""Seconds that each part has; kernels may have to compile, and the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, in a sentence and as JSON-ready data.

    `absent`: something optional is not there. `failed` has an error. So has `loaded`: the check took too long on a busy machine, which says
    nothing about the machine itself.
    """

    state: Literal["ok", "absent", "skipped", "loaded", "failed"]
    told: str
    data: object = None
    error: MtpctlError | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its finding, and the seconds it took."""

    name: str
    finding: Finding
    seconds: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks in their order, and the seconds until all were done. `failure`: the verdict if one has failed."""

    checks: list[Check]
    seconds: float
    failure: str = "not fit to run"

    @property
    def verdict(self) -> str:
        """The outcome of all checks, in a few words."""
        states = {check.finding.state for check in self.checks}
        if "failed" in states:
            return self.failure
        return "the machine is too loaded to tell" if "loaded" in states else "all well"

    @property
    def error(self) -> MtpctlError | None:
        """The first failure, naming the other checks that failed; None where all is well."""
        failed = [(check.name, check.finding.error) for check in self.checks if check.finding.error is not None]
        if not failed:
            return None
        first = failed[0][1]
        return type(first)(f"{first} (also wrong: {', '.join(name for name, _ in failed[1:])})") if failed[1:] else first

    def to_dict(self) -> dict[str, object]:
        """JSON-ready: every check by its name, the seconds in all, and the exit code."""
        checks = {}
        for check in self.checks:
            found = check.finding
            error = None if found.error is None else str(found.error)
            checks[check.name] = {"state": found.state, "finding": found.told, "data": found.data, "error": error} | {
                "seconds": round(check.seconds, 3)
            }
        return {"checks": checks, "seconds": round(self.seconds, 3), "exit_code": 0 if self.error is None else self.error.exit_code}


Report = Callable[[Check], None]


def examine_cluster(address: str) -> Diagnosis:
    """Try the network between every two hosts of the cluster at this address. Raises EnvironmentMissing where none answers."""
    began = time.perf_counter()
    with cluster(ClusterConfig(address=address), cpus=0, gpus=0, tidy=False):
        found = asyncio.run(try_links())
    seconds = time.perf_counter() - began
    return Diagnosis([Check("links", links(found), seconds)], seconds)


def links(found: list[Link]) -> Finding:
    """Which links between hosts are slow, or dead?"""
    data = [asdict(link) for link in found]
    if not found:
        return Finding("absent", "the cluster has one host", data)
    bad = slow(found)
    rates = sorted(link.rate for link in found if not link.error)
    usual = f"{len(found)} pairs of hosts" + (f", {rates[len(rates) // 2] / 1e9:.2f} GB/s in the median" if rates else "")
    if not bad:
        return Finding("ok", usual, data)
    told = f"{usual}; slow: {'; '.join(link.told() for link in bad)}"
    kind = EnvironmentMissing if any(link.error for link in bad) else ThresholdMissed
    return Finding("failed", told, data, kind(f"links: {told}; look at its cable and route, or set cluster.interface"))


def examine(*, quick: bool = False, done: Report = lambda check: None) -> Diagnosis:
    """Run every check; `quick` leaves out the self-check. `done` is called with each check as it ends.

    A check that fails is recorded, and the others go on. Raises EnvironmentMissing where the project is not installed.
    """
    cards, no_cards = stack.gpus()
    installed = stack.packages(stack.project_requirements(), "gpu" if cards else "cpu")
    with tempfile.TemporaryDirectory(prefix="mtpctl-doctor-") as made:
        folder = Path(made)
        # Two at a time, since most of a part's time goes into importing packages on one core.
        lanes: list[dict[str, Callable[[], Awaitable[Finding]]]] = [
            {
                "python": python,
                "machine": machine,
                "gpus": lambda: gpus(cards, no_cards),
                "packages": lambda: packages(installed),
                "kernels": lambda: kernels(folder),
                "transports": lambda: transports(folder),
                "ray": lambda: ray(folder),
                "sandbox": sandbox,
                "families": lambda: families(folder, on_cpu=not cards),
            },
            {"self-check": lambda: self_check(folder, quick)},
        ]

        async def both() -> list[list[Check]]:
            return await asyncio.gather(*(_one_by_one(lane, done) for lane in lanes))

        began = time.perf_counter()
        checks = asyncio.run(both())
        return Diagnosis([check for lane in checks for check in lane], time.perf_counter() - began)


async def _one_by_one(lane: dict[str, Callable[[], Awaitable[Finding]]], done: Report) -> list[Check]:
    checks = []
    for name, find in lane.items():
        began = time.perf_counter()
        try:
            finding = await find()
        except MtpctlError as error:
            finding = _finding(error)
        checks.append(Check(name, finding, time.perf_counter() - began))
        done(checks[-1])
    return checks


def _finding(error: MtpctlError) -> Finding:
    """The finding of a check that failed; `loaded` where it took too long on a busy machine."""
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    # Ray has a deadline of its own for its processes, and says so in its own words.
    slow = isinstance(error, NoAnswer) or "timed out" in str(error)
    if not slow or load - LANES < cpus:
        return Finding("failed", str(error), error=error)
    told = f"{error}; the machine is loaded ({load:.1f} processes want its {cpus} CPUs): look again when less runs on it"
    return Finding("loaded", told, error=type(error)(told))


async def python() -> Finding:
    """Is this interpreter one that the stack runs on?"""
    found = stack.python()
    if found.state == "other":
        raise EnvironmentMissing(f"Python: {found.found} is running, {found.wanted} is needed; make the environment with such a one")
    return Finding("ok", f"{found.found} ({found.wanted} is needed)", {"version": found.found, "needed": found.wanted})


async def machine() -> Finding:
    """How many CPUs and how much memory are there, and what did killed runs leave? This check never fails."""
    host, left = stack.machine(), leftovers.find()
    size = sum(each.nbytes for each in left) / 2**30
    found = {**host, "leftovers": [{"path": str(each.path), "bytes": each.nbytes} for each in left]}
    told = (
        f"{host['cpus']} CPUs, {host['memory_gib']:g} GiB memory, {host['memory_available_gib']:g} of it free, "
        f"{host['shared_memory_free_gib']:g} GiB free in /dev/shm; {host['system']}, {host['arch']}"
    )
    if left:
        told += f"; killed runs left {len(left)} folder(s), {size:.3g} GiB: the next start removes them, or mtpctl clean"
    return Finding("ok", told, found)


async def gpus(cards: list[stack.Card], why_none: str) -> Finding:
    """Which cards are there?"""
    if not cards:
        return Finding("absent", f"none ({why_none}): everything runs on the CPU", [])
    kinds = [(card["name"], card["memory_gib"]) for card in cards]
    told = "; ".join(f"{kinds.count(kind)} x {kind[0]}, {kind[1]:g} GiB each" for kind in dict.fromkeys(kinds))
    return Finding("ok", f"{told}; driver {cards[0]['driver']}", cards)


async def packages(installed: list[stack.Package]) -> Finding:
    """Is everything there that the project asks for, in the version that it asks for?"""
    data = [asdict(package) | {"state": package.state} for package in installed]
    wrong = [package for package in installed if package.needed and package.state != "ok"]
    if wrong:
        others = f" (also: {', '.join(package.name for package in wrong[1:])})" if wrong[1:] else ""
        return Finding("failed", "; ".join(package.mend for package in wrong), data, EnvironmentMissing(wrong[0].mend + others))
    pinned = [f"{package.name} {package.found}" for package in installed if package.pinned and package.state == "ok"]
    optional = [package for package in installed if not package.needed]
    lacking = sum(package.state != "ok" for package in optional)
    told = [f"all {len(installed) - lacking} as asked for, pinned: {', '.join(pinned)}"]
    for package in optional:
        purpose = stack.SPEEDS_UP.get(package.name, "speed alone")
        told.append(f"optional: {package.name} {'there' if package.state == 'ok' else 'not there'} (for {purpose})")
    return Finding("ok", "; ".join(told), data)


async def kernels(folder: Path) -> Finding:
    """Which implementations of `linear_logprob` agree with the reference here? One of them has to, `auto`'s choice."""
    told = await run_part("kernels", folder, DEADLINE_S["kernels"])
    text = f"{_live(told['implementations'])}; auto runs {told['auto']}"
    if not any(row["live"] for row in told["implementations"] if row["name"] == told["auto"].split()[0]):
        return Finding("failed", text, told, ThresholdMissed(f"kernels: what auto runs here does not agree with the reference: {text}"))
    return Finding("ok", text, told)


async def transports(folder: Path) -> Finding:
    """Which transports work between trainer and engines here?"""
    rows = (await run_part("transports", folder, DEADLINE_S["transports"]))["transports"]
    text = _live(rows)
    if not any(row["live"] for row in rows):
        return Finding("failed", text, rows, EnvironmentMissing(f"transports: none works here: {text}"))
    return Finding("ok", text, rows)


async def ray(folder: Path) -> Finding:
    """Does Ray start on this machine, and does a worker answer?"""
    told = await run_part("ray", folder, DEADLINE_S["ray"])
    return Finding("ok", f"{told['version']} starts here, and a task answers", told)


async def sandbox() -> Finding:
    """Which walls does the sandbox have here, for rewards and environments that run the model's code?"""
    try:
        with Sandbox() as tried:
            found = await asyncio.to_thread(layers, tried)
            walls = tried.walls()
    except EnvironmentMissing as error:
        return Finding("absent", f"{error}; the reward code and the environment python refuse to start", [])
    return Finding("ok", f"{walls}; " + "; ".join(f"{layer.name}: {layer.by}" for layer in found), [asdict(layer) for layer in found])


async def families(folder: Path, *, on_cpu: bool) -> Finding:
    """Which model families can vLLM serve here?"""
    if find_spec("vllm") is None:
        return Finding("skipped", "there is no vLLM to serve with")
    rows = (await run_part("families", folder, DEADLINE_S["families"]))["families"]
    dead = [row for row in rows if not row["live"]]
    text = f"vLLM serves {', '.join(row['name'] for row in rows if row['live']) or 'none'}"
    if dead:
        lacks = next((row["lacks"] for row in dead if row["lacks"]), None)
        mend = f"install {lacks} in the release that pyproject.toml names" if lacks else "install the project anew"
        told = f"families: vLLM cannot serve {', '.join(row['name'] for row in dead)} here: {dead[0]['reason']}; {mend}"
        return Finding("failed", text, rows, EnvironmentMissing(told))
    return Finding("ok", text + ("; linear attention, on a CPU, in bf16 alone" if on_cpu else ""), rows)


async def self_check(folder: Path, quick: bool) -> Finding:
    """Do vLLM and Megatron give the same tokens the same log-probs?"""
    if quick:
        return Finding("skipped", "left out by --quick: vLLM's log-probs were not compared with the trainer's")
    if find_spec("vllm") is None:
        return Finding("skipped", "there is no vLLM to sample with")
    sampled = await run_part("sample", folder, DEADLINE_S["sample"])
    found = Agreement(**await run_part("score", folder, DEADLINE_S["score"]))
    told = (
        f"{found.tokens:,} tokens of {found.responses} responses, sampled at T={found.temperature:g} with speculation: the log-probs of "
        f"vLLM and of the trainer differ by {found.mean_abs:.1e} in the mean, {found.max_abs:.1e} at most (bound {found.bound:g} for the "
        f"mean, {found.precision}); {found.accepted:,} of {found.drafted:,} drafts accepted"
    )
    data = asdict(found) | {"tokens_per_s": sampled["tokens"] / sampled["seconds"]}
    try:
        found.check()
    except ThresholdMissed as error:
        return Finding("failed", told, data, error)
    return Finding("ok", told, data)


def _live(rows: list[Trial]) -> str:
    live = [row["name"] for row in rows if row["live"]]
    return "; ".join([f"{', '.join(live) or 'none'} live", *(f"{row['name']} {row['reason']}" for row in rows if not row["live"])])
