"""Keys that recipes have and this version does not act on yet: a run that sets one is refused, never quietly different."""

from __future__ import annotations

from mtpctl.recipe import Recipe, UserError


def check_supported(recipe: Recipe) -> None:
    """Raise UserError naming the first key that would change nothing. `--dry-run` plans with all of them."""
    sync = recipe.sync
    unread = {
        "sync.on_collapse: error": sync.on_collapse == "error",
        f"sync.transport: {sync.transport}": sync.transport != "shm" and "rl" in recipe.train.stages,
    }
    for key, wanted in unread.items():
        if wanted:
            raise UserError(f"{key} is planned with, and not run by this version yet; leave it at its default" + _mend(key))


def _mend(key: str) -> str:
    return " (the one transport that runs is shm, on one host)" if key.startswith("sync.transport") else ""
