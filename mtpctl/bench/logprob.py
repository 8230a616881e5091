"""`mtpctl bench logprob`: the log-prob server in comparison with a bare forward pass of its engine, and the cost of a weight update.

One replica runs in a Ray actor, as in training. The bare pass runs in the same actor with the same weights, so that the model is loaded
only once; the two alternate. Times of the server are measured in the caller's process, so they include queue, batching and Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mtpctl.bench.report import Environment, markdown_table
from mtpctl.families.configs import toy_config
from mtpctl.families.tensors import aliases
from mtpctl.jobs.logprob_serve import web
from mtpctl.kernels.logprob import LogProbOut
from mtpctl.logprob.dispatch import ServerLimits
from mtpctl.logprob.protocol import Scored, ScoreRequest
from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
from mtpctl.logprob.replica import Replica, start_replica
from mtpctl.logprob.server import LogprobServer
from mtpctl.model.build import TORCH_DTYPES
from mtpctl.plan.buckets import TensorSpec
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore, default_root
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.head import Head
from mtpctl.web.guard import HttpBounds
from mtpctl.web.server import listen

TIMED_WORK = (
    "bare: MegatronEngine.score in the replica's process, from token lists to lists of numbers, packing included; "
    "server: from the caller's `score` to its answer, in the caller's process; HTTP: from the request's first byte to the decoded answer"
)
MIN_RELATIVE_THROUGHPUT = 0.85
MAX_LOGITS_GIB = 1.0
MAX_ADDED_MS = 5.0
MAX_SYNC_COPY = 0.5
"""Maximum additional memory of an update, relative to the model's weights. An update does not need a second copy of them."""
PROMPT_FRACTION = 0.25
BUCKET_BYTES = 1 << 28

TOY = toy_config(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=768,
    vocab_size=2048,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
)
"""The model on a machine without a GPU."""


@dataclass(frozen=True)
class Workload:
    """The requests to send.

    lengths: minimum and maximum tokens of a request. in_flight: concurrent requests. requests: requests per round. single: tokens of the
    request to an idle server. singles: number of times that this request is measured, after a warm-up.
    """

    lengths: tuple[int, int]
    in_flight: int = 64
    requests: int = 128
    rounds: int = 3
    single: int = 512
    singles: int = 25
    tokens_per_batch: int = 16384

    def draw(self, vocab: int, count: int, seed: int) -> list[ScoreRequest]:
        """Random requests with uniformly distributed lengths. The first quarter of each is the prompt."""
        generator = torch.Generator().manual_seed(seed)
        min_length, max_length = self.lengths
        sizes = torch.randint(min_length, max_length + 1, (count,), generator=generator).tolist()
        return [_request(torch.randint(0, vocab, (length,), generator=generator).tolist()) for length in sizes]


def _request(ids: list[int]) -> ScoreRequest:
    return ScoreRequest(ids, max(1, int(len(ids) * PROMPT_FRACTION)))


@dataclass(frozen=True)
class Measurement:
    """A figure and its bound: a minimum if `at_least`, else a maximum."""

    what: str
    value: float | None
    unit: str
    bound: float | None = None
    at_least: bool = False
    detail: str = ""

    @property
    def missed(self) -> bool:
        if self.bound is None or self.value is None:
            return False
        # `not`, so that NaN is a miss.
        return not (self.value >= self.bound if self.at_least else self.value <= self.bound)


@dataclass
class Report:
    """Findings, and all measured times in seconds."""

    findings: list[Measurement] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)


class _MeteredHead(Head):
    """Records the peak memory of computing log-probs from hidden states."""

    logits_bytes = 0

    def logprob(self, *args: Any, **options: Any) -> LogProbOut:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = super().logprob(*args, **options)
        torch.cuda.synchronize()
        self.logits_bytes = max(self.logits_bytes, torch.cuda.max_memory_allocated() - before)
        return out


