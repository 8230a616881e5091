"""Responses to text, beside the event loop: a long one takes milliseconds to decode, and a step has thousands of them."""

from __future__ import annotations

import asyncio

from mtpctl.data.tokenizers import Tokenizer
from mtpctl.samples import Ids

AT_ONCE = 16
"""Responses that one job of the thread decodes. Each job wakes the event loop once; the last of it waits for all of it."""


class Decoder:
    """Decodes in one thread at a time, which takes whatever waits for it: with many, the loop would wait for each whenever it goes on."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Ids, asyncio.Future[str]]] = []
        self._working: asyncio.Task[None] | None = None

    async def text(self, tokenizer: Tokenizer, ids: Ids) -> str:
        """The text of these ids."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, done))
        if self._working is None:
            self._working = asyncio.create_task(self._work(tokenizer))
        return await done

    async def _work(self, tokenizer: Tokenizer) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
                try:
                    texts = await asyncio.to_thread(_texts, tokenizer, [ids for ids, _ in taken])
                except Exception as error:
                    for _, done in taken:
                        if not done.done():
                            done.set_exception(error)
                    continue
                for (_, done), text in zip(taken, texts, strict=True):
                    if not done.done():  # nobody waits for a response of a run that ends
                        done.set_result(text)
        finally:
            self._working = None


def _texts(tokenizer: Tokenizer, responses: list[Ids]) -> list[str]:
    return [tokenizer.decode(ids) for ids in responses]
