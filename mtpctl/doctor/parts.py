"""Checks that run in separate processes ("parts"): `python -m mtpctl.doctor.parts NAME FOLDER`.

A part may hang, crash or patch torch without affecting other checks. It writes its result to `NAME.json` in the folder, and its output to
`NAME.log`. `sample` and `score` compare vLLM's log-probs of sampled tokens with the trainer's, at a temperature other than 1 and with
speculation: a policy gradient is correct only if both engines compute the same distribution. They are separate parts because the two
engines need conflicting patches to run on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, get_args

from mtpctl.doctor import mismatch_parts
from mtpctl.errors import MtpctlError, PrerequisiteMissing, RuntimeFailure, ThresholdMissed, UserError
from mtpctl.families.configs import toy_config
from mtpctl.families.registry import FAMILIES
from mtpctl.recipe.schema import ClusterConfig, KernelsConfig
from mtpctl.recipe.sync import TRANSPORTS
from mtpctl.samples import GenerationRequest, Logprobs, Sample, ids_of
from mtpctl.telemetry.run_directory import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Maximum error of a kernel's log-probs against the float64 reference, by the dtype of the inputs."""
RAY_TASK_S = 60.0
RESPONSES = 64
TEMPERATURE = 0.7
AGREEMENT_BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
"""Maximum mean absolute difference of log-probs (nats), by the precision of the weights."""
VOCAB = 16
MODEL = toy_config(vocab_size=VOCAB, max_position_embeddings=256, head_dim=32, initializer_range=0.1, bos_token_id=1, eos_token_id=2)
_ERRORS = {error.exit_code: error for error in (UserError, PrerequisiteMissing, RuntimeFailure)}


class PartTimeout(RuntimeFailure):
    """A part exceeded its deadline."""