class BenchRank(ScoreRank):
    """A `ScoreRank` that can also time a bare pass for comparison, and publish random weights."""

    def bare(self, sequences: list[list[int]], prompt_lengths: list[int]) -> float:
        """Time one `MegatronEngine.score` call for all sequences, in seconds: packing, forward passes, and conversion to lists."""
        batch = [Sequence(ids, start, [1] * (len(ids) - start)) for ids, start in zip(sequences, prompt_lengths, strict=True)]
        self._wait()
        started = time.perf_counter()
        self.engine.score(batch)
        self._wait()
        return time.perf_counter() - started

    def logits_gib(self, sequences: list[list[int]], prompt_lengths: list[int]) -> float | None:
        """Peak memory in GiB for computing log-probs and entropy of these sequences from hidden states; None on a CPU."""
        if self.engine.device.type != "cuda":
            return None
        original = self.engine.head
        self.engine.head = metered_head = _MeteredHead(
            original.kernels, original.shape, original.parallel, sequence_parallel=original.sequence_parallel
        )
        self.bare(sequences, prompt_lengths)
        self.engine.head = original
        return metered_head.logits_bytes / GIB

    def publish(self, root: str, version: int) -> tuple[Manifest, float]:
        """Publish random weights in the store at `root`. Returns the manifest, and the seconds for creating and publishing the weights."""
        shape, dtype = self.engine.folder.shape, TORCH_DTYPES[self.config.precision]
        generator = torch.Generator(self.engine.device).manual_seed(version)

        def draw() -> Iterator[tuple[str, torch.Tensor]]:
            for name, size in self.tensors.items():
                tensor = torch.zeros(size, dtype=dtype, device=self.engine.device)
                if tensor.ndim > 1:
                    tensor.normal_(0.0, 0.02, generator=generator)
                elif not name.endswith("bias"):
                    tensor.fill_(1.0)
                yield name, tensor

        publisher = Publisher(VersionStore(Path(root)), bucket_bytes=BUCKET_BYTES, section_of=self._section_of)
        specs = (TensorSpec(name, tuple(size), str(dtype).removeprefix("torch.")) for name, size in self.tensors.items())
        publisher.plan(specs, aliases(shape))
        started = time.perf_counter()
        manifest = publisher.publish(draw(), version)
        return manifest, time.perf_counter() - started

    def reset_peak_memory(self) -> None:
        """Record the allocated memory, and reset its peak."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()

    def extra_memory_gib(self) -> float | None:
        """Peak GiB since `reset_peak_memory`, minus the GiB that were allocated then; None on a CPU."""
        return (torch.cuda.max_memory_allocated() - self._allocated) / GIB if self.engine.device.type == "cuda" else None

    def weights_gib(self) -> float:
        """GiB of the model's parameters."""
        return sum(p.numel() * p.element_size() for p in self.engine.module.parameters()) / GIB

    def _wait(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()


async def measure(folder: Path, precision: str, workload: Workload, scratch: Path, *, gpus: float) -> Report:
    """Run all measurements on one replica with random weights. folder: contains the model's config."""
    config = ReplicaConfig(
        model=str(folder),
        parallel=ParallelConfig(),
        precision=precision,
        mtp=MtpConfig(),
        kernels=KernelsConfig(),
        tokens_per_batch=workload.tokens_per_batch,
        threads=0 if gpus else 1,
        random_seed=0,
    )

    async def start(index: int) -> Replica:
        return await start_replica(config, name="log-prob replica", options=[{"num_cpus": 0, "num_gpus": gpus}], kind=BenchRank)

    server = await LogprobServer.start(start, 1, ServerLimits(workload.tokens_per_batch, 1 << 22))
    bench = Bench(server, workload)
    try:
        await bench.throughput()
        await bench.latency()
        await bench.update(scratch)
    finally:
        await server.close()
    return bench.report


class Bench:
    """The measurements, in the order in which they run."""

    def __init__(self, server: LogprobServer, workload: Workload) -> None:
        self.server, self.workload = server, workload
        self.report = Report()
        ((_, self.replica),) = server.replicas.live()
        self.vocab = server.bounds.vocab

    async def throughput(self) -> None:
        """Measure tokens/s of the server with many requests in flight, and of a bare pass over the same requests, and memory for logits."""
        workload = self.workload
        requests = workload.draw(self.vocab, workload.requests, seed=0)
        tokens = sum(r.tokens for r in requests)
        await self._time_bare_pass(requests[: workload.in_flight])
        await self._time_server(requests[: workload.in_flight])
        bare_times, server_times = [], []
        for turn in range(workload.rounds):
            # The order alternates, because a GPU slows down as it warms up.
            for variant in ("bare", "served") if turn % 2 == 0 else ("served", "bare"):
                if variant == "bare":
                    bare_times.append(await self._time_bare_pass(requests))
                else:
                    server_times.append(await self._time_server(requests))
        self.report.times |= {"bare": bare_times, "server": server_times}
        shares = ", ".join(f"{bare_s / server_s:.3f}" for bare_s, server_s in zip(bare_times, server_times, strict=True))
        self._add_measurement("bare", tokens / statistics.median(bare_times), "tokens/s")
        self._add_measurement(
            "through the server", tokens / statistics.median(server_times), "tokens/s", detail=f"{workload.in_flight} in flight"
        )
        share = statistics.median(bare_times) / statistics.median(server_times)
        self._add_measurement(
            "throughput relative to the bare pass", share, "", MIN_RELATIVE_THROUGHPUT, at_least=True, detail=f"by round {shares}"
        )
        self._add_measurement(
            "memory for logits", await self.replica.ranks.call(BenchRank.logits_gib, *_to_lists(requests)), "GiB", MAX_LOGITS_GIB
        )

    async def latency(self) -> None:
        """Measure the latency that the server and HTTP add to the bare pass, for single requests to an idle server."""
        (request,) = self.workload.draw(self.vocab, 1, seed=1)
        request = _request((list(request.token_ids) * self.workload.single)[: self.workload.single])
        times: dict[str, list[float]] = {"bare": [], "server": [], "HTTP": []}
        async with _serve_http(self.server) as port:
            body = json.dumps({"token_ids": list(request.token_ids), "prompt_length": request.prompt_length}).encode()
            connection = http.client.HTTPConnection("127.0.0.1", port)
            for repetition in range(self.workload.singles + 1):
                bare_s = await self._time_bare_pass([request])
                started = time.perf_counter()
                await self.server.score(request)
                server_s = time.perf_counter() - started
                http_s = await asyncio.to_thread(_post, connection, body)
                if repetition:
                    for name, seconds in (("bare", bare_s), ("server", server_s), ("HTTP", http_s)):
                        times[name].append(1000 * seconds)
            connection.close()
        self.report.times |= {f"{self.workload.single} tokens, {name}": [ms / 1000 for ms in values] for name, values in times.items()}
        median = {name: statistics.median(values) for name, values in times.items()}
        self._add_measurement(f"bare, {self.workload.single} tokens", median["bare"], "ms")
        for name in ("server", "HTTP"):
            detail = f"{median[name]:.2f} ms in all; minimum {min(times[name]) - min(times['bare']):+.2f}"
            self._add_measurement(f"added by the {name}", median[name] - median["bare"], "ms", MAX_ADDED_MS, detail=detail)

    async def update(self, scratch: Path) -> None:
        """Measure a weight update while requests are queued."""
        requests = self.workload.draw(self.vocab, self.workload.in_flight, seed=2)
        weights = await self.replica.ranks.call(BenchRank.weights_gib)
        root = default_root(f"bench-{os.getpid()}", int(weights * GIB), scratch / "versions")
        try:
            manifest, publish_s = await self.replica.ranks.call(BenchRank.publish, str(root), 1)
            await self.replica.ranks.call(BenchRank.reset_peak_memory)
            answers = [asyncio.create_task(self.server.score(request)) for request in requests]
            await asyncio.sleep(0)
            (report,) = await self.server.update(manifest)
            results = await asyncio.gather(*answers, return_exceptions=True)
        finally:
            VersionStore(root).close()
        extra_gib = await self.replica.ranks.call(BenchRank.extra_memory_gib)
        old, new = (sum(isinstance(result, Scored) and result.version == version for result in results) for version in (0, 1))
        self._add_measurement("answers lost", len(requests) - old - new, "", 0, detail=f"{old} under the old weights, {new} under the new")
        self._add_measurement("update", report.seconds, "s", detail=f"{report.nbytes / 1e9:.2f} GB by {manifest.transport}")
        self._add_measurement("update, serving paused", report.stall_seconds, "s")
        self._add_measurement("publishing before it", publish_s, "s")
        self._add_measurement(
            "memory beyond the weights in an update", extra_gib, "GiB", MAX_SYNC_COPY * weights, detail=f"weights: {weights:.2f} GiB"
        )

    async def _time_bare_pass(self, requests: list[ScoreRequest]) -> float:
        return await self.replica.ranks.call(BenchRank.bare, *_to_lists(requests))

    async def _time_server(self, requests: list[ScoreRequest]) -> float:
        """Seconds until the server has answered all requests, `workload.in_flight` at a time."""
        remaining = iter(requests)

        async def client() -> None:
            for request in remaining:
                await self.server.score(request)

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(self.workload.in_flight)))
        return time.perf_counter() - started

    def _add_measurement(
        self, what: str, value: float | None, unit: str, bound: float | None = None, *, at_least: bool = False, detail: str = ""
    ) -> None:
        self.report.findings.append(Measurement(what, value, unit, bound, at_least, detail))


