"""The section `sync`: how new weights reach engines and log-prob servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, PositiveFloat, PositiveInt, Section


class SyncBase(Section):
    bucket_bytes: PositiveInt = Field(1 << 30, description="Bytes of one bucket of tensors, at most.")
    sections: list[Literal["target", "draft", "adapter"]] = Field(
        ["target", "draft"],
        description="What is sent at each sync. With train.lora, target is the weights with the adapter merged in; adapter, in its place, "
        "is the adapter alone.",
    )
    verify: Literal["first", "always", "never"] = Field("first", description="At which syncs both ends compare checksums of every tensor.")
    pause: Literal["keep", "abort", "wait"] = Field(
        "keep",
        description="What becomes of requests in flight at a sync. keep: they pause; abort: they are cut, and continued afterwards; "
        "wait: the sync waits for them.",
    )
    deadline_s: PositiveFloat = Field(120.0, description="Seconds after which a sync is given up.")
    release_kv: bool = Field(False, description="Engines free the memory of their KV cache during a sync.")
    on_collapse: Literal["warn", "error"] = Field(
        "warn", description="What to do when draft acceptance falls below half its running mean after a sync."
    )


class ShmConfig(SyncBase):
    transport: Literal["shm"] = Field("shm", description="One host, through its shared memory; also from and to cards.")


class IpcConfig(SyncBase):
    transport: Literal["ipc"] = Field("ipc", description="CUDA, one host, through IPC memory handles.")


class NcclConfig(SyncBase):
    transport: Literal["nccl"] = Field("nccl", description="CUDA, any hosts. The default, unless cluster.device is cpu: then it is shm.")


SyncConfig = Annotated[ShmConfig | IpcConfig | NcclConfig, Field(discriminator="transport")]


@dataclass(frozen=True, slots=True)
class Transport:
    """What a transport needs, and how it works.

    `pushes`: sender and receivers take part at the same time; otherwise receivers read from the version store when they like.
    `cuda`: both ends are on cards. `one_process_a_card`: no two of its processes share a card.
    """

    pushes: bool
    cuda: bool
    one_process_a_card: bool = False


TRANSPORTS = {
    "shm": Transport(pushes=False, cuda=False),
    "ipc": Transport(pushes=True, cuda=True),
    "nccl": Transport(pushes=True, cuda=True, one_process_a_card=True),
}
"""By the values of `sync.transport`. The module of each is of the same name, in `mtpctl.sync.transports`."""

PUSHED = tuple(name for name, transport in TRANSPORTS.items() if transport.pushes)


def sections_fit(sync: SyncBase) -> Complaints:
    """Refuse sections that do not make up a whole version, and buckets that are too small."""
    if len(set(sync.sections)) != len(sync.sections) or ("target" in sync.sections) == ("adapter" in sync.sections):
        yield f"sync.sections: must hold target or adapter, and draft or not, each once, got [{', '.join(sync.sections)}]"
    if sync.bucket_bytes < 1024:
        yield f"sync.bucket_bytes: must be at least 1024, got {sync.bucket_bytes}"
