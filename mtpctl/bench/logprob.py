"""`mtpctl bench logprob`: the log-prob server against a forward pass of its engine alone, and its answers during a weight update.

One replica runs in a Ray actor, as in training. The bare pass runs in the same actor on the same weights, so that one card holds
the model once; the two take turns. Times through the server are taken in the caller's process: queue, batches and Ray included.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from mtpctl.bench.logprob_rank import BenchRank
from mtpctl.bench.machine import Environment
from mtpctl.families.configs import toy_config
from mtpctl.jobs.logprob_serve import web
from mtpctl.logprob.dispatch import ServerLimits
from mtpctl.logprob.protocol import Scored, ScoreRequest
from mtpctl.logprob.rank import ReplicaConfig
from mtpctl.logprob.replica import Replica, start_replica
from mtpctl.logprob.server import LogprobServer
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.sync.store import VersionStore, default_root
from mtpctl.web.guard import HttpBounds
from mtpctl.web.server import listen

TIMER = (
    "bare: MegatronEngine.score in the replica's process, from token lists to lists of numbers, packing included; "
    "server: from the caller's `score` to its answer, in the caller's process; HTTP: from the request's first byte to the decoded answer"
)
LEAST_SHARE = 0.85
MOST_LOGITS_GIB = 1.0
MOST_ADDED_MS = 5.0
MOST_DIFFERENCE = {"fp32": 1e-6, "bf16": 1e-2}
MOST_SYNC_COPY = 0.5
"""Memory that an update may take, as a share of the model's own: less than a second copy of the weights."""
CLEARLY = 10.0
"""How many times closer an answer must be to those of its own version than to those of the other."""
SHARPER = 3.0
"""Factor of the second version's logits, which spreads its log-probs like those of a trained model."""
PROMPT_SHARE = 0.25

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
"""The model on a machine without a card."""


@dataclass(frozen=True)
class Load:
    """The requests to send. lengths: tokens of the shortest and the longest; in_flight: requests at once; requests: of one round.

    single: tokens of the request to an idle server; singles: how often it is sent.
    """

    lengths: tuple[int, int]
    in_flight: int = 64
    requests: int = 128
    rounds: int = 3
    single: int = 512
    singles: int = 25
    tokens_per_batch: int = 16384
    bucket_bytes: int = 1 << 28

    def drawn(self, vocab: int, count: int, seed: int) -> list[ScoreRequest]:
        """Random requests, lengths uniform, the first quarter of each its prompt."""
        generator = torch.Generator().manual_seed(seed)
        low, high = self.lengths
        sizes = torch.randint(low, high + 1, (count,), generator=generator).tolist()
        return [self.of(torch.randint(0, vocab, (n,), generator=generator).tolist()) for n in sizes]

    @staticmethod
    def of(ids: list[int]) -> ScoreRequest:
        return ScoreRequest(ids, max(1, int(len(ids) * PROMPT_SHARE)))


@dataclass(frozen=True)
class Finding:
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
    """Findings, and every time that was taken (seconds)."""

    findings: list[Finding] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)


async def measure(folder: Path, precision: str, load: Load, scratch: Path, *, gpus: float) -> Report:
    """Run all measurements on a replica of the model whose config is in `folder`, with random weights."""
    config = ReplicaConfig(
        model=str(folder),
        parallel=ParallelConfig(),
        precision=precision,
        mtp=MtpConfig(),
        kernels=KernelsConfig(),
        tokens_per_batch=load.tokens_per_batch,
        threads=0 if gpus else 1,
        random_seed=0,
    )

    async def start(index: int) -> Replica:
        return await start_replica(config, name="log-prob replica", options=[{"num_cpus": 0, "num_gpus": gpus}], kind=BenchRank)

    server = await LogprobServer.start(start, 1, ServerLimits(load.tokens_per_batch, 1 << 22))
    bench = Bench(server, load, precision)
    try:
        await bench.throughput()
        await bench.latency()
        await bench.update(scratch)
        await bench.batching()
    finally:
        await server.close()
    return bench.report