def _to_lists(requests: list[ScoreRequest]) -> tuple[list[list[int]], list[int]]:
    """Token ids and prompt lengths, in the format of the ranks' methods."""
    return [list(r.token_ids) for r in requests], [r.prompt_length for r in requests]


@contextlib.asynccontextmanager
async def _serve_http(server: LogprobServer) -> AsyncIterator[int]:
    """Serve over HTTP within the block. Yields the port."""
    with contextlib.closing(listen("127.0.0.1", 0)) as socket:
        http_server = web(server, None, "bench", key=None, bounds=HttpBounds())
        serving = asyncio.create_task(http_server.serve(sockets=[socket]))
        try:
            yield socket.getsockname()[1]
        finally:
            http_server.should_exit = True
            await serving


def _post(connection: http.client.HTTPConnection, body: bytes) -> float:
    """Send one request. Returns its duration in seconds."""
    started = time.perf_counter()
    connection.request("POST", "/v1/logprobs", body, {"content-type": "application/json"})
    response = connection.getresponse()
    json.loads(response.read())
    assert response.status == 200, response.status
    return time.perf_counter() - started


def format_table(report: Report) -> str:
    rows = []
    for f in report.findings:
        value = "not measured on a CPU"
        if f.value is not None:
            value = f"{f.value:.3g} {f.unit}" if abs(f.value) < 1000 else f"{f.value:,.0f} {f.unit}"
        bound = "" if f.bound is None else f"{'≥' if f.at_least else '≤'} {f.bound:.3g} {f.unit}"
        ratio = f"{f.value / f.bound:.2f}" if f.value is not None and f.bound else ""
        rows.append((f.what, value, bound, ratio, " · ".join(filter(None, ["**missed**" if f.missed else "", f.detail]))))
    return markdown_table(("what", "measured", "bound", "measured / bound", ""), rows)


def to_document(report: Report, environment: Environment, workload: Workload) -> dict[str, Any]:
    findings = [{**asdict(f), "missed": f.missed} for f in report.findings]
    return {"environment": environment, "timer": TIMED_WORK, "options": asdict(workload), "findings": findings, "seconds": report.times}
