"""Replicas in this process: the ranks' methods on a separate thread instead of in Ray actors. One model a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpctl.logprob.rank import ScoreRank
from mtpctl.logprob.replica import Replica
from tests.fakes.logprob_ranks import CONFIG, LocalRanks, Loop, replica_config


@pytest.fixture(scope="module")
def run() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MiMo with random weights that distinguish tokens, and a byte tokenizer."""
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