class Bench:
    """The measurements, in the order in which they are taken."""

    def __init__(self, server: LogprobServer, load: Load, precision: str) -> None:
        self.server, self.load = server, load
        self.limit = MOST_DIFFERENCE[precision]
        self.report = Report()
        ((_, self.replica),) = server.replicas.live()
        self.vocab = server.bounds.vocab

    async def _bare(self, requests: list[ScoreRequest]) -> float:
        """Seconds of a bare pass over the requests."""
        seconds: float = await self.replica.ranks.call("bare", *_as_lists(requests))
        return seconds

    async def throughput(self) -> None:
        """Measure tokens/s with many requests in flight, against one bare pass over the same requests; and memory for logits."""
        load = self.load
        requests = load.drawn(self.vocab, load.requests, seed=0)
        tokens = sum(r.tokens for r in requests)
        await self._bare(requests[: load.in_flight])
        await self._through(requests[: load.in_flight])
        bare, served = [], []
        for turn in range(load.rounds):
            # The order alternates, since a card slows down as it gets warm.
            for kind in ("bare", "served") if turn % 2 == 0 else ("served", "bare"):
                if kind == "bare":
                    bare.append(await self._bare(requests))
                else:
                    served.append(await self._through(requests))
        self.report.times |= {"bare": bare, "server": served}
        shares = ", ".join(f"{b / s:.3f}" for b, s in zip(bare, served, strict=True))
        self._found("bare", tokens / statistics.median(bare), "tokens/s")
        self._found("through the server", tokens / statistics.median(served), "tokens/s", detail=f"{load.in_flight} in flight")
        share = statistics.median(bare) / statistics.median(served)
        self._found("share of the bare pass", share, "", LEAST_SHARE, at_least=True, detail=f"turn by turn {shares}")
        self._found("memory for logits", await self.replica.ranks.call("logits_gib", *_as_lists(requests)), "GiB", MOST_LOGITS_GIB)

    async def _through(self, requests: list[ScoreRequest]) -> float:
        """Seconds until the server has answered all requests, `load.in_flight` at once."""
        left = iter(requests)

        async def client() -> None:
            for request in left:
                await self.server.score(request)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(self.load.in_flight)))
        return time.perf_counter() - began

    async def latency(self) -> None:
        """Measure the latency of one request at a time on an idle server, against the bare pass."""
        (request,) = self.load.drawn(self.vocab, 1, seed=1)
        request = Load.of((list(request.token_ids) * self.load.single)[: self.load.single])
        times: dict[str, list[float]] = {"bare": [], "server": [], "HTTP": []}
        async with _http(self.server) as port:
            body = json.dumps({"token_ids": list(request.token_ids), "prompt_length": request.prompt_length}).encode()
            connection = http.client.HTTPConnection("127.0.0.1", port)
            for turn in range(self.load.singles + 1):
                bare = await self._bare([request])
                began = time.perf_counter()
                await self.server.score(request)
                served = time.perf_counter() - began
                over_http = await asyncio.to_thread(_ask, connection, body)
                if turn:
                    for name, seconds in (("bare", bare), ("server", served), ("HTTP", over_http)):
                        times[name].append(1000 * seconds)
            connection.close()
        self.report.times |= {f"{self.load.single} tokens, {name}": [t / 1000 for t in taken] for name, taken in times.items()}
        middle = {name: statistics.median(taken) for name, taken in times.items()}
        self._found(f"bare, {self.load.single} tokens", middle["bare"], "ms")
        for name in ("server", "HTTP"):
            detail = f"{middle[name]:.2f} ms in all; least {min(times[name]) - min(times['bare']):+.2f}"
            self._found(f"added by the {name}", middle[name] - middle["bare"], "ms", MOST_ADDED_MS, detail=detail)

    async def update(self, scratch: Path) -> None:
        """Update the weights while requests wait; every answer must be that of the version that it names."""
        requests = self.load.drawn(self.vocab, self.load.in_flight, seed=2)
        weights = await self.replica.ranks.call("weights_gib")
        root = default_root(f"bench-{os.getpid()}", int(weights * GIB), scratch / "versions")
        calm = {0: await self._answers(requests)}
        try:
            manifest, published = await self.replica.ranks.call("publish", str(root), 1, self.load.bucket_bytes, SHARPER)
            await self.replica.ranks.call("start_memory")
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self.server.score(request)) for request in requests]
                await asyncio.sleep(0)
                (report,) = await self.server.update(manifest)
            answers = [task.result() for task in asked]
        finally:
            VersionStore(root).close()
        more = await self.replica.ranks.call("more_memory_gib")
        calm[1] = await self._answers(requests)
        wrong = 0
        for place, answer in enumerate(answers):
            own, other = (_difference(answer, calm[version][place]) for version in (answer.version, 1 - answer.version))
            wrong += not own * CLEARLY <= other
        under = [sum(answer.version == version for answer in answers) for version in (0, 1)]
        detail = f"{under[0]} under the old weights, {under[1]} under the new"
        self._found("answers lost or not of their version", wrong + len(requests) - len(answers), "", 0, detail=detail)
        self._found("update", report.seconds, "s", detail=f"{report.nbytes / 1e9:.2f} GB by {manifest.transport}")
        self._found("update, serving stood still", report.stall_seconds, "s")
        self._found("publishing before it", published, "s")
        self._found("memory beyond the weights in an update", more, "GiB", MOST_SYNC_COPY * weights, detail=f"weights: {weights:.2f} GiB")

    async def batching(self) -> None:
        """Compare the answers to requests sent one by one with those to the same requests sent at once."""
        requests = self.load.drawn(self.vocab, self.load.in_flight, seed=3)
        alone = [await self.server.score(request) for request in requests]
        worst = _largest([_difference(a, b) for a, b in zip(alone, await self._answers(requests), strict=True)])
        values = torch.tensor([x for answer in alone for x in answer.logprobs])
        detail = f"log-probs: mean {values.mean():.2f}, std {values.std():.2f}"
        self._found("alone or in a mixed batch, largest difference", worst, "nats", self.limit, detail=detail)

    async def _answers(self, requests: list[ScoreRequest]) -> list[Scored]:
        return list(await asyncio.gather(*map(self.server.score, requests)))

    def _found(
        self, what: str, value: float | None, unit: str, bound: float | None = None, *, at_least: bool = False, detail: str = ""
    ) -> None:
        self.report.findings.append(Finding(what, value, unit, bound, at_least, detail))


