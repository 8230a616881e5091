"""Time what the gateway costs: tokens/s of conversations over HTTP against the same ones asked of the engines directly.

    python scripts/time_gateway.py                    # a simulated engine, on any machine
    python scripts/time_gateway.py --shape mimo7b     # vLLM on a card, with a model of known answers; --shape tiny on a CPU

The simulated engine takes a fixed time a token, whatever else is asked. Both ways ask for the same tokens: a conversation's prompts are
rendered in advance for the one, and come as messages for the other, from clients in a process of their own. Rounds of the two alternate
after one turn of each that warms up, and the share is the median of the rounds' own. All rounds have the same conversations, so after the
first their prompts are in an engine's prefix cache. Prints a table, and the same as JSON, a line a row. Exit code 6 where a share misses
its bound.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Literal

import aiohttp
import typer

from mtpctl.bench.cycle_model import answer
from mtpctl.bench.machine import machine, told
from mtpctl.bench.rollout_engines import Bench, Options, known_shape
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import settle_heap
from mtpctl.data.tokenizers import Tokenizer, load_byte_tokenizer, make_byte_tokenizer
from mtpctl.environments.gateway.answers import AnswerReader
from mtpctl.environments.gateway.server import Gateway
from mtpctl.environments.gateway.trajectory import Generate, Model
from mtpctl.environments.turns import ChatReplies
from mtpctl.recipe.cluster import ClusterConfig
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.web.server import listen

BOUND = 0.95
"""Tokens/s through the gateway over those without it, at least."""
TEMPLATE = len("user: \nassistant: <eos>")
"""Characters that the chat template adds to a turn, at most; the byte tokenizer makes a token of each."""

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way of having the conversations: tokens/s, and milliseconds of this process's CPU for an answer."""

    tokens_per_s: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Talk:
    """The conversations of a round: `batch` at once, in each `turns` questions of `asked` tokens and answers of `tokens`."""

    batch: int
    turns: int
    asked: int
    tokens: int

    def questions(self, number: int) -> Messages:
        """What the client of one conversation says, turn by turn."""
        texts = (f"question {turn} of conversation {number} " for turn in range(self.turns))
        return [{"role": "user", "content": text.ljust(self.asked - TEMPLATE, ".")} for text in texts]

    @property
    def answers(self) -> int:
        return self.batch * self.turns

    def way(self, seconds: float, cpu_s: float) -> Way:
        return Way(self.answers * self.tokens / seconds, cpu_s / self.answers * 1e3)