async def run_part(name: str, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run a part in a separate process and return its result.

    Raises:
        UserError, PrerequisiteMissing, RuntimeFailure: if the part raised one of them.
        RuntimeFailure: if the part crashed, with its last line of output.
        PartTimeout: after `deadline_s`. All processes of the part are killed.
    """
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    with log.open("wb") as output:
        command = (sys.executable, "-m", "mtpctl.doctor.parts", name, str(folder))
        # A new session, so that all processes of the part can be killed.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = await asyncio.wait_for(process.wait(), deadline_s)
        except TimeoutError:
            raise PartTimeout(f"{name}: no answer within {deadline_s:g} s") from None
        finally:
            with suppress(ProcessLookupError):  # The whole group has already ended.
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if not result.exists():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeFailure(f"{name}: ended with code {code}: {lines[-1] if lines else 'it printed nothing'}")
    document: dict[str, Any] = json.loads(result.read_text())
    if "error" in document:
        raise _ERRORS.get(document["exit_code"], RuntimeFailure)(document["error"])
    return document


def main(name: str, folder: Path) -> None:
    """Run one part in this process, and write its result or its MtpctlError. Other errors end the process with a traceback."""
    try:
        document = PARTS[name](folder)
    except MtpctlError as error:
        document = {"error": str(error), "exit_code": error.exit_code}
    write_atomically(folder / f"{name}.json", json.dumps(document))


class Trial(TypedDict):
    """Whether an implementation, transport or family works on this machine (`live`), else the reason. `lacks`: a missing module."""

    name: str
    live: bool
    reason: NotRequired[str]
    max_abs_error: NotRequired[float]
    lacks: NotRequired[str | None]


def kernels(folder: Path) -> dict[str, object]:
    """Run every `linear_logprob` implementation on a small problem and compare it with the reference."""
    import torch

    from mtpctl.kernels.logprob import linear_logprob

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 256, generator=generator).to(device, dtype) for rows in (128, 1000))
    weight = weight / 16
    labels = torch.randint(1000, (128,), generator=generator).to(device)
    exact = linear_logprob(hidden.double(), weight.double(), labels, implementation="reference").logprob
    bound = TOLERANCE[str(dtype).removeprefix("torch.")]
    rows = []
    for name in get_args(KernelsConfig.model_fields["linear_logprob"].annotation):
        if name == "auto":
            continue
        row: Trial = {"name": name, "live": False}
        try:
            error = float((linear_logprob(hidden, weight, labels, implementation=name).logprob - exact).abs().max())
        except ValueError as refusal:
            row["reason"] = str(refusal).removeprefix(f"implementation: {name!r} ")
        except Exception as failure:  # A backend that does not compile or launch here is a result of the check.
            row["reason"] = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else 'no message'}"
        else:
            row["live"], row["max_abs_error"] = error <= bound, error
            if not row["live"]:  # also for NaN
                row["reason"] = f"differs from the reference by {error:.1e}, bound {bound:g}"
        rows.append(row)
    return {"device": device, "auto": _auto_choice(hidden, weight, labels), "implementations": rows}


def _auto_choice(hidden: Tensor, weight: Tensor, labels: Tensor) -> str:
    """The implementation that `auto` selects, from its log message."""
    from mtpctl.kernels.logprob import linear_logprob

    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    log, listener = logging.getLogger("mtpctl.kernels"), Listener()
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    with suppress(Exception):  # Its error is that of the implementation, which was tried before.
        linear_logprob(hidden, weight, labels)
    log.removeHandler(listener)
    return messages[-1].removeprefix("linear_logprob: auto runs ") if messages else "none"


def families(folder: Path) -> dict[str, object]:
    """Import vLLM's module of every family."""
    from vllm import ModelRegistry

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
    """Send a tensor through `shm` and `storage`, and check the requirements of the CUDA transports."""
    import torch

    rows = []
    for name, transport in TRANSPORTS.items():
        if not transport.cuda:
            reason = _send_through_files(folder / "versions", f"file://{folder / 'storage'}" if name == "storage" else None)
        elif not torch.cuda.is_available():
            reason = "needs CUDA"
        elif name == "nccl" and not torch.distributed.is_nccl_available():
            reason = "needs a torch that is built with NCCL"
        else:
            reason = ""
        rows.append({"name": name, "live": not reason, "reason": reason})
    return {"transports": rows}


def _send_through_files(fallback_root: Path, url: str | None) -> str:
    """Publish a tensor, and read it as a receiver does. Returns the reason for a failure, or an empty string."""
    import torch

    from mtpctl.cluster.object_store import ObjectStore
    from mtpctl.sync.remote import URL_FIELD
    from mtpctl.sync.sender import Publisher
    from mtpctl.sync.store import VersionStore, default_root
    from mtpctl.sync.transports.base import open_reader

    remote = None if url is None else ObjectStore(url, URL_FIELD)
    store = VersionStore(default_root(f"doctor-{os.getpid()}", 1 << 20, fallback_root), remote)
    try:
        sent = torch.arange(1 << 16, dtype=torch.float32)
        manifest = Publisher(store, bucket_bytes=1 << 16).publish([("weight", sent)], 1)
        reader = open_reader(manifest.transport, manifest.address)
        buckets = [data.clone() for _, data in reader.stream("target", manifest.sections["target"].buckets)]
        reader.close()
    finally:
        store.close()
    return "" if torch.equal(torch.cat(buckets).view(torch.float32), sent) else "the received bytes differ from the bytes sent"


def ray(folder: Path) -> dict[str, object]:
    """Start Ray on this machine and run one task."""
    import ray

    from mtpctl.cluster.local import cluster

    with cluster(ClusterConfig(num_cpus=1, num_gpus=0), cpus=1, gpus=0, remove_leftovers=False):
        answer = ray.get(ray.remote(num_cpus=1)(_answer).remote(), timeout=RAY_TASK_S)
    return {"version": ray.__version__, "answered": answer}


def _answer() -> int:
    return 42


@dataclass(frozen=True, slots=True)
class Agreement:
    """Difference between the engines' log-probs over all response tokens (nats), and the draft tokens proposed and accepted."""

    responses: int
    tokens: int
    temperature: float
    precision: str
    mean_abs: float
    max_abs: float
    bound: float
    drafted: int
    accepted: int

    def check(self) -> None:
        """Raise ThresholdMissed if the mean difference exceeds the bound or is NaN."""
        if not self.mean_abs <= self.bound:
            raise ThresholdMissed(
                f"self-check: vLLM's log-probs differ from the trainer's by {self.mean_abs:.2e} on average "
                f"(largest {self.max_abs:.2e}), beyond {self.bound:g} for {self.precision}"
            )


def sample(folder: Path) -> dict[str, object]:
    """Create a model in `folder`, sample from it with vLLM, and write the samples to `samples.json`."""
    import torch

    from mtpctl.convert.hf_folder import create_hf_folder

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    precision: Literal["fp32", "bf16"] = "bf16" if device == "cuda" else "fp32"
    model = create_hf_folder(MODEL, folder / "model", seed=0)
    samples, seconds = asyncio.run(_generate(model.path, device, precision))
    (folder / "samples.json").write_text(json.dumps({"precision": precision, "samples": [each.to_dict() for each in samples]}))
    return {"tokens": sum(len(each.response_ids) for each in samples), "seconds": seconds}


async def _generate(model: Path, device: Literal["cpu", "cuda"], precision: Literal["fp32", "bf16"]) -> tuple[list[Sample], float]:
    """Sample from the model. Returns the samples and the seconds of generation."""
    from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import build_engine_settings

    rollout = VllmConfig(
        context=128,
        max_in_flight=RESPONSES,
        kv_cache_bytes=64 << 20,
        gpu_memory=0.1,
        eager=True,
        threads=1 if device == "cpu" else 0,
        speculation=SpeculationConfig(num_tokens=1),
    )
    engine = await VllmEngine.start(build_engine_settings(rollout, model=str(model), precision=precision, device=device))
    started_at = time.perf_counter()
    # Many lengths of prompts and responses, so that engine steps mix prefill, drafts and single tokens.
    requests = [
        GenerationRequest(
            Sample(f"p{i}", f"g{i}", ids_of((7 * i + 3 * j) % VOCAB for j in range(1 + i % 9))),
            max_tokens=16 + i % 33,
            temperature=TEMPERATURE,
            seed=i,
        )
        for i in range(RESPONSES)
    ]
    try:
        return list(await asyncio.gather(*(engine.generate(request) for request in requests))), time.perf_counter() - started_at
    finally:
        await engine.shutdown()


def score(folder: Path) -> dict[str, object]:
    """Score the samples in `folder` with the Megatron engine. Returns an `Agreement` as a dict."""
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.recipe.model import MtpConfig
    from mtpctl.recipe.section import ParallelConfig
    from mtpctl.trainer.batch import Sequence
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine

    stored = json.loads((folder / "samples.json").read_text())
    samples = [Sample.from_dict(fields) for fields in stored["samples"]]
    config = EngineConfig(ParallelConfig(), precision=stored["precision"], mtp=MtpConfig(mode="load"), train=False)
    engine = MegatronEngine(HfFolder.open(folder / "model"), config)
    sequences = [Sequence(sample.token_ids, len(sample.prompt_ids), sample.loss_mask) for sample in samples]
    scores = engine.score(sequences, temperature=TEMPERATURE)
    engine.close()
    return asdict(compare(samples, [score.logprobs for score in scores], stored["precision"]))


def compare(samples: list[Sample], logprobs: list[Logprobs], precision: str) -> Agreement:
    """Compare the samples' behavior log-probs with `logprobs`, token by token."""
    errors = [
        abs(a - b) for sample, row in zip(samples, logprobs, strict=True) for a, b in zip(sample.behaviour_logprobs, row, strict=True)
    ]
    return Agreement(
        responses=len(samples),
        tokens=len(errors),
        temperature=TEMPERATURE,
        precision=precision,
        mean_abs=sum(errors) / len(errors),
        max_abs=max(errors),
        bound=AGREEMENT_BOUNDS[precision],
        drafted=sum(sample.speculation.drafted for sample in samples),
        accepted=sum(sample.speculation.accepted for sample in samples),
    )


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "kernels": kernels,
    "transports": transports,
    "ray": ray,
    "families": families,
    "sample": sample,
    "score": score,
    "mismatch-engine": mismatch_parts.generate,
    "mismatch-trainer": mismatch_parts.score,
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
