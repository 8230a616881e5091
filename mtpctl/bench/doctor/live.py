"""Try out kernels, transports, Ray and vLLM's models, and report which of them work here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, get_args

from mtpctl.recipe.cluster import ClusterConfig
from mtpctl.recipe.kernels import KernelsConfig
from mtpctl.recipe.sync import TRANSPORTS

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far a kernel's log-probs may be from the float64 reference, for inputs of this dtype."""
_RAY_S = 60.0


class Trial(TypedDict):
    """One implementation, transport or family: whether it works here, and if not, why. `lacks`: a package that it cannot import."""

    name: str
    live: bool
    reason: NotRequired[str]
    max_abs_error: NotRequired[float]
    lacks: NotRequired[str | None]


def kernels(folder: Path) -> dict[str, object]:
    """Try every `linear_logprob` implementation on a small problem: whether it runs here, and its error against the reference."""
    import torch

    from mtpctl.kernels.logprob import linear_logprob

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 256, generator=generator).to(device, dtype) for rows in (128, 1000))
    weight = weight / 16
    labels = torch.randint(1000, (128,), generator=generator).to(device)
    exact = linear_logprob(hidden.double(), weight.double(), labels, implementation="reference").logprob
    rows = []
    names = [name for name in get_args(KernelsConfig.model_fields["linear_logprob"].annotation) if name != "auto"]
    for name in names:
        row: Trial = {"name": name, "live": False}
        try:
            error = float((linear_logprob(hidden, weight, labels, implementation=name).logprob - exact).abs().max())
        except ValueError as refusal:
            row["reason"] = str(refusal).removeprefix(f"implementation: {name!r} ")
        except Exception as failure:  # Whether a backend compiles and launches here is the question; the others are tried all the same.
            row["reason"] = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else 'no message'}"
        else:
            bound = TOLERANCE[str(dtype).removeprefix("torch.")]
            row["live"], row["max_abs_error"] = error <= bound, error
            if error > bound:
                row["reason"] = f"is {error:.1e} off the reference, beyond {bound:g}"
        rows.append(row)
    return {"device": device, "auto": _auto(hidden, weight, labels), "implementations": rows}


def _auto(hidden: Tensor, weight: Tensor, labels: Tensor) -> str:
    """The implementation that `auto` chooses, as its log line names it."""
    from mtpctl.kernels.logprob import linear_logprob

    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    log, listener = logging.getLogger("mtpctl.kernels"), Listener()
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    linear_logprob(hidden, weight, labels)
    log.removeHandler(listener)
    return told[-1].removeprefix("linear_logprob: auto runs ")


def families(folder: Path) -> dict[str, object]:
    """Import the installed vLLM's module of every family. Names the package that a module lacks."""
    from vllm import ModelRegistry

    from mtpctl.families.registry import FAMILIES

    rows = []
    for family in FAMILIES:
        row: Trial = {"name": family.name, "live": True, "reason": "", "lacks": None}
        try:
            ModelRegistry.models[family.architectures[0]].load_model_cls()
        except ImportError as error:
            row["live"], row["reason"] = False, str(error)
            row["lacks"] = error.name if isinstance(error, ModuleNotFoundError) else None
        rows.append(row)
    return {"families": rows}


def transports(folder: Path) -> dict[str, object]:
    """Try every transport of a recipe: a tensor is sent through `shm`, the requirements of the CUDA ones are looked up."""
    import torch

    rows = []
    for name, transport in TRANSPORTS.items():
        if not transport.cuda:
            reason = _send_through_shm(folder / "versions")
        elif not torch.cuda.is_available():
            reason = "needs CUDA"
        elif name == "nccl" and not torch.distributed.is_nccl_available():
            reason = "needs a torch that is built with NCCL"
        else:
            reason = ""
        rows.append({"name": name, "live": not reason, "reason": reason})
    return {"transports": rows}


def _send_through_shm(fallback: Path) -> str:
    """Publish a tensor and read it back as a receiver does. Returns what went wrong, or an empty text."""
    import os

    import torch

    from mtpctl.sync.sender import Publisher
    from mtpctl.sync.store import VersionStore, default_root
    from mtpctl.sync.transports.base import open_reader

    store = VersionStore(default_root(f"doctor-{os.getpid()}", 1 << 20, fallback))
    try:
        sent = torch.arange(1 << 16, dtype=torch.float32)
        manifest = Publisher(store, bucket_bytes=1 << 16).publish([("weight", sent)], 1)
        reader = open_reader(manifest.transport, manifest.address)
        parts = [data.clone() for _, data in reader.stream("target", manifest.sections["target"].buckets)]
        reader.close()
    finally:
        store.close()
    return "" if torch.equal(torch.cat(parts).view(torch.float32), sent) else "what was read is not what was sent"


def ray(folder: Path) -> dict[str, object]:
    """Start Ray on this machine and have one task answered."""
    import ray

    from mtpctl.cluster.local import cluster

    with cluster(ClusterConfig(num_cpus=1, num_gpus=0), cpus=1, gpus=0, tidy=False):
        answer = ray.get(ray.remote(num_cpus=1)(_answer).remote(), timeout=_RAY_S)
    return {"version": ray.__version__, "answered": answer}


def _answer() -> int:
    return 42
