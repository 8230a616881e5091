"""Checkpoints of a run without tensors: all files that are read before a trainer starts."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

from mtpctl.checkpoint.finding import next_number
from mtpctl.checkpoint.listing import LISTING, entry_of_text, write_listing

SHARD, BYTES = "__0_0.distcp", 4096
_CHECKPOINT = "torch.distributed.checkpoint"


def stored_metadata(sizes: dict[str, int]) -> bytes:
    """A `.metadata` with the size of each shard file, as torch pickles it."""
    stored = [
        _value(name) + _object("filesystem", "_StorageInfo", _dict(relative_path=_value(name), offset=_value(0), length=_value(size)))
        for name, size in sizes.items()
    ]
    fields = _dict(state_dict_metadata=_value({}), planner_data=_value(None), storage_data=b"}(" + b"".join(stored) + b"u")
    return b"\x80\x02" + _object("metadata", "Metadata", fields) + b"."


def _object(module: str, name: str, state: bytes) -> bytes:
    return f"c{_CHECKPOINT}.{module}\n{name}\n".encode() + b")\x81" + state + b"b"


def _dict(**fields: bytes) -> bytes:
    return b"}(" + b"".join(_value(name) + value for name, value in fields.items()) + b"u"


def _value(value: object) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def write_checkpoint(run: Path, name: str, *, buffer: str = "", **state: Any) -> Path:
    """A complete checkpoint of a run with a unique shard, in `run/checkpoints`.

    state: of the controller; by default it follows from the name.
    """
    stage, step, *end = name.split("-") if "-" in name else (state["ended"][-1], 0)
    ended = state.get("ended", ["sft"] * (stage == "rl") + [stage] * bool(end))
    saved = {"stage": stage, "step": int(step), "version": 0, "synced_at": -1, "cursor": None, "losses": []}
    path = run / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(saved | {"ended": ended} | state))
    add_engine_files(path)
    if buffer:
        (path / "buffer.jsonl").write_text(buffer)
        write_listing(path, json.loads((path / LISTING).read_text())["number"], {})
    return path


def add_engine_files(path: Path) -> None:
    """Write the trainer's files of a checkpoint, the listing last."""
    number = next_number(path.parent)
    shard = (path.name * BYTES)[:BYTES]
    (path / SHARD).write_text(shard)
    (path / ".metadata").write_bytes(stored_metadata({SHARD: BYTES}))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    record = {"format": 1, "steps": 0, "optimizer": True, "adapter": None, "state": {}, "number": number}
    (path / "engine.json").write_text(json.dumps(record))
    write_listing(path, number, {SHARD: entry_of_text(shard)})


def with_checksum(listing: dict[str, Any]) -> dict[str, Any]:
    """A changed listing with the checksum of its contents."""
    record = {key: listing[key] for key in ("format", "number", "files")}
    return record | {"checksum": entry_of_text(json.dumps(record)).checksum}


def flip(file: Path, at: int = -100) -> None:
    """Change one byte of a file, but not its size and times."""
    contents, stat = bytearray(file.read_bytes()), file.stat()
    contents[at] ^= 1
    file.write_bytes(contents)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
