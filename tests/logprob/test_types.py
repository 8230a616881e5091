"""A bf16 replica of an MoE model whose router bias is fp32: each tensor is received in the replica's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import section_of
from mtpctl.logprob.protocol import ScoreRequest
from mtpctl.logprob.rank import ScoreRank
from mtpctl.logprob.replica import Replica
from mtpctl.sync.protocol import Manifest, PlanMismatch
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import update_target
from tests.fakes.logprob_ranks import LocalRanks, Loop, replica_config
from tests.fakes.toys import TOYS, toy_folder

Tensors = dict[str, torch.Tensor]
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module", params=["deepseek-v3", "glm4-moe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, Tensors, Any]]:
    """A replica, the tensors of another model of its sizes as a trainer in bf16 exports them, and what publishes tensors."""
    root, config = tmp_path_factory.mktemp("types"), TOYS[request.param]
    folder, other = (toy_folder(config, root / str(seed), seed, "bf16") for seed in (0, 1))
    rank = ScoreRank(replica_config(folder, precision="bf16"), 0)
    bounds = rank.build("")
    tensors = load_file(other / "model.safetensors")
    store, shape = VersionStore(root / "versions"), shape_of(config)

    def publish(version: int, tensors: Tensors) -> Manifest:
        publisher = Publisher(store, bucket_bytes=1 << 20, section_of=lambda name: section_of(name, shape))
        return publisher.publish(iter(tensors.items()), version, checksums=True)

    yield Replica(LocalRanks(rank), bounds, 0, keep_previous=False), tensors, publish
    rank.engine.close()


def test_update_keeps_the_dtype_of_each_tensor(made: tuple[Replica, Tensors, Any], run: Loop) -> None:
    replica, tensors, publish = made

    async def ask() -> int:
        (scored,) = await replica.score([ScoreRequest(list(range(40)))], 1)
        return scored.version

    assert {str(value.dtype) for value in tensors.values()} == {"torch.bfloat16", "torch.float32"}
    report = run(update_target(replica, publish(1, tensors), verify=True))
    assert report.verified == len(tensors)
    assert run(ask()) == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        (BIAS, torch.bfloat16, "is bfloat16, the served model float32"),
        ("model.norm.weight", torch.float32, "is float32, the served model bfloat16"),
    ],
)
def test_any_other_type_is_refused(made: tuple[Replica, Tensors, Any], run: Loop, kind: str, dtype: torch.dtype, message: str) -> None:
    replica, tensors, publish = made
    wrong = {name: value.to(dtype) if name.endswith(kind) else value for name, value in tensors.items()}
    with pytest.raises(PlanMismatch, match=f"{kind} {message}"):
        run(update_target(replica, publish(2 if dtype is torch.bfloat16 else 3, wrong)))
