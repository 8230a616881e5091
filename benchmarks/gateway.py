"""The cost of the gateway: tokens/s of conversations over HTTP, relative to the same conversations sent to the engines directly.

    python benchmarks/gateway.py                    # a simulated engine, on any machine
    python benchmarks/gateway.py --shape mimo7b     # vLLM on a GPU, with a model of known answers; --shape tiny on a CPU

The simulated engine takes a fixed time for a token, whatever else is requested. Both ways request the same tokens: direct ones are rendered
in advance, and those of the gateway are messages of clients in another process. Rounds alternate after a warm-up, and the share is the
median of the rounds' shares. All rounds have the same conversations, so after the first their prompts are in an engine's prefix cache.
Exit code 6 if a share is below 95%.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import aiohttp

from harness import finish, parser, print_environment
from mtpctl.bench.report import format_spread
from mtpctl.bench.rollout import Bench, Options, parse_shape
from mtpctl.bench.rollout_engines import expected_answer
from mtpctl.cluster.process import freeze_heap
from mtpctl.data.tokenizers import load_plain_tokenizer, make_byte_tokenizer
from mtpctl.environments.gateway.server import AnswerReader, Gateway
from mtpctl.environments.gateway.trajectory import ChatBackend, Generate
from mtpctl.environments.turns import ChatReplies
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.web.server import listen

MIN_SHARE = 0.95
"""Minimum tokens/s through the gateway relative to those without it."""
TEMPLATE_CHARACTERS = len("user: \nassistant: <eos>")
"""Maximum number of characters that the chat template adds to a turn. Each is a token of the byte tokenizer."""
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Talk:
    """A round of `batch` concurrent conversations. question, tokens: number of tokens of each question and answer."""

    batch: int
    turns: int
    question: int
    tokens: int

    def questions(self, number: int) -> Messages:
        """The user messages of conversation `number`."""
        texts = (f"question {turn} of conversation {number} " for turn in range(self.turns))
        return [{"role": "user", "content": text.ljust(self.question - TEMPLATE_CHARACTERS, ".")} for text in texts]

    def figures(self, seconds: float, cpu_s: float) -> tuple[float, float]:
        """Tokens/s, and CPU milliseconds of this process per answer."""
        answers = self.batch * self.turns
        return answers * self.tokens / seconds, cpu_s / answers * 1e3


class SimulatedEngine:
    """Generates tokens at a fixed rate, one every `step_s` seconds."""

    def __init__(self, tokens: int, step_s: float) -> None:
        self.step_s = step_s
        self.text = [*b"abcdefgh" * (tokens // 8 + 1)]

    async def __call__(self, request: GenerationRequest) -> Sample:
        sample = request.sample.copy()
        count = request.max_tokens - len(sample.response_ids)
        await asyncio.sleep(count * self.step_s)
        sample.append(self.text[:count], [-1.0] * count, 1)
        sample.finish_reason = "length"
        return sample


def run_clients(pipe: Connection) -> None:
    """Receive lists of conversations (base URL, questions) from the pipe, hold each list concurrently, and send back the seconds."""

    async def talk(client: aiohttp.ClientSession, url: str, questions: Messages, tokens: int) -> None:
        messages: list[dict[str, object]] = []
        for question in questions:
            messages.append({**question})
            async with client.post(f"{url}/chat/completions", json={"messages": messages, "max_tokens": tokens}) as response:
                response.raise_for_status()
                messages.append((await response.json())["choices"][0]["message"])

    async def run(talks: list[tuple[str, Messages]], tokens: int) -> float:
        # Not httpx, whose own time grows with the square of the connections and would hide the gateway's.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)) as client:
            began = time.perf_counter()
            await asyncio.gather(*(talk(client, url, questions, tokens) for url, questions in talks))
            return time.perf_counter() - began

    while (work := pipe.recv()) is not None:
        pipe.send(asyncio.run(run(*work)))


class Measurement:
    """Holds conversations with the engines, directly and through a gateway. vocab: size of a cycle model's vocabulary; None for others."""

    def __init__(self, generate: Generate, tokenizer: Any, context: int, pipe: Connection, vocab: int | None) -> None:
        self.generate, self.tokenizer, self.context, self.pipe, self.vocab = generate, tokenizer, context, pipe, vocab

    async def direct(self, talk: Talk) -> tuple[float, float]:
        """Hold the conversations directly, with the tokens that the gateway would render from the messages."""
        replies = ChatReplies(self.tokenizer)
        prompts = []
        for number in range(talk.batch):
            first, *others = talk.questions(number)
            prompts.append([self.tokenizer.chat([first]), *(replies.tokens([question], None) for question in others)])

        async def converse(number: int, first: list[int], others: list[list[int]]) -> Sample:
            sample = Sample(str(number), str(number), first)
            sample = await self.generate(GenerationRequest(sample, talk.tokens))
            for ids in others:
                sample = sample.copy()
                sample.append(ids, [0.0] * len(ids), sample.version_spans[-1].version, trained=False)
                sample = await self.generate(GenerationRequest(sample, len(sample.response_ids) + talk.tokens))
            return sample

        began, cpu = time.perf_counter(), time.process_time()
        samples = await asyncio.gather(*(converse(number, first, others) for number, (first, *others) in enumerate(prompts)))
        figures = talk.figures(time.perf_counter() - began, time.process_time() - cpu)
        self.check(talk, samples)
        return figures

    async def through_gateway(self, talk: Talk) -> tuple[float, float]:
        """Hold the conversations over HTTP, with clients in another process."""
        model = ChatBackend(self.generate, self.tokenizer, AnswerReader(self.tokenizer, None), self.context)
        async with Gateway(model, self.tokenizer, "policy", talk.turns, listen("127.0.0.1", 0)) as gateway:
            secrets = [gateway.open(GenerationRequest(Sample(str(n), str(n), []), self.context))[0] for n in range(talk.batch)]
            self.pipe.send(([(gateway.base_url(secret), talk.questions(n)) for n, secret in enumerate(secrets)], talk.tokens))
            cpu = time.process_time()
            while not self.pipe.poll():
                await asyncio.sleep(0.02)
            figures = talk.figures(self.pipe.recv(), time.process_time() - cpu)
            trajectories = [gateway.close(secret) for secret in secrets]
        assert all(len(samples) == 1 for samples in trajectories), "a conversation is one sample"
        self.check(talk, [sample for (sample,) in trajectories])
        return figures

    def check(self, talk: Talk, samples: list[Sample]) -> None:
        """Assert that every answer has the right length and, if the model's answers are known, the right tokens."""
        for sample in samples:
            assert sample.num_sampled == talk.turns * talk.tokens, f"{sample.num_sampled} tokens instead of {talk.turns * talk.tokens}"
            if self.vocab is None:
                continue
            ids, begin = sample.token_ids.tolist(), len(sample.prompt_ids)
            for turn in range(talk.turns):
                expected = expected_answer(ids[begin - 1], talk.tokens, self.vocab)
                assert ids[begin : begin + talk.tokens] == expected, f"turn {turn} has tokens that the model does not sample"
                begin += talk.tokens
                begin += next((n for n, trained in enumerate(sample.loss_mask[begin - len(sample.prompt_ids) :]) if trained), 0)