class FixedStep:
    """Answers of `tokens` tokens, each of which takes `step_s`."""

    def __init__(self, tokens: int, step_s: float) -> None:
        self.step_s = step_s
        self.text = [*b"abcdefgh" * (tokens // 8 + 1)]

    async def __call__(self, request: GenerationRequest) -> Sample:
        sample = request.sample.copy()
        wanted = request.max_tokens - len(sample.response_ids)
        await asyncio.sleep(wanted * self.step_s)
        sample.append(self.text[:wanted], [-1.0] * wanted, 1)
        sample.finish_reason = "length"
        return sample


def clients(pipe: Connection) -> None:
    """Have conversations, all of them at once, and tell the seconds: of each list of (base URL, questions) that comes through the pipe."""

    async def talk(client: aiohttp.ClientSession, url: str, questions: Messages, tokens: int) -> None:
        messages: list[dict[str, object]] = []
        for question in questions:
            messages.append({**question})
            async with client.post(f"{url}/chat/completions", json={"messages": messages, "max_tokens": tokens}) as found:
                found.raise_for_status()
                messages.append((await found.json())["choices"][0]["message"])

    async def run(talks: list[tuple[str, Messages]], tokens: int) -> float:
        # The time of httpx grows with the square of its connections, and hides what is measured here.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)) as client:
            began = time.perf_counter()
            await asyncio.gather(*(talk(client, url, questions, tokens) for url, questions in talks))
            return time.perf_counter() - began

    while (wanted := pipe.recv()) is not None:
        pipe.send(asyncio.run(run(*wanted)))


class Measurement:
    """Has conversations of the engines `generate`, directly and through a gateway before them. `vocab`: of a model of known answers."""

    def __init__(self, generate: Generate, tokenizer: Tokenizer, context: int, pipe: Connection, vocab: int | None) -> None:
        self.generate, self.tokenizer, self.context, self.pipe, self.vocab = generate, tokenizer, context, pipe, vocab

    async def directly(self, talk: Talk) -> Way:
        """The conversations as requests with the tokens that the gateway would make of the messages."""
        replies = ChatReplies(self.tokenizer)
        prompts = []
        for number in range(talk.batch):
            first, *others = talk.questions(number)
            prompts.append([self.tokenizer.chat([first]), *(replies.tokens([question], None) for question in others)])

        async def one(number: int, first: list[int], others: list[list[int]]) -> Sample:
            sample = Sample(str(number), str(number), first)
            sample = await self.generate(GenerationRequest(sample, talk.tokens))
            for ids in others:
                sample = sample.copy()
                sample.append(ids, [0.0] * len(ids), sample.version_spans[-1].version, trained=False)
                sample = await self.generate(GenerationRequest(sample, len(sample.response_ids) + talk.tokens))
            return sample

        began, cpu = time.perf_counter(), time.process_time()
        samples = await asyncio.gather(*(one(number, first, others) for number, (first, *others) in enumerate(prompts)))
        way = talk.way(time.perf_counter() - began, time.process_time() - cpu)
        self.check(talk, samples)
        return way

    async def through(self, talk: Talk) -> Way:
        """The conversations of clients in another process, which ask over HTTP."""
        model = Model(self.generate, self.tokenizer, AnswerReader(self.tokenizer, None), self.context)
        async with Gateway(model, self.tokenizer, "policy", talk.turns, listen("127.0.0.1", 0)) as gateway:
            opened = [gateway.open(GenerationRequest(Sample(str(n), str(n), []), self.context))[0] for n in range(talk.batch)]
            self.pipe.send(([(gateway.base_url(secret), talk.questions(n)) for n, secret in enumerate(opened)], talk.tokens))
            cpu = time.process_time()
            while not self.pipe.poll():
                await asyncio.sleep(0.02)
            way = talk.way(self.pipe.recv(), time.process_time() - cpu)
            samples = [gateway.close(secret) for secret in opened]
        assert all(len(each) == 1 for each in samples), "a conversation is one sample"
        self.check(talk, [sample for (sample,) in samples])
        return way

    def check(self, talk: Talk, samples: list[Sample]) -> None:
        """Raise AssertionError where an answer has another length, or is not the one of a model whose answers are known."""
        for sample in samples:
            assert sample.sampled == talk.turns * talk.tokens, f"{sample.sampled} tokens in place of {talk.turns * talk.tokens}"
            if self.vocab is not None:
                whole, begin = sample.token_ids.tolist(), len(sample.prompt_ids)
                for turn in range(talk.turns):
                    wanted = answer(whole[begin - 1], talk.tokens, self.vocab)
                    assert whole[begin : begin + talk.tokens] == wanted, f"turn {turn} has tokens that the model does not sample"
                    begin += talk.tokens
                    begin += next((n for n, kept in enumerate(sample.loss_mask[begin - len(sample.prompt_ids) :]) if kept), 0)


@asynccontextmanager
async def engine(bench: Bench | None, tokens: int, step_s: float) -> AsyncIterator[Generate]:
    """What answers: a pool of one engine, or the simulated one."""
    if bench is None:
        yield FixedStep(tokens, step_s)
        return
    async with bench.pool(0) as pool:
        yield pool.sample


async def measure(
    engines: AbstractAsyncContextManager[Generate], talks: list[Talk], rounds: int, made: Callable[[Generate], Measurement]
) -> list[dict[str, object]]:
    """The rows of the table, each of which is printed as soon as it is measured."""
    rows = []
    async with engines as generate:
        measurement = made(generate)
        settle_heap()
        for talk in talks:
            short = Talk(talk.batch, 1, talk.asked, talk.tokens)
            await measurement.directly(short)
            await measurement.through(short)
            pairs = [(await measurement.directly(talk), await measurement.through(talk)) for _ in range(rounds)]
            rows.append(row(talk, pairs))
            print(line(rows[-1]), flush=True)
    return rows


def row(talk: Talk, pairs: list[tuple[Way, Way]]) -> dict[str, object]:
    """One row of the table: medians over the rounds, and every round's own."""
    direct, through = zip(*pairs, strict=True)
    shares = [after.tokens_per_s / before.tokens_per_s for before, after in pairs]
    return {
        "conversations": talk.batch,
        "turns": talk.turns,
        "asked_tokens": talk.asked,
        "answer_tokens": talk.tokens,
        "direct_tokens_per_s": [way.tokens_per_s for way in direct],
        "gateway_tokens_per_s": [way.tokens_per_s for way in through],
        "shares": shares,
        "share": statistics.median(shares),
        "direct_cpu_ms": statistics.median(way.cpu_ms for way in direct),
        "gateway_cpu_ms": statistics.median(way.cpu_ms for way in through),
        "bound": BOUND,
    }


HEAD = (
    "| conversations | tokens/s without the gateway (least – most) | through it | share | CPU ms an answer, without and through it |\n"
    "|---|---|---|---|---|"
)


def line(row: dict[str, object]) -> str:
    def spread(name: str, form: str) -> str:
        values = row[name]
        assert isinstance(values, list)
        return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"

    rates = f"{spread('direct_tokens_per_s', ',.0f')} | {spread('gateway_tokens_per_s', ',.0f')}"
    return f"| {row['conversations']} | {rates} | {spread('shares', '.1%')} | {row['direct_cpu_ms']:.2f}, {row['gateway_cpu_ms']:.2f} |"


def main(
    shape: Annotated[str, typer.Option(help="A vLLM engine of this shape, mimo7b or tiny; default: a simulated engine.")] = "",
    model: Annotated[Path | None, typer.Option(help="Where the model is, or is written; default: a temporary folder.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Conversations at once.")] = None,
    turns: Annotated[int, typer.Option(help="Answers in each.")] = 4,
    asked: Annotated[int, typer.Option(help="Tokens of a question, the template's included.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    step_ms: Annotated[float, typer.Option(help="Time of a token of the simulated engine.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="Measured rounds of each way.")] = 3,
) -> None:
    import torch

    batches = tuple(sorted(set(batch or (64, 256))))
    talks = [Talk(each, turns, asked, tokens) for each in batches]
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() and shape else "cpu"
    with tempfile.TemporaryDirectory(prefix="mtpctl-gateway-") as scratch, ExitStack() as stack:
        make_byte_tokenizer(Path(scratch) / "tokenizer")
        tokenizer = load_byte_tokenizer(Path(scratch) / "tokenizer")
        bench = None
        if shape:
            before = turns * asked + (turns - 1) * tokens
            options = Options(known_shape(shape), model or Path(scratch) / "model", batches, before, tokens, 1, 1.0, rounds, device)
            bench = Bench(options, print, at_once=1)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=clients, args=(theirs,), daemon=True)
        process.start()
        stack.callback(ours.send, None)
        gpus = 1 if device == "cuda" else 0
        stack.enter_context(
            cluster(ClusterConfig(device=device, num_cpus=None if gpus else 2), cpus=1, gpus=gpus) if bench else nullcontext()
        )
        context, vocab = (bench.context, bench.shape.vocab) if bench else (1 << 20, None)
        print(f"{told(machine())}\n\n{HEAD}", flush=True)
        rows = asyncio.run(
            measure(
                engine(bench, tokens, step_ms / 1e3),
                talks,
                rounds,
                lambda generate: Measurement(generate, tokenizer, context, ours, vocab),
            )
        )
    told_engine = shape or f"{step_ms:g} ms a token"
    print("\n" + "\n".join(json.dumps({"engine": told_engine, "environment": machine(), **each}) for each in rows))
    if not all(each["share"] >= BOUND for each in rows):
        raise typer.Exit(6)


if __name__ == "__main__":
    typer.run(main)
