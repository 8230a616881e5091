"""A gateway in a separate process in front of a fake engine: prints its address and the secrets of two trajectories, one for each agent."""

from __future__ import annotations

import asyncio
import sys

from mtpctl.environments.gateway.server import Gateway
from mtpctl.web.server import listen
from tests.fakes.scripted_engine import Scripted, byte_tokenizer, model_of, request_of

KEY = "s3cret"


async def main(turns: int) -> None:
    engine = Scripted(lambda text, call: "yes", delay_s=0.002)
    engine.answered = Forgetful()
    model = model_of(engine, context=1 << 20)
    async with Gateway(model, byte_tokenizer(), "toy", turns, listen("127.0.0.1", 0), key=KEY) as gateway:
        gateway.create_single_request = request_of
        secrets = [gateway.open(request_of(deadline_s=600.0))[0] for _ in range(2)]
        print(gateway.address, *secrets, flush=True)
        await asyncio.Event().wait()


class Forgetful(list[list[int]]):
    """Discards answers."""

    def append(self, answer: list[int]) -> None:
        """Keep nothing of it."""


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
