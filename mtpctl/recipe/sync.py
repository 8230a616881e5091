"""The section `sync`: how new weights reach engines and log-prob servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, PositiveFloat, PositiveInt, Section


class SyncBase(Section):
    bucket_bytes: PositiveInt = Field(1 << 30, description="Bytes of a bucket, at most.")
    sections: list[Literal["target", "draft", "adapter"]] = Field(
        ["target", "draft"],
        description="What moves at each sync. With train.lora: target is weights with the adapter merged in; adapter, in its place, "
        "the adapter alone.",
    )
    verify: Literal["first", "always", "never"] = Field("first", description="When checksums of every tensor are compared on both ends.")
    pause: Literal["keep", "abort", "wait"] = Field("keep", description="What requests in flight do during a sync.")
    deadline_s: PositiveFloat = Field(120.0, description="Seconds after which a sync is given up.")
    release_kv: bool = Field(False, description="Engines give the memory of their KV cache back for the time of a sync.")
    on_collapse: Literal["warn", "error"] = Field("warn", description="When acceptance falls under half its running mean after a sync.")


class ShmConfig(SyncBase):
    transport: Literal["shm"] = Field("shm", description="One host, through its shared memory; from and to cards too.")


class IpcConfig(SyncBase):
    transport: Literal["ipc"] = Field("ipc", description="CUDA, one host, through memory handles.")


class NcclConfig(SyncBase):
    transport: Literal["nccl"] = Field("nccl", description="CUDA, any hosts.")


SyncConfig = Annotated[ShmConfig | IpcConfig | NcclConfig, Field(discriminator="transport")]


def sections_fit(sync: SyncBase) -> Complaints:
    """Sections that make no version, and buckets too small to hold anything."""
    if len(set(sync.sections)) != len(sync.sections) or ("target" in sync.sections) == ("adapter" in sync.sections):
        yield f"sync.sections: must hold target or adapter, and draft or not, each once, got [{', '.join(sync.sections)}]"
    if sync.bucket_bytes < 1024:
        yield f"sync.bucket_bytes: must be at least 1024, got {sync.bucket_bytes}"
