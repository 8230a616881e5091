"""Replicas in this process: the ranks' methods on a thread of their own instead of in Ray actors. One model a module."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mtpctl.logprob.dispatch import ServerLimits
from mtpctl.logprob.protocol import ReplicaDead
from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
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
    """`Ranks` of one rank in this process. `kill` makes it behave as a process that is gone."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        self.thread = ThreadPoolExecutor(1)
        self.dead = asyncio.Event()
        self.calls: list[str] = []

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        self.calls.append(method)
        done = asyncio.get_running_loop().run_in_executor(self.thread, getattr(self.rank, method), *args)
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


@pytest.fixture(scope="module")
def run() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MiMo with random weights that tell tokens apart, and a byte tokenizer."""
    from mtpctl.convert.hf_folder import create_hf_folder
    from mtpctl.data.tokenizers import make_byte_tokenizer

    path = tmp_path_factory.mktemp("model") / "tiny"
    create_hf_folder(CONFIG, path, seed=3)
    make_byte_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    from mtpctl.convert.hf_folder import create_hf_folder

    return create_hf_folder(CONFIG, tmp_path_factory.mktemp("other") / "other", seed=9).path


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


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    """The one engine of this process while a module's tests run."""
    rank = ScoreRank(replica_config(folder), 0)
    rank.build("")
    yield rank.engine
    rank.engine.close()


@pytest.fixture
def replica(engine: Any, folder: Path) -> Callable[..., Replica]:
    """Makes a replica over the module's engine, at version 0 of whatever weights that has."""

    def make(*, keep_previous: bool = False) -> Replica:
        rank = ScoreRank(replica_config(folder, keep_previous=keep_previous), 0)
        return Replica(LocalRanks(rank), rank.adopt(engine), 0, keep_previous=keep_previous)

    return make


async def serve(start: Callable[[int], Awaitable[Replica]], count: int = 1, published: Any = None, **limits: Any) -> LogprobServer:
    """A server with small limits over replicas made by `start`."""
    settings = {"tokens_per_batch": 1024, "queue_tokens": 1 << 20, **limits}
    return await LogprobServer.start(start, count, ServerLimits(**settings), published=published)