@asynccontextmanager
async def open_engine(bench: Bench | None, tokens: int, step_s: float) -> AsyncIterator[Generate]:
    """A pool with one engine, or the simulated engine if there is no `bench`."""
    if bench is None:
        yield SimulatedEngine(tokens, step_s)
        return
    async with bench.pool(0) as pool:
        yield pool.sample


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="", help="a vLLM engine of this shape, mimo7b or tiny; default: a simulated engine")
    arguments.add_argument("--model", type=Path, help="the folder of the model, written if it does not exist; default: a temporary one")
    arguments.add_argument("--batch", type=int, action="append", help="concurrent conversations; may be repeated; default: 64, 256")
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--question", type=int, default=64, help="tokens of a question, the template's included")
    arguments.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    arguments.add_argument("--step-ms", type=float, default=10.0, help="time of a token of the simulated engine")
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    import torch

    batches = tuple(sorted(set(options.batch or (64, 256))))
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() and options.shape else "cpu"
    shares: dict[int, float] = {}

    async def measure(bench: Bench | None, tokenizer: Any, pipe: Connection) -> None:
        context, vocab = (bench.context, bench.shape.vocab) if bench else (1 << 20, None)
        async with open_engine(bench, options.tokens, options.step_ms / 1e3) as generate:
            measurement = Measurement(generate, tokenizer, context, pipe, vocab)
            freeze_heap()
            for batch in batches:
                talk, warmup = (Talk(batch, turns, options.question, options.tokens) for turns in (options.turns, 1))
                await measurement.direct(warmup)
                await measurement.through_gateway(warmup)
                pairs = [(await measurement.direct(talk), await measurement.through_gateway(talk)) for _ in range(options.rounds)]
                ratios = [through[0] / direct[0] for direct, through in pairs]
                shares[batch] = statistics.median(ratios)
                rates = " | ".join(format_spread([pair[way][0] for pair in pairs], ",.0f") for way in (0, 1))
                cpu = ", ".join(f"{statistics.median(pair[way][1] for pair in pairs):.2f}" for way in (0, 1))
                print(f"| {batch} | {rates} | {format_spread(ratios, '.1%')} | {cpu} |", flush=True)

    with tempfile.TemporaryDirectory(prefix="mtpctl-gateway-") as scratch:
        make_byte_tokenizer(Path(scratch) / "tokenizer")
        tokenizer = load_plain_tokenizer(Path(scratch) / "tokenizer")
        bench = None
        if options.shape:
            prompt = options.turns * options.question + (options.turns - 1) * options.tokens
            folder = options.model or Path(scratch) / "model"
            settings = Options(parse_shape(options.shape), folder, batches, prompt, options.tokens, 1, 1.0, options.rounds, device)
            bench = Bench(settings, print, num_engines=1)
        pipe, remote = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=run_clients, args=(remote,), daemon=True).start()
        print_environment()
        print(
            "| conversations | tokens/s without the gateway (least–most) | through it | share | CPU ms an answer, without and through it |"
        )
        print("|---|---|---|---|---|", flush=True)
        with bench.cluster() if bench else nullcontext():
            asyncio.run(measure(bench, tokenizer, pipe))
        pipe.send(None)
    finish(
        [
            f"{batch} conversations: {share:.1%} of the tokens/s, bound {MIN_SHARE:.0%}"
            for batch, share in shares.items()
            if share < MIN_SHARE
        ]
    )


if __name__ == "__main__":
    main()
