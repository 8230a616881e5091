"""Log-prob replicas in this process: the methods of a rank run in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mtpctl.logprob.dispatch import ServerLimits
from mtpctl.logprob.protocol import ReplicaDead
from mtpctl.logprob.rank import ReplicaConfig
from mtpctl.logprob.replica import Replica
from mtpctl.logprob.server import LogprobServer
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig

T = TypeVar("T")


CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


class LocalRanks:
    """`Ranks` with one rank in this process. `kill` simulates the death of the process."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        self.thread = ThreadPoolExecutor(1)
        self.dead = asyncio.Event()

    def call(self, method: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        done = asyncio.get_running_loop().run_in_executor(self.thread, getattr(self.rank, method.__name__), *args)
        return self._answer(done)

    async def _answer(self, done: asyncio.Future[Any]) -> Any:
        gone = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if self.dead.is_set():
            done.add_done_callback(lambda late: late.exception())
            raise ReplicaDead("the replica was killed")
        gone.cancel()
        return done.result()

    def kill(self) -> None:
        self.dead.set()

    async def end(self) -> None:
        self.kill()
        self.thread.shutdown(wait=False)


class Loop:
    """An event loop that outlives a test, so that a server living in it can too."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __call__(self, step: Awaitable[T], seconds: float = 60.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(step, seconds))

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


def replica_config(folder: Path, **changes: Any) -> ReplicaConfig:
    settings: dict[str, Any] = {
        "model": str(folder),
        "parallel": ParallelConfig(),
        "precision": "fp32",
        "mtp": MtpConfig(),
        "kernels": KernelsConfig(),
        "tokens_per_batch": 1024,
        "threads": 1,
    }
    return ReplicaConfig(**{**settings, **changes})


async def serve(start: Callable[[int], Awaitable[Replica]], count: int = 1, store: Any = None, **limits: Any) -> LogprobServer:
    """A server with small limits over replicas made by `start`."""
    settings = {"tokens_per_batch": 1024, "queue_tokens": 1 << 20, **limits}
    return await LogprobServer.start(start, count, ServerLimits(**settings), store=store)
