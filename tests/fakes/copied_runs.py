"""Run directories with small checkpoints, to be copied."""

from __future__ import annotations

from pathlib import Path

from mtpctl.checkpoint.listing import read_listing, write_latest, write_listing
from tests.fakes.checkpoint_folders import write_checkpoint


def make_run(folder: Path) -> Path:
    """A run directory without checkpoints."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text("name: run\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    (folder / "replicas.json").write_text('{"requested": 3}\n')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder


def make_checkpoint(run: Path, name: str) -> Path:
    """A checkpoint with unique contents."""
    path = write_checkpoint(run, name)
    (path / "deeper").mkdir()
    (path / "deeper" / "__1_0.distcp").write_text(f"of {name} " * 100)
    relist(path)
    write_latest(path)
    return path


def relist(path: Path) -> None:
    """Write the listing of the current files."""
    listing = read_listing(path)
    assert listing is not None
    write_listing(path, listing.number, {})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