def _as_lists(requests: list[ScoreRequest]) -> tuple[list[list[int]], list[int]]:
    """Token ids and prompt lengths, as the ranks take them."""
    return [list(r.token_ids) for r in requests], [r.prompt_length for r in requests]


def _difference(a: Scored, b: Scored) -> float:
    """Largest difference of two answers in log-probs and entropy; NaN where one holds a NaN."""
    pairs: Iterator[tuple[float, float]] = zip([*a.logprobs, *a.entropy], [*b.logprobs, *b.entropy], strict=True)
    return _largest([abs(x - y) for x, y in pairs])


def _largest(values: list[float]) -> float:
    """The largest value; NaN where there is one, which `max` would lose."""
    return math.nan if any(map(math.isnan, values)) else max(values)


@contextlib.asynccontextmanager
async def _http(server: LogprobServer) -> AsyncIterator[int]:
    """Serve over HTTP on a free port of this host, which is returned."""
    with contextlib.closing(listen("127.0.0.1", 0)) as bound:
        http_server = web(server, None, "bench", key=None, bounds=HttpBounds())
        serving = asyncio.create_task(http_server.serve(sockets=[bound]))
        try:
            yield bound.getsockname()[1]
        finally:
            http_server.should_exit = True
            await serving


def _ask(connection: http.client.HTTPConnection, body: bytes) -> float:
    began = time.perf_counter()
    connection.request("POST", "/v1/logprobs", body, {"content-type": "application/json"})
    response = connection.getresponse()
    json.loads(response.read())
    assert response.status == 200, response.status
    return time.perf_counter() - began


def table(report: Report) -> str:
    lines = ["| what | measured | bound | measured / bound | |", "|---|---|---|---|---|"]
    for f in report.findings:
        value = "not counted on a CPU"
        if f.value is not None:
            value = f"{f.value:.3g} {f.unit}" if abs(f.value) < 1000 else f"{f.value:,.0f} {f.unit}"
        bound = "" if f.bound is None else f"{'≥' if f.at_least else '≤'} {f.bound:.3g} {f.unit}"
        ratio = f"{f.value / f.bound:.2f}" if f.value is not None and f.bound else ""
        verdict = " · ".join(filter(None, ["**missed**" if f.missed else "", f.detail]))
        lines.append(f"| {f.what} | {value} | {bound} | {ratio} | {verdict} |")
    return "\n".join(lines)


def as_json(report: Report, environment: Environment, load: Load) -> dict[str, object]:
    """Environment, options and results, JSON-ready."""
    findings = [{**asdict(f), "missed": f.missed} for f in report.findings]
    return {"environment": environment, "timer": TIMER, "options": asdict(load), "findings": findings, "seconds": report.times}
