"""Time what the gateway costs: tokens/s of conversations over HTTP against the same ones asked of the engines directly.

    python scripts/time_gateway.py --batch 64 --batch 256

The engine is simulated: every answer takes a fixed time a token, whatever else is asked. Clients are in a process of their own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from mtpctl.data.tokenizers import load_byte_tokenizer, make_byte_tokenizer
from mtpctl.rollout.gateway.answers import AnswerReader
from mtpctl.rollout.gateway.messages import ChatRequest
from mtpctl.rollout.gateway.server import Gateway
from mtpctl.rollout.gateway.trajectory import Model
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.web.server import listen

EOS = 258


class FixedStep:
    """Answers of `tokens` tokens, each of which takes `step_s`."""

    def __init__(self, tokens: int, step_s: float) -> None:
        self.tokens, self.step_s = tokens, step_s
        self.made = 0

    async def __call__(self, request: GenerationRequest) -> Sample:
        sample = request.sample.copy()
        await asyncio.sleep(self.tokens * self.step_s)
        sample.append([*b"abcdefgh" * (self.tokens // 8), EOS][-self.tokens :], [-1.0] * self.tokens, 1)
        sample.finish_reason = "stop"
        self.made += self.tokens
        return sample


def messages_of(turn: int) -> list[dict[str, str]]:
    """What a client says after the answers so far."""
    return [{"role": "user", "content": f"question {turn}"}]


def clients(urls: list[str], turns: int, pipe: Connection) -> None:
    """Have every conversation, all at once, and tell the seconds."""

    async def talk(client: aiohttp.ClientSession, url: str) -> None:
        messages: list[dict[str, object]] = []
        for turn in range(turns):
            messages += messages_of(turn)
            async with client.post(f"{url}/chat/completions", json={"messages": messages}) as found:
                found.raise_for_status()
                messages.append((await found.json())["choices"][0]["message"])

    async def run() -> float:
        # The time of httpx grows with the square of its connections, and hides what is measured here.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            began = time.perf_counter()
            await asyncio.gather(*(talk(client, url) for url in urls))
            return time.perf_counter() - began

    pipe.send(asyncio.run(run()))


async def measure(batch: int, turns: int, tokens: int, step_s: float, made_in: Path) -> None:
    """Print a line of the table: the same conversations in this process, and over HTTP."""
    tokenizer, engine = load_byte_tokenizer(made_in), FixedStep(tokens, step_s)
    model = Model(engine, tokenizer, AnswerReader(tokenizer, None), 1 << 20)
    request = GenerationRequest(Sample("p", "g", [1]), 1 << 20, stop_token_ids=[EOS])

    async def alone() -> None:
        sample = request.sample
        for turn in range(turns):
            asked = ChatRequest.model_validate({"messages": messages_of(turn)})
            ids = tokenizer.encode(asked.messages[0].content)  # type: ignore[arg-type]
            sample = sample.copy()
            sample.append(ids, [0.0] * len(ids), 1, trained=False)
            sample = await engine(GenerationRequest(sample, 1 << 20, stop_token_ids=[EOS]))

    began = time.perf_counter()
    await asyncio.gather(*(alone() for _ in range(batch)))
    direct = batch * turns * tokens / (time.perf_counter() - began)
    async with Gateway(model, tokenizer, "toy", turns, listen("127.0.0.1", 0)) as gateway:
        opened = [gateway.open(request)[0] for _ in range(batch)]
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=clients, args=([gateway.base_url(s) for s in opened], turns, theirs))
        process.start()
        cpu = time.process_time()
        while not ours.poll():
            await asyncio.sleep(0.05)
        through = batch * turns * tokens / ours.recv()
        spent = (time.process_time() - cpu) / (batch * turns) * 1e3
        process.join()
        for secret in opened:
            gateway.close(secret)
    print(f"| {batch} | {direct:,.0f} | {through:,.0f} | {through / direct:.3f} | {spent:.2f} |", flush=True)


def main(
    batch: Annotated[list[int] | None, typer.Option(help="Conversations at once.")] = None,
    turns: Annotated[int, typer.Option(help="Answers in each.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    step_ms: Annotated[float, typer.Option(help="Time of a token.")] = 10.0,
) -> None:
    print("| conversations | tokens/s without the gateway | through it | share | CPU ms an answer |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as made:
        make_byte_tokenizer(Path(made))
        for each in batch or [64, 256]:
            asyncio.run(measure(each, turns, tokens, step_ms / 1e3, Path(made)))


if __name__ == "__main__":
    typer.run(main)
