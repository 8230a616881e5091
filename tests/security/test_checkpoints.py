"""Checkpoints and run directories from others: reading them runs nothing and leaves nothing outside."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpctl.checkpoint.finding import find_complete_checkpoint
from mtpctl.checkpoint.listing import LISTING, write_listing
from mtpctl.checkpoint.reading import shard_sizes
from mtpctl.errors import UserError
from mtpctl.recipe.loading import dump_resolved
from mtpctl.telemetry.run_directory import RunDirectory
from tests.fakes.checkpoint_folders import SHARD, stored_metadata, with_checksum, write_checkpoint
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.runs import recipe


class Call:
    """Pickles as a call that unpickling executes."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def attacks(mark: Path) -> dict[str, bytes]:
    """Pickles that create the file `mark` if they are loaded without restrictions."""
    code = f"open({str(mark)!r}, 'w')"
    return {
        "system": pickle.dumps(Call(os.system, f"touch {mark}")),
        "eval": pickle.dumps(Call(eval, code)),
        "exec": pickle.dumps(Call(exec, code)),
        "process": pickle.dumps(Call(subprocess.Popen, ["touch", str(mark)])),
        "open": pickle.dumps(Call(open, str(mark), "w")),
        "attribute": b"cbuiltins\ngetattr\n(cbuiltins\n__dict__\nS'eval'\ntR.",
        "instance": f"(S{str(['touch', str(mark)])!r}\nisubprocess\nPopen\n.".encode(),
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c" + bytes([len(f"touch {mark}")]) + f"touch {mark}".encode() + b"\x85R.",
        "torch": b"ctorch\nload\n(S'/etc/passwd'\ntR.",
        "before the rest": pickle.dumps(Call(os.system, f"touch {mark}"))[:-1] + b"0" + stored_metadata({SHARD: 1})[2:],
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    toy = recipe(tmp_path / "run")
    RunDirectory.create(toy.run_path, dump_resolved(toy)).close()
    return toy.run_path


@pytest.mark.parametrize("attack", list(attacks(Path())))
def test_metadata_that_runs_code_is_refused_by_each_reader(run: Path, tmp_path: Path, attack: str) -> None:
    """Readers of this package, without torch, and of torch."""
    from mtpctl.checkpoint.reading import tensors_in

    mark = tmp_path / "mark"
    path = write_checkpoint(run, "rl-000002")
    (path / ".metadata").write_bytes(attacks(mark)[attack])
    write_listing(path, 1, {})
    for read in (shard_sizes, tensors_in, lambda path: find_complete_checkpoint(path.parent, verify_checksums=True)):
        with pytest.raises(
            UserError, match=r"/rl-000002/\.metadata: contains .*, which no checkpoint needs and which may run code"
        ) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        (["convert-hf", "RUN", "DST"], True),
        (["convert-hf", "RUN", "--inspect"], True),
        (["convert-hf", "CKPT", "DST"], True),
        (["convert-hf", "CKPT", "DST"], False),
    ],
)
def test_commands_execute_no_code_from_another_users_run(mtpctl: Any, run: Path, tmp_path: Path, command: list[str], listed: bool) -> None:
    """With a valid listing, which an attacker can write as well, and as a checkpoint of another program."""
    mark = tmp_path / "mark"
    path = write_checkpoint(run, "rl-000002")
    (path / ".metadata").write_bytes(attacks(mark)["system"])
    if listed:
        write_listing(path, 1, {})
    else:
        (path / LISTING).unlink()
        (path / "engine.json").unlink()
    paths = {"RUN": str(run), "CKPT": str(path), "DST": str(tmp_path / "out")}
    result = mtpctl(*(paths.get(word, word) for word in command))
    assert result.code == 2 and not mark.exists() and not (tmp_path / "out").exists()
    assert result.err.splitlines()[-1].startswith(f"error: {path}/.metadata: contains posix.system, which no checkpoint needs")


@pytest.mark.parametrize("pointer", ["../../outside/checkpoints/rl-000009", "/etc", "rl-000002/../../..", "x" * 100_000, "\x00"])
def test_pointer_to_another_checkpoint_is_ignored(run: Path, tmp_path: Path, pointer: str) -> None:
    write_checkpoint(tmp_path / "outside", "rl-000009")
    path = write_checkpoint(run, "rl-000002")
    (run / "checkpoints" / "latest").write_text(pointer)
    assert find_complete_checkpoint(run / "checkpoints", verify_checksums=True).path == path


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd"])
def test_listing_that_names_a_file_outside_is_damage(run: Path, name: str) -> None:
    path = write_checkpoint(run, "rl-000002")
    listing = json.loads((path / LISTING).read_text())
    listing["files"] = {name: {"size": 1, "checksum": "xxh3:00"}}
    (path / LISTING).write_text(json.dumps(with_checksum(listing)))
    with pytest.raises(UserError, match=r"files\.json is truncated or overwritten"):
        find_complete_checkpoint(run / "checkpoints", verify_checksums=True)
